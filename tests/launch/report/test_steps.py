"""Who waited for whom, told from spans made by hand; and the records that a run keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.launch.report.intervals import intersect, length, subtract, union
from rondo.launch.report.steps import Records, critical_path, read_steps, steps_of
from rondo.launch.report.timeline import SpanRecord, read_run
from rondo.runtime.records.timeline import Timeline
from tests.launch.hand import TENTH, generated, one_step, span


def test_intervals_join_cross_and_are_taken_away() -> None:
    assert union([(5, 7), (1, 3), (2, 4), (6, 6), (7, 9)]) == [(1, 4), (5, 9)]
    assert intersect([(1, 4), (5, 9)], [(0, 2), (3, 6), (8, 20)]) == [(1, 2), (3, 4), (5, 6), (8, 9)]
    assert subtract([(1, 4), (5, 9)], [(0, 2), (3, 6), (8, 20)]) == [(2, 3), (6, 8)]
    assert length([(1, 4), (5, 9)]) == 7


def test_the_trainers_wait_is_told_apart_by_what_its_groups_were_missing() -> None:
    (step,) = steps_of(one_step())
    assert (step.step, step.start, step.step_s) == (0, 0.0, 10.0)
    assert step.trainer == pytest.approx(
        {
            "wait for weights": 1.0, "wait for rollout": 3.0, "wait for reward": 0.5, "wait for reference": 1.3,
            "wait for coordinator": 0.2, "train": 3.0, "commit": 0.6, "publish": 0.3, "other": 0.1,
        }
    )  # fmt: skip


def test_the_parts_of_a_step_sum_to_the_step() -> None:
    spans = [s for number in range(3) for s in one_step(number * 100.0, number)]
    told = steps_of(spans)
    assert [step.step for step in told] == [0, 1, 2]
    for step in told:
        assert sum(step.trainer.values()) == pytest.approx(step.step_s)
    path = critical_path(spans, [0, 1, 2])
    assert path[0][1] == 0 and [start for _, start, _ in path[1:]] == [end for _, _, end in path[:-1]]


def test_the_wait_for_the_longest_trajectory_is_from_most_of_the_groups_to_the_last() -> None:
    (step,) = steps_of(one_step())
    assert step.longest_s == pytest.approx(1.0)  # from 30 to 40; from 40 on it is the reward's
    quick = [s for s in one_step() if s.args.get("group") != 1] + generated(1, 10, 30.5, 0)
    assert steps_of(quick)[0].longest_s == pytest.approx(0.0)


def test_a_rollout_that_is_busy_with_other_groups_is_waited_for_not_the_weights() -> None:
    (step,) = steps_of([*one_step(), *generated(7, -20, 10, 0)])
    assert "wait for weights" not in step.trainer
    assert step.trainer["wait for rollout"] == pytest.approx(4.0)


def test_a_wait_for_a_role_that_starts_again_is_told_apart() -> None:
    killed = [s for s in one_step() if s.process != "reference-0.0"] + [
        span("reference-0.0", "wait for a round", -5, 2),
        span("reference-0.0", "load", 8, 30, incarnation=1),
        span("reference-0.0", "load", 30, 50, incarnation=1),
        span("reference-0.0", "forward", 52, 58, 0, incarnation=1, groups=[0, 1]),
    ]
    (step,) = steps_of(killed)
    assert step.trainer["start of reference"] == pytest.approx(0.5)  # from 45, when its input was there, to 50
    assert step.trainer["wait for reference"] == pytest.approx(0.8)
    assert sum(step.trainer.values()) == pytest.approx(step.step_s)
    with_another = [*killed, span("reference-1.0", "wait for a round", 0, 100)]
    assert "start of reference" not in steps_of(with_another)[0].trainer


def test_the_others_wait_for_rollout_while_it_generates_and_else_for_the_actor() -> None:
    (step,) = steps_of(one_step())
    rollout, reference = step.roles["rollout"], step.roles["reference"]
    assert (rollout.num_processes, rollout.busy_s) == (1, pytest.approx(3.5))
    assert rollout.waits_s == pytest.approx({"actor": 6.5})
    assert reference.busy_s == pytest.approx(1.2)
    assert reference.waits_s == pytest.approx({"rollout": 3.5, "actor": 5.3})


def test_a_rollout_that_evaluates_waits_for_nobody_else() -> None:
    (step,) = steps_of([*one_step(), span("rollout-0.0", "evaluate", 60, 100, lane="rollout/evaluation")])
    assert step.roles["rollout"].waits_s == pytest.approx({"actor": 2.5, "evaluation": 4.0})


def test_seconds_of_a_role_are_summed_over_its_replicas() -> None:
    (step,) = steps_of([*one_step(), span("rollout-1.0", "generate", 0, 100, 0, group=9)])
    rollout = step.roles["rollout"]
    assert (rollout.num_processes, rollout.busy_s) == (2, pytest.approx(13.5))


def test_work_inside_other_work_counts_once() -> None:
    (step,) = steps_of([*one_step(), span("actor-0.0", "save", 97, 98, 0)])
    assert (step.trainer["publish"], step.trainer["save"]) == (pytest.approx(0.2), pytest.approx(0.1))


def test_a_step_that_was_not_committed_is_no_step() -> None:
    assert steps_of([s for s in one_step() if s.name != "commit"]) == []
    still = [SpanRecord(s.process, s.name, s.lane, s.start, s.end, s.step, still=s.name == "step") for s in one_step()]
    assert steps_of(still) == []


def test_a_step_whose_commit_ends_beside_the_next_one_is_a_step() -> None:
    spans = [s for s in one_step() if s.name != "commit"]
    assert [told.step for told in steps_of([*spans, span("actor-0.0", "commit", 99, 140, 0, lane="actor/settle")])] == [
        0
    ]


def test_a_round_that_never_came_is_waited_for_nobody_in_particular() -> None:
    idle = [s for s in one_step() if s.name != "wait for a round"]
    (step,) = steps_of([*idle, span("actor-0.0", "wait for a round", 0, 60)])
    assert step.trainer["wait for rollout"] == pytest.approx(3.5)
    assert step.trainer["wait for coordinator"] == pytest.approx(2.5)


def write(run: Path, spans: list[SpanRecord]) -> None:
    for process in {s.process for s in spans}:
        group, _, rank = process.rpartition(".")
        made = Timeline(run, group, int(rank), clock=lambda: 0)
        for s in spans:
            if s.process == process:
                made.add((s.name, s.lane, s.start, s.end - s.start, s.step, dict(s.args), 0))
        made.close()


def test_every_step_is_recorded_once_also_by_a_leader_that_starts_again(tmp_path: Path) -> None:
    write(tmp_path, one_step(0.0, 0) + one_step(100.0, 1))
    assert [step.step for step in Records(tmp_path).advance(final=True)] == [0, 1]
    assert Records(tmp_path).advance(final=True) == []
    records = Records(tmp_path)
    spans, _ = read_run(tmp_path)
    told = read_steps(tmp_path, [])
    assert [step.step for step in told] == [0, 1]
    assert told == read_steps(tmp_path, spans)
    assert told[1].trainer == pytest.approx(steps_of(one_step())[0].trainer)
    assert records.advance() == []


def test_steps_without_a_record_are_told_from_their_spans(tmp_path: Path) -> None:
    write(tmp_path, one_step(0.0, 0))
    Records(tmp_path).advance(final=True)
    later = [s for s in one_step(100.0 + 10 * 86400 * 365 * 100, 1) if s.end > TENTH]
    assert [step.step for step in read_steps(tmp_path, later)] == [0, 1]


def test_a_step_is_recorded_only_when_every_process_has_had_time_to_tell(tmp_path: Path) -> None:
    write(tmp_path, one_step(0.0, 0))
    began = min(s.start for s in read_run(tmp_path)[0])
    assert Records(tmp_path, clock=lambda: began + 110 * TENTH).advance() == []
    assert [step.step for step in Records(tmp_path, clock=lambda: began + 140 * TENTH).advance()] == [0]
