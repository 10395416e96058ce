"""rondo.comm"""
