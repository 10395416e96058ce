"""Scores, by the user's own functions.

pool           who asks; worker, the killable process in which they run
"""
