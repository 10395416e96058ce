from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from rondo.comm.ring.records import STORAGE, Column
from rondo.comm.ring.tensors import as_array, as_tensor, torch_dtype
from tests.comm.memory import ROOT, TestRing


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
