"""rondo.roles"""
