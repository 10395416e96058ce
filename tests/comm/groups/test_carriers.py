"""Which library carries a group, what is said when it cannot, and the bytes-only carriers over a stand-in for NCCL."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistStoreError, PrefixStore, TCPStore

from rondo.comm.groups import nccl_extras
from rondo.comm.groups.carriers import Gloo, check_backend
from rondo.comm.groups.nccl_extras import UNIQUE_ID_BYTES, Bytes, Nccl4Py, PyNccl, exchange_id
from rondo.runtime.errors import ConfigError

GENEROUS_S = 120.0


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: TCPStore, prefix: str) -> PrefixStore:
    return PrefixStore(prefix, TCPStore(store.host, store.port, is_master=False))


class Fabric:
    """What connects the ranks of one unique id."""

    made: dict[bytes, Fabric] = {}  # noqa: RUF012  # as a network has one instance

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.held: dict[Any, Any] = {}
        self.arrived = threading.Condition()


class FakeNccl:
    """NCCL between threads: a call is done when it returns. Ids have zeros in them, like real ones."""

    def __init__(self, letter: bytes = b"i") -> None:
        self._letter = letter
        self.events: list[str] = []

    def unique_id(self) -> bytes:
        return (b"\0" + self._letter).ljust(UNIQUE_ID_BYTES, b"\0")

    def init(self, size: int, rank: int, unique_id: bytes, device: int) -> None:
        self.rank = rank
        self.fabric = Fabric.made.setdefault(unique_id, Fabric(size))
        self.fabric.barrier.wait(GENEROUS_S)

    def post(self, operation: str, data: Any, rank: int, stream: int) -> None:
        if operation == "broadcast":
            if self.rank == rank:
                self.fabric.held["broadcast"] = data.clone()
            self.fabric.barrier.wait(GENEROUS_S)
            data.copy_(self.fabric.held["broadcast"])
            self.fabric.barrier.wait(GENEROUS_S)
            return
        with self.fabric.arrived:
            if operation == "send":
                self.fabric.held.setdefault((self.rank, rank), []).append(data.clone())
                self.fabric.arrived.notify_all()
            else:
                assert self.fabric.arrived.wait_for(lambda: self.fabric.held.get((rank, self.rank)), GENEROUS_S)
                data.copy_(self.fabric.held[rank, self.rank].pop(0))

    def abort(self) -> None:
        self.events.append("abort")

    def destroy(self) -> None:
        self.events.append("destroy")


def both(work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(work, range(2), timeout=GENEROUS_S))


@pytest.mark.parametrize(
    ("backend", "device", "text"),
    [
        ("gloo", "cuda:0", "backend must fit the device cuda:0, got gloo. Use nccl, nccl4py or pynccl"),
        ("nccl", "cpu", "backend must fit the device cpu, got nccl. Use gloo"),
        ("pynccl", "cpu", "backend must fit the device cpu, got pynccl. Use gloo"),
    ],
)
def test_a_backend_that_does_not_fit_the_device_is_refused(backend: str, device: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_backend(backend, device)
    assert str(refused.value) == text


def test_a_torch_without_nccl_says_so() -> None:
    if torch.distributed.is_nccl_available():
        check_backend("nccl", "cuda:0")
    else:
        with pytest.raises(ConfigError, match="backend nccl must be part of torch"):
            check_backend("nccl", "cuda:0")


@pytest.mark.parametrize(("extra", "module"), [("nccl4py", "nccl.core"), ("pynccl", "pynccl.api")])
def test_an_extra_that_is_not_installed_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, extra: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # imports of it fail as if it were not there
    with pytest.raises(ConfigError) as refused:
        check_backend(extra, "cuda:0")
    assert str(refused.value).startswith(f"backend {extra} must be installed with what it needs, got ")
    assert str(refused.value).endswith(f"Run pip install 'rondo-rl[{extra}]'")


def test_bindings_without_the_library_under_them_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ModuleType("nccl.core")
    core.get_version = lambda: SimpleNamespace(libnccl=None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    with pytest.raises(ConfigError, match=r"got no libnccl.so.2. Run pip install 'rondo-rl\[nccl4py\]'"):
        check_backend("nccl4py", "cuda:0")


def test_the_unique_id_of_rank_0_reaches_every_rank_whole(store: TCPStore) -> None:
    ids = both(lambda rank: exchange_id(FakeNccl(bytes([97 + rank])), client(store, "whole"), rank, GENEROUS_S))
    assert ids == [(b"\0a").ljust(UNIQUE_ID_BYTES, b"\0")] * 2


def test_a_unique_id_that_never_comes_ends_by_the_deadline_and_a_wrong_one_is_refused(store: TCPStore) -> None:
    with pytest.raises(DistStoreError):
        exchange_id(FakeNccl(), client(store, "never"), 1, 0.05)
    client(store, "wrong").set("unique-id", b"short")
    with pytest.raises(ConfigError, match="must be 128 bytes, got 5"):
        exchange_id(FakeNccl(), client(store, "wrong"), 1, GENEROUS_S)


def test_bytes_go_by_broadcast_send_and_receive(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_extras, "_MAX_POST_BYTES", 3)  # eight bytes take three posts

    def work(rank: int) -> tuple[list[int], list[int], list[str]]:
        library = FakeNccl(b"o")
        carrier = Bytes(library, client(store, "bytes"), rank, 2, "cpu", GENEROUS_S)
        mine = torch.arange(8, dtype=torch.uint8) + 10 * rank
        shared = mine.clone()
        carrier.move("broadcast", shared, 1, GENEROUS_S)
        sent = mine.clone()
        carrier.move("send" if rank == 0 else "recv", sent, 1 - rank, GENEROUS_S)
        carrier.abort()
        carrier.close()
        return shared.tolist(), sent.tolist(), library.events

    zero, one = list(range(8)), list(range(10, 18))
    assert both(work) == [(one, zero, ["abort", "destroy"])] * 2


def test_pynccl_gets_and_gives_the_unique_id_as_raw_memory_and_posts_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `internal` field ends at the first zero, and its structure is four times as long as NCCL's."""
    import ctypes

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 512)]

    real = bytes(range(128))
    calls: list[tuple[Any, ...]] = []

    class Nccl:
        def get_unique_id(self) -> UniqueId:
            made = UniqueId()
            ctypes.memmove(ctypes.addressof(made), real, 128)
            return made

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: calls.append((name, *arguments))

    class NcclWrp:
        def __init__(self, size: int, rank: int, device: int) -> None:
            self.nk, self.comm_i = Nccl(), "comm"
            calls.append(("wrap", size, rank, device))

        def set_nuid(self, made: UniqueId) -> None:
            calls.append(("id", ctypes.string_at(ctypes.addressof(made), 128)))

        def init_comm(self) -> None: ...

    api, binding = ModuleType("pynccl.api"), ModuleType("pynccl.binding")
    api.Nccl, api.NcclWrp = Nccl, NcclWrp  # type: ignore[attr-defined]
    binding.ncclUniqueId, binding.ncclUint8 = UniqueId, 1  # type: ignore[attr-defined]
    for module in (ModuleType("pynccl"), api, binding):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    library, data = PyNccl(), torch.zeros(5, dtype=torch.uint8)
    assert library.unique_id() == real
    library.init(4, 2, real, 3)
    library.post("broadcast", data, 1, 77)
    library.post("send", data, 0, 77)
    library.post("recv", data, 3, 77)
    pointer = data.data_ptr()
    assert calls == [
        ("wrap", 4, 2, 3), ("id", real), ("bcast", pointer, 5, 1, 1, "comm", 77),
        ("pp_send", pointer, 5, 1, 0, "comm", 77), ("pp_recv", pointer, 5, 1, 3, "comm", 77),
    ]  # fmt: skip


