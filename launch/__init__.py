"""rondo.launch"""
