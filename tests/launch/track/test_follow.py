"""A tracker is told each point once, however often and wherever it is killed, beside a run and by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.check.check import _host
from rondo.launch.cli import main
from rondo.launch.config import RunConfig, load, override, resolve, unresolve
from rondo.launch.track import follow as following
from rondo.launch.track.beside import Beside
from rondo.launch.track.follow import follow
from rondo.launch.track.settings import TrackerConfig, missing
from rondo.launch.track.trackers import tensorboard
from rondo.runtime.checkpoints import goes_on_from
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes import process
from tests.launch.configs import write
from tests.launch.track.test_points import evaluation, step, written

BOARD = TrackerConfig(name="tensorboard")


def made_run(folder: Path, num_steps: int = 6) -> Path:
    folder.mkdir(parents=True)
    settings = {"name": "demo", "train": {"lr": 1e-5, "sglang": {"x": 1}}, "trackers": [{"name": "tensorboard"}]}
    (folder / "config.resolved.json").write_text(json.dumps(settings))
    written(folder / "metrics.jsonl", *(step(number, loss=number / 4) for number in range(num_steps)), evaluation(3))
    return folder


def events(run: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, {tag: value}) of every event of a run's files, read as TensorBoard's format has them."""
    return list(map(_event, messages(run)))


def messages(run: Path) -> list[bytes]:
    """Those of a run's files, but for the version."""
    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
        assert at == len(data) and found[0] == b"\x1a\x0dbrain.Event:2"
    return found[1:]


def _event(message: bytes) -> tuple[int, dict[str, float]]:
    assert message[:1] == b"\x09" and message[9:10] == b"\x10"
    number, at = _varint(message, 10)
    values: dict[str, float] = {}
    assert message[at : at + 1] == b"\x2a"
    _, at = _varint(message, at + 1)
    while at < len(message):
        size, at = _varint(message, at + 1)
        length = message[at + 1]
        values[message[at + 2 : at + 2 + length].decode()] = struct.unpack_from("<f", message, at + 3 + length)[0]
        at += size
    return number, values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def over(wait_s: float) -> bool:
    return True


def test_checksums_are_those_of_the_format() -> None:
    crc = 0xE3069283  # of "123456789", in every text about CRC-32C
    assert tensorboard._masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_an_event_file_has_every_point_once_and_a_second_time_adds_nothing(tmp_path: Path) -> None:
    run = made_run(tmp_path / "demo")
    assert follow(run, BOARD, over) == follow(run, BOARD, over) == 7
    found = events(run)
    assert [number for number, _ in found] == [0, 1, 2, 3, 4, 5, 3]
    assert found[2] == (2, {"train/reward_mean": 0.5, "train/loss": 0.5})
    assert found[6] == (3, {"evaluation/reward": 0.25, "evaluation/num_samples": 4.0})


def test_an_event_file_forgets_what_a_run_went_back_behind_and_is_followed_on_from_there(tmp_path: Path) -> None:
    run = made_run(tmp_path / "demo", 4)
    follow(run, BOARD, over)
    goes_on_from(run, 2)
    for number in (2, 3):
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(json.dumps(step(number, loss=9.0)).encode() + b"\n")
        follow(run, BOARD, over)
    found = messages(run)
    restart = b"\x3a\x02\x08\x01\x09" + struct.pack("<d", 2.0) + b"\x10\x02"  # SessionLog.START, whose step 2 is
    assert found.index(restart) == 5 and found.count(restart) == 1
    assert [_event(each)[0] for each in found if each != restart] == [0, 1, 2, 3, 3, 2, 3]


def test_a_value_beyond_float32_is_infinite(tmp_path: Path) -> None:
    run = made_run(tmp_path / "demo", 0)
    written(run / "metrics.jsonl", step(0, loss=-1e300))
    follow(run, BOARD, over)
    assert events(run) == [(0, {"train/reward_mean": 0.5, "train/loss": float("-inf")})]


