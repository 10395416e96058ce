"""Bytes that come through two pieces; on the CPU, where they could come at once. A device: `make gpu`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rondo.runtime.memory.to_host import host_bytes, through, to_host


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 40, 41])
def test_every_byte_comes_through_two_pieces(size: int) -> None:
    source, into = torch.arange(size, dtype=torch.uint8) + 1, torch.zeros(size, dtype=torch.uint8)
    through([torch.zeros(8, dtype=torch.uint8) for _ in range(2)], into, source)
    assert torch.equal(into, source)


def test_tensors_of_any_strides_come_whole() -> None:
    tensor = torch.arange(24.0).view(4, 6)[1:3, ::2]
    into = torch.zeros(2, 3)
    to_host(into, tensor)
    assert torch.equal(into, tensor)
    assert np.array_equal(host_bytes(tensor), into.numpy().view(np.uint8).reshape(-1))
    assert host_bytes(into).base is not None and host_bytes(into).__array_interface__["data"][0] == into.data_ptr()


@pytest.mark.cuda
def test_a_device_s_bytes_come_on_a_stream_of_its_own() -> None:
    tensor = torch.randn(20_000_000, device="cuda")
    torch.cuda.synchronize()
    into = torch.zeros(20_000_000)
    with torch.cuda.stream(torch.cuda.Stream()):
        to_host(into, tensor)
    assert torch.equal(into, tensor.cpu())
