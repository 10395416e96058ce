"""Replay: `rondo autoscale`, the decisions of a run's autoscaler, made again from its events.

Owns the reading back and the comparison. A run's own settings make the decisions that it made, or something else than the rule
and its samples had a hand in them: that is told, and an error. With `--set` others say what they would have wanted of the same
samples.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.autoscale.decide import AutoscaleConfig, Decision, Sample, State, decide
from rondo.launch.autoscale.watch import DECIDED, HELD, RULES
from rondo.launch.config import override, unresolve
from rondo.launch.report.records import read_records
from rondo.launch.rundir import existing_run, read_json
from rondo.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Replayed:
    """One sample: what was decided of it, and what is decided now."""

    time: float
    told: Mapping[str, Any]
    decision: Decision

    @property
    def same(self) -> bool:
        made = asdict(self.decision)
        return all(self.told.get(name) == made[name] for name in ("action", "target", "reason"))


def replay(records: Iterable[Mapping[str, Any]], rules: AutoscaleConfig, *, others: bool = False) -> Iterator[Replayed]:
    """Of a run's events, in their order. Each start of the run begins anew, as does whoever changes the rules; `others`:
    these are not the run's, and stay."""
    state, own, begun = State(), rules, False
    for record in records:
        if record.get("kind") == RULES and not others:
            rules, begun = AutoscaleConfig(**record["rules"]), True
        if record.get("kind") not in (DECIDED, HELD):
            continue
        if record["number"] == 0:
            state, rules, begun = State(), rules if begun else own, False
        state, decision = decide(state, Sample(**record["sample"]), rules)
        yield Replayed(record["time"], record, decision)


def main(path: Path, sets: Sequence[str], *, as_json: bool) -> int:
    """Prints every decision to scale. 1 where the run made others; ConfigError of a run without an autoscaler."""
    run = existing_run(path)
    config = override(unresolve(read_json(run / "config.resolved.json")), sets)
    if config.autoscale is None:
        raise ConfigError(f"autoscale must be set in the settings of {run}, got nothing. Name a run that has it")
    found = list(replay(read_records(run / "events.jsonl"), config.autoscale, others=bool(sets)))
    other = [] if sets else [each for each in found if not each.same]
    changes = [each for each in found if each.decision.action != "hold"]
    if as_json:
        told = [{"time": each.time, **asdict(each.decision)} for each in changes]
        sys.stdout.buffer.write(orjson.dumps({"samples": len(found), "differ": len(other), "decisions": told}) + b"\n")
        return int(bool(other))
    for each in changes:
        decision = each.decision
        print(f"{decision.at:9.1f} s  {decision.replicas} -> {decision.target}  {decision.reason}")
    print(
        f"{len(found)} samples, {len(changes)} decisions" + ("" if sets else f", {len(other)} not as the run made them")
    )
    for each in other[:3]:
        print(
            f"{each.decision.at:9.1f} s  {each.told['action']} ({each.told['reason']}), and not {each.decision.action}"
        )
    return int(bool(other))
