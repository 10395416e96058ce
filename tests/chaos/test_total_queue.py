"""The checker turns red: a checker that was never seen red proves nothing."""

from __future__ import annotations

from tests.chaos.total_queue import judge

ROWS = [(group, sample) for group in range(4) for sample in range(2)]
STEP_OF = {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_run_in_which_every_row_is_read_once_is_good() -> None:
    verdict = judge(ROWS, ROWS, ROWS, STEP_OF, 2)
    assert verdict.good and verdict.num_read == 8 and not verdict.recovered


def test_a_planted_loss_is_found() -> None:
    verdict = judge(ROWS, ROWS, [row for row in ROWS if row != (2, 1)], STEP_OF, 2)
    assert not verdict.good and verdict.lost == {(2, 1)}


def test_a_row_of_a_step_that_is_not_committed_is_not_lost() -> None:
    assert judge(ROWS, ROWS, ROWS[:4], STEP_OF, 1).good


def test_a_planted_duplicate_is_found() -> None:
    verdict = judge(ROWS, ROWS, [*ROWS, (1, 0)], STEP_OF, 2)
    assert not verdict.good and verdict.duplicated == {(1, 0)}


def test_a_row_that_nobody_put_is_found() -> None:
    verdict = judge(ROWS[:-1], ROWS[:-1], ROWS, STEP_OF, 2)
    assert not verdict.good and verdict.unexpected == {(3, 1)}


def test_a_row_whose_producer_died_before_the_put_returned_is_recovered() -> None:
    verdict = judge(ROWS, ROWS[1:], ROWS, STEP_OF, 2)
    assert verdict.good and verdict.recovered == {(0, 0)}
