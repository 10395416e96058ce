"""What is said about a run, from figures made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rondo.launch.report.explain import Processor, RoleShare, Setup, explain, lines, processor_of
from rondo.launch.report.steps import RoleUse, Step, steps_of
from rondo.launch.report.timeline import Figures
from tests.launch.hand import one_step

SETUP = Setup(
    max_staleness=1,
    processes={"rollout": 1, "actor": 1, "reference": 2, "actor_fwd": 1},
    num_threads=5,
    num_cores=8,
    prompts_per_step=32,
)


def step(number: int = 0, *, longest_s: float = 0.0, idle: float = 0.0, **parts: float) -> Step:
    """A step whose trainer has these parts, in seconds; `idle`: the rollout's wait for the trainer."""
    trainer = {n.replace("_for_", " for ").replace("_of_", " of "): seconds for n, seconds in parts.items()}
    step_s = sum(trainer.values())
    roles = {"actor": RoleUse(1, 0.0, {}), "rollout": RoleUse(1, step_s - idle, {"actor": idle})}
    roles["reference"] = RoleUse(2, 2 * step_s, {})
    return Step(number, 10.0 * number, step_s, trainer, longest_s, roles)


def first(*steps: Step, setup: Setup = SETUP) -> Any:
    return explain(steps, setup, Processor()).findings[0]


def test_a_trainer_that_hardly_waits_limits_the_run() -> None:
    found = first(step(train=0.9, wait_for_rollout=0.05, other=0.05, idle=0.5))
    assert found.subject == "actor"
    assert found.why == (
        "it trains 0.900 s (90%) of a step and waits 0.050 s (5%)",
        "rollout waits for the trainer's next version 50% of the time",
    )
    assert found.change[0] == "give it more: actor_processes=2, actor_threads, or a device"
    assert "rollout needs less than it has" in found.change[1]


def test_saving_in_every_step_is_seen() -> None:
    found = first(step(train=0.5, save=0.5))
    assert "save takes 0.500 s (50%) of a step" in found.why
    assert "save less often: a greater train.save_every" in found.change


def test_a_rollout_that_is_never_idle_limits_the_run() -> None:
    found = first(step(train=0.4, wait_for_rollout=0.5, wait_for_coordinator=0.1))
    assert found.subject == "rollout"
    assert (
        found.why[0]
        == "the trainer waits 0.600 s (60%) of a step: 0.500 s (50%) for rollout, 0.100 s (10%) for coordinator"
    )
    assert found.change == ("rollout_replicas=2, or more rollout_threads, rollout.num_slots",)


def test_a_rollout_that_waits_a_little_limits_the_run_still_and_one_that_waits_much_takes_turns() -> None:
    found = first(step(train=0.2, wait_for_rollout=0.8, idle=0.2))
    assert found.subject == "rollout"
    assert found.why[1] == "rollout waits for the trainer's next version 20% of the time"
    assert [change.partition("=")[0] for change in found.change] == ["rollout_replicas", "max_staleness"]
    assert first(step(train=0.2, wait_for_rollout=0.8, idle=0.4)).subject == "turns"


def test_long_tails_ask_for_spare_groups_first() -> None:
    found = first(step(train=0.4, wait_for_rollout=0.6, longest_s=0.3))
    assert found.why[1].startswith("of its wait for rollout 0.300 s (50%) is for the last tenth")
    assert found.change[0].startswith("rollout.spare_groups=3 (now 0)")
    assert found.change[1].startswith("max_staleness=2 (now 1)")


def test_roles_that_take_turns_ask_for_staleness() -> None:
    found = first(
        step(train=0.5, wait_for_rollout=0.3, wait_for_weights=0.2, idle=0.6), setup=replace(SETUP, max_staleness=0)
    )
    assert found.text == "actor and rollout take turns: each waits for the other."
    assert found.why[1] == "rollout waits for the trainer's next version 60% of the time"
    assert found.change[0].startswith("max_staleness=1 (now 0)")
    together = replace(SETUP, beside_actor=frozenset({"rollout", "advantages"}))
    assert "groups of their own" in first(step(train=0.5, wait_for_rollout=0.5, idle=0.5), setup=together).change[0]


