"""From a row to samples.

workflow       what makes the samples of a row, single_turn: the one that asks once
episode        one sample in turns; environments, who answers the policy in them, and tools, which it calls
agents         programs that make samples by calls of a model, and agent_sessions, what each is answered
groups         what becomes of a leased prompt group; leases, which of them came further; columns, what is written
filters        which groups are trained
evaluation     how well one policy version answers prompts that nobody trains on
"""