class Killed(BaseException):
    pass


def test_killed_at_every_moment_of_its_work_it_has_every_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and behind every write of the event file and of the cursor, and in the middle of a frame."""
    whole = made_run(tmp_path / "whole")
    follow(whole, BOARD, over)
    board, write_json, os_write = tensorboard.TensorBoard, following.write_json, os.write
    count, kill_at = 0, 0

    def may_die(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any) -> Any:
            nonlocal count
            count += 2
            if count - 1 == kill_at:
                raise Killed
            found = work(*arguments)
            if count == kill_at:
                raise Killed
            return found

        return done

    monkeypatch.setattr(following, "write_json", may_die(write_json))
    monkeypatch.setattr(tensorboard.os, "write", may_die(lambda fd, data: os_write(fd, bytes(data[:33]))))
    while True:
        kill_at, count = kill_at + 1, 0
        run = made_run(tmp_path / f"killed_{kill_at}")
        try:
            follow(run, BOARD, over)
        except Killed:
            count = -1000
            follow(run, BOARD, over)
        assert events(run) == events(whole)
        if count > 0:
            break
    assert kill_at > 20 and tensorboard.TensorBoard is board


def test_a_service_that_has_less_than_the_cursor_says_is_told_again(tmp_path: Path) -> None:
    run = made_run(tmp_path / "demo")
    follow(run, BOARD, over)
    (file,) = (run / "tensorboard").iterdir()
    os.truncate(file, file.stat().st_size - 5)
    assert follow(run, BOARD, over) == 7 and len(events(run)) == 7


def test_another_destination_is_told_all(tmp_path: Path) -> None:
    run = made_run(tmp_path / "demo")
    follow(run, BOARD, over)
    follow(run, TrackerConfig(name="tensorboard", folder=tmp_path / "logs"), over)
    ours, theirs = [*(run / "tensorboard").iterdir(), *(tmp_path / "logs" / "demo").iterdir()]
    assert ours.read_bytes() == theirs.read_bytes()


def test_one_process_at_a_time_follows(tmp_path: Path) -> None:
    run = made_run(tmp_path / "demo")

    def second(wait_s: float) -> bool:
        with pytest.raises(ConfigError, match=r"one process at a time must tell tensorboard of .*, got another"):
            follow(run, BOARD, over)
        return True

    follow(run, BOARD, second)


def test_by_hand_of_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "demo")
    logs = tmp_path / "logs"
    assert main(["track", str(run), "--to", "tensorboard", "--folder", str(logs)]) == 0
    assert capsys.readouterr().out == "tensorboard has 7 points of demo, of 7 records\n"
    assert [path.parent.name for path in logs.glob("*/events*")] == ["demo"]


def test_a_run_directory_that_cannot_be_written_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made_run(tmp_path / "demo")
    (run / "trackers").touch()  # who runs the tests may write whatever its mode is
    assert main(["track", str(run), "--to", "tensorboard"]) == 2
    assert capsys.readouterr().err.startswith(
        f"{run}/trackers must be writable, since it holds how far tensorboard was told"
    )


def test_a_package_that_is_missing_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rondo.launch.track.settings.find_spec", lambda name: None)
    line = (
        "trackers[wandb] must have the package wandb, which is not installed. Install it: pip install 'rondo-rl[wandb]'"
    )
    assert (missing("wandb"), missing("tensorboard")) == (line, None)
    config = override(load(write(tmp_path)), ['trackers=["wandb", "tensorboard"]'])
    assert line in [finding.text for finding in _host(config)]
    assert main(["track", str(made_run(tmp_path / "demo")), "--to", "wandb"]) == 2
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("trackers", "rule"),
    [
        ('["wandb", "wandb"]', "trackers must have different names, got 'wandb' twice. Remove one"),
        ('["neptune"]', "trackers.0.name must be 'tensorboard', 'wandb', "),
        ('[{"name": "mlflow", "url": "http://me:key@host"}]', "trackers[mlflow].url must hold no key"),
        ('[{"name": "clearml", "url": "http://host"}]', "trackers[clearml].url must not be set"),
        ('[{"name": "mlflow", "offline": True}]', "trackers[mlflow].offline must not be set"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, trackers: str, rule: str) -> None:
    config = load(write(tmp_path))
    with pytest.raises(ConfigError) as refused:
        override(config, [f"trackers={trackers}"])
    assert rule in str(refused.value)
    assert "key@host" not in str(refused.value)


def test_a_name_stands_for_a_tracker_with_its_defaults(tmp_path: Path) -> None:
    config: RunConfig = override(load(write(tmp_path)), ['trackers=["tensorboard"]'])
    assert config.trackers == (BOARD,) and unresolve(resolve(config)) == config


async def until(so: Callable[[], bool]) -> None:
    while not so():  # noqa: ASYNC110 - a file of another process
        await asyncio.sleep(0.01)


def told_by(run: Path, what: list[tuple[str, Mapping[str, Any]]], first_pause_s: float) -> Beside:
    return Beside(
        run,
        {"tensorboard": "rondo.launch.track.follow"},
        lambda kind, data: what.append((kind, data)),
        first_pause_s=first_pause_s,
    )


async def test_a_killed_process_is_told_of_and_has_another_life_when_the_run_is_over_for_all_that_is_left(
    tmp_path: Path,
) -> None:
    run, what = made_run(tmp_path / "demo"), list[tuple[str, Mapping[str, Any]]]()
    beside = told_by(run, what, 3600.0)
    running = asyncio.create_task(beside.run())
    async with asyncio.timeout(120):
        await until((run / "trackers" / "tensorboard.json").exists)
        os.kill(beside.pids()["tensorboard"], signal.SIGKILL)
        await until(lambda: bool(what))
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(json.dumps(step(6)).encode() + b"\n")
        await beside.finish(running, lambda: False)
    assert [(kind, data["tracker"], data["how"]) for kind, data in what] == [
        ("tracker_died", "tensorboard", "killed by SIGKILL")
    ]
    assert [number for number, _ in events(run)] == [0, 1, 2, 3, 4, 5, 3, 6]
    assert running.done() and beside.pids() == {}


async def test_what_cannot_start_is_tried_again_and_says_why_without_a_password_and_a_stop_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, what = made_run(tmp_path / "demo"), list[tuple[str, Mapping[str, Any]]]()
    (run / "tensorboard").touch()
    with pytest.raises(FileExistsError):
        follow(run, BOARD, over)
    said = "FileExistsError: tensorboard of http://me:secret@there/board"
    (tmp_path / "ends_at_once.py").write_text(f"raise SystemExit({said!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    beside = Beside(
        run, {"tensorboard": "ends_at_once"}, lambda kind, data: what.append((kind, data)), first_pause_s=0.01
    )
    running = asyncio.create_task(beside.run())
    async with asyncio.timeout(120):
        await until(lambda: len(what) > 1)
        await beside.finish(running, lambda: True)
    kind, data = what[0]
    assert (kind, data["how"]) == ("tracker_died", "exit code 1")
    assert data["why"] == "FileExistsError: tensorboard of http://...@there/board"
    assert running.done() and beside.pids() == {}


async def test_what_it_starts_in_a_session_of_its_own_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pids = made_run(tmp_path / "demo"), tmp_path / "pids"
    starts = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, file=open(%r, 'w'))"
    (tmp_path / "leaves_another.py").write_text(starts % str(pids))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    beside = Beside(run, {"tensorboard": "leaves_another"}, lambda kind, data: None)
    running = asyncio.create_task(beside.run())
    async with asyncio.timeout(120):
        await until(lambda: pids.exists() and pids.read_text() != "" and beside.pids() == {})
        found = process.stat(int(pids.read_text()))
        await beside.finish(running, lambda: True)
    assert found is None or not found.alive
