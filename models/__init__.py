"""rondo.models"""
