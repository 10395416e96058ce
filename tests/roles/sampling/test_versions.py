"""Versions that are to be measured: each is handed over once, and stays until it is measured, whoever dies."""

from __future__ import annotations

from pathlib import Path

from rondo.roles.sampling.versions import Versions


def test_a_version_is_known_from_when_it_lies_there_until_a_later_attempt_makes_it_anew(tmp_path: Path) -> None:
    first = Versions(tmp_path, 0)
    assert first.waiting() == [] and not first.ended()
    first.begin(0)
    for version in (0, 20, 40):
        assert not first.knows(version)
        first.folder_of(version).mkdir()
    (tmp_path / "evaluating" / "version_000060.tmp").mkdir()  # being written
    assert first.waiting() == [0, 20, 40]
    first.done(20, {"reward": 0.5})
    assert first.waiting() == [0, 40] and first.knows(20) and not first.ended()
    first.begin(10)  # a trainer that was killed makes the same versions again
    assert first.waiting() == [0, 40] and first.knows(20) and first.knows(40)
    first.end()
    later = Versions(tmp_path, 1)
    assert first.ended() and not later.ended() and later.waiting() == []  # until its trainer says where it begins
    later.begin(10)
    assert later.waiting() == [0] and later.knows(0) and not later.knows(20) and not later.knows(40)
