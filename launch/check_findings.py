"""What a check found, and how it is told. Owns no rule.

print_findings([Finding("ok", "a step trains 64 samples on 8 process(es)")])   ->   ok     a step trains 64 samples ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. An "error" stops a run; a "note" is for the reader's judgement."""

    level: Literal["ok", "note", "error"]
    text: str


def print_findings(findings: Sequence[Finding]) -> None:
    """One line a finding, errors last."""
    for level in ("ok", "note", "error"):
        for finding in findings:
            if finding.level == level:
                print(f"{level:<6} {finding.text}")