@pytest.mark.parametrize(
    ("whom", "change"),
    [
        ("reference", "reference_replicas=3, or reference_threads"),
        ("actor_fwd", "actor_fwd_replicas=2, or actor_fwd_threads"),
        ("reward", "reward.num_workers=2 (now 1), or a quicker one"),
        ("weights", "max_staleness=2 (now 1)"),
        ("coordinator", "fewer, larger rounds: a greater train.micro_batch_tokens"),
        ("advantages", "more replicas of advantages (now 1)"),
    ],
)
def test_whom_the_trainer_waits_for_longest_limits_the_run(whom: str, change: str) -> None:
    found = first(step(train=0.4, wait_for_rollout=0.1, **{f"wait_for_{whom}": 0.5}))
    assert (found.subject, found.change[0]) == (whom, change)


def test_a_role_in_the_trainers_process_is_told_as_such_and_nothing_is_advised_that_its_mode_has_not() -> None:
    parts = {"train": 0.4, "wait_for_reference": 0.5, "wait_for_rollout": 0.1}
    hybrid = replace(SETUP, beside_actor=frozenset({"advantages", "reference"}))
    found = first(step(**parts), setup=hybrid)
    assert found.text == "reference and the trainer share one process: what one computes, the other waits for."
    assert found.why[-1] == "at work on the thread that they share: reference 100%, actor 0%"
    assert not any("reference_replicas" in change for change in found.change)
    assert any("modes.fully_async" in change for change in found.change)
    colocated = replace(SETUP, beside_actor=frozenset({"advantages", "reference", "rollout"}))
    assert len(first(step(train=1.0, idle=0.5), setup=colocated).change) == 1
    found = first(step(train=0.4, wait_for_rollout=0.6), setup=colocated)
    assert found.subject == "rollout" and not any("rollout_replicas" in change for change in found.change)
    for setup, change in (
        (hybrid, "processes=2, threads"),
        (colocated, "processes=2, threads, or a device; or groups of their own"),
    ):
        assert first(step(train=1.0), setup=setup).change[0].startswith(f"give it more: {change}")


def test_full_processors_and_too_many_threads_are_told() -> None:
    steps, full = [step(train=1.0)], Processor({"actor-0": 1.0, "rollout-0": 0.9})
    assert [f.subject for f in explain(steps, SETUP, full).findings] == ["actor"]
    found = explain(steps, replace(SETUP, num_cores=2), full).findings[1]
    assert found.why == ("all processes together keep 1.90 of 2 cores busy",)
    assert found.change[0] == "fewer threads: all processes together have 5 compute threads on 2 cores"


def test_processes_that_have_no_core_although_the_run_leaves_some_are_told() -> None:
    processor = Processor({"actor-0": 0.4}, {}, {"rollout-0.0": 0.15, "actor-0.0": 0.6, "coordinator.0": 0.01})
    found = explain([step(train=1.0)], replace(SETUP, num_cores=2), processor).findings[1]
    assert found.text == "other programs take the processors."
    assert found.why == (
        "of the time these were ready to run and had no core: actor-0.0 60%, rollout-0.0 15%",
        "the run itself keeps only 0.40 of 2 cores busy",
    )


def test_a_runtime_that_costs_much_is_told() -> None:
    processor = Processor({"actor-0": 0.5, "coordinator": 0.1}, {"actor-0.0": 0.1, "coordinator.0": 0.1})
    assert processor.own == pytest.approx(0.2)
    assert [f.subject for f in explain([step(train=1.0)], SETUP, processor).findings] == ["actor", "runtime"]


