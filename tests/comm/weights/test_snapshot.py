from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.runtime.errors import CorruptData, OutOfSpace
from tests.comm.memory import MemorySegment, start_child

HERE = "tests.comm.weights.test_snapshot"
NUM_BYTES = snapshot_bytes(1 << 20, 20)


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    names = [f"{kind}.layers.{i}.weight" for i in range(4) for kind in ("model", "exp_avg", "exp_avg_sq")]
    shard = {name: torch.randn(100, 70, generator=generator) for name in names}
    return {**shard, "step": torch.tensor(float(version)), "rng": torch.arange(16, dtype=torch.uint8) + version}


def write(hot: HotSnapshot, version: int) -> None:
    hot.write(version, tensors(version), {"schedule": version, "names": ["a"]}, checksum=version + 7)


def assert_holds(hot: HotSnapshot, version: int) -> None:
    found, state = hot.read(version)
    assert state == {"schedule": version, "names": ["a"]}
    assert list(found) == list(tensors(version)) and hot.checksum(version) == version + 7
    for name, tensor in tensors(version).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_fresh_snapshot_holds_nothing() -> None:
    hot = HotSnapshot(MemorySegment(NUM_BYTES))
    assert hot.versions() == ()
    with pytest.raises(KeyError, match="version 0 must be in the hot snapshot, which holds none"):
        hot.read(0)


def test_the_newest_two_versions_are_held_exactly() -> None:
    segment = MemorySegment(NUM_BYTES)
    hot = HotSnapshot(segment)
    for version in range(5):
        write(hot, version)
        assert hot.versions() == (version,)[: version + 1] if version == 0 else (version - 1, version)
    successor = HotSnapshot(segment)
    assert_holds(successor, 3)
    assert_holds(successor, 4)
    with pytest.raises(KeyError, match=r"version 2 must be in the hot snapshot, which holds \(3, 4\)"):
        successor.read(2)


def test_what_is_read_is_a_copy() -> None:
    hot = HotSnapshot(MemorySegment(NUM_BYTES))
    write(hot, 0)
    found, _ = hot.read(0)
    write(hot, 1)
    write(hot, 2)
    assert torch.equal(found["rng"], tensors(0)["rng"])


class Dying(dict[str, torch.Tensor]):
    """Tensors whose process is killed while the `last` one is asked for."""

    last = 7

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:  # type: ignore[override]
        for i, item in enumerate(super().items()):
            if i == self.last:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def write_and_die(segment_fd: int, versions: list[int], dying: int) -> None:
    hot = HotSnapshot(MemorySegment(fd=segment_fd))
    for version in versions:
        write(hot, version)
    hot.write(dying, Dying(tensors(dying)), {})


@pytest.mark.parametrize(
    ("written", "dying", "left"),
    [
        ([0, 1], 2, (1,)),
        ([4, 5], 5, (4,)),  # 5 was never committed: a restart from 4 makes it again
    ],
)
def test_a_rank_killed_while_it_writes_leaves_the_version_before(
    written: list[int], dying: int, left: tuple[int, ...]
) -> None:
    segment = MemorySegment(NUM_BYTES)
    child = start_child(f"{HERE}:write_and_die", segment.fd, written, dying, fds=[segment.fd])
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    hot = HotSnapshot(segment)
    assert hot.versions() == left
    for version in left:
        assert_holds(hot, version)
    write(hot, dying)
    assert hot.versions() == (*left, dying)
    assert_holds(hot, dying)
    for version in left:
        assert_holds(hot, version)


def write_forever(segment_fd: int) -> None:
    hot = HotSnapshot(MemorySegment(fd=segment_fd))
    version = max(hot.versions(), default=-1) + 1
    while True:
        write(hot, version)
        os.write(1, b".")
        version += 1


def test_a_rank_killed_at_any_moment_leaves_a_whole_version() -> None:
    segment = MemorySegment(NUM_BYTES)
    child = start_child(f"{HERE}:write_forever", segment.fd, fds=[segment.fd])
    assert child.stdout is not None
    for _ in range(8):
        assert os.read(child.stdout.fileno(), 1) == b"."
    child.kill()
    child.communicate()
    hot = HotSnapshot(segment)
    assert hot.versions() and hot.versions()[-1] >= 7
    for version in hot.versions():
        assert_holds(hot, version)


@pytest.mark.parametrize(
    ("held", "version", "after"),
    [
        ((4, 5), 6, (5, 6)),
        ((5, 4), 6, (5, 6)),
        ((4, 5), 5, (4, 5)),  # the uncommitted 5 is made again, the committed 4 stays
        ((5,), 5, (5,)),
        ((5, 7), 6, (5, 6)),  # 7 was forgotten by a restart from 5
        ((7, 8), 2, (2, 7)),  # a global restart from a checkpoint: both are forgotten
        ((2, 7), 3, (2, 3)),
    ],
)
def test_the_version_that_a_restart_would_read_is_never_replaced(
    held: tuple[int, ...], version: int, after: tuple[int, ...]
) -> None:
    hot = HotSnapshot(MemorySegment(NUM_BYTES))
    for older in held:
        write(hot, older)
    write(hot, version)
    assert hot.versions() == after
    for each in after:
        assert_holds(hot, each)


def test_a_snapshot_that_does_not_fit_leaves_the_one_before() -> None:
    hot = HotSnapshot(MemorySegment(NUM_BYTES))
    write(hot, 0)
    with pytest.raises(OutOfSpace, match="tensor huge must end within"):
        hot.write(1, {"huge": torch.zeros(10**6, dtype=torch.float64)}, {})
    assert hot.versions() == (0,)
    assert_holds(hot, 0)


def test_a_damaged_manifest_is_refused() -> None:
    segment = MemorySegment(NUM_BYTES)
    hot = HotSnapshot(segment)
    hot.write(0, {}, {"seed": 7})
    at = bytes(segment.view()).index(b'"seed"')
    segment.view()[at + 1] ^= 1
    with pytest.raises(CorruptData, match="the manifest of version 0 must have checksum"):
        hot.read(0)


def test_snapshot_bytes_hold_what_they_promise() -> None:
    hot = HotSnapshot(MemorySegment(snapshot_bytes(64, 64, state_bytes=1000)))
    hot.write(0, {f"{'n' * 250}{i}": torch.zeros(1, dtype=torch.uint8) for i in range(64)}, {"text": "x" * 980})
    assert len(hot.read(0)[0]) == 64
    with pytest.raises(ValueError, match="a snapshot's segment must have at least 12288 bytes, got 8192"):
        HotSnapshot(MemorySegment(8192))
