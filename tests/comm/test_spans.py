from __future__ import annotations

import itertools
import random

from rondo.comm.spans import by_group, num_rows, rows_of, runs, samples, spans_of


def test_rows_become_spans_and_come_back_in_their_order() -> None:
    rows = [[7, 0], [7, 1], [7, 3], [9, 4], [9, 5], [7, 2], [7, 2], [8, -1]]
    spans = spans_of(rows)
    assert spans == [[7, 0, 2], [7, 3, 1], [9, 4, 2], [7, 2, 1], [7, 2, 1], [8, -1, 1]]
    assert rows_of(spans) == rows and num_rows(spans) == 8
    assert spans_of([]) == [] == rows_of([])


def test_any_rows_come_back_and_any_set_of_samples_is_its_runs() -> None:
    draw = random.Random(0)
    for _ in range(300):
        rows = [[draw.randint(0, 2), draw.randint(0, 5)] for _ in range(draw.randint(0, 20))]
        assert rows_of(spans_of(rows)) == rows
        chosen = draw.getrandbits(100) & draw.getrandbits(100)
        found = list(runs(chosen))
        assert sum(samples(first, count) for first, count in found) == chosen
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found))


def test_a_row_named_twice_is_counted() -> None:
    assert by_group([[1, 0, 3], [2, 5, 1], [1, 2, 2]]) == ({1: 0b1111, 2: 0b100000}, 1)
    assert by_group([[1, 64, 64]]) == ({1: samples(64, 64)}, 0)
