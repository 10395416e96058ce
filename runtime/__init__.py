"""rondo.runtime"""
