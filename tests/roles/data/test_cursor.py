"""The order of rows: every pass a permutation, computed and not kept, the same wherever it is computed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.roles.data.cursor import Balance, Cursor, Order, Permutation, Place, held_out_rows


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**63 - 1))
def test_a_permutation_takes_every_index_once(size: int, seed: int) -> None:
    permutation = Permutation(size, seed)
    assert sorted(map(permutation, range(size))) == list(range(size))


def test_a_permutation_of_a_billion_rows_costs_no_memory_and_repeats_nothing() -> None:
    permutation = Permutation(1_000_000_007, "large")
    drawn = [permutation(i) for i in range(2000)]
    assert len(set(drawn)) == 2000
    assert 0 <= min(drawn) < 5_000_000 and 995_000_000 < max(drawn) < 1_000_000_007


def test_every_place_is_equally_likely_for_every_row() -> None:
    # 4 rows, 4,000 seeds: each of the 16 counts has mean 1000 and standard deviation 27.
    counts = [[0] * 4 for _ in range(4)]
    for seed in range(4000):
        permutation = Permutation(4, "fair", seed)
        for index in range(4):
            counts[index][permutation(index)] += 1
    assert all(850 < count < 1150 for row in counts for count in row)


def test_all_orders_of_three_rows_appear() -> None:
    orders = {tuple(map(Permutation(3, "orders", seed), range(3))) for seed in range(100)}
    assert orders == set(itertools.permutations(range(3)))


def test_the_order_never_changes_between_versions_and_machines() -> None:
    order = Order(num_rows=10, seed=7)
    rows = [order.locate(position).row for position in range(20)]
    assert rows == [3, 9, 5, 2, 8, 7, 0, 4, 6, 1, 2, 5, 3, 6, 0, 8, 1, 9, 4, 7]


def test_every_pass_takes_every_row_once_in_an_order_of_its_own() -> None:
    order = Order(num_rows=50, seed=1)
    passes = [[order.locate(50 * number + i) for i in range(50)] for number in range(3)]
    for number, places in enumerate(passes):
        assert {place.pass_number for place in places} == {number}
        assert sorted(place.row for place in places) == list(range(50))
    assert len({tuple(place.row for place in places) for places in passes}) == 3


KINDS = ["image"] * 30 + ["text"] * 60 + ["audio"] * 10


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_step_of_a_balanced_order_holds_each_kind_in_its_share_of_the_data(shuffle: bool) -> None:
    order = Order(100, seed=3, shuffle=shuffle, balance=Balance(KINDS))
    passes = [[order.locate(100 * number + at).row for at in range(100)] for number in range(2)]
    for rows in passes:
        assert sorted(rows) == list(range(100))
        for step in range(10):
            counts = Counter(KINDS[row] for row in rows[10 * step : 10 * step + 10])
            assert abs(counts["image"] - 3) <= 1 and abs(counts["text"] - 6) <= 1 and abs(counts["audio"] - 1) <= 1
    assert (passes[0] == passes[1]) != shuffle


def test_where_a_kind_runs_dry_the_others_fill_its_places_in_their_shares_and_every_row_comes_once() -> None:
    order = Order(100, seed=3, balance=Balance(KINDS, {"audio": 2.0, "image": 1.0, "text": 1.0, "video": 9.0}))
    rows = [order.locate(at).row for at in range(100)]
    assert sorted(rows) == list(range(100))
    first, then, last = (Counter(KINDS[row] for row in rows[slice(*part)]) for part in ((0, 20), (20, 60), (80, 100)))
    assert (first["audio"], first["image"], first["text"]) == (10, 5, 5)
    assert (then["audio"], then["image"], then["text"]) == (0, 20, 20)
    assert last == {"text": 20}


def test_another_seed_gives_another_order() -> None:
    assert [Order(50, 1).locate(i).row for i in range(50)] != [Order(50, 2).locate(i).row for i in range(50)]


def test_without_shuffling_rows_come_as_they_stand() -> None:
    cursor = Cursor(Order(num_rows=3, seed=0, shuffle=False))
    assert list(itertools.islice(cursor, 5)) == [Place(0, 0), Place(0, 1), Place(0, 2), Place(1, 0), Place(1, 1)]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_step_longer_than_the_data_takes_rows_of_several_passes(num_rows: int) -> None:
    cursor = Cursor(Order(num_rows, seed=5))
    step = list(itertools.islice(cursor, 8))
    assert [place.pass_number for place in step] == [position // num_rows for position in range(8)]
    for number in range(8 // num_rows):
        assert sorted(place.row for place in step if place.pass_number == number) == list(range(num_rows))


@pytest.mark.parametrize("stop", range(13))
def test_a_cursor_resumes_exactly_where_it_stopped_also_at_the_edge_of_a_pass(stop: int) -> None:
    order = Order(num_rows=4, seed=3, num_passes=3)
    whole = list(Cursor(order))
    assert len(whole) == 12
    stopped = Cursor(order)
    taken = list(itertools.islice(stopped, stop))
    assert taken + list(Cursor(order, stopped.position)) == whole


def test_an_ended_cursor_stays_ended_and_goes_on_with_more_passes() -> None:
    cursor = Cursor(Order(num_rows=2, seed=3, num_passes=1))
    assert len(list(cursor)) == 2
    assert list(cursor) == []
    longer = Cursor(Order(num_rows=2, seed=3, num_passes=2), cursor.position)
    assert [place.pass_number for place in longer] == [1, 1]


@pytest.mark.parametrize("position", [-1, 6, 7])
def test_a_position_outside_the_passes_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"position must be in range\(6\)"):
        Order(num_rows=3, seed=0, num_passes=2).locate(position)


def test_held_out_rows_are_distinct_and_depend_on_the_seed_alone() -> None:
    rows = held_out_rows(1000, 100, seed=1)
    assert len(set(rows)) == 100 and set(rows) <= set(range(1000))
    assert rows == held_out_rows(1000, 100, seed=1)
    assert rows[:50] == held_out_rows(1000, 50, seed=1)
    assert set(rows) != set(held_out_rows(1000, 100, seed=2))
