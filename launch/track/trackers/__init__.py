"""A file a service: `open(run, config)` gives something that takes points (`follow.py` says what it promises)."""