def test_figures_are_means_over_the_steps() -> None:
    found = explain([step(0, train=1.0), step(1, train=2.0, wait_for_rollout=1.0)], SETUP, Processor())
    assert (found.first, found.last, found.step_s) == (0, 1, 2.0)
    assert found.trainer == {"train": 1.5, "wait for rollout": 0.5}
    assert found.roles["rollout"] == RoleShare(1, 1.0, {"actor": 0.0})
    assert found.roles["actor"].waits == {"rollout": 0.25}


def test_steps_in_which_a_role_started_again_are_named_and_left_out() -> None:
    steps = [step(0, train=1.0), step(1, train=1.0, start_of_rollout=9.0), step(2, train=1.0)]
    found = explain(steps, SETUP, Processor())
    assert (found.step_s, found.num_left_out, found.starts) == (1.0, 1, {"rollout": 9.0})
    assert (found.first, found.last) == (0, 2)
    assert lines("demo", found)[1] == (
        "the trainer waited for roles to start, at first or again: rollout 9.0 s (steps left out below: 1)"
    )
    assert explain(steps[1:2], SETUP, Processor()).step_s == 10.0


def test_the_whole_way_from_spans_to_words() -> None:
    processor = Processor({"actor-0": 0.3, "rollout-0": 0.35, "supervisor": 0.01}, {"actor-0.0": 0.02})
    text = lines("demo", explain(steps_of(one_step()), SETUP, processor))
    assert text[:8] == [
        "run demo: steps 0 to 0, 10.000 s a step",
        "",
        "actor and rollout take turns: each waits for the other.",
        "  because the trainer waits 6.000 s (60%) of a step: 3.000 s (30%) for rollout, 1.300 s (13%) for reference, "
        "1.000 s (10%) for weights, 0.500 s (5%) for reward, 0.200 s (2%) for coordinator",
        "  because rollout waits for the trainer's next version 65% of the time",
        "  change  max_staleness=2 (now 1): samples may be one version older, and generation goes on meanwhile",
        "",
        "a step of the trainer",
    ]
    assert "reference       1          12%      actor 53%, rollout 35%" in text
    assert "rollout         1          35%      actor 65%" in text
    assert text[-1] == "  event loops, coordinator, supervisor and store together: 0.030 of a core"


def test_processor_time_is_that_around_the_steps_of_the_newest_incarnation() -> None:
    def look(at: int, used: float, name: str = "cpu", incarnation: int = 2, **more: float) -> Figures:
        values: Mapping[str, float] = {"loop": used, "process": 2 * used} if name == "cpu" else more
        return Figures("actor-0.0" if name == "cpu" else "supervisor.0", name, at * 10**9, values, incarnation)

    figures = [
        look(0, 9.0, incarnation=1), look(10, 0.0), look(20, 1.0), look(30, 5.0), look(40, 5.0),
        look(10, 0, "cores", actor=1.0), look(30, 0, "cores", actor=11.0),
    ]  # fmt: skip
    assert processor_of(figures, 20.5, 29.5) == Processor({"actor": 0.5}, {"actor-0.0": 0.4})
    assert processor_of([], 0, 1) == Processor()
    ended = [
        Figures("a.0", "cpu", at * 10**9, {"delayed": delayed}) for at, delayed in ((0, 1.0), (10, 6.0), (20, 2.0))
    ]
    assert processor_of(ended, 0, 20).delayed == {"a.0": 0.25}


def test_the_setup_is_read_from_the_resolved_settings() -> None:
    def group(*roles: str, **sizes: int) -> dict[str, Any]:
        return {"roles": list(roles), "replicas": 1, "processes": 1, "threads": 1, **sizes}

    settings = {
        "role_groups": [group("rollout", replicas=3, threads=2), group("actor", "reference", processes=2)],
        "max_staleness": 4,
        "rollout": {"spare_groups": 2, "prompts_per_step": 16},
        "reward": {"num_workers": 3},
    }
    processes = {"rollout": 3, "actor": 2, "reference": 2}
    assert Setup.of(settings, 8) == Setup(4, processes, 8, 8, 2, 16, 3, frozenset({"reference"}))
