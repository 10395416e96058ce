"""CUDA IPC: a handle that another process on the same GPU opens, where there is one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rondo.comm.weights.ipc import SharedTensor, share
from rondo.runtime.errors import ConfigError
from tests.comm.memory import ROOT


def test_a_tensor_on_the_cpu_has_no_handle() -> None:
    with pytest.raises(ConfigError, match=r"must be on a cuda device, got cpu\. Use the slab"):
        share(torch.ones(3))


def read_in_child() -> None:
    """Opens the handle on standard input as torch itself does, a uint8 tensor of 24 elements, and adds 1 to each."""
    for line in sys.stdin:
        shared = SharedTensor(
            *[bytes.fromhex(each[4:]) if str(each).startswith("hex:") else each for each in json.loads(line)]
        )
        tensor = rebuild_cuda_tensor(
            torch.Tensor, torch.Size((24,)), (1,), shared.offset, torch.storage.TypedStorage, torch.uint8, 0, shared.handle,
            shared.storage_bytes, shared.storage_offset_bytes, False, shared.counter_handle, shared.counter_offset,
            shared.event_handle, shared.event_sync_required,
        )  # fmt: skip
        print(json.dumps(tensor.tolist()), flush=True)
        tensor.add_(1)
        torch.cuda.synchronize()
        print("written", flush=True)


@pytest.mark.cuda
def test_another_process_sees_and_changes_the_same_memory_on_the_device() -> None:
    tensor = torch.arange(30, dtype=torch.uint8, device="cuda")[6:]
    torch.cuda.synchronize()
    call = "from tests.comm.weights.test_ipc import read_in_child; read_in_child()"
    with subprocess.Popen(
        [sys.executable, "-c", call], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        told = [f"hex:{each.hex()}" if isinstance(each, bytes) else each for each in share(tensor)]
        child.stdin.write(json.dumps(told) + "\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == list(range(6, 30))
        assert child.stdout.readline() == "written\n"
        child.stdin.close()
        assert child.wait(60) == 0
    assert tensor.tolist() == list(range(7, 31))
