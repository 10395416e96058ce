from __future__ import annotations

import itertools
import random

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rondo.comm.partitions.runs import Numbers
from rondo.comm.partitions.samplers import balanced
from rondo.comm.partitions.spec import (
    Balanced,
    Groups,
    Ordered,
    Own,
    Sampler,
    Sequential,
    TokenBudget,
    VersionWindow,
    load_sampler,
)
from rondo.runtime.errors import ConfigError, SamplerFailed
from tests.comm.partitions.hand import Hand
from tests.strength import strength

QUICK = settings(max_examples=strength(quick=25, full=60), deadline=None)
SAMPLERS = [
    Sequential(), Balanced(), Balanced(equal_size=False), TokenBudget(40), VersionWindow(), Groups(2), Ordered(3),
    Ordered(3, window=4), Own("tests.comm.partitions.own_samplers:Shuffled", {"seed": 1}),
]  # fmt: skip


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: repr(s)[:40])
@QUICK
@given(data=st.data())
def test_every_row_is_delivered_once_whatever_comes_between(sampler: Sampler, data: st.DataObject):
    hand = Hand()
    hand.task(sampler=sampler)
    delivered: list[int] = []
    number = itertools.count()
    alive: set[int] = set()
    keys: dict[int, str] = {}

    def take(**ask) -> bool:
        ranks = data.draw(st.integers(1, 3))
        parts = hand.claim(ranks=ranks, batch=4, **ask)
        assert not parts or len(parts) == ranks
        assert all(len(part) <= 4 for part in parts) or sampler == Balanced(equal_size=False)
        rows = [id for part in parts for id in part]
        if not rows:
            return False
        if data.draw(st.booleans()):
            delivered.extend(rows)
            for rank in range(ranks):
                hand.ack(hand.table.tasks["t"].scopes["a.1"].next - 1, rank=rank)
        else:
            hand.die("a")
        return True

    for _ in range(data.draw(st.integers(0, 6))):
        if data.draw(st.booleans()):
            n = 2 * data.draw(st.integers(1, 3))
            numbers = [next(number) for _ in range(n)]
            ids = hand.put(
                n, keys=[str(i) for i in numbers], groups=[i // 2 for i in numbers],
                tokens=[data.draw(st.integers(1, 50)) for _ in range(n)], versions=[i % 3 for i in range(n)],
            )  # fmt: skip
            keys |= dict(zip(ids, map(str, numbers), strict=True))
            alive |= set(ids)
        else:
            take(partial=data.draw(st.booleans()))
        hand.check()
    while take(partial=True, ended=True):
        hand.check()
    assert sorted(delivered) == sorted(alive)


@QUICK
@given(costs=st.lists(st.integers(0, 1000), max_size=60), parts=st.integers(1, 9), equal=st.booleans())
@example(costs=[0] * 6, parts=3, equal=False)
def test_balancing_deals_every_row_once_and_no_worse_than_the_largest_row(costs, parts, equal):
    found = balanced(costs, parts, equal_size=equal)
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    assert len(found) == parts
    sums = [sum(costs[i] for i in part) for part in found]
    if equal:
        assert max(map(len, found)) - min(map(len, found)) <= 1
    assert max(sums) - min(sums) <= max(costs, default=0) * (2 if equal else 1)
    if len(costs) >= parts:
        assert all(found)


def test_balancing_halves_what_dealing_in_turn_leaves():
    numbers = random.Random(0)
    costs = [numbers.randint(100, 4000) for _ in range(256)]
    sums = [sum(costs[i] for i in part) for part in balanced(costs, 8, equal_size=True)]
    dealt = [sum(costs[i::8]) for i in range(8)]
    assert max(sums) - min(sums) < 0.1 * (max(dealt) - min(dealt))


@QUICK
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=40), ranks=st.integers(1, 3))
def test_a_token_budget_is_kept_but_by_a_row_that_stands_alone(costs, ranks):
    hand = Hand()
    hand.task(sampler=TokenBudget(20))
    ids = hand.put(len(costs), tokens=costs)
    cost = dict(zip(ids, costs, strict=True))
    while parts := hand.claim(ranks=ranks, batch=8, partial=True):
        for part in parts:
            assert sum(cost[id] for id in part) <= 20 or len(part) == 1


