from __future__ import annotations

import itertools
import random

from rondo.comm.ring.spans import (
    by_part,
    num_rows,
    num_samples,
    rows_of,
    runs,
    samples,
    spans_in,
    spans_of,
    whole_samples,
)


def test_rows_become_spans_and_come_back_in_their_order() -> None:
    rows = [
        [7, 0, 0],
        [7, 1, 0],
        [7, 3, 0],
        [9, 4, 0],
        [9, 5, 0],
        [7, 2, 0],
        [7, 2, 0],
        [8, -1, 0],
        [7, 0, 1],
        [7, 1, 1],
    ]
    spans = spans_of(rows)
    assert spans == [[7, 0, 0, 2], [7, 0, 3, 1], [9, 0, 4, 2], [7, 0, 2, 1], [7, 0, 2, 1], [8, 0, -1, 1], [7, 1, 0, 2]]
    assert rows_of(spans) == rows and (num_rows(spans), num_samples(spans)) == (10, 8)
    assert spans_of([]) == [] == rows_of([])
    assert spans_in(7, [2, 3, 5], 1) == [[7, 1, 2, 2], [7, 1, 5, 1]]


def test_any_rows_come_back_and_any_set_of_samples_is_its_runs() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rows = [[draw.randint(0, 2), draw.randint(0, 5), draw.randint(0, 2)] for _ in range(draw.randint(0, 20))]
        assert rows_of(spans_of(rows)) == rows
        chosen = draw.getrandbits(100) & draw.getrandbits(100)
        found = list(runs(chosen))
        assert sum(samples(first, count) for first, count in found) == chosen
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found))


def test_a_row_named_twice_is_counted() -> None:
    assert by_part([[1, 0, 0, 3], [2, 1, 5, 1], [1, 0, 2, 2]]) == ({(1, 0): 0b1111, (2, 1): 0b100000}, 1)
    assert by_part([[1, 0, 64, 64], [1, 1, 64, 1]]) == ({(1, 0): samples(64, 64), (1, 1): samples(64, 1)}, 0)


def test_a_sample_is_whole_where_none_of_its_parts_is_left_out_before_the_last_that_is_named() -> None:
    assert whole_samples([[1, 0, 0, 3], [2, 0, 5, 1]]) == {1: 0b111, 2: 0b100000}
    # Sample 1 has parts 0 and 2, sample 2 has 0 to 2; of group 2 there is a part 1 alone.
    assert whole_samples([[1, 0, 0, 3], [1, 1, 2, 1], [1, 2, 1, 2], [2, 1, 0, 1]]) == {1: 0b101, 2: 0}
