"""Processes that may die, and what ends with them.

process        identity, descent, and killing with proof; guard, which dies with its parent; janitor, which clears after a run
pool           killable processes for a user's functions (pool_worker), each with a subreaper above it
"""
