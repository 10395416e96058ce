from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rondo.comm.weights.broadcast import Communicator, Sent, receive_version, send_version
from rondo.comm.weights.delta import encode
from rondo.comm.weights.held import Held
from rondo.comm.weights.topology import Topology
from rondo.runtime.errors import Closed, CorruptData, OutOfSpace, PeerGone, ProtocolError
from tests.comm.weights.versions import assert_serves, flip, holding, new_slab, publish, run_worlds

HERE = "tests.comm.weights.test_broadcast"
SHAPES: tuple[Topology, ...] = ("flat", "tree", "chain")
Damage = Callable[[torch.Tensor], None]


class World:
    """Ranks as threads over queues; `damage[rank]` sees what this rank receives, before it does."""

    def __init__(self, num_ranks: int) -> None:
        self.queues = {(a, b): queue.Queue[torch.Tensor | None]() for a in range(num_ranks) for b in range(num_ranks)}
        self.num_ranks = num_ranks
        self.damage: dict[int, Damage] = {}

    def run(self, root: int, send: Callable[[Communicator], Any], helds: dict[int, Held]) -> dict[int, Any]:
        """What each rank returned or raised. One that raises hangs up, as a process that dies does."""
        world = [Member(self, rank) for rank in range(self.num_ranks)]

        def one(rank: int) -> Any:
            try:
                return send(world[rank]) if rank == root else receive_version(world[rank], helds[rank], root=root)
            except (PeerGone, CorruptData, OutOfSpace, ProtocolError) as error:
                for other in range(self.num_ranks):
                    self.queues[rank, other].put(None)
                return error

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return dict(enumerate(pool.map(one, range(self.num_ranks))))


