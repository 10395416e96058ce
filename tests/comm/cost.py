"""What an act costs without a clock: the lines of code that it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def lines(act: Callable[[], object], within: str) -> int:
    """How many lines of files below `within` ("/comm/") the act runs; tests do not count."""
    count = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Callable[..., object] | None:
        nonlocal count
        count += event == "line"
        name = frame.f_code.co_filename
        return trace if within in name and "/tests/" not in name else None

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return count
