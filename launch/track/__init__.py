"""Trackers: what tells others of a run from its files, each in a process of its own beside it.

settings: what may be asked for. points: what the files say, each point once. follow: one tracker, from its cursor on.
beside: the processes, started and started again. trackers/: a file for each service.
"""
