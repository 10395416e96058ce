"""Everything that would stop a run, found before it starts.

check          the checks in order, in a child; findings, what they tell
looks          shape (the run), target (the machine), estimate (memory), data (rows and rewards), sglang (servers)
"""
