"""Scores, by the user's own functions.

pool           who asks; function, where they run: in killable processes, or here; worker, what such a process does
"""
