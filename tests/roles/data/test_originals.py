"""Media of kept samples as they came: each once, within their room, and told of by prompt group."""

from __future__ import annotations

import os
from pathlib import Path

from rondo.roles.data.originals import FOLDER, Originals, of_group
from rondo.runtime.records.telling import PROCESS


def files(run: Path) -> list[str]:
    return sorted(each.name for each in (run / FOLDER).iterdir() if each.suffix != ".jsonl")


def test_each_medium_lies_there_once_and_a_group_is_told_as_it_was_kept_last(tmp_path: Path) -> None:
    first, second = Originals(tmp_path, 1 << 20), Originals(tmp_path, 1 << 20)
    picture, frames = first.put(b"picture"), second.put([b"one", b"picture"])
    first.keep(3, 7, [("image", frames)])
    second.keep(3, 7, [("image", picture), ("video", frames)])
    second.keep(3, 8, [("audio", second.put(b"picture"))])
    assert files(tmp_path) == sorted({*picture, *frames}) and len(files(tmp_path)) == 2
    told = [(each["kind"], each["name"], each["bytes"]) for each in of_group(tmp_path, 3, 7)]
    assert told == [("image", picture[0], 7), ("video", frames[0], 3), ("video", picture[0], 7)]
    (tmp_path / FOLDER / picture[0]).unlink()
    assert [each["bytes"] for each in of_group(tmp_path, 3, 8)] == [None]
    assert of_group(tmp_path, 4, 7) == of_group(tmp_path / "none", 0, 0) == []


def test_those_used_longest_ago_make_room_and_what_cannot_be_kept_costs_nothing(tmp_path: Path) -> None:
    kept = Originals(tmp_path, 100)
    names = [kept.put(bytes([each]) * 30)[0] for each in range(3)]
    for at, name in enumerate(names):
        os.utime(tmp_path / FOLDER / name, (at, at))
    assert kept.put(b"\x00" * 30) == names[:1]  # used again: now the youngest
    names += kept.put(b"\x03" * 30)
    assert files(tmp_path) == sorted([names[0], names[2], names[3]])
    before = PROCESS.counts().get("kept media", 0)
    assert kept.put(b"x" * 101) == []
    assert files(tmp_path) == sorted([names[0], names[2], names[3]])
    (tmp_path / "file").write_text("")
    in_the_way = Originals(tmp_path / "file", 100)
    assert in_the_way.put(b"x") == []
    in_the_way.keep(0, 0, [])
    assert PROCESS.counts()["kept media"] == before + 3


def test_several_workers_stay_within_the_room_and_little_more(tmp_path: Path) -> None:
    workers = [Originals(tmp_path, 6400) for _ in range(2)]
    for number in range(300):
        workers[number % 2].put(number.to_bytes(4, "little") * 20)
    assert sum((tmp_path / FOLDER / name).stat().st_size for name in files(tmp_path)) <= 6400 + 2 * 100
