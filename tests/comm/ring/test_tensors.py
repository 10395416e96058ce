from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from rondo.comm.ring.records import STORAGE, Column
from rondo.comm.ring.tensors import Packer, as_array, as_tensor, manifest_of, torch_dtype, unpack
from rondo.runtime.errors import CorruptData, OutOfSpace
from tests.comm.memory import ROOT, MemorySegment, TestRing


@pytest.mark.parametrize("dtype", sorted(STORAGE))
def test_a_tensor_goes_through_the_ring_and_comes_back_bit_for_bit(dtype: str) -> None:
    bits = torch.arange(2 * 3 * 8, dtype=torch.uint8).reshape(2, 3, 8) % 2
    tensor = bits.view(torch_dtype(dtype))
    array, name = as_array(tensor)
    assert name == dtype
    ring = TestRing(4096)
    ref = ring.writer.put([(0, 0, 0, 1)], [Column("t", name, [array])], epoch=0, attempt=0)
    record = ring.view.read(ref.pos, ref.seq)
    back = as_tensor(record.column("t", 0), record.dtype("t"))
    assert back.dtype == tensor.dtype and back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8), bits)


def test_a_tensor_over_the_ring_is_a_view() -> None:
    array = np.zeros(4, np.uint16)
    tensor = as_tensor(array, "bfloat16")
    array[2] = 0x3F80
    assert tensor.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert as_array(tensor)[0].ctypes.data == array.ctypes.data


def test_an_array_that_does_not_store_its_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="an array for dtype bfloat16 must have dtype uint16, got float32"):
        as_tensor(np.zeros(2, np.float32), "bfloat16")
    with pytest.raises(ValueError, match=r"a tensor for the ring must have one of the dtypes bool, .*, got complex64"):
        as_array(torch.zeros(2, dtype=torch.complex64))


def test_tensors_over_read_only_memory_come_without_a_warning() -> None:
    code = (
        "import numpy as np; from rondo.comm.ring.tensors import as_tensor;"
        "print(as_tensor(np.frombuffer(bytes(8), np.float32), 'float32').tolist())"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0, 0.0]\n", "")


def test_packed_tensors_come_back_as_views_in_order() -> None:
    block = MemorySegment(8192).view()
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4, dtype=torch.float16),
        "transposed": torch.arange(12).reshape(3, 4).T,
        "eight": torch.randn(9).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
    }
    packer = Packer(block)
    for name, tensor in tensors.items():
        packer.add(name, tensor)
    back = unpack(block, manifest_of(block, *packer.finish({"version": 3})))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert back[name].contiguous().view(-1).tolist() == tensor.contiguous().view(-1).tolist()
    start = np.frombuffer(block, np.uint8).ctypes.data
    assert (back["a"].data_ptr() - start, back["scalar"].data_ptr() - start) == (0, 64)


def test_a_tensor_with_a_gradient_is_packed_like_any_other() -> None:
    block = MemorySegment(4096).view()
    packer = Packer(block)
    packer.add("w", torch.ones(4, requires_grad=True))
    back = unpack(block, manifest_of(block, *packer.finish()))["w"]
    assert back.tolist() == [1.0] * 4 and not back.requires_grad


def test_a_block_that_is_too_small_is_named_with_its_size() -> None:
    packer = Packer(MemorySegment(4096).view())
    packer.add("a", torch.zeros(1000))
    with pytest.raises(OutOfSpace, match="tensor b must end within 4096 bytes, got 4100"):
        packer.add("b", torch.zeros(17))
    packer.add("c", torch.zeros(1))
    with pytest.raises(OutOfSpace, match="the manifest of 2 tensors must end within 4096 bytes"):
        packer.finish()


def test_a_name_twice_is_refused() -> None:
    packer = Packer(MemorySegment(4096).view())
    packer.add("a", torch.zeros(1))
    with pytest.raises(ValueError, match="tensors of one block must have different names, got a twice"):
        packer.add("a", torch.zeros(1))


@pytest.mark.parametrize(
    "fields", [["float32", [4], 8190], ["float32", [4], 4], ["float32", [-4], 0], ["nn", [4], 0], ["float99", [4], 0]]
)
def test_a_manifest_that_points_out_of_its_block_is_refused(fields: list[object]) -> None:
    with pytest.raises(CorruptData):
        unpack(memoryview(bytes(8192)), {"tensors": {"w": fields}})