def test_a_token_budget_waits_until_every_rank_is_full():
    hand = Hand()
    hand.task(sampler=TokenBudget(10))
    hand.put(3, tokens=[6, 6, 6])
    assert hand.pick(ranks=3, batch=8) is None
    hand.put(1, tokens=[6])
    assert hand.claim(ranks=3, batch=8) == [[0], [1], [2]]


def test_groups_come_whole_by_their_id_however_their_rows_were_mixed():
    hand = Hand()
    hand.task(sampler=Groups(3))
    rows = hand.put(4, groups=["a", "b", "a", "b"])
    assert hand.pick(batch=3, partial=True) is None
    rows += hand.put(2, groups=["b", "c"])
    assert hand.claim(batch=5, partial=True) == [[rows[1], rows[3], rows[4]]]
    hand.emit("clear", rows=[[rows[0], 1]])
    hand.put(1, groups="a")
    assert hand.pick(batch=3, partial=True) is None
    with pytest.raises(SamplerFailed, match="whole group"):
        hand.pick(batch=2)


def test_a_row_beyond_a_whole_group_begins_the_next_and_costs_neither():
    hand = Hand()
    hand.task(sampler=Groups(8))
    rows = hand.put(9, groups="a")
    assert hand.claim(batch=8) == [rows[:8]]
    assert hand.pick(batch=8, partial=True, ended=True) is None
    rows += hand.put(15, groups="a")
    assert hand.claim(ranks=2, batch=8) == [rows[8:16], rows[16:24]]


def test_a_whole_group_that_lost_a_row_waits_for_another_of_its_group():
    hand = Hand()
    hand.task(sampler=Groups(2))
    rows = hand.put(5, groups=["a", "b", "a", "a", "b"])
    assert hand.pick(batch=6) is None  # two whole groups for three
    hand.emit("clear", rows=[[rows[0], 1]])
    assert hand.claim(ranks=2, batch=2) == [[rows[1], rows[4]], [rows[2], rows[3]]]


def test_groups_of_a_batch_stay_on_one_rank():
    hand = Hand()
    hand.task(sampler=Groups(2))
    rows = hand.put(8, groups=[0, 1, 2, 3, 0, 1, 2, 3])
    assert hand.claim(ranks=2, batch=4) == [[rows[0], rows[4], rows[1], rows[5]], [rows[2], rows[6], rows[3], rows[7]]]


def test_a_version_window_gives_the_oldest_inside_and_leaves_the_rest():
    hand = Hand()
    hand.task(sampler=VersionWindow(max_staleness=2))
    old, rows = hand.put(2, versions=3), hand.put(4, versions=[7, 5, 6, 4])
    assert hand.claim(batch=3, version=7) == [[rows[1], rows[2], rows[0]]]
    assert hand.pick(batch=3, version=7, partial=True) is None
    assert hand.claim(batch=3, version=5, partial=True) == [[*old, rows[3]]]


@pytest.mark.parametrize("window", [None, 4])
def test_the_order_is_the_same_for_a_seed_whatever_the_order_of_arrival(window):
    def order(seed: int, arrival: int) -> list[str]:
        keys = [str(i) for i in range(12)]
        random.Random(arrival).shuffle(keys)
        hand = Hand()
        hand.task(sampler=Ordered(seed, window=window))
        found: list[str] = []
        for key in keys:
            hand.put(1, keys=[key])
            for part in hand.claim(batch=2):
                found += [hand.table.entry(id).value("keys", 0) for id in part]
        while parts := hand.claim(batch=2, partial=True, ended=True):
            found += [hand.table.entry(id).value("keys", 0) for id in parts[0]]
        return found

    assert order(1, 0) == order(1, 1) == order(1, 2) != order(2, 0)
    assert sorted(order(1, 0), key=int) == [str(i) for i in range(12)]
    if window is not None:
        assert sorted(order(1, 0)[:4], key=int) == ["0", "1", "2", "3"]


