from __future__ import annotations

import random

from rondo.comm.bus.balance import Bound, fill, micro_batches, recut
from rondo.comm.bus.group import Group
from rondo.comm.ring.spans import rows_of


def test_a_step_takes_the_groups_that_fill_its_budget_and_at_least_one() -> None:
    costs = {1: [9, 9], 2: [1, 1], 3: [1]}
    assert fill(costs.items(), 20) == {1: [9, 9], 2: [1, 1]}
    assert fill(costs.items(), 5) == {1: [9, 9]}
    assert fill((), 5) == {}


def test_rows_of_text_go_one_by_one_to_the_rank_with_least_work() -> None:
    assert micro_batches({1: [8, 2], 2: [5, 5]}, 2, 100) == [[[[1, 0, 0, 2]], [[2, 0, 0, 2]]]]
    assert micro_batches({1: [4, 4, 4, 4]}, 2, 4) == [
        [[[1, 0, 0, 1]], [[1, 0, 1, 1]]],
        [[[1, 0, 2, 1]], [[1, 0, 3, 1]]],
    ]


def test_samples_that_share_media_stay_on_one_rank_in_one_micro_batch_where_the_budget_allows() -> None:
    costs = {1: [5, 5], 2: [4, 4], 3: [1, 1]}
    assert micro_batches(costs, 2, 10, Bound(media={1, 2, 3})) == [[[[1, 0, 0, 2]], [[2, 0, 0, 2], [3, 0, 0, 2]]]]


def test_samples_that_share_media_beyond_the_budget_are_cut_into_as_few_parts_as_it_allows() -> None:
    ((first, second),) = micro_batches({1: [3, 3, 3, 3]}, 2, 9, Bound(media={1}))
    assert (first, second) == ([[1, 0, 0, 3]], [[1, 0, 3, 1]])


def test_what_is_used_again_stays_with_its_rank_in_as_few_micro_batches_as_it_needs() -> None:
    costs = {1: [3, 3, 3], 2: [4, 4], 3: [2, 2]}
    streamed = [[[2, 0, 0, 1]], [[3, 0, 0, 2]], [[1, 0, 0, 2]]], [[[1, 0, 2, 1]], [[2, 0, 1, 1]]]
    # Rank 0 has 3 + 3 | 4 + 2 + 2 within 8 tokens, rank 1 has 3 + 4.
    assert recut(streamed, costs, 8) == [
        [[[1, 0, 0, 2]], [[1, 0, 2, 1], [2, 0, 1, 1]]],
        [[[2, 0, 0, 1], [3, 0, 0, 2]], []],
    ]
    # Samples that share media are never taken apart again.
    assert recut([[[[3, 0, 0, 2]], [[2, 0, 0, 1]]]], costs, 5, Bound(media={3})) == [[[[2, 0, 0, 1]]], [[[3, 0, 0, 2]]]]


def test_whole_groups_stay_in_one_micro_batch_even_beyond_the_budget() -> None:
    assert micro_batches({1: [8, 8], 2: [8, 8]}, 1, 10, Bound(groups=True)) == [[[[1, 0, 0, 2]]], [[[2, 0, 0, 2]]]]


def test_a_sample_costs_its_tokens_and_its_share_of_the_encoders_work_rounded_up() -> None:
    info = [[20, 10, 30], [4, 4, 4], [1.0, 1.0, 1.0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1.0, 1.0, 1.0]]
    assert Group(0, 0, 0, 3, known=0b111, info=info).costs() == [20, 10, 30]
    assert Group(0, 0, 0, 3, known=0b111, info=info, encoder=100).costs() == [54, 44, 64]