def test_nccl4py_is_called_with_the_tensors_themselves_and_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class UniqueId:
        def __init__(self, as_bytes: bytes) -> None:
            self.as_bytes = as_bytes

        from_bytes = classmethod(lambda kind, data: kind(data))

    class Communicator:
        @classmethod
        def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> Communicator:
            calls.append(("init", nranks, rank, unique_id.as_bytes))
            return cls()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments, **keywords: calls.append((name, *arguments, *keywords.values()))

    core = ModuleType("nccl.core")
    core.get_unique_id = lambda: UniqueId(b"made")  # type: ignore[attr-defined]
    core.get_version = lambda: SimpleNamespace(libnccl="2.30")  # type: ignore[attr-defined]
    core.UniqueId, core.Communicator = UniqueId, Communicator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.core", core)
    library, data = Nccl4Py(), torch.zeros(5, dtype=torch.uint8)
    assert library.unique_id() == b"made"
    library.init(4, 2, b"id", 0)
    library.post("broadcast", data, 1, 77)
    library.post("send", data, 0, 77)
    library.post("recv", data, 3, 77)
    library.abort()
    library.destroy()
    assert [call[0] for call in calls] == ["init", "broadcast", "send", "recv", "abort", "destroy"]
    assert calls[0] == ("init", 4, 2, b"id") and calls[2][2:] == (0, 77) and calls[3][2:] == (3, 77)
    assert calls[1][1] is data and calls[1][2] is data and calls[1][3:] == (1, 77)


def test_gloo_groups_do_not_touch_the_default_group(store: TCPStore) -> None:
    def work(rank: int) -> list[float]:
        carrier = Gloo(client(store, "gloo"), rank, 2, GENEROUS_S)
        tensor = torch.tensor([1.0 + rank])
        carrier.move("broadcast", tensor, 1, GENEROUS_S)
        carrier.close()
        return list(tensor)

    assert both(work) == [[2.0], [2.0]]
    assert not torch.distributed.is_initialized()
