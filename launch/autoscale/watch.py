"""Watch: the autoscaler of a run at work. What its processes tell becomes samples, and a decision becomes a request.

Owns the sampling and the record of it. Owns neither the rule (`decide.py`) nor the scaling, which it asks for as a user would.
Every sample is told as an event with the decision that was made of it ("autoscale", or "autoscale_holds" where nothing was to be
done), which is all that `replay.py` needs to make them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rondo.launch.autoscale.decide import AutoscaleConfig, Decision, Sample, State, decide
from rondo.runtime.records.telling import tell_every

if TYPE_CHECKING:
    from rondo.launch.elastic.scaler import Scaler

ROLE = "rollout"
DECIDED, HELD = "autoscale", "autoscale_holds"


@dataclass(frozen=True, slots=True)
class Replicas:
    """Of rollout: the names of those that are there to stay or come, which of them answer, and whether any come or go."""

    names: tuple[str, ...]
    serving: frozenset[str]
    scaling: bool


class Autoscaler:
    """`replicas` says what is there, `scale` asks for so many with a reason, `tell` writes an event (kind, data)."""

    def __init__(
        self,
        rules: AutoscaleConfig,
        replicas: Callable[[], Replicas],
        scale: Callable[[int, str], object],
        tell: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._replicas, self._scale, self._tell = rules, replicas, scale, tell
        self._clock, self._began_at = clock, clock()
        self._state = State()
        self._engines: dict[str, Mapping[str, Any]] = {}
        self._step_s = self._wait_s = 0.0
        self._num = 0

    def on_event(self, record: Mapping[str, Any]) -> None:
        """A record of the run: what an engine does, or a step of the trainer."""
        if "engine" in record:
            self._engines[record["source"]] = record["engine"]
        elif "wait_s" in record and "step_s" in record:
            self._step_s += record["step_s"]
            self._wait_s += record["wait_s"]

    async def run(self) -> None:
        """Until it is cancelled."""

        async def look() -> None:
            self.look()

        await tell_every("autoscaler", self._rules.period_s, look)

    def look(self) -> Decision:
        """One sample, and what follows from it."""
        sample = self._sample()
        self._state, decision = decide(self._state, sample, self._rules)
        fields = {name: value for name, value in asdict(decision).items() if name != "at"}
        kind = HELD if decision.action == "hold" else DECIDED
        self._tell(kind, {**fields, "number": self._num, "sample": asdict(sample)})
        self._num += 1
        if decision.action != "hold":
            self._scale(decision.target, decision.reason)
        return decision

    def _sample(self) -> Sample:
        seen = self._replicas()
        engines = [self._engines[name] for name in seen.names if name in self._engines]
        slots, running, waiting, cached, room = (
            sum(int(engine[name]) for engine in engines)
            for name in ("num_slots", "num_running", "num_waiting", "cached_tokens", "cache_tokens")
        )
        serving = len(seen.serving.intersection(seen.names))
        step_s, wait_s, self._step_s, self._wait_s = self._step_s, self._wait_s, 0.0, 0.0
        at = round(self._clock() - self._began_at, 3)
        numbers = (len(seen.names), serving, slots, running, waiting, step_s, wait_s)
        return Sample(at, *numbers, cached / room if room else None, seen.scaling)


def autoscaler(rules: AutoscaleConfig, scaler: Scaler, tell: Callable[[str, Mapping[str, Any]], None]) -> Autoscaler:
    """That of a run, which asks its scaler."""

    def replicas() -> Replicas:
        view = scaler.view()
        serving = frozenset(engine.engine_id for engine in scaler.engines(ROLE) if engine.healthy)
        return Replicas(view.replicas.get(ROLE, ()), serving, scaling=view.active is not None)

    return Autoscaler(
        rules, replicas, lambda target, reason: scaler.request(ROLE, target, reason=f"autoscale: {reason}"), tell
    )
