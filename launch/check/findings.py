"""What a check found and saw, and how it is told. Owns no rule.

print_findings([ok("a step trains 64 samples on 8 process(es)")])   ->   ok     a step trains 64 samples ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rondo.launch.check.estimate import Shape, Traced
from rondo.roles.data.fingerprints import Fingerprint
from rondo.runtime.errors import RondoError
from rondo.runtime.reference import in_one_line, in_users_words


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. An "error" stops a run; a "note" is for the reader's judgement."""

    level: Literal["ok", "note", "error"]
    text: str


ok, note, error = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "error")


@dataclass(slots=True)
class Facts:
    """What was seen of the model, the data and the devices. None where an error kept the check from looking."""

    model_path: str | None = None
    teacher_paths: dict[str, str] = field(default_factory=dict)
    """Teacher -> where its model's files are."""
    teacher_parameters: int = 0
    """Of all teachers."""
    judge_paths: dict[str, str] = field(default_factory=dict)
    """"genrm", "scorer" -> where its model's files are."""
    judge_parameters: int = 0
    """Of both."""
    num_parameters: int | None = None
    num_tensors: int | None = None
    max_positions: int | None = None
    shape: Shape | None = None
    traced: dict[str, Traced] = field(default_factory=dict)
    """What processes would hold, by what they do."""
    num_devices: int | None = None
    device_bytes: int | None = None
    """Memory of the smallest device of this machine."""
    num_rows: int | None = None
    num_held_out: int | None = None
    fingerprints: dict[str, Fingerprint] | None = None
    """Of every data set."""


@dataclass(slots=True)
class Report:
    """Findings and facts, filled by one look after another. A process tells another one as JSON."""

    findings: list[Finding] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)

    def add(self, level: Literal["ok", "note", "error"], text: str) -> None:
        self.findings.append(Finding(level, in_users_words(text)))

    def look(self, at: Callable[[], object], what: str) -> None:
        """Runs one look. An error of ours has its text; one of user code or of a library is told with type and place."""
        try:
            at()
        except RondoError as error:
            self.add("error", str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any failure of user code is a finding
            advice = "Check the network" if isinstance(error, ConnectionError) else "Correct it"
            self.add("error", f"{what} must load without errors, got {in_one_line(error)}. {advice}")


def print_findings(findings: Sequence[Finding]) -> None:
    """One line a finding, errors last."""
    for level in ("ok", "note", "error"):
        for finding in findings:
            if finding.level == level:
                print(f"{level:<6} {finding.text}")
