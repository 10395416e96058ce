"""Equal settings, equal bits: in every mode, and through deaths, stops and resumes at random steps."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from rondo.launch.report.diff import first_difference
from rondo.launch.report.records import step_records
from rondo.roles.data.cursor import Order
from rondo.roles.training.parity import read
from rondo.runtime.checkpoints import ASIDE, MARKER, complete
from tests.e2e.shell import Rondo
from tests.parity.runs import NUM_STEPS, TASK, Run, scored_in_waits
from tests.strength import LONG

STEPS = random.Random(1905)
"""Draws the moments of deaths; a failure's message has them, since it has the run's output."""
MODES = ("colocate", "fully_async") if LONG else ("colocate",)
DISTURBED = "hybrid" if LONG else "fully_async"
"""The mode of the run that is killed and stopped: whichever has no undisturbed one. That hybrid, too, computes as colocate does
tests/e2e/test_updates.py shows, on two ranks, one of which is killed."""


@pytest.fixture(scope="module")
def modes(rondo: Rondo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Undisturbed runs on policy. Where they take turns the trainer rests while the engine generates."""
    folder = tmp_path_factory.mktemp("modes")
    runs = {mode: Run(folder / mode) for mode in MODES}
    sets = {"colocate": ["train.release_memory=True"], "fully_async": ["samples.keep=1"]}
    for mode, run in runs.items():
        run.whole(rondo, mode, sets=sets[mode])
    return runs


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_the_same_samples_in_the_same_rounds_to_the_same_bits(
    modes: dict[str, Run], mode: str
) -> None:
    assert mode == "colocate" or first_difference(modes["colocate"].path, modes[mode].path) is None
    (steps,) = read(modes[mode].path).values()
    assert sorted(steps) == list(range(-1, NUM_STEPS))  # -1 made version 0
    assert len({step.checksum for step in steps.values()}) == NUM_STEPS + 1
    ids = [row[:2] for step in range(NUM_STEPS) for rows in steps[step].rounds for row in rows]
    assert ids == [(group, sample) for group in range(4 * NUM_STEPS) for sample in range(3)]
    assert max(len(step.rounds) for step in steps.values()) > 1


def test_a_run_killed_stopped_and_resumed_at_random_steps_ends_in_the_same_bits(
    modes: dict[str, Run], tmp_path: Path, rondo: Rondo
) -> None:
    run = Run(tmp_path / "disturbed")
    kills = [f"{role}@{STEPS.randint(1, 5)}" for role in ("actor", "rollout")]
    run.stop(run.train(DISTURBED, kills=kills, sets=["num_steps=16"]), at_step=STEPS.randint(5, 7))
    run.kill(run.resume(), at_step=STEPS.randint(9, 11))
    older, newest = complete(run.path / "checkpoints")[-2:]
    shard = newest / "shards" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[STEPS.randrange(len(data))] ^= 1 << STEPS.randrange(8)
    shard.write_bytes(data)
    ended = run.resumed(rondo, "--set", "num_steps=25")
    assert f"run parity goes on from {older.name}\n" in ended.output
    assert (run.path / "checkpoints" / ASIDE / f"{newest.name}.broken" / MARKER).is_file()
    assert [each.name for each in complete(run.path / "checkpoints")] == ["step_000015", "step_000017"]
    assert first_difference(modes["colocate"].path, run.path) is None
    assert ended.summary["attempt"] == 2
    assert (ended.summary["samples_lost"], ended.summary["samples_trained_twice"]) == (0, 0)
    assert ended.summary["samples_trained"] == NUM_STEPS * 4 * 3
    final = [
        next(each.path.glob(f"checkpoints/step_{NUM_STEPS:06d}/hf/model.safetensors"))
        for each in (run, modes["colocate"])
    ]
    assert final[0].read_bytes() == final[1].read_bytes()


@pytest.mark.skipif(not LONG, reason="a run of its own: `make test-long`")
def test_above_staleness_0_a_disturbed_run_consumes_the_same_prompts_in_the_same_order_within_the_bound(
    modes: dict[str, Run], tmp_path: Path, rondo: Rondo
) -> None:
    run, how = Run(tmp_path / "stale"), {"sets": ["max_staleness=2"], "kills": [f"rollout@{STEPS.randint(1, 4)}"]}
    if LONG:  # the test above does so on policy, and tests/e2e stops a stale run, which goes on
        run.kill(run.train("hybrid", **how), at_step=STEPS.randint(6, 10))
        run.resumed(rondo)
    else:
        run.whole(rondo, "hybrid", **how)
    assert first_difference(modes["colocate"].path, run.path, ids_only=True) is None
    assert first_difference(modes["colocate"].path, run.path) is not None
    records = step_records(run.path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(NUM_STEPS))
    assert 0 < max(record["staleness_max"] for record in records) <= 2
    assert scored_in_waits(run.path) > 0


@pytest.mark.skipif(
    not LONG, reason="one more run: RONDO_TEST_LONG=1; tests/launch/report/test_diff.py plants faults into records"
)
def test_a_planted_fault_is_found_at_the_first_row_that_it_touches(
    modes: dict[str, Run], tmp_path: Path, rondo: Rondo
) -> None:
    faulty = tmp_path / "task.py"
    row, reward = '"abcdefghij"[n]', " % 7 / 7"
    text = TASK.read_text()
    assert text.count(row) == text.count(reward) == 1
    # Row 3 has another prompt, and row 4 another reward: whichever the order of the data brings first.
    faulty.write_text(text.replace(row, '"abcXefghij"[n]').replace(reward, ' % (5 if label == "4" else 7) / 7'))
    run = Run(tmp_path / "faulty")
    run.whole(rondo, "colocate", task=faulty, sets=["num_steps=3"])
    found = first_difference(modes["colocate"].path, run.path)
    order = Order(num_rows=10, seed=0)
    first = next(position for position in range(12) if order.locate(position).row in (3, 4))
    what = {3: "has other tokens", 4: "has equal tokens, but other log-probs, advantages"}[order.locate(first).row]
    assert found is not None
    told = rf"step {first // 4}, round \d+, rank 0: group {first} sample 0 {what}.*; weights of version \d+ are \w+ and \w+"
    assert re.fullmatch(told, found), found
