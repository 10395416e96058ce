"""One version to receivers on other nodes or in other jobs: bucket by bucket, relayed, verified by each, repaired.

Owns the order of messages of one sending. Does not own the group (whatever has `send`, `recv` and `broadcast` of tensors is a
communicator: its members, deadlines and errors are its own), nor where a version lies (`held.py`).

A sending is some rounds. In each, down the topology (`topology.py`) and back up:

    root     frame: [magic, bytes, sum] header: what comes, which buckets, [chunk] [chunk] ...        -->
    others   relay every chunk as it comes; then add their wants to their children's: [whole, bucket, bucket, ...]  <--

The first round carries a `delta` where the sender has a base, else every bucket. A receiver that holds another base, or got a
damaged delta, asks for the whole version; one that got a wrong bucket asks for this one. The next round carries what was
asked for, to all. When nobody wants anything, or after `max_rounds`, a header says that it is over, and how.

Invariant: every receiver verifies for itself, before it counts: what it relays needs no trust. A communicator that fails, because
somebody died or a deadline passed, fails the sending with its error; what was half received stays unproved (`held.py`), and
the next whole sending, over a new communicator, repairs it. After an error a communicator is not to be used again.

    sender      report = send_version(comm, published, base=previous)
    receivers   id = receive_version(comm, held)               # each rank but the root
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson
import torch

from rondo.comm.weights.delta import apply, encode
from rondo.comm.weights.held import Held, Published, VersionId
from rondo.comm.weights.sums import bucket_sum
from rondo.comm.weights.topology import Place, Topology, choose, place
from rondo.runtime.errors import CorruptData, OutOfSpace, ProtocolError, Refused

MAX_HEADER_BYTES = 256 << 20
_FRAME = struct.Struct("<8sQQ")  # magic, bytes of the header, its sum
_MAGIC = b"rondo-w1"
_WHOLE, _DELTA, _END = "whole", "delta", "end"


class Communicator(Protocol):
    """A group of processes that move tensors of bytes, as `comm/groups/communicators.py` makes them. Calls of one process come
    from one
    thread, in the same order on both sides; each ends, in time, with the tensor moved or with an error."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def send(self, tensor: torch.Tensor, peer: int, /) -> None: ...
    def recv(self, tensor: torch.Tensor, peer: int, /) -> None: ...
    def broadcast(self, tensor: torch.Tensor, root: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Sent:
    """How a sending went. `sent_bytes` of chunks left the root once (its links multiply them); `version_bytes` is the whole."""

    id: VersionId
    topology: str
    num_rounds: int
    by_delta: bool
    sent_bytes: int
    version_bytes: int


# ---- the sender -----------------------------------------------------------------------------------------------------


def send_version(
    comm: Communicator,
    version: Published,
    *,
    base: Published | None = None,
    delta: bytes | None = None,
    topology: Topology = "auto",
    max_rounds: int = 4,
    num_threads: int = 1,
    device: str = "cpu",
) -> Sent:
    """Send `version` to every other rank; returns when all have proved it.

    With `base`, the version sent before, only what changed is sent (or `delta`, the message of `encode`). `device`: where the
    communicator wants its tensors ("cuda:0" for NCCL). Raises CorruptData when somebody still has wrong bytes after
    `max_rounds`, and whatever the communicator raises.
    """
    if delta is None and base is not None:
        delta = encode(base, version, num_threads=num_threads)
    manifest = version.manifest
    buckets = [version.bucket(index) for index in range(manifest.num_buckets)]
    shape = choose(comm.size, len(buckets)) if topology == "auto" else topology
    link = _Link(comm, place(shape, comm.size, comm.rank, comm.rank), comm.rank, device)
    about = {"id": list(version.id), "num_buckets": len(buckets), "topology": shape}
    by_delta, sent_bytes = delta is not None, 0
    wanted: Sequence[int] = range(len(buckets))
    for number in range(1, max_rounds + 1):
        if delta is not None:
            chunks = _cut(np.frombuffer(delta, np.uint8), manifest.bucket_bytes)
            link.frame(about | {"kind": _DELTA, "num_bytes": len(delta), "chunk_bytes": manifest.bucket_bytes})
        else:
            chunks = [buckets[index] for index in wanted]
            link.frame(about | {"kind": _WHOLE, "buckets": list(wanted)}, manifest.raw)
        for chunk in chunks:
            link.pass_on(chunk)
        sent_bytes += sum(chunk.size for chunk in chunks)
        wants = link.gather(np.zeros(1 + len(buckets), np.uint8))
        if not wants.any():
            link.frame(about | {"kind": _END})
            return Sent(version.id, shape, number, by_delta, sent_bytes, manifest.num_bytes)
        delta = None
        wanted = range(len(buckets)) if wants[0] else np.flatnonzero(wants[1:]).tolist()
    link.frame(about | {"kind": _END})
    raise CorruptData(
        f"every receiver must have proved version {version.id} after {max_rounds} rounds, got {int(wants[1:].sum())} buckets "
        "that are still wrong somewhere. Look at the links between the nodes"
    )


# ---- a receiver -----------------------------------------------------------------------------------------------------


def receive_version(
    comm: Communicator, held: Held, *, root: int = 0, num_threads: int = 1, device: str = "cpu"
) -> VersionId:
    """Receive what `root` sends, pass it on, prove it. Returns the version that `held` then serves.

    Raises CorruptData when the sending ended and this copy is still wrong, ProtocolError for anything but a sending,
    OutOfSpace for a version that `held` has no memory for, and whatever the communicator raises: `held` serves nothing then,
    or what it served before, where no byte of that has changed.
    """
    # The shape comes with the first header, which reaches everybody the same way: by the communicator's own broadcast.
    link = _Link(comm, Place(root, (), True), root, device)
    while True:
        header, raw = link.receive_frame()
        link.place = place(header["topology"], comm.size, comm.rank, root)
        id = VersionId.from_json(header["id"])
        wants = np.zeros(1 + header["num_buckets"], np.uint8)
        if header["kind"] == _END:
            if held.id != id:
                raise CorruptData(
                    f"version {id} must be proved when its sending ends, got wrong bytes. Send it again whole"
                )
            return id
        if header["kind"] == _DELTA:
            wants[0] = _receive_delta(link, held, header, num_threads)
        else:
            _receive_buckets(link, held, id, raw, header["buckets"], wants)
        link.gather(wants)


def _receive_delta(link: _Link, held: Held, header: dict[str, Any], num_threads: int) -> bool:
    """Whether the whole version is needed instead."""
    if (
        header["num_bytes"] > held.capacity_bytes
    ):  # a delta is smaller than the version; nothing this large is allocated
        raise OutOfSpace(f"a delta must be smaller than {held.capacity_bytes} bytes, got {header['num_bytes']}.")
    message = np.empty(header["num_bytes"], np.uint8)
    for chunk in _cut(message, header["chunk_bytes"]):
        link.pass_on(chunk)
    try:
        apply(held, message, num_threads=num_threads)
    except (CorruptData, Refused, OutOfSpace):  # told to the root, which sends the whole version
        return True
    return False


def _receive_buckets(
    link: _Link, held: Held, id: VersionId, raw: bytes, buckets: Sequence[int], wants: np.ndarray
) -> None:
    """Take what is missing here, pass on everything, and set `wants` for what came wrong."""
    proved = held.id == id  # others asked for this round
    if not proved and not held.is_coming(id):
        held.begin(id, raw)
    manifest = held.manifest
    spare = np.empty(min(manifest.bucket_bytes, manifest.num_bytes), np.uint8)
    for index in buckets:
        start, end = manifest.bounds(index)
        link.pass_on(spare[: end - start] if proved else held.bucket(index))
        if not proved and not held.is_right(index):
            wants[1 + index] = 1
    if not proved and not wants.any():
        try:
            held.prove()
        except CorruptData:  # this round did not carry what is missing here; the next one carries everything
            wants[0] = 1


# ---- the wires ------------------------------------------------------------------------------------------------------


class _Link:
    """This rank's connections in one sending: a parent above, children below."""

    def __init__(self, comm: Communicator, at: Place, root: int, device: str) -> None:
        self._comm = comm
        self.place = at
        self._root = root
        self._device = torch.device(device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    def frame(self, header: dict[str, Any], raw: bytes = b"") -> None:
        encoded = orjson.dumps(header)
        body = len(encoded).to_bytes(8, "little") + encoded + raw
        frame = _FRAME.pack(_MAGIC, len(body), bucket_sum(memoryview(body)))
        for data in (frame, body):
            self._everybody(np.frombuffer(bytearray(data), np.uint8))

    def receive_frame(self) -> tuple[dict[str, Any], bytes]:
        """The header, and the manifest behind it. Raises ProtocolError for what is none: the sides are out of step."""
        frame = np.empty(_FRAME.size, np.uint8)
        self._everybody(frame)
        magic, num_bytes, wanted = _FRAME.unpack(frame.tobytes())
        if magic != _MAGIC or num_bytes > MAX_HEADER_BYTES:
            raise ProtocolError(f"a sending of weights must begin with its frame, got {magic!r} and {num_bytes} bytes.")
        body = np.empty(num_bytes, np.uint8)
        self._everybody(body)
        if bucket_sum(body) != wanted:
            raise ProtocolError("the header of a sending of weights must have its sum, got another. Send it again")
        header_bytes = int.from_bytes(body[:8].tobytes(), "little")
        return orjson.loads(body[8 : 8 + header_bytes].tobytes()), body[8 + header_bytes :].tobytes()

    def pass_on(self, chunk: np.ndarray) -> None:
        """Receive `chunk` from the parent, where there is one, and send it to the children."""
        if self.place.flat:
            self._everybody(chunk)
            return
        moved = self._room(chunk)
        if self.place.parent is not None:
            self._comm.recv(moved, self.place.parent)
        for child in self.place.children:
            self._comm.send(moved, child)
        if self.place.parent is not None:
            torch.from_numpy(chunk).copy_(moved)

    def gather(self, wants: np.ndarray) -> np.ndarray:
        """Add what the children want to `wants`, and tell the parent."""
        for child in self.place.children:
            theirs = torch.empty(wants.size, dtype=torch.uint8, device=self._device)
            self._comm.recv(theirs, child)
            wants |= theirs.cpu().numpy()
        if self.place.parent is not None:
            self._comm.send(torch.from_numpy(wants).to(self._device), self.place.parent)
        return wants

    def _everybody(self, chunk: np.ndarray) -> None:
        moved = self._room(chunk)
        self._comm.broadcast(moved, self._root)
        if self._comm.rank != self._root:
            torch.from_numpy(chunk).copy_(moved)

    def _room(self, chunk: np.ndarray) -> torch.Tensor:
        """The root's bytes on the device; for the others, room for them apart from where they will lie.

        A library whose call was given up may write into its tensor later, when that memory holds another version.
        """
        if self._comm.rank == self._root:
            return torch.from_numpy(chunk).to(self._device)
        if self._buffer.numel() < chunk.size:
            self._buffer = torch.empty(chunk.size, dtype=torch.uint8, device=self._device)
        return self._buffer[: chunk.size]


def _cut(data: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    return [data[start : start + chunk_bytes] for start in range(0, data.size, chunk_bytes)]
