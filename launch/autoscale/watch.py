"""Watch: the autoscaler of a run at work. What its processes tell becomes samples, and a decision becomes a request.

Owns the sampling and the record of it. Owns neither the rule (`decide.py`) nor the scaling, which it asks for as a user would.
Every sample is told as an event with the decision that was made of it ("autoscale", or "autoscale_holds" where nothing was to be
done), which is all that `replay.py` needs to make them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rondo.launch.autoscale.decide import AutoscaleConfig, Decision, Sample, State, decide
from rondo.launch.elastic.request import Wish
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.telling import tell_every

if TYPE_CHECKING:
    from rondo.launch.elastic.scaler import Scaler

ROLE = "rollout"
DECIDED, HELD, RULES = "autoscale", "autoscale_holds", "autoscale_rules"
ASKED = "autoscale: "
"""How the reasons of its requests begin."""


class Autoscaler:
    """`scaler` says what is there, how many there may be whatever the rules say, and is asked for other numbers; `tell` writes an
    event (kind, data)."""

    def __init__(
        self,
        rules: AutoscaleConfig,
        scaler: Scaler,
        tell: Callable[[str, Mapping[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules, self.enabled, self._most = rules, True, scaler.most(ROLE)
        self.last: Decision | None = None
        self._scaler, self._tell = scaler, tell
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
        await tell_every("autoscaler", self.rules.period_s, self.look)

    def enable(self, enabled: bool) -> None:
        """It decides nothing any more, or begins anew."""
        if enabled != self.enabled:
            self.enabled = enabled
            self._begin()

    def change(self, rules: AutoscaleConfig) -> None:
        """Begin anew under other rules. ConfigError for what stays, and for more replicas than there may be."""
        if self._most is not None and rules.max_replicas > self._most:
            raise ConfigError(
                f"autoscale.max_replicas must be at most {self._most} on this machine while a run goes on, as for "
                f"`rondo scale`, got {rules.max_replicas}. Send fewer, or resume the run with other settings"
            )
        if rules.period_s != self.rules.period_s:
            raise ConfigError(
                f"autoscale.period_s must stay while a run goes on, {self.rules.period_s:g}, got {rules.period_s:g}. "
                "Set it, and resume the run"
            )
        self.rules = rules
        self._begin()

    def _begin(self) -> None:
        self._state, self._num, self.last = State(), 0, None
        self._tell(RULES, {"rules": self.rules.model_dump(), "enabled": self.enabled})

    def conditions(self) -> dict[str, Any]:
        """What decides: value and threshold by the name of the setting, and what they were read from."""
        last, rules, state = self.last, self.rules, self._state
        if last is None or last.wait is None or last.use is None or last.queue is None:
            return {}
        told = {
            name: {"value": value, "threshold": most, "met": value > most if name.endswith("out") else value < most}
            for name, value, most in (
                ("wait_out", last.wait, rules.wait_out), ("use_out", last.use, rules.use_out),
                ("queue_out", last.queue, rules.queue_out), ("wait_in", last.wait, rules.wait_in),
                ("use_in", last.use, rules.use_in),
            )
        }  # fmt: skip
        since = {"out_since": state.out_since, "in_since": state.in_since, "at": last.at, "reason": last.reason}
        return {"conditions": told, "metrics": asdict(state.samples[-1]), "observations": since}

    def look(self) -> None:
        """One sample, and what follows from it: `last`; nothing while it decides nothing."""
        if not self.enabled:
            return
        sample = self._sample()
        self._state, decision = decide(self._state, sample, self.rules)
        self.last = decision
        fields = {name: value for name, value in asdict(decision).items() if name != "at"}
        kind = HELD if decision.action == "hold" else DECIDED
        self._tell(kind, {**fields, "number": self._num, "sample": asdict(sample)})
        self._num += 1
        if decision.action != "hold":
            self._scaler.ask(Wish(ROLE, decision.action, decision.target, f"{ASKED}{decision.reason}"))

    def _sample(self) -> Sample:
        view = self._scaler.view()
        names = view.replicas.get(ROLE, ())
        engines = [self._engines[name] for name in names if name in self._engines]
        slots, running, waiting, cached, room = (
            sum(int(engine[name]) for engine in engines)
            for name in ("num_slots", "num_running", "num_waiting", "cached_tokens", "cache_tokens")
        )
        serving = sum(engine.healthy and engine.engine_id in names for engine in self._scaler.engines(ROLE))
        step_s, wait_s, self._step_s, self._wait_s = self._step_s, self._wait_s, 0.0, 0.0
        at = round(self._clock() - self._began_at, 3)
        numbers = (len(names), serving, slots, running, waiting, step_s, wait_s)
        return Sample(at, *numbers, cached / room if room else None, view.active is not None)
