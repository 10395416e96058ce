"""What a run writes down while it lasts.

record         JSONL files and log lines; tail, what has come to a growing one since the last look
ledger         whose processes there were, over restarts of the supervisor
timeline       what each thread did when
telling        what only tells changes nothing
streams        stdout and stderr, which may be closed
"""
