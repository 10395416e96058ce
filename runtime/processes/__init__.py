"""Processes that may die, and what ends with them.

process        identity, descent, and killing with proof; guard, which dies with its parent; janitor, which clears after a run
cgroup         a control group for all of a run, where one can be made
pool           killable processes for a user's functions (pool_worker), each with a subreaper above it; command, a user's program
"""
