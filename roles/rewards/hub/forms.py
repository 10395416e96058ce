"""Rewards for the form of a response whatever it says, and one by chance.

tags("<think>6 * 12</think><answer>72</answer>", "72", prompt="...", metadata={})    ->   1.0
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any


def tags(response: str, label: Any, *, prompt: Any, metadata: Any, names: Sequence[str] = ("think", "answer")) -> float:
    """1 for these tags once each, in this order, with text in each and none around them; spaces between them do not count."""
    rest = response.strip()
    for name in names:
        opened, closed = f"<{name}>", f"</{name}>"
        inside, end, after = rest.removeprefix(opened).partition(closed)
        alone = not any(f"<{slash}{each}>" in inside for each in names for slash in ("", "/"))
        if not (rest.startswith(opened) and end and inside.strip() and alone):
            return 0.0
        rest = after.strip()
    return float(not rest)


def format(response: str, label: Any, *, prompt: Any, metadata: Any, pattern: str) -> float:
    """1 where the whole response matches the regular expression `pattern`, in which a dot is any character."""
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)


def random(response: str, label: Any, *, prompt: Any, metadata: Any, chance: float = 0.5) -> float:
    """1 with this chance, else 0, drawn from what row and response are: the same again in every run. A control: what rises under
    it was not learnt from a reward."""
    drawn = hashlib.sha256(repr((prompt, label, response)).encode("utf-8", "surrogatepass")).digest()
    return float(int.from_bytes(drawn[:8], "big") / 2**64 < chance)
