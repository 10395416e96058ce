"""Buckets, payloads, shared memory, checksums: the bytes of weights on their way to a server."""

from __future__ import annotations

import base64
import os
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rondo.comm.weights.ipc import SharedTensor
from rondo.roles.engines.sglang.shared_memory import FOLDER, SharedBytes
from rondo.roles.engines.sglang.weights_buckets import largest, pack, plan
from rondo.roles.engines.sglang.weights_disk import write
from rondo.roles.engines.sglang.weights_payload import cuda_payload, shared_memory_payload
from rondo.roles.engines.sglang.weights_sums import checksum
from rondo.runtime.errors import ConfigError, OutOfSpace
from tests.roles.engines.sglang.weights_server import read_payload, version, write_model


def mixed() -> dict[str, torch.Tensor]:
    return {
        "flags": torch.tensor([1, 0, 1], dtype=torch.uint8),
        "norm": torch.arange(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "weight": torch.randn(4, 6).t(),
        "scale": torch.tensor([0.1, 0.2], dtype=torch.float64),
        "half": torch.arange(3, dtype=torch.float16),
    }


def named() -> list[Path]:
    return list(FOLDER.glob(f"rondo_weights_{os.getpid()}_*"))


@pytest.mark.parametrize("bucket_bytes", [1, 30, 100, 1 << 20])
def test_every_tensor_is_in_one_bucket_aligned_and_without_gaps(bucket_bytes: int) -> None:
    tensors = mixed()
    buckets = plan(tensors, bucket_bytes)
    places = [place for bucket in buckets for place in bucket.places]
    assert sorted(place.name for place in places) == sorted(tensors)
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.places) == 1
        assert [place.start for place in bucket.places] == [0, *(place.end for place in bucket.places)][:-1]
        assert all(place.start % place.dtype.itemsize == 0 for place in bucket.places)
        assert bucket.places[-1].end == bucket.num_bytes
    assert largest(buckets) == max(bucket.num_bytes for bucket in buckets)


def test_a_tensor_without_elements_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got \['empty'\]"):
        plan(mixed() | {"empty": torch.zeros(0, 3)}, 100)
    with pytest.raises(ConfigError, match="got none"):
        plan({}, 100)


@pytest.mark.parametrize("bucket_bytes", [30, 1 << 20])
def test_a_server_reads_from_a_payload_the_tensors_that_were_packed(bucket_bytes: int) -> None:
    tensors = mixed()
    buckets = plan(tensors, bucket_bytes)
    read: dict[str, torch.Tensor] = {}
    with SharedBytes(largest(buckets)) as block:
        for bucket in buckets:
            pack(bucket, tensors, block.tensor)
            read |= read_payload(shared_memory_payload(bucket, block.handle))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name], tensor)


def test_a_payload_names_nothing_but_what_sglang_lets_its_reader_import() -> None:
    bucket = plan(mixed(), 1 << 20)[0]
    shared = SharedTensor(
        0, "GPU-1", b"\0h", 512, 64, b"counter", 3, b"event", True
    )  # fmt: skip
    memory = named_in(shared_memory_payload(bucket, "/block"))
    device = named_in(cuda_payload(bucket, shared))
    both = {"sglang.srt.weight_sync.tensor_bucket FlattenedTensorMetadata", "torch Tensor", "torch Size", "torch uint8"}
    both |= {f"torch {name}" for name in ("bfloat16", "float16", "float32", "float64")}
    assert memory == both | {
        "torch.storage UntypedStorage", "torch.multiprocessing.reductions rebuild_storage_filename",
        "torch.multiprocessing.reductions rebuild_typed_storage", "torch.multiprocessing.reductions rebuild_tensor",
    }  # fmt: skip
    assert device == both | {"torch.storage TypedStorage", "sglang.srt.utils.patch_torch _rebuild_cuda_tensor_modified"}


def named_in(payload: str) -> set[str]:
    return {
        str(argument) for code, argument, _ in pickletools.genops(base64.b64decode(payload)) if code.name == "GLOBAL"
    }


def test_a_handle_of_a_device_travels_with_every_argument_in_torchs_own_order() -> None:
    bucket = plan({"w": torch.zeros(8, dtype=torch.uint8)}, 100)[0]
    shared = SharedTensor(16, "GPU-1", b"handle", 512, 64, b"counter", 3, b"event", True)
    codes = list(pickletools.genops(base64.b64decode(cuda_payload(bucket, shared))))
    start = next(n for n, (_, argument, _) in enumerate(codes) if argument and "_rebuild_cuda" in str(argument))
    plain = [argument for code, argument, _ in codes[start + 1 :] if argument is not None][:14]
    wanted = [
        "torch Tensor",
        "torch Size",
        8,
        1,
        16,
        "torch.storage TypedStorage",
        "torch uint8",
        "GPU-1",
        b"handle",
        512,
        64,
    ]
    assert plain == [*wanted, b"counter", 3, b"event"]


def test_a_block_has_a_name_as_long_as_it_is_there() -> None:
    with SharedBytes(100) as block:
        assert [f"/{path.name}" for path in named()] == [block.handle]
    assert not named()


def test_a_name_that_a_killed_process_left_is_removed_and_that_of_a_living_one_stays() -> None:
    theirs = FOLDER / f"rondo_weights_{os.getpid()}_theirs"
    code = (
        "import fcntl, signal, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, theirs], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, SharedBytes(100) as mine:
        assert child.stdout.readline() == "held\n"
        with SharedBytes(100):
            assert theirs.exists() and (FOLDER / mine.handle[1:]).exists()
        child.kill()
        child.wait()
        with SharedBytes(100):
            assert not theirs.exists() and (FOLDER / mine.handle[1:]).exists()
    assert not named()


def test_more_shared_memory_than_there_is_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(OutOfSpace, match="bucket_bytes"):
        SharedBytes(1 << 50)
    assert not named()


def test_checksums_are_those_that_sglang_computes() -> None:
    """Values from SGLang 0.5.23: its SHA-256 on a CPU, its triton kernel (in triton's interpreter) on a GPU."""
    words = torch.arange(8192 * 35 + 11, dtype=torch.int32)
    odd = torch.arange(7, dtype=torch.uint8)
    assert checksum([odd], "cpu") == "57355ac3303c148f"
    assert checksum([words], "cpu") == checksum([words[:100], words[100:]], "cpu") == "0df8ce4a40a24c18"
    assert checksum([odd], "cuda") == "d9e9661b18c29da2"
    assert checksum([words], "cuda") == checksum([words[:100], words[100:]], "cuda") == "f5881895cdd59a88"
    assert checksum([torch.zeros(0)], "cuda") == "0" * 16


def test_the_folder_of_a_version_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", version(0))
    folder = write(tmp_path / "version_000001", version(1), model)
    first = (folder / "model-00001-of-00001.safetensors").stat().st_ino
    assert (write(folder, version(1), model) / "model-00001-of-00001.safetensors").stat().st_ino == first
    assert [path.name for path in tmp_path.iterdir() if path != model] == ["version_000001"]
