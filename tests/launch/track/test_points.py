"""What a run's file says to trackers: which points, each (step, name) once, the same from wherever it is read."""

from __future__ import annotations

from pathlib import Path

import orjson

from rondo.launch.track.points import Point, Points
from rondo.runtime.checkpoints import goes_on_from


def step(number: int, **figures: object) -> dict[str, object]:
    return {
        "time": float(number),
        "kind": "metrics",
        "step": number,
        "version": number + 1,
        "reward_mean": 0.5,
    } | figures


def evaluation(version: int, label: str = "step", **figures: object) -> dict[str, object]:
    told = {"label": label, "version": version, "reward": 0.25, "num_samples": 4} | figures
    return {"time": float(version), "evaluation": told}


def written(path: Path, *records: dict[str, object] | bytes) -> Path:
    lines = (each if isinstance(each, bytes) else orjson.dumps(each) + b"\n" for each in records)
    path.write_bytes(b"".join(lines))
    return path


def test_steps_critics_and_evaluations_are_points_with_their_names(tmp_path: Path) -> None:
    sets = {"held": {"mean@1": 0.5, "num": 3}, "hard one": {"pass@4": 0.75}}
    path = written(
        tmp_path / "m",
        {"time": 0.0, "kind": "metrics", "waits_s": {"call ack": 1.0}},
        step(0, loss=1, waits_s={"call ack": 1.0}, job="x", skipped=None, ok=True, staleness_tokens={"0": 7}),
        {"time": 2.0, "critic": {"step": 1, "value_loss": 0.5}},
        evaluation(1, sets=sets),
        evaluation(1, label="asked-7"),
        {
            "time": 3.0,
            "source": "rollout-0",
            "rank": 1,
            "engine": {"version": 2},
            "forward": {"a": {"tokens": 3}},
            "waits_s": {"x": 1},
        },
        {
            "time": 3.5,
            "source": "rollout-0",
            "rank": 1,
            "engine": {"version": 3},
            "rewards": {"components": {"b c": 1}},
        },
        {"time": 4.0, "evaluation": {"version": 2, "reward": None, "figures": {"eval_loss": 2.5}}},
    )
    train = {"train/reward_mean": 0.5, "train/loss": 1.0, "train/staleness_tokens/0": 7.0}
    told = {"evaluation/reward": 0.25, "evaluation/num_samples": 4.0}
    assert Points(path).read() == [
        Point(1, 0, 0.0, train),
        Point(2, 1, 2.0, {"critic/value_loss": 0.5}),
        Point(3, 1, 1.0, told | {"evaluation/held/mean@1": 0.5, "evaluation/hard/one/pass@4": 0.75}),
        Point(4, 0, 3.0, {"rollout-0.1/engine/version": 2.0}),
        Point(5, 0, 3.0, {"rollout-0.1/forward/a/tokens": 3.0}),
        Point(6, 0, 3.5, {"rollout-0.1/rewards/components/b/c": 1.0}),
        Point(7, 2, 4.0, {"evaluation/eval_loss": 2.5}),
    ]


def test_a_step_trained_again_keeps_its_first_figures_and_evaluations_come_in_any_order(tmp_path: Path) -> None:
    path = written(
        tmp_path / "m", step(0), step(1, loss=1), step(2), evaluation(3, "end"), step(1, loss=2), step(2), evaluation(2),
        evaluation(3), step(3),
    )  # fmt: skip
    points = Points(path).read()
    assert [(each.number, each.step) for each in points] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 2), (6, 3)]
    assert points[1].values["train/loss"] == 1.0


def test_torn_lines_are_left_out_and_one_that_is_still_written_waits(tmp_path: Path) -> None:
    path = written(tmp_path / "m", step(0), b'{"time":1,"st\n', b"\n", step(1), b'{"time":2.0,"step":2,')
    points = Points(path)
    assert [each.step for each in points.read()] == [0, 1]
    with path.open("ab") as file:
        file.write(b'"reward_mean":1}\n')
    assert [(each.number, each.step) for each in points.read()] == [(3, 2)]
    assert points.read() == Points(tmp_path / "none").read() == []


def test_what_a_run_that_went_back_trains_again_are_points_again_and_the_first_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", *map(step, range(4)), evaluation(2), evaluation(4))
    points = Points(path)
    assert [each.step for each in points.read()] == [0, 1, 2, 3, 2, 4]
    goes_on_from(tmp_path, 2)
    assert points.read() == []
    points = Points(path, orjson.loads(orjson.dumps(points.state())))
    with path.open("ab") as file:
        file.writelines(
            orjson.dumps(each) + b"\n" for each in (step(2, loss=9.0), step(3), evaluation(2), evaluation(4))
        )
    assert [(each.number, each.step, each.went_back_to) for each in points.read()] == [
        (7, 2, 2),
        (8, 3, None),
        (9, 4, None),
    ]


def test_what_is_no_record_of_a_run_is_left_out(tmp_path: Path) -> None:
    others: list[bytes] = [
        b"[1, 2]\n",
        b'"text"\n',
        b"7\n",
        b'{"step": 1, "reward_mean": 1}\n',
        b'{"time": 1, "critic": 3}\n',
    ]
    others += [b'{"time": 1, "step": "one", "reward_mean": 1}\n', b'{"time": 1, "evaluation": {"reward": 1}}\n']
    points = Points(written(tmp_path / "m", step(0), *others, step(1))).read()
    assert [(each.number, each.step) for each in points] == [(1, 0), (2, 1)]


def test_a_file_read_in_pieces_from_any_place_says_what_the_whole_says(tmp_path: Path) -> None:
    told = {"time": 0.0, "source": "rollout-0", "engine": {"version": 1}}
    records = [[evaluation(number // 2), step(number % 7), told][number % 3] for number in range(30)]
    whole = Points(written(tmp_path / "m", *records)).read()
    text = (tmp_path / "m").read_bytes()
    for cut in range(0, len(text), 37):
        path = written(tmp_path / "cut", text[:cut])
        first = Points(path)
        found = first.read(most=4) + first.read()
        kept = orjson.loads(orjson.dumps(first.state()))
        path.write_bytes(text)
        assert found + Points(path, kept).read() == whole
