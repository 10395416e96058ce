"""How hard random tests try: a part of it by default, all of it with RONDO_TEST_LONG=1, as `make test-long` sets it.

    @settings(max_examples=strength(quick=40, full=300), deadline=None)

Both show the same things: a quick run tries fewer examples, schedules or acts, and finds every planted fault too.
"""

from __future__ import annotations

import os

LONG = os.environ.get("RONDO_TEST_LONG", "") not in ("", "0")


def strength(quick: int, full: int) -> int:
    """How many examples, schedules or acts this run tries."""
    return full if LONG else quick
