"""The ring: rows in shared memory, written once, read in place.

ring           positions and room, over words (single-writer words in memory; litmus tries this machine's)
views          those that a process has open, by name
records        what lies in a ring: headers and columns; spans, how its rows are named; tensors, views over plain memory
"""
