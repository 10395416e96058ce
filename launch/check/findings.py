"""What a check found, and how it is told. Owns no rule.

print_findings([Finding("ok", "a step trains 64 samples on 8 process(es)")])   ->   ok     a step trains 64 samples ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rondo.runtime.errors import RondoError
from rondo.runtime.reference import in_one_line, in_users_words


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. An "error" stops a run; a "note" is for the reader's judgement."""

    level: Literal["ok", "note", "error"]
    text: str


class Report:
    """Findings and facts, filled by one look after another."""

    def __init__(self) -> None:
        self.findings: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def add(self, level: str, text: str) -> None:
        self.findings.append({"level": level, "text": in_users_words(text)})

    def look(self, at: Callable[[], None], what: str) -> None:
        """Runs one look. An error of ours has its text; one of user code or of a library is told with type and place."""
        try:
            at()
        except RondoError as error:
            self.add("error", str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any failure of user code is a finding
            self.add(
                "error",
                f"{what} must load without errors, got {in_one_line(error)}. Correct it",
            )


def print_findings(findings: Sequence[Finding]) -> None:
    """One line a finding, errors last."""
    for level in ("ok", "note", "error"):
        for finding in findings:
            if finding.level == level:
                print(f"{level:<6} {finding.text}")
