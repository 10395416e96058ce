"""Process groups over NCCL: the same members as in test_groups.py, each on a GPU of its own."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from rondo.comm.groups.carriers import check_backend
from rondo.comm.groups.communicators import Communicator, open_group
from rondo.comm.groups.epochs import Epoch, GroupSpec, Life
from rondo.runtime.errors import ConfigError, GroupBroken

LIMIT_S = 60.0
pytestmark = pytest.mark.cuda(2)


def pair(name: str, backend: str, number: int = 1) -> tuple[Communicator, Communicator]:
    """Both members in this process, each on its own device and in its own threads."""
    spec = GroupSpec(name, ("actor-0/0", "rollout-0/0"), backend, timeout_s=LIMIT_S)
    epoch = Epoch(name, number, (Life("actor-0", 0, 1), Life("rollout-0", 0, 1)))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def open_one(rank: int) -> Communicator:
        address = store.host, store.port
        return open_group(spec, epoch, spec.members[rank], address, device=f"cuda:{rank}", deadline_s=LIMIT_S)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(open_one, range(2))
    return first, second


@pytest.mark.parametrize("backend", ["nccl", "nccl4py", "pynccl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_bytes_cross_from_gpu_to_gpu(backend: str, dtype: Any) -> None:
    module = {"nccl4py": "nccl", "pynccl": "pynccl"}.get(backend)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{backend} is not installed: pip install 'rondo-rl[{backend}]'")
    members = pair(f"cross {backend} {dtype}", backend)
    data = [torch.arange(1 << 20, device=f"cuda:{rank}").to(dtype) * (1 - rank) for rank in range(2)]

    def work(rank: int) -> bool:
        members[rank].broadcast(data[rank], 0)
        members[rank].barrier()
        return bool(torch.equal(data[rank].cpu(), data[0].cpu())) and members[rank].close()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, range(2))) == [True, True]


def test_a_member_that_never_comes_costs_the_deadline_and_the_process_goes_on() -> None:
    first, second = pair("silent", "nccl")
    with pytest.raises(GroupBroken):
        first.recv(torch.zeros(8, device="cuda:0"), 1, deadline_s=2.0)
    second.abort()
    first.close(LIMIT_S), second.close(LIMIT_S)
    assert all(member.close() for member in pair("silent", "nccl", number=2))


def test_an_abort_wakes_a_call() -> None:
    first, second = pair("abort", "nccl")
    woken = threading.Timer(1.0, first.abort)
    woken.start()
    with pytest.raises(GroupBroken, match="it was aborted here"):
        first.recv(torch.zeros(8, device="cuda:0"), 1)
    woken.join()
    second.abort()


def test_gloo_is_refused_for_a_gpu() -> None:
    with pytest.raises(ConfigError):
        check_backend("gloo", "cuda:0")
