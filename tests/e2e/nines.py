"""A reward that a few steps of reinforcement learning raise whatever the seed, since the samples of a group differ in it.

What the warm-up teaches, sorted digits, is worth next to nothing in it; so what rises, rises by the reward alone.
"""

from __future__ import annotations


def nines(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """The nines among at most six characters, 0 to 1."""
    return response.count("9") / 6
