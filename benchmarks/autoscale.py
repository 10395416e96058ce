"""How a run's autoscaler follows a load: changes, turns, time above its bound; against the best fixed size and Relax's rules.

No clock and no process: the rule of `launch/autoscale/decide.py` gets samples of a small world in which time is a number. A
trainer takes steps of a fixed number of prompts once the replicas have made them; replicas make prompts as fast as their slots
allow and as the staleness bound admits; one more takes a while to start, one less to drain. How long a prompt takes:

    steady    it does not
    burst     three times as long for twenty minutes
    drift     slowly from one to three times, and back
    saw       one and three times in turn, faster than a replica starts
    sensor    steady, and every other sample says the opposite of what is so; one in five is lost
    recorded  as in the steps of a run, whose seconds are stretched: of `--run RUN`, else of one that is kept beside this file

`above` is the share of time at which the trainer had waited for more than the bound of the last minute. The best fixed size is
the smallest that keeps this below one hundredth, or the one with the least where none does; it knows the load beforehand. A turn
is a change that undoes the one before within ten minutes. `relax` are the rules that Relax documents, on the same signals.

    rondo bench autoscale
    rondo bench autoscale --run runs/quickstart
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.autoscale.decide import AutoscaleConfig, Decision, Sample, State, decide
from rondo.launch.report.steps import Step, read_steps

RULES = AutoscaleConfig(max_replicas=8)
HOURS = 3
TURN_S = 600.0
RECORDED = Path(__file__).with_name("autoscale_recorded.json")
Load = Callable[[float], float]
"""Seconds of the run -> how much longer than at first a prompt takes."""
Sensor = Callable[[int, Sample], Sample | None]
"""What is told in the place of the n-th sample; None: nothing."""
Policy = Callable[[Sample], Decision]


@dataclass(slots=True)
class World:
    """One run, in ticks of a second."""

    load: Load
    replicas: int = 1
    serving: int = 1
    prompts_per_step: int = 64
    train_s: float = 20.0
    max_staleness: int = 4
    slots: int = 32
    generate_s: float = 15.0
    """Of a prompt at load 1: two replicas and a half make what the trainer takes."""
    start_s: float = 60.0
    drain_s: float = 20.0
    now: float = 0.0
    ready: float = 0.0
    training_until: float = -1.0
    changes_at: float = math.inf
    step_began: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    replica_s: float = 0.0
    waited: list[bool] = field(default_factory=list)

    def tick(self) -> None:
        self.now += 1
        if self.now >= self.changes_at:
            self.changes_at, self.serving = math.inf, self.replicas
        self.replica_s += max(self.replicas, self.serving)
        if self.training_until > 0 and self.now >= self.training_until:
            step_s = self.now - self.step_began
            self.step_s += step_s
            self.wait_s += step_s - self.train_s
            self.training_until, self.step_began = -1.0, self.now
        self.ready += self.running / (self.generate_s * self.load(self.now))
        if self.training_until < 0 and self.ready >= self.prompts_per_step:
            self.ready -= self.prompts_per_step
            self.training_until = self.now + self.train_s
        self.waited.append(self.training_until < 0)

    @property
    def admitted(self) -> float:
        """Prompts that may be generated now: those of the steps ahead, without what is there and what is trained."""
        ahead = (self.max_staleness + 1) * self.prompts_per_step
        return max(0.0, ahead - self.ready - (self.prompts_per_step if self.training_until > 0 else 0))

    @property
    def running(self) -> float:
        return min(self.serving * self.slots, self.admitted)

    def sample(self) -> Sample:
        running = self.running
        waiting = min(self.admitted - running, self.serving * self.slots)
        step_s, wait_s, self.step_s, self.wait_s = self.step_s, self.wait_s, 0.0, 0.0
        slots, scaling = self.serving * self.slots, self.changes_at < math.inf
        numbers = (slots, round(running), round(waiting), step_s, wait_s)
        return Sample(self.now, self.replicas, min(self.serving, self.replicas), *numbers, scaling=scaling)

    def scale(self, target: int) -> None:
        more = target > self.replicas
        self.changes_at = self.now + (self.start_s if more else self.drain_s)
        self.replicas = target
        self.serving = min(self.serving, target)  # who drains makes no more


@dataclass(frozen=True, slots=True)
class Scenario:
    load: Load
    sensor: Sensor = lambda _, sample: sample
    hours: float = HOURS


def burst(now: float) -> float:
    return 3.0 if 3600 <= now < 4800 else 1.0


def drift(now: float) -> float:
    end = HOURS * 3600
    return 1 + 2 * (1 - abs(2 * now / end - 1))


def saw(now: float) -> float:
    return 3.0 if int(now / 45) % 2 else 1.0


def opposite(number: int, sample: Sample) -> Sample | None:
    if number % 5 == 4:
        return None
    if number % 2:
        return sample
    return replace(sample, wait_s=sample.step_s - sample.wait_s, running=sample.slots - sample.running, waiting=0)


def recorded(steps: Sequence[tuple[float, float]]) -> tuple[Load, float]:
    """The load of a run of (rollout's busy seconds, trainer's seconds without waits) a step, one after another, and its hours.
    Load 1 is that of the step in the middle; a step whose samples were there already counts as a fourth of that."""
    typical = sorted(busy_s for busy_s, _ in steps)[len(steps) // 2]
    scale = World(burst).train_s / (sum(seconds for _, seconds in steps) / len(steps))
    ends: list[float] = []
    for _, seconds in steps:
        ends.append((ends[-1] if ends else 0.0) + seconds * scale)

    def load(now: float) -> float:
        at = next((index for index, end in enumerate(ends) if now < end), len(ends) - 1)
        return max(steps[at][0] / typical, 0.25)

    return load, ends[-1] / 3600


def trained_s(step: Step) -> float:
    """Without its waits, and the starts of others."""
    return step.step_s - sum(
        seconds for name, seconds in step.trainer.items() if name.startswith(("wait for", "start of"))
    )


def ours(rules: AutoscaleConfig) -> Policy:
    state = State()

    def policy(sample: Sample) -> Decision:
        nonlocal state
        state, decision = decide(state, sample, rules)
        return decision

    return policy


def relax(rules: AutoscaleConfig) -> Policy:
    """More: use over 0.85, or more than 10 requests at each engine, for 30 s. One less: use under 0.3, nothing waiting, and under
    0.5 after, for 120 s. 60 and 300 s of cooldown."""
    seen: deque[Sample] = deque(maxlen=6)
    since: dict[str, float] = {}
    last = -math.inf

    def policy(sample: Sample) -> Decision:
        nonlocal last
        seen.append(sample)
        now, n = sample.at, sample.replicas
        use = sum(each.use for each in seen) / len(seen)
        queue = sum(each.waiting for each in seen) / len(seen)
        wanted = {
            "scale_out": use > 0.85 or queue > 10 * n,
            "scale_in": n > 1 and use < 0.3 and queue == 0 and use * n / (n - 1) < 0.5,
        }
        for action, so in wanted.items():
            since[action] = since.get(action, now) if so else math.inf
        if not sample.scaling and now - since["scale_out"] >= 30 and now - last >= 60 and n < rules.max_replicas:
            step = min(max(int((use - 0.7) / 0.1) if use > 0.9 else 0, int(queue - 5 * n) // 20, 1), 4)
            last = now
            return Decision(now, "scale_out", n, min(n + step, rules.max_replicas), "")
        if not sample.scaling and now - since["scale_in"] >= 120 and now - last >= 300 and n > rules.min_replicas:
            last = now
            return Decision(now, "scale_in", n, n - 1, "")
        return Decision(now, "hold", n, n, "")

    return policy


def follow(scenario: Scenario, policy: Policy | None, rules: AutoscaleConfig, replicas: int) -> dict[str, Any]:
    """One run under a policy, or of a fixed size."""
    world = World(scenario.load, replicas, replicas)
    made: list[Decision] = []
    for number in range(int(scenario.hours * 3600 / rules.period_s)):
        for _ in range(int(rules.period_s)):
            world.tick()
        told = scenario.sensor(number, world.sample())
        if policy is None or told is None:
            continue
        decision = policy(told)
        if decision.action != "hold":
            made.append(decision)
            world.scale(decision.target)
    actions = [decision.action for decision in made]
    turns = sum(
        before.action != after.action and after.at - before.at < TURN_S for before, after in itertools.pairwise(made)
    )
    return {
        "out": actions.count("scale_out"), "in": actions.count("scale_in"), "turns": turns,
        "above": round(above(world.waited, rules), 4), "waits": round(sum(world.waited) / len(world.waited), 4),
        "replica_hours": round(world.replica_s / 3600, 2), "last": world.replicas,
        "most": max([replicas, *(decision.target for decision in made)]),
    }  # fmt: skip


def above(waited: Sequence[bool], rules: AutoscaleConfig) -> float:
    """Share of time at which the trainer had waited more than `wait_out` of the last minute."""
    window, count, found = int(rules.window_s), 0, 0
    for at, waits in enumerate(waited):
        count += waits - (waited[at - window] if at >= window else 0)
        found += at >= window and count > rules.wait_out * window
    return found / max(1, len(waited) - window)


def best_fixed(scenario: Scenario, rules: AutoscaleConfig) -> dict[str, Any]:
    sizes = range(rules.min_replicas, rules.max_replicas + 1)
    found = {size: follow(scenario, None, rules, size) for size in sizes}
    good = [size for size, figures in found.items() if figures["above"] < 0.01]
    size = good[0] if good else min(found, key=lambda each: (found[each]["above"], each))
    return {"size": size} | {name: found[size][name] for name in ("above", "waits", "replica_hours")}


def scenarios(steps: Sequence[tuple[float, float]]) -> dict[str, Scenario]:
    load, hours = recorded(steps)
    return {
        "steady": Scenario(lambda _: 1.0), "burst": Scenario(burst), "drift": Scenario(drift), "saw": Scenario(saw),
        "sensor": Scenario(lambda _: 1.0, opposite), "recorded": Scenario(load, hours=hours),
    }  # fmt: skip


def kept() -> list[tuple[float, float]]:
    return [(busy_s, seconds) for busy_s, seconds in orjson.loads(RECORDED.read_bytes())["steps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run whose steps are the recorded load")
    options = parser.parse_args()
    steps = kept()
    if options.run is not None:
        steps = [(step.roles["rollout"].busy_s, trained_s(step)) for step in read_steps(options.run, [])]
    figures: dict[str, Any] = {}
    for name, scenario in scenarios(steps).items():
        found = {
            "rondo": follow(scenario, ours(RULES), RULES, 1),
            "relax": follow(scenario, relax(RULES), RULES, 1),
            "best_fixed": best_fixed(scenario, RULES),
        }
        figures[name] = found
        for who, told in found.items():
            print(f"{name:9} {who:10}", "  ".join(f"{key}={value}" for key, value in told.items()))
    print(orjson.dumps({"rules": RULES.model_dump(), "scenarios": figures}).decode())


if __name__ == "__main__":
    main()