def test_an_order_in_windows_goes_on_where_it_was_after_a_restart():
    hand = Hand()
    hand.task(sampler=Ordered(0, window=1))
    hand.put(4, keys=["0", "1", "2", "3"])
    hand.claim(batch=2)
    hand.ack(0)
    hand.emit("clear", rows=[[0, 2]])
    hand.partitions = type(hand.partitions).load(hand.partitions.dump())
    assert hand.claim(batch=2) == [[2, 3]]


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("restarted", [False, True])
def test_an_order_in_windows_does_not_wait_for_rows_that_were_cleared_before_it_met_them(window, restarted):
    hand = Hand()
    hand.task(sampler=Ordered(0, window=window))
    hand.put(8, keys=[str(i) for i in range(8)])
    hand.emit("clear", rows=[[0, 3], [5, 1]])
    if restarted:
        hand.partitions = type(hand.partitions).load(hand.partitions.dump())
    found = [id for _ in range(4) for id in hand.claim(batch=1)[0]]
    assert sorted(found) == [3, 4, 6, 7]
    for batch in range(4):
        hand.ack(batch)
    hand.emit("reset", task="t", to=1)  # in a further pass too
    assert sorted(hand.table.entry(id).value("keys", id) for id in hand.claim(batch=4)[0]) == ["3", "4", "6", "7"]


def test_numbers_are_kept_as_runs():
    numbers, held = Numbers(), set()
    for number in random.Random(0).sample([*range(60), *range(0, 60, 7)], 69):
        numbers.add(number)
        held.add(number)
        assert [n for n in range(-1, 62) if n in numbers] == sorted(held)
    assert numbers.runs() == [[0, 60]] and 30 in Numbers(numbers.runs())


@pytest.mark.parametrize("key", [str(1 << 64), "9" * 5000, "1" + "0" * 18])
def test_keys_that_are_too_large_for_a_number_are_text_to_a_checkpoint_and_refused_by_an_order(key):
    hand = Hand()
    hand.task(sampler=Ordered(0, window=4))
    rows = hand.put(2, keys=[key, "9" * 18])
    with pytest.raises(SamplerFailed, match=r"must be numbers below 10\*\*18"):
        hand.pick()
    hand.emit("clear", rows=[[rows[0], 2]])
    assert orjson.loads(orjson.dumps(hand.partitions.dump()))["tables"][0]["cleared"] == [[10**18 - 1, 1]]


@pytest.mark.parametrize("how", ["raise", "twice", "unknown", "many", "ranks", "text", "type"])
def test_a_sampler_that_breaks_its_contract_is_named_and_changes_nothing(how):
    hand = Hand()
    hand.task(sampler=Own("tests.comm.partitions.own_samplers:Wrong", {"how": how}))
    hand.put(3)
    before = hand.partitions.dump()
    with pytest.raises(SamplerFailed, match="own_samplers:Wrong of task t must"):
        hand.pick(batch=4)
    assert hand.partitions.dump() == before


def test_a_sampler_that_cannot_be_made_is_named():
    hand = Hand()
    hand.task(sampler=Own("tests.comm.partitions.nowhere:Class"))
    hand.put(1)
    with pytest.raises(SamplerFailed, match="nowhere:Class"):
        hand.pick()
    with pytest.raises(ConfigError, match=r"package\.module:Class"):
        Own("nothing")
    with pytest.raises(ConfigError, match="sequential"):
        load_sampler({"kind": "magic"})