def test_every_row_is_planned_once_within_the_budget_and_equal_input_gives_equal_batches() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        groups = list(range(draw.randint(1, 8)))
        costs = {group: [draw.randint(1, 30) for _ in range(draw.randint(1, 6))] for group in groups}
        together = [group for group in groups if draw.random() < 0.5]
        ranks, budget = draw.randint(1, 4), draw.randint(5, 60)
        batches = micro_batches(costs, ranks, budget, Bound(media=set(together)))
        assert batches == micro_batches(costs, ranks, budget, Bound(media=[*reversed(together)]))
        rows = sorted(row for batch in batches for rank in batch for row in rows_of(rank))
        assert rows == sorted([group, sample, 0] for group in groups for sample in range(len(costs[group])))
        assert all(len(batch) == ranks for batch in batches)
        for rank in (rows_of(spans) for batch in batches for spans in batch):
            assert len(rank) <= 1 or sum(costs[group][sample] for group, sample, _ in rank) <= budget
        for group in together:
            places = [rank for batch in batches for rank in batch if any(row[0] == group for row in rank)]
            if sum(costs[group]) <= budget:
                assert len(places) == 1
            most = sum(costs[group]) // (budget - max(costs[group])) + 1 if max(costs[group]) < budget else 6
            assert len(places) <= most


def test_one_rank_fills_micro_batches_in_order_and_cuts_a_group_only_where_the_budget_ends() -> None:
    assert micro_batches({2: [4, 4], 3: [1], 1: [4, 4]}, 1, 10) == [[[[1, 0, 0, 2]]], [[[2, 0, 0, 2], [3, 0, 0, 1]]]]
    assert micro_batches({1: [4, 4], 2: [2, 2, 2]}, 1, 10) == [[[[1, 0, 0, 2], [2, 0, 0, 1]]], [[[2, 0, 1, 2]]]]


def test_the_parts_of_a_sample_stay_in_one_micro_batch_where_the_stream_says_so_and_go_apart_where_not() -> None:
    costs, parts = {1: [4, 4, 4, 2], 2: [3]}, {1: [1, 3]}  # sample 1 of group 1 has three parts
    assert micro_batches(costs, 1, 9, Bound(samples=True, parts=parts)) == [
        [[[1, 0, 0, 1]]], [[[1, 0, 1, 1], [1, 1, 1, 1], [1, 2, 1, 1]]], [[[2, 0, 0, 1]]],
    ]  # fmt: skip
    assert micro_batches(costs, 1, 9, Bound(parts=parts)) == [
        [[[1, 0, 0, 2]]], [[[1, 1, 1, 1], [1, 2, 1, 1], [2, 0, 0, 1]]],
    ]  # fmt: skip
    streamed = [[[[1, 0, 1, 1], [1, 1, 1, 1], [1, 2, 1, 1]], [[2, 0, 0, 1]], [[1, 0, 0, 1]]]]
    assert recut(streamed, costs, 14, Bound(samples=True, parts=parts)) == [
        [[[1, 0, 0, 2], [1, 1, 1, 1], [1, 2, 1, 1]]], [[[2, 0, 0, 1]]],
    ]  # fmt: skip


def test_rows_of_any_parts_are_planned_once_with_their_samples_groups_and_media_together() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        parts = {group: [draw.randint(1, 4) for _ in range(draw.randint(1, 5))] for group in range(draw.randint(1, 6))}
        costs = {group: [draw.randint(1, 30) for _ in range(sum(each))] for group, each in parts.items()}
        branched = {group: each for group, each in parts.items() if max(each) > 1}
        bound = Bound(
            groups=seed % 4 == 1, samples=seed % 2 == 0, parts=branched, media={g for g in parts if draw.random() < 0.3}
        )
        ranks, budget = draw.randint(1, 3), draw.randint(10, 80)
        made = micro_batches(costs, ranks, budget, bound)
        again = recut([[batch[rank] for batch in made] for rank in range(ranks)], costs, budget * 2, bound)
        every = [[g, s, p] for g, each in parts.items() for s, num in enumerate(each) for p in range(num)]
        for batches in (made, again):
            assert sorted(row for batch in batches for rank in batch for row in rows_of(rank)) == sorted(every)
            for rank in (rows_of(spans) for batch in batches for spans in batch):
                for group, sample, _ in rank:
                    if bound.samples:
                        assert sum(row[:2] == [group, sample] for row in rank) == parts[group][sample]
                    if bound.groups:
                        assert sum(row[0] == group for row in rank) == len(costs[group])
