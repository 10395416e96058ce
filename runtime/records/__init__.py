"""What a run writes down while it lasts.

record         JSONL files and log lines
ledger         whose processes there were, over restarts of the supervisor
timeline       what each thread did when
telling        what only tells changes nothing
"""
