"""Rounds of a step that makes several updates: mini-batches in admission order, passes, and steps that wait to be whole."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import orjson
import pytest

from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event
from rondo.comm.bus.rounds import mini_batch_sizes
from rondo.comm.ring.spans import num_rows, rows_of, spans_of
from tests.comm.driver import BASE, STREAMS, Driver, by_field


def driver(mini_batches: int = 2, passes: int = 1, *, whole_step: bool = False, **changes: Any) -> Driver:
    train = replace(STREAMS[2], mini_batches=mini_batches, passes=passes, whole_step=whole_step)
    return Driver(**{"groups_per_step": 4, "streams": (*STREAMS[:2], train), **changes})


def ready(bus: Driver, groups: list[int]) -> None:
    for group in groups:
        bus.fill(group)
    bus.score()


def put_lengths(bus: Driver, group: int, lengths: list[int]) -> None:
    found = bus.grant(group)
    bus._put(
        "ring/rollout-0/0", [[group, s, 0] for s in range(len(lengths))], list(BASE), epoch=found.epoch,
        reservation=found.reservation(), info=by_field([[n, 4, 1.0, 0, 0, 0, 1.0] for n in lengths]),
    )  # fmt: skip


def groups_of(rounds: list[Event]) -> list[int]:
    return sorted({g for event in rounds for rank in event["spans"] for g, *_ in rank})


def all_rounds(bus: Driver, step: int) -> list[Event]:
    made: list[Event] = []
    while planned := bus.train_rounds(step):
        made += planned
        assert len(made) < 200
    return made


def test_mini_batches_differ_by_one_group_at_most() -> None:
    assert mini_batch_sizes(4, 1) == [4]
    assert mini_batch_sizes(8, 3) == [3, 3, 2]
    assert mini_batch_sizes(5, 5) == [1] * 5


def test_a_steps_groups_are_divided_over_its_updates_in_admission_order_and_every_pass_has_all_of_them() -> None:
    bus = driver(mini_batches=2, passes=3)
    a, b, c, d = bus.admit(0)
    ready(bus, [d, b, c, a])
    made = all_rounds(bus, 0)
    assert [event["update"] for event in made] == [0, 1, 2, 3, 4, 5]
    assert [groups_of([event]) for event in made] == [[a, b], [c, d]] * 3
    assert [event["closes"] for event in made] == [True] * 6
    assert [event["last"] for event in made] == [False] * 5 + [True]
    assert [event["index"] for event in made] == list(range(6))
    bus.commit(1)
    assert bus.index.counts["trained"] == 4 and bus.index.rounds.lanes["actor"].rounds == {}


def test_an_update_is_streamed_and_the_next_one_waits_for_its_last_round() -> None:
    bus = driver()
    a, b, c, d = bus.admit(0)
    ready(bus, [a, c, d])
    (first,) = bus.train_rounds(0)
    assert groups_of([first]) == [a] and not first["closes"]
    assert bus.train_rounds(0) == []  # c and d are ready; b is missing in the first update
    ready(bus, [b])
    second, third = bus.train_rounds(0), bus.train_rounds(0)
    assert groups_of(second) == [b] and second[-1]["closes"] and not second[-1]["last"]
    assert groups_of(third) == [c, d] and third[-1]["last"]


def test_a_group_whose_mini_batch_may_still_change_is_not_streamed() -> None:
    bus = driver()
    a, b, c, d = bus.admit(0)
    ready(bus, [b, c])
    # If a is filtered, c moves up into the first mini-batch: certain is b alone, which stays in it.
    assert bus.index.membership(0) == [b, c] and bus.index.mini_batches(0, 2) == [[b], []]
    assert groups_of(bus.train_rounds(0)) == [b]
    bus.grant(a)
    bus.emit(event="settle", group=a, epoch=0, outcome="filtered", why="equal rewards")
    assert bus.index.mini_batches(0, 2) == [[b, c], []]
    (e,) = bus.admit(0)
    ready(bus, [d, e])
    made = all_rounds(bus, 0)
    assert [(event["update"], groups_of([event])) for event in made] == [(0, [c]), (1, [d, e])]


def test_whoever_asks_again_after_a_death_or_a_restart_of_the_coordinator_gets_the_same_rounds() -> None:
    bus = driver(passes=2)
    ready(bus, bus.admit(0))
    made = [*bus.train_rounds(0), *bus.train_rounds(0), *bus.train_rounds(0)]  # in the second pass
    assert made[-1]["update"] == 2
    copy = Index.load(bus.index.rules, orjson.loads(orjson.dumps(bus.index.dump())))
    assert copy.dump() == bus.index.dump()
    bus.die("actor-0", 1)
    bus.start("actor-0", 2)
    bus.join()
    for index in (bus.index, copy):
        assert [made["spans"] for made in index.rounds.find("actor", "step0", 0)[:3]] == [
            event["spans"] for event in made
        ]
    assert copy.plan_rounds("actor", "actor-0", 2, 0) == bus.index.plan_rounds("actor", "actor-0", 2, 0) != []


def test_another_layout_has_every_pass_planned_anew() -> None:
    bus = driver(mini_batches=1, passes=2)
    ready(bus, bus.admit(0))
    assert len(all_rounds(bus, 0)) == 2
    bus.emit(event="join", stream="actor", member="actor-0", ranks=2, tokens=1 << 20)
    anew = all_rounds(bus, 0)
    assert [len(event["spans"]) for event in anew] == [2, 2] and anew[1]["update"] == 1


def test_a_stream_that_needs_the_whole_step_waits_for_all_of_its_groups_and_others_do_not() -> None:
    for whole_step in (True, False):
        bus = driver(whole_step=whole_step)
        a, b, c, d = bus.admit(0)
        ready(bus, [a, b, c])
        assert groups_of(bus.train_rounds(0)) == ([] if whole_step else [a, b])
        ready(bus, [d])
        assert groups_of(all_rounds(bus, 0)) == ([a, b, c, d] if whole_step else [c, d])


def test_a_whole_step_larger_than_a_round_is_planned_to_its_end() -> None:
    bus = driver(mini_batches=1, whole_step=True)
    bus.join(tokens=20)  # one group a round
    ready(bus, bus.admit(0))
    made = all_rounds(bus, 0)
    assert [groups_of([event]) for event in made] == [[0], [1], [2], [3]]
    assert [event["last"] for event in made] == [False, False, False, True]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_when_each_survivor_is_in_one_update_of_a_pass_with_one_rank_within_the_budget(
    seed: int,
) -> None:
    draw = random.Random(seed)
    mini_batches, passes, ranks = draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 3)
    bus = driver(mini_batches, passes, groups_per_step=6, spare_groups=draw.randint(0, 3), whole_step=seed % 4 == 0)
    budget = draw.choice((40, 80, 1000))
    bus.emit(event="join", stream="actor", member="actor-0", ranks=ranks, tokens=budget)
    lengths: dict[int, list[int]] = {}
    made: list[Event] = []
    waiting = bus.admit(0)
    while not (made and made[-1]["last"]):
        assert len(made) < 200
        if not waiting:
            made += bus.train_rounds(0)
            waiting = bus.admit(0)
            continue
        group = waiting.pop(draw.randrange(len(waiting)))
        if draw.random() < 0.2:
            bus.grant(group)
            bus.emit(event="settle", group=group, epoch=0, outcome="filtered", why="equal rewards")
            waiting += bus.admit(0)
        else:
            lengths[group] = [draw.randint(6, 39) for _ in range(2)]
            put_lengths(bus, group, lengths[group])
            bus.score()
        if draw.random() < 0.5:
            made += bus.train_rounds(0)
    members = bus.index.membership(0)[:6]
    sizes = mini_batch_sizes(6, mini_batches)
    per_rank: list[list[set[tuple[int, int]]]] = []
    for update in range(mini_batches * passes):
        mine = [event for event in made if event["update"] == update]
        at = sum(sizes[: update % mini_batches])
        rows = [(g, s) for event in mine for rank in event["spans"] for g, s, _ in rows_of(rank)]
        assert sorted(rows) == [(g, s) for g in sorted(members[at : at + sizes[update % mini_batches]]) for s in (0, 1)]
        assert [event["closes"] for event in mine] == [False] * (len(mine) - 1) + [True]
        per_rank.append([{(g, s) for event in mine for g, s, _ in rows_of(event["spans"][r])} for r in range(ranks)])
        for event in mine:
            assert all(sum(lengths[g][s] for g, s, _ in rows_of(rank)) <= budget for rank in event["spans"])
    for update, held in enumerate(per_rank):
        assert held == per_rank[update % mini_batches]
    spans = spans_of([[g, s, 0] for g in members for s in (0, 1)])
    bus.emit(event="commit", role="actor", version=1, checksum=7, attempt=0, spans=spans)
    assert bus.index.imbalance() == "" and bus.index.counts["trained"] == 6


def test_ranks_have_about_equal_tokens_media_included_in_every_pass() -> None:
    bus = driver(mini_batches=2, passes=2, groups_per_step=16, media_bytes=512, row_bytes=128)
    bus.emit(event="join", stream="actor", member="actor-0", ranks=4, tokens=1 << 20)
    draw = random.Random(0)
    for group in bus.admit(0):
        found = bus.grant(group)
        if group % 2:
            bus.put_media(group, encoder=draw.randint(50, 400))
        bus._put(
            "ring/rollout-0/0", [[group, 0, 0], [group, 1, 0]], list(BASE), epoch=0, reservation=found.reservation(),
            info=by_field([[draw.randint(20, 300), 4, 1.0, 0, 0, 0, 1.0] for _ in range(2)]),
        )  # fmt: skip
    bus.score()
    made = all_rounds(bus, 0)
    assert len(made) == 4
    for event in made:
        loads = [sum(bus.index.groups[g].costs()[s] for g, s, _ in rows_of(rank)) for rank in event["spans"]]
        assert max(loads) <= 1.3 * sum(loads) / len(loads)
        assert sum(num_rows(rank) for rank in event["spans"]) == 16


@pytest.mark.parametrize("whole_step", [False, True])
def test_filtered_groups_are_replaced_and_spares_become_surplus_in_steps_of_several_updates(whole_step: bool) -> None:
    bus = driver(mini_batches=2, passes=2, spare_groups=2, whole_step=whole_step)
    admitted = bus.admit(0)
    assert len(admitted) == 6
    bus.grant(admitted[1])
    bus.emit(event="settle", group=admitted[1], epoch=0, outcome="filtered", why="equal rewards")
    replacement = bus.admit(0)
    assert len(replacement) == 1
    ready(bus, [*admitted[:1], *admitted[2:], *replacement])
    made = all_rounds(bus, 0)
    assert [groups_of([event]) for event in made] == [[0, 2], [3, 4]] * 2
    rows = [[g, s, 0] for g in (0, 2, 3, 4) for s in (0, 1)]
    bus.emit(event="commit", role="actor", version=1, checksum=7, attempt=0, spans=spans_of(rows))
    counts = bus.index.counts
    assert (counts["trained"], counts["surplus"], counts["filtered"]) == (4, 2, 1)
    assert bus.index.imbalance() == "" and bus.index.groups == {}
