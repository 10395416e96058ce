"""Everything that would stop a run, found before it starts.

check          the checks in order, in a child; findings, what they tell; probe, what of this machine is tried (probing), in jobs
looks          target (the machine), data (rows and rewards), own (parts of the user's), sglang (servers)
memory         shape (the model, counted), trace (the run's own code without memory) on ledger (what lives), estimate (all of it)
"""