class Member:
    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.size, self._world = rank, world.num_ranks, world

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._world.queues[self.rank, peer].put(tensor.clone())

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        found = self._world.queues[peer, self.rank].get(timeout=120)
        if found is None:
            raise PeerGone(f"rank {peer} must answer, got nothing")
        assert found.shape == tensor.shape
        tensor.copy_(found)
        if self.rank in self._world.damage:
            self._world.damage[self.rank](tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.rank != root:
            self.recv(tensor, root)
            return
        for other in range(self.size):
            if other != root:
                self.send(tensor, other)


def damaging(nth: int, more_than: int = 2000, times: int = 1) -> Damage:
    """Flips one bit in the `nth` tensor of more than so many bytes, and in those behind it, `times` in all."""
    count = 0

    def damage(tensor: torch.Tensor) -> None:
        nonlocal count
        if tensor.numel() > more_than:
            count += 1
            if nth < count <= nth + times:
                flip(tensor.numpy(), 4321)

    return damage


@pytest.mark.parametrize("topology", SHAPES)
@pytest.mark.parametrize("num_ranks", [2, 6])
def test_every_receiver_proves_what_the_root_sent(topology: Topology, num_ranks: int) -> None:
    version = publish(new_slab(), 0, 5)
    root = num_ranks - 1
    helds = {rank: Held(version.manifest.num_bytes) for rank in range(num_ranks) if rank != root}
    done = World(num_ranks).run(root, lambda comm: send_version(comm, version, topology=topology), helds)
    assert done[root] == Sent(version.id, topology, 1, False, version.manifest.num_bytes, version.manifest.num_bytes)
    for rank, held in helds.items():
        assert done[rank] == version.id
        assert_serves(held, 5)


@pytest.mark.parametrize("topology", SHAPES)
def test_a_bit_flipped_on_one_link_costs_one_bucket_more(topology: Topology) -> None:
    version = publish(new_slab(), 0, 5)
    world = World(5)
    world.damage[2] = damaging(3)
    helds = {rank: Held(version.manifest.num_bytes) for rank in range(1, 5)}
    done = world.run(0, lambda comm: send_version(comm, version, topology=topology), helds)
    sent = done[0]
    assert sent.num_rounds == 2 and sent.sent_bytes == version.manifest.num_bytes + version.manifest.bucket_bytes
    for held in helds.values():
        assert_serves(held, 5)


def test_a_link_that_always_flips_a_bit_is_given_up_and_the_others_are_served() -> None:
    version = publish(new_slab(), 0, 5)
    world = World(3)
    world.damage[2] = damaging(1, times=10**6)
    helds = {rank: Held(version.manifest.num_bytes) for rank in (1, 2)}
    done = world.run(0, lambda comm: send_version(comm, version, max_rounds=3), helds)
    assert isinstance(done[0], CorruptData) and "after 3 rounds" in str(done[0])
    assert_serves(helds[1], 5)
    assert isinstance(done[2], CorruptData)
    with pytest.raises(Closed):
        helds[2].tensors()
    done = World(3).run(0, lambda comm: send_version(comm, version), helds)
    assert done[2] == version.id
    assert_serves(helds[2], 5)


@pytest.mark.parametrize("topology", SHAPES)
def test_receivers_of_the_base_get_the_delta_and_one_of_another_base_makes_it_whole(topology: Topology) -> None:
    slab = new_slab()
    base, version, other = publish(slab, 0, 4), publish(slab, 1, 5), publish(slab, 2, 3)
    helds = {rank: holding(base) for rank in range(1, 4)}
    done = World(4).run(0, lambda comm: send_version(comm, version, base=base, topology=topology), helds)
    assert done[0].by_delta and done[0].num_rounds == 1 and done[0].sent_bytes < version.manifest.num_bytes / 2
    for held in helds.values():
        assert_serves(held, 5)
    helds = {1: holding(base), 2: holding(other), 3: Held(version.manifest.num_bytes)}
    done = World(4).run(0, lambda comm: send_version(comm, version, base=base, topology=topology), helds)
    assert done[0].num_rounds == 2 and done[0].sent_bytes > version.manifest.num_bytes
    for held in helds.values():
        assert_serves(held, 5)


def test_a_delta_damaged_on_its_way_is_repaired_by_the_whole_version() -> None:
    slab = new_slab()
    base, version = publish(slab, 0, 4), publish(slab, 1, 5)
    world = World(3)
    world.damage[1] = damaging(0)
    helds = {rank: holding(base) for rank in (1, 2)}
    done = world.run(0, lambda comm: send_version(comm, version, delta=encode(base, version)), helds)
    assert done[0].num_rounds == 2
    for held in helds.values():
        assert_serves(held, 5)


def test_a_receiver_without_memory_or_in_the_middle_of_something_else_gets_a_typed_error() -> None:
    version = publish(new_slab(), 0, 5)
    small = Held(100)
    done = World(2).run(0, lambda comm: send_version(comm, version), {1: small})
    assert isinstance(done[1], OutOfSpace) and isinstance(done[0], PeerGone)
    done = World(2).run(0, lambda comm: comm.broadcast(torch.zeros(24, dtype=torch.uint8), 0), {1: small})
    assert isinstance(done[1], ProtocolError)


# ---- real processes over gloo ---------------------------------------------------------------------------------------


def send_and_receive(comm: Any) -> list[Any]:
    """Each shape, then deltas; what every rank ends with, and how it went at the root."""
    slab = new_slab()
    told: list[Any] = []
    held = Held(publish(slab, 0, 1).manifest.num_bytes)
    for number, topology in enumerate(SHAPES):
        base = publish(slab, number % 3, 1 + number)
        version = publish(slab, (number + 1) % 3, 2 + number)
        if comm.rank == 0:
            for sent in (
                send_version(comm, base, topology=topology),
                send_version(comm, version, base=base, topology=topology),
            ):
                told.append([sent.by_delta, sent.num_rounds])
        else:
            for wanted in (base, version):
                receive_version(comm, held)
                assert_serves(held, wanted.id.version)
                told.append(held.id.version if held.id else None)
    return told


class Dying:
    """A communicator whose process is killed at its `nth` message."""

    def __init__(self, comm: Any, nth: int) -> None:
        self.rank, self.size, self._comm, self._left = comm.rank, comm.size, comm, nth

    def __getattr__(self, name: str) -> Callable[..., None]:
        def move(tensor: torch.Tensor, peer: int) -> None:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            getattr(self._comm, name)(tensor, peer)

        return move


def with_a_killed_rank(comm: Any, topology: Topology, killed: int) -> list[Any]:
    """What each survivor holds and was told: it starts from version 4 and half of version 5 comes."""
    slab = new_slab()
    before, version = publish(slab, 0, 4), publish(slab, 1, 5)
    held = holding(before)
    using: Any = Dying(comm, 6) if comm.rank == killed else comm
    try:
        if comm.rank == 0:
            send_version(using, version, topology=topology)
        else:
            receive_version(using, held)
    except PeerGone as error:
        served = held.id.version if held.id else None
        if comm.rank and served is None:
            with pytest.raises(Closed):
                held.tensors()
        repaired = holding_again(held, version)
        return [type(error).__name__, served, repaired]
    return ["no error", held.id.version if held.id else None, None]


def holding_again(held: Held, version: Any) -> int | None:
    """The version after a later whole sending, here within this process."""
    world = World(2)
    done = world.run(0, lambda comm: send_version(comm, version), {1: held})
    assert done[1] == version.id
    assert_serves(held, 5)
    return held.id.version if held.id else None


KILLED = [("chain", 0), ("chain", 1), ("tree", 1), ("flat", 2)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What the ranks of every scenario with real processes say."""
    scenarios: list[list[Any]] = [["send_and_receive", 4]]
    scenarios += [["with_a_killed_rank", 3, topology, killed] for topology, killed in KILLED]
    return run_worlds(HERE, scenarios, tmp_path_factory.mktemp("worlds"))


def test_versions_and_deltas_reach_other_processes_by_every_shape(worlds: list[list[Any]]) -> None:
    root, *others = worlds[0]
    assert root == [[False, 1], [True, 1]] * 3
    assert others == [[1, 2, 2, 3, 3, 4]] * 3


@pytest.mark.parametrize(("topology", "killed"), KILLED)
def test_survivors_of_a_killed_rank_get_an_error_serve_no_half_version_and_are_repaired(
    topology: str, killed: int, worlds: list[list[Any]]
) -> None:
    found = worlds[1 + KILLED.index((topology, killed))]
    assert found[killed] is None
    for rank in {0, 1, 2} - {killed}:
        error, served, repaired = found[rank]
        assert error == "PeerGone" and repaired == 5
        assert served == (4 if rank == 0 else None)  # the root has its slab, and never began this copy
