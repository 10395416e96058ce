from __future__ import annotations

import os
import signal
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file

from rondo.comm.weights import disk
from rondo.comm.weights.disk import newest, read_version, versions, write_version
from rondo.comm.weights.held import Held
from rondo.runtime.errors import Closed, CorruptData
from tests.comm.memory import start_child
from tests.comm.weights.versions import assert_serves, new_slab, publish, weights

HERE = "tests.comm.weights.test_disk"


def write(root: Path, version: int, keep: int = 2) -> Path:
    return write_version(root, publish(new_slab(), 0, version), keep=keep, max_file_bytes=40_000)


def held() -> Held:
    return Held(publish(new_slab(), 0, 5).manifest.num_bytes)


def read_in_child(root: str, num_bytes: int) -> None:
    copy = Held(num_bytes)
    folder = newest(Path(root))
    assert folder is not None
    read_version(folder, copy)
    assert_serves(copy, 6)
    print("read", flush=True)


def test_another_process_reads_and_proves_the_newest_version(tmp_path: Path) -> None:
    for version in (5, 6):
        write(tmp_path, version)
    child = start_child(f"{HERE}:read_in_child", str(tmp_path), held().capacity_bytes, fds=[])
    assert child.communicate()[0] == b"read\n" and child.returncode == 0


def test_a_folder_is_what_hugging_face_reads(tmp_path: Path) -> None:
    folder = write(tmp_path, 5)
    index = orjson.loads((folder / "model.safetensors.index.json").read_bytes())
    found = {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}
    assert len(set(index["weight_map"].values())) > 1
    for name, tensor in weights(5).items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_only_the_newest_are_kept_and_an_equal_one_is_replaced(tmp_path: Path) -> None:
    for version in (3, 4, 5, 5, 6):
        write(tmp_path, version)
    assert [path.name for path in versions(tmp_path)] == ["version_000005", "version_000006"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_000005", "version_000006"]
    assert newest(tmp_path / "nothing") is None
    with pytest.raises(ValueError, match="keep must be at least 1"):
        write(tmp_path, 7, keep=0)


def test_a_flipped_bit_in_any_file_is_refused_and_a_whole_one_repairs_it(tmp_path: Path) -> None:
    folder = write(tmp_path, 5)
    files = [path for path in folder.iterdir() if path.name != "model.safetensors.index.json"]
    assert len(files) >= 4
    for path in files:
        whole = path.read_bytes()
        for at in (len(whole) - 5, len(whole) // 2):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            copy = held()
            with pytest.raises(CorruptData):
                read_version(folder, copy)
            with pytest.raises(Closed):
                copy.tensors()
        path.write_bytes(whole)
    copy = held()
    assert read_version(folder, copy) == publish(new_slab(), 0, 5).id
    assert_serves(copy, 5)


def test_files_cut_off_missing_or_of_another_version_are_refused(tmp_path: Path) -> None:
    folder, other = write(tmp_path, 5), write(tmp_path, 6)
    for name in sorted(path.name for path in folder.iterdir()):
        whole = (folder / name).read_bytes()
        for wrong in (whole[: len(whole) // 2], (other / name).read_bytes(), b""):
            if wrong == whole:
                continue
            (folder / name).write_bytes(wrong)
            copy = held()
            with pytest.raises(CorruptData):
                read_version(folder, copy)
            assert copy.id is None
        (folder / name).write_bytes(whole)
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(CorruptData, match="must be a whole safetensors file"):
        read_version(folder, held())


def write_and_die(root: str) -> None:
    write(Path(root), 5)

    def dying(*args: object, **others: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    disk.flush_tree = dying  # every file is written, nothing is renamed yet
    write(Path(root), 6)


def test_a_writer_killed_before_the_rename_leaves_the_version_before(tmp_path: Path) -> None:
    child = start_child(f"{HERE}:write_and_die", str(tmp_path), fds=[])
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    folder, copy = newest(tmp_path), held()
    assert folder is not None and folder.name == "version_000005"
    read_version(folder, copy)
    assert_serves(copy, 5)
    write(tmp_path, 6, keep=1)
    assert [path.name for path in versions(tmp_path)] == ["version_000006"]
