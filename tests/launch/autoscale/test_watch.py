"""A run's autoscaler beside the run: what is told becomes samples, decisions become requests, and all of it can be made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from rondo.launch import cli
from rondo.launch.autoscale.decide import AutoscaleConfig
from rondo.launch.autoscale.watch import ASKED, Autoscaler
from rondo.launch.config import load, resolve
from rondo.launch.elastic.request import Wish
from rondo.launch.elastic.scaler import EngineView, Scaler, ScalingView
from rondo.launch.rundir import RunDir
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.record import JsonLines

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.py"
RULES = "autoscale={'max_replicas': 4}"
ENGINE = {"num_slots": 8, "num_running": 8, "num_waiting": 6, "cached_tokens": 96, "cache_tokens": 128}


class Fleet:
    """Replicas that come at once, with engines that are full, and a trainer that waits a third of its time."""

    def __init__(self, run: Path, *sets: str) -> None:
        self.names: list[str] = ["rollout-0"]
        self.asked: list[tuple[int, str]] = []
        self.now = 50.0
        self.events = JsonLines(run / "events.jsonl", clock=lambda: self.now)
        rules = load(QUICKSTART, [RULES, *sets]).autoscale
        assert rules is not None
        self.autoscaler = Autoscaler(rules, cast(Scaler, self), self.tell, clock=lambda: self.now)

    def most(self, role: str) -> None:
        return None

    def view(self) -> ScalingView:
        return ScalingView({"rollout": tuple(self.names)}, None, ())

    def engines(self, role: str) -> list[EngineView]:
        return [EngineView(name, "rollout", "initial", "ready", True, 1, 0, None) for name in self.names]

    def ask(self, wish: Wish) -> None:
        self.asked.append((wish.num_replicas, wish.reason.removeprefix(ASKED)))
        self.names = [f"rollout-{number}" for number in range(wish.num_replicas)]

    def tell(self, kind: str, data: Any) -> None:
        self.events.write({"kind": kind, "source": "supervisor", **data})

    def goes_on(self, seconds: int) -> None:
        for _ in range(seconds // 10):
            self.now += 10
            for name in [*self.names, "rollout-9"]:  # one that left is not counted
                self.autoscaler.on_event({"kind": "metrics", "source": name, "engine": ENGINE})
            self.autoscaler.on_event({"kind": "metrics", "source": "actor-0", "step": 1, "step_s": 6.0, "wait_s": 2.0})
            self.autoscaler.on_event({"kind": "died", "source": "supervisor"})
            self.autoscaler.look()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunDir.create(tmp_path, "demo", resolve(load(QUICKSTART, [RULES]))) as made:
        return made.path


def test_what_a_run_tells_becomes_requests_with_their_reason(run: Path) -> None:
    fleet = Fleet(run)
    fleet.goes_on(290)
    why = "the trainer waits 33% of its time for data, more than 10%, and engines are 100% in use"
    assert fleet.asked == [(2, why), (3, why)]
    lines = [orjson.loads(line) for line in (run / "events.jsonl").read_bytes().splitlines()]
    assert len(lines) == 29 and [line["number"] for line in lines] == list(range(29))
    first = next(line for line in lines if line["kind"] == "autoscale")
    assert (first["replicas"], first["target"], first["reason"], first["queue"]) == (1, 2, why, 6.0)
    sample = {
        "at": 100.0,
        "replicas": 1,
        "serving": 1,
        "slots": 8,
        "running": 8,
        "waiting": 6,
        "step_s": 6.0,
        "wait_s": 2.0,
    }
    assert first["sample"] == sample | {"cache_use": 0.75, "scaling": False}


def test_the_same_decisions_are_made_again_from_the_events_also_over_several_starts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        Fleet(run).goes_on(290)
    assert cli.main(["autoscale", str(run)]) == 0
    *made, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in made] == [["100.0", "s", "1", "->", "2"], ["200.0", "s", "2", "->", "3"]] * 2
    assert last == "58 samples, 4 decisions, 0 not as the run made them"
    assert cli.main(["autoscale", str(run), "--json", "--set", "autoscale.wait_out=0.5"]) == 0
    assert orjson.loads(capsys.readouterr().out) == {"samples": 58, "differ": 0, "decisions": []}


def test_one_that_is_told_to_decide_nothing_or_by_other_rules_begins_anew_and_can_be_followed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(run)
    scales = fleet.autoscaler
    fleet.goes_on(90)
    scales.enable(False)
    fleet.goes_on(300)
    assert fleet.asked == [] and scales.look() is None
    scales.enable(True)
    with pytest.raises(ConfigError, match=r"autoscale\.period_s must stay while a run goes on, 10, got 20"):
        scales.change(scales.rules.model_copy(update={"period_s": 20.0}))
    scales.change(AutoscaleConfig(**scales.rules.model_dump() | {"max_replicas": 2}))
    fleet.goes_on(290)
    assert [target for target, _ in fleet.asked] == [2]
    assert scales.conditions()["conditions"]["wait_out"] == {
        "value": pytest.approx(1 / 3),
        "threshold": 0.1,
        "met": True,
    }
    assert scales.conditions()["observations"]["reason"].endswith("; there are autoscale.max_replicas")
    Fleet(run).goes_on(290)  # a start later: the rules of the settings
    assert cli.main(["autoscale", str(run)]) == 0
    assert capsys.readouterr().out.endswith("67 samples, 3 decisions, 0 not as the run made them\n")


def test_a_decision_that_the_rule_does_not_make_of_its_sample_is_told(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Fleet(run, "autoscale.hold_out_s=200").goes_on(150)  # other rules than the run says that it had
    assert cli.main(["autoscale", str(run)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "15 samples, 1 decisions, 9 not as the run made them"
    assert told[2].endswith("; not yet for 200 s), and not hold")


def test_a_run_without_an_autoscaler_has_nothing_to_make_again(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "plain", resolve(load(QUICKSTART))) as made:
        assert cli.main(["autoscale", str(made.path)]) == 2


IN_ONE = "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages', 'reference', 'actor_fwd']}]"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            "role_groups.0.replicas=5",
            "role_groups[rollout].replicas must lie within autoscale.min_replicas and autoscale.max_replicas",
        ),
        (IN_ONE, "autoscale must not be set where rollout shares its processes with the actor"),
    ],
)
def test_settings_that_leave_nothing_to_scale_are_refused(wrong: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(QUICKSTART, [RULES, wrong])
    assert told in str(error.value)
