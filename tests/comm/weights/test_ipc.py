"""CUDA IPC: the handle's fields everywhere; sharing itself between two processes on one GPU, where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from rondo.comm.weights.ipc import SharedTensor, opened, share
from rondo.runtime.errors import ConfigError, CorruptData
from tests.comm.memory import ROOT

SHARED = SharedTensor("bfloat16", (3, 4), (4, 1), 8, "uuid", b"\0handle\xff", 64, 512, b"counter", 3, b"event", True)


def test_a_handle_comes_back_from_json_as_it_was() -> None:
    wire = json.dumps(SHARED.to_json())
    assert SharedTensor.from_json(json.loads(wire)) == SHARED
    scalar = replace(SHARED, shape=(), strides=())
    assert SharedTensor.from_json(scalar.to_json()) == scalar


@pytest.mark.parametrize(
    "wrong",
    [
        {"handle": "not base 64!"}, {"shape": [3, 400]}, {"shape": [3]}, {"strides": [-4, 1]}, {"offset": 21},
        {"dtype": "load_library"}, {"storage_bytes": None}, {"event_handle": None},
    ],
)  # fmt: skip
def test_a_handle_that_does_not_add_up_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(CorruptData):
        SharedTensor.from_json(SHARED.to_json() | wrong)
    fields = SHARED.to_json()
    del fields[next(iter(wrong))]
    with pytest.raises(CorruptData, match="must have all its fields"):
        SharedTensor.from_json(fields)


def test_a_tensor_on_the_cpu_has_no_handle() -> None:
    with pytest.raises(ConfigError, match=r"must be on a cuda device, got cpu\. Use the slab"):
        share(torch.ones(3))


def test_a_tensor_on_a_device_that_this_process_does_not_see_is_refused() -> None:
    with pytest.raises(ConfigError, match="must lie on a device of this process, got uuid"):
        opened(SHARED)


def read_in_child() -> None:
    for line in sys.stdin:
        tensor = opened(SharedTensor.from_json(json.loads(line)))
        print(json.dumps([str(tensor.dtype), list(tensor.shape), tensor.float().cpu().tolist()]), flush=True)
        tensor.add_(1)
        torch.cuda.synchronize()
        print("written", flush=True)


@pytest.mark.cuda
def test_another_process_sees_and_changes_the_same_memory_on_the_device() -> None:
    tensor = torch.arange(24, dtype=torch.bfloat16, device="cuda").view(4, 6)[1:3, ::2]
    torch.cuda.synchronize()
    call = "from tests.comm.weights.test_ipc import read_in_child; read_in_child()"
    with subprocess.Popen(
        [sys.executable, "-c", call], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(share(tensor).to_json()) + "\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == ["torch.bfloat16", [2, 3], tensor.float().cpu().tolist()]
        assert child.stdout.readline() == "written\n"
        child.stdin.close()
        assert child.wait(60) == 0
    assert tensor.tolist() == [[7.0, 9.0, 11.0], [13.0, 15.0, 17.0]]
