"""The parity file, and where two of them part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rondo.launch.report.diff import first_difference, show_diff
from rondo.roles.training.parity import ParityLog, RowSum, read, row_sum
from rondo.runtime.errors import ConfigError


def row(group: int, sample: int, tokens: int = 0, rest: int = 0) -> RowSum:
    return group, sample, 100 * group + sample + tokens, rest


def write(run: Path, steps: list[tuple[int, list[list[RowSum]]]], *, rank: int = 0) -> Path:
    run.mkdir(exist_ok=True)
    log = ParityLog(run, rank)
    for version, (checksum, rounds) in enumerate(steps, 1):
        for rows in rounds:
            log.add(rows)
        log.write(version, checksum, log.taken())
    return run


BASE = [(11, [[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1)]]), (12, [[row(2, 0), row(2, 1)]])]


def test_what_was_written_is_read_back_and_a_step_that_ran_again_counts_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", BASE)
    write(run, [(77, [[row(5, 0)]])])
    steps = read(run)[0]
    assert steps.keys() == {0, 1}
    assert (steps[0].checksum, steps[0].rounds) == (77, ((row(5, 0),),))
    assert (steps[1].checksum, steps[1].version, steps[1].rounds) == (12, 2, ((row(2, 0), row(2, 1)),))


def test_a_torn_last_line_is_left_out_and_ended_by_the_next_incarnation(tmp_path: Path) -> None:
    run = write(tmp_path / "run", BASE)
    path = run / "parity" / "rank_0.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    assert read(run)[0].keys() == {0}
    ParityLog(run, 0).write(2, 12, [])
    assert read(run)[0].keys() == {0, 1}


def test_a_step_that_begins_again_forgets_the_rounds_it_had(tmp_path: Path) -> None:
    log = ParityLog(tmp_path, 0)
    log.add([row(9, 0)])
    log.taken()
    log.add([row(0, 0)])
    log.write(1, 3, log.taken())
    assert read(tmp_path)[0][0].rounds == ((row(0, 0),),)


@pytest.mark.parametrize("changed", range(8))
def test_every_column_counts_and_an_absent_one_differs_from_an_empty_one(changed: int) -> None:
    def summed(at: int | None) -> RowSum:
        arrays = [np.arange(4, dtype=np.int32) for _ in range(6)]
        if at is not None and at < 6:
            arrays[at][2] += 1
        rest: list[np.ndarray | None] = [*arrays[1:]]
        if at is not None and at >= 6:
            rest.append(None if at == 6 else np.zeros(0, np.float32))
        return row_sum(1, 2, arrays[0], rest)

    assert summed(changed)[:2] == summed(None)[:2] == (1, 2)
    assert (summed(changed) != summed(None)) == (changed != 7)
    assert summed(6) != summed(7)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (BASE, None),
        (
            [BASE[0], (13, [[row(2, 0), row(2, 1, tokens=1)]])],
            "step 1, round 0, rank 0: group 2 sample 1 has other tokens; weights of version 2 are 0000000c and 0000000d",
        ),
        (
            [(11, [[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1, rest=5)]])],
            "step 0, round 1, rank 0: group 1 sample 1 has equal tokens, but other log-probs, advantages, mask or versions; "
            "weights of version 1 are equal, 0000000b",
        ),
        (
            [(11, [[row(0, 1), row(0, 0)], [row(1, 0), row(1, 1)]])],
            "step 0, round 0, rank 0: samples 0/0 0/1 against 0/1 0/0; weights of version 1 are equal, 0000000b",
        ),
        (
            [(11, [[row(0, 0), row(0, 1)]])],
            "step 0, round 1, rank 0: 2 rounds and 1; weights of version 1 are equal, 0000000b",
        ),
        (
            [(10, BASE[0][1])],
            "step 0, all rounds equal, rank 0: the weights differ; weights of version 1 are 0000000b and 0000000a",
        ),
    ],
)
def test_the_first_difference_is_told(
    tmp_path: Path, steps: list[tuple[int, list[list[RowSum]]]], told: str | None
) -> None:
    assert first_difference(write(tmp_path / "a", BASE), write(tmp_path / "b", steps)) == told


def test_a_shorter_run_is_told_by_the_step_it_lacks(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", BASE), write(tmp_path / "b", BASE[:1])
    assert first_difference(a, b) == f"step 1, rank 0: only in {a}"
    assert first_difference(b, a) == f"step 1, rank 0: only in {a}"


def test_ids_alone_leave_bits_and_the_cut_into_rounds_aside_but_not_the_order(tmp_path: Path) -> None:
    a = write(tmp_path / "a", BASE)
    other = write(tmp_path / "b", [(1, [[row(0, 0), row(0, 1, 7), row(1, 0)], [row(1, 1)]]), (2, BASE[1][1])])
    assert first_difference(a, other, ids_only=True) is None
    turned = write(tmp_path / "c", [(1, [[row(1, 0), row(1, 1), row(0, 0), row(0, 1)]])])
    found = first_difference(a, turned, ids_only=True)
    assert found is not None and found.startswith("step 0, rank 0: samples 0/0 0/1 1/0 1/1 against 1/0 1/1 0/0 0/1; ")


def test_ids_of_several_ranks_are_compared_as_those_of_the_step(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for run, ranks in ((a, (0, 1)), (b, (1, 0))):
        for rank, group in enumerate(ranks):
            write(run, [(1, [[row(group, 0)]])], rank=rank)
    assert first_difference(a, b, ids_only=True) is None
    found = first_difference(a, b)
    assert found is not None and found.startswith("step 0, round 0, rank 0: samples 0/0 against 1/0")


def test_runs_on_other_numbers_of_ranks_and_runs_without_the_file_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a", BASE), write(tmp_path / "b", BASE)
    assert show_diff(a, b, ids_only=False) == 0
    assert capsys.readouterr().out == "equal in all 2 steps: ids, rows and weights\n"
    write(b, BASE, rank=1)
    assert show_diff(a, b, ids_only=False) == 1
    assert capsys.readouterr().out == "the runs trained on 1 and 2 ranks, whose rounds cannot be compared\n"
    (tmp_path / "c").mkdir()
    with pytest.raises(ConfigError, match=r"RUN must be the directory of a run with deterministic=True, .* got .*/c"):
        first_difference(a, tmp_path / "c")
