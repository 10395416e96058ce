"""Segments and doorbells: shared memory and eventfds that outlive whoever uses them, handed over by the supervisor.

Owns the memory: the server creates it, keeps it and hands out descriptors. Does not own what lies inside (rings, slabs,
snapshots, heartbeats). Nothing has a name in the file system, so nothing can leak and /dev/shm does not limit us.

Invariants: who shows no token gets no descriptor; the first asker of a name fixes its size, everyone after it and after
every restart gets the same memory; a segment cannot shrink and its pages are there from the start, so no access ends in
SIGBUS; what is granted at any moment, made or not, fits into the memory that is free; dropped memory lives until its last mapping
goes.

    server = SegmentServer(rt_dir / "handover.sock", token, on_register)     # in the supervisor, on a thread of its own
    client = SegmentClient(rt_dir / "handover.sock", token)                  # in every worker
    ring = client.segment("ring/rollout-0/0", 64 << 20).view()

The socket is a plain blocking Unix socket of whole packets (SEQPACKET), since uvloop's streams carry no descriptors. A
packet is one JSON object; descriptors travel beside a reply with SCM_RIGHTS.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hmac
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime.closing import Closing
from rondo.runtime.errors import (
    Closed,
    OutOfSpace,
    PeerGone,
    ProtocolError,
    Refused,
    RondoError,
    describe,
    restore,
    shortage,
)
from rondo.runtime.memory.free import free_memory_bytes
from rondo.runtime.waits import blocking

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_PACKET_BYTES = 16 * 1024
_MAX_NAME_BYTES = 200
_JOIN_S, _NO_ROOM_S = 5.0, 0.1
_REPLY_S = 30.0
_BYTES_PER_S = 256 << 20
"""Pages are made at several times this rate; a request's deadline grows with its bytes at it."""
_LONGEST_S = 3600.0
_PIECE_BYTES = 256 << 20
"""So much is made at once: what is there by now is not counted as promised."""
QUICK_BYTES = 4 << 20
"""Memory up to this size is made in milliseconds; more is asked for on a connection of its own, and beside an event loop."""
_PEER_CREDENTIALS = struct.Struct("3i")


class NoSuchSegment(RondoError, KeyError):
    """Asked for existing memory under a name that nobody has given a size yet."""

    __str__ = Exception.__str__  # KeyError would show its message in quotes


@dataclass(frozen=True, slots=True)
class Registration:
    """A process of a role group, as it names itself before anything else. `start_time` in clock ticks since boot."""

    group: str
    incarnation: int
    rank: int
    pid: int
    start_time: int
    session: int


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """`segments` is (name, bytes), in order of names."""

    segments: tuple[tuple[str, int], ...]
    num_doorbells: int
    num_clients: int

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.segments)


class Segment(Closing):
    """Named memory, mapped at the first `view`. Closing lets go of this mapping, never of the memory.

    A view outlives a segment that nobody holds any more, and ends with a segment that is closed.
    """

    def __init__(self, name: str, num_bytes: int, fd: int) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.fd = fd
        self._views: dict[bool, memoryview] = {}

    def view(self, readonly: bool = False) -> memoryview:
        """All of the memory, `num_bytes` unsigned bytes; the same mapping at every call."""
        found = self._views.get(readonly)
        if found is None:
            if self.fd < 0:
                raise Closed(f"segment {self.name} must be open, got a view after close(). Ask for it again")
            protection = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(self.fd, self.num_bytes, flags=mmap.MAP_SHARED, prot=protection)
            found = self._views[readonly] = memoryview(mapping)
        return found

    def close(self) -> None:
        """Unmaps, or leaves that to the last array that still views the memory. Safe to call twice."""
        self.__del__()
        for view in self._views.values():
            with contextlib.suppress(BufferError):  # an array views it: the mapping goes with the array
                view.release()
        self._views.clear()

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        _close(fd)


# ---------------------------------------------------------------------------------------------- server


class _Memory:
    """A segment's entry. `lock` is held while the pages are made, so that askers of one name wait for one another."""

    __slots__ = ("fd", "lock", "num_bytes")

    def __init__(self) -> None:
        self.fd = -1
        self.num_bytes = 0
        self.lock = threading.Lock()


class SegmentServer:
    """Hands memory, doorbells and registrations over. One thread accepts, one serves each client.

    `on_register` runs on a client's thread; an error of our tree that it raises refuses the process. `free` tells the bytes that
    may still be taken, and what limits them.
    """

    def __init__(
        self,
        path: Path | str,
        token: str,
        on_register: Callable[[Registration], None],
        *,
        free: Callable[[], tuple[int, str]] = free_memory_bytes,
    ) -> None:
        self.path = Path(path)
        self._free = free
        self._promised_bytes = 0  # granted, and not made yet: askers at one time cannot all pass
        self._token = token
        self._on_register = on_register
        self._lock = threading.Lock()
        self._memories: dict[str, _Memory] = {}
        self._doorbells: dict[str, int] = {}
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    def start(self) -> None:
        """Listens. OSError when the path is taken."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(self.path))
            listener.listen(256)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name="segments", daemon=True)
        self._acceptor.start()

    def listen_again(self) -> None:
        """Listens at its path anew, from which somebody has removed its socket. Clients and memory stay."""
        before = self._listener
        assert before is not None
        self.start()
        before.shutdown(socket.SHUT_RDWR)
        before.close()

    def close(self) -> None:
        """Hangs up on everyone and lets go of all memory. Safe to call twice."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which closing alone would not
        assert self._acceptor is not None
        self._acceptor.join(_JOIN_S)
        listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            clients = dict(self._clients)
        for connection in clients:
            with contextlib.suppress(OSError):  # gone by itself meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        for thread in clients.values():
            thread.join(_JOIN_S)
        self.clear()

    def segment(self, name: str, num_bytes: int) -> Segment:
        """The server's own descriptor of a segment, made now if it is new."""
        fd, size = self._memory(name, num_bytes)
        return Segment(name, size, fd)

    def drop(self, name: str) -> None:
        """Forgets a segment and a doorbell; the next asker gets new ones. Mappings keep the old memory."""
        with self._lock:
            memory = self._memories.pop(name, None)
            doorbell = self._doorbells.pop(name, -1)
        if memory is not None:
            with memory.lock:
                _close(memory.fd)
                memory.fd = -1
        _close(doorbell)

    def clear(self, prefix: str = "") -> None:
        """Drops every name that begins with `prefix`."""
        with self._lock:
            names = [name for name in {*self._memories, *self._doorbells} if name.startswith(prefix)]
        for name in names:
            self.drop(name)

    def stats(self) -> SegmentStats:
        with self._lock:
            sizes = sorted((name, memory.num_bytes) for name, memory in self._memories.items() if memory.fd >= 0)
            return SegmentStats(tuple(sizes), len(self._doorbells), len(self._clients))

    def _memory(self, name: str, num_bytes: int) -> tuple[int, int]:
        """Return a new descriptor of a segment, which the caller closes, and the segment's size. The copy is made under the
        lock: behind it, `drop` may close the number that it was made from, and the number may come to name other memory."""
        _check_name(name)
        if type(num_bytes) is not int:
            raise ValueError(f"the size of segment {name} must be a whole number, got {num_bytes!r}. Give bytes")
        while True:
            with self._lock:
                memory = self._memories.get(name)
                if memory is None:
                    if num_bytes <= 0:
                        raise NoSuchSegment(
                            f"segment {name!r} must exist to be asked for without a size. Give num_bytes"
                        )
                    memory = self._memories[name] = _Memory()
            with memory.lock:
                if self._memories.get(name) is not memory:
                    continue  # dropped, or not made, while this waited for the lock
                if memory.fd < 0:
                    try:
                        memory.fd, memory.num_bytes = self._make(name, num_bytes), num_bytes
                    except OutOfSpace:
                        with self._lock:
                            if self._memories.get(name) is memory:
                                del self._memories[name]
                        raise
                return _duplicate(name, memory.fd), memory.num_bytes

    def _make(self, name: str, num_bytes: int) -> int:
        """A new segment's descriptor. OutOfSpace where the kernel would make pages until it must kill somebody."""
        with self._lock:
            free, whose = self._free()
            free -= self._promised_bytes
            if num_bytes > free:
                raise OutOfSpace(
                    f"segment {name} must fit into the {max(0, free)} bytes of memory that are free in {whose}, got "
                    f"{num_bytes}. Make it smaller, or give the run more memory"
                )
            self._promised_bytes += num_bytes
        fd, left = -1, num_bytes
        try:
            fd = os.memfd_create(f"rondo:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            while left:
                piece = min(_PIECE_BYTES, left)
                os.posix_fallocate(fd, num_bytes - left, piece)  # every page is made now: a later access never fails
                left -= piece
                self._made(piece)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            _close(fd)
            raise OutOfSpace(
                f"segment {name} must fit into memory, got {num_bytes} bytes ({error.strerror}). "
                + (shortage(error) or "Make it smaller, or give the run more memory")
            ) from error
        finally:
            self._made(left)
        return fd

    def _made(self, num_bytes: int) -> None:
        """So much of what was granted is there by now, or will never be."""
        with self._lock:
            self._promised_bytes -= num_bytes

    def _doorbell(self, name: str) -> int:
        """Return a new descriptor of a doorbell, which the caller closes."""
        _check_name(name)
        with self._lock:
            if name not in self._doorbells:
                self._doorbells[name] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return _duplicate(name, self._doorbells[name])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return  # close() has shut it down
                time.sleep(_NO_ROOM_S)  # no descriptor, or a caller that was gone at once
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="segments-client", daemon=True)
            with self._lock:
                self._clients[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """One client, from its hello to its end."""
        try:
            connection.settimeout(_REPLY_S)  # whoever connects and says nothing does not stay
            if not self._welcome(connection):
                return
            connection.settimeout(None)  # ends with the client, whose death closes the socket, or with close()
            while packet := connection.recv(_MAX_PACKET_BYTES):
                try:
                    reply, fd = self._answer(connection, orjson.loads(packet))
                except (RondoError, ValueError, TypeError, KeyError) as error:
                    reply, fd = {"error": describe(error)}, -1
                except OSError as error:
                    reply, fd = {"error": describe(OutOfSpace(f"the supervisor: {shortage(error) or error}"))}, -1
                try:
                    _send(connection, reply, fd)
                finally:
                    _close(fd)
        except OSError:
            return  # the client is gone, or so stuck that it does not read: the supervisor hears of deaths elsewhere
        finally:
            with self._lock:
                del self._clients[connection]
            connection.close()

    def _welcome(self, connection: socket.socket) -> bool:
        token = connection.recv(_MAX_PACKET_BYTES)
        if hmac.compare_digest(token, self._token.encode()):
            _send(connection, {}, -1)
            return True
        refusal = Refused("the token must be the run's own, got another. Read it from the run-time directory")
        _send(connection, {"error": describe(refusal)}, -1)
        return False

    def _answer(self, connection: socket.socket, request: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The reply to one request, and the descriptor beside it (-1: none), which the caller closes."""
        kind = request["ask"]
        if kind == "segment":
            try:
                fd, num_bytes = self._memory(request["name"], request["num_bytes"])
            except NoSuchSegment as error:
                return {"missing": str(error)}, -1
            return {"num_bytes": num_bytes}, fd
        if kind == "doorbell":
            return {}, self._doorbell(request["name"])
        if kind == "drop":
            self.drop(request["name"])
            return {}, -1
        if kind == "register":
            registration = Registration(**request["process"])
            if registration.pid != _peer_pid(connection):
                raise Refused(f"pid must be the caller's own, got {registration.pid} from {_peer_pid(connection)}")
            self._on_register(registration)
            return {}, -1
        raise ProtocolError(f"a request must ask for segment, doorbell, drop or register, got {kind!r}")


def _send(connection: socket.socket, reply: dict[str, Any], fd: int) -> None:
    """One packet. A client that does not read it is dropped: it must not hold the memory of others."""
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
    packet = orjson.dumps(reply)
    if len(packet) > _MAX_PACKET_BYTES:
        reply["error"]["traceback"] = reply["error"]["traceback"][-_MAX_PACKET_BYTES // 4 :]
        packet = orjson.dumps(reply)
    connection.sendmsg([packet], beside, socket.MSG_DONTWAIT)


def _peer_pid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid: int = _PEER_CREDENTIALS.unpack(credentials)[0]
    return pid


def _check_name(name: str) -> None:
    if type(name) is not str or not 0 < len(name.encode()) <= _MAX_NAME_BYTES or "\0" in name:
        raise ValueError(f"a segment's name must have 1 to {_MAX_NAME_BYTES} bytes, got {name!r}. Choose a shorter one")


def _duplicate(name: str, fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise OutOfSpace(f"{name} must have a free descriptor, got {error.strerror}. Raise `ulimit -n`") from error


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


# ---------------------------------------------------------------------------------------------- client


class SegmentClient(Closing):
    """A process's connection to the server. Safe from any thread; every call blocks for one short round trip. More than
    `QUICK_BYTES` is made on a connection of its own: the calls of other threads are answered meanwhile.

    PeerGone when the server is not there or leaves, TimeoutError past `deadline_s` (and a second for each 256 MiB asked
    for), Refused for a wrong token.
    """

    def __init__(self, path: Path | str, token: str, deadline_s: float = 60.0) -> None:
        self._path, self._token = path, token
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(deadline_s)
            self._socket.connect(str(path))
            self._exchange("hello", token.encode(), deadline_s)
        except OSError as error:
            self._socket.close()
            if isinstance(error, RondoError):
                raise
            raise PeerGone(f"the supervisor must listen at {path}, got {error}. Is the run alive?") from error
        except RondoError:
            self._socket.close()
            raise

    def segment(self, name: str, num_bytes: int) -> Segment:
        """The memory of that name, made with `num_bytes` if it is new, else as large as its first asker made it.

        With 0 bytes it must exist: NoSuchSegment, a KeyError, otherwise. OutOfSpace when memory does not suffice. The
        segment is the caller's to close; every call gives another mapping of the same memory.
        """
        deadline_s = self._deadline_s + min(num_bytes / _BYTES_PER_S, _LONGEST_S)
        with SegmentClient(self._path, self._token) if num_bytes > QUICK_BYTES else nullcontext(self) as client:
            reply, fd = client._ask(deadline_s, ask="segment", name=name, num_bytes=num_bytes)
        if "missing" in reply:
            raise NoSuchSegment(reply["missing"])
        return Segment(name, reply["num_bytes"], fd)

    def doorbell(self, name: str) -> int:
        """The eventfd of that name, non-blocking; the descriptor is the caller's to close."""
        return self._ask(self._deadline_s, ask="doorbell", name=name)[1]

    def drop(self, name: str) -> None:
        """Makes the server forget memory and doorbell of that name. Mappings stay valid until they go."""
        self._ask(self._deadline_s, ask="drop", name=name)

    def register(self, group: str, incarnation: int, rank: int, pid: int, start_time: int, session: int) -> None:
        """Names this process to the supervisor. Refused when its incarnation is not the living one."""
        process = asdict(Registration(group, incarnation, rank, pid, start_time, session))
        self._ask(self._deadline_s, ask="register", process=process)

    def close(self) -> None:
        """Hangs up. What was handed over stays. Safe to call twice."""
        self._socket.close()

    def _ask(self, deadline_s: float, **request: Any) -> tuple[dict[str, Any], int]:
        try:
            with self._lock:  # one request at a time: replies carry no number
                if self._socket.fileno() < 0:
                    raise Closed("the segment client must be open, got a call after close(). Make a new one")
                return self._exchange(request["ask"], orjson.dumps(request), deadline_s)
        except TimeoutError:
            self._socket.close()  # a late reply must not be taken for the next one
            raise
        except OSError as error:
            if isinstance(error, RondoError):
                raise
            raise PeerGone(f"the supervisor must stay until it has answered, got {error}") from error

    def _exchange(self, name: str, packet: bytes, deadline_s: float) -> tuple[dict[str, Any], int]:
        self._socket.settimeout(deadline_s)
        with blocking(f"handover {name}", peer="supervisor", deadline_s=deadline_s):
            self._socket.sendall(packet)
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _MAX_PACKET_BYTES, 1)
        fd = descriptors[0] if descriptors else -1
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close(fd)
            raise PeerGone("the supervisor must answer a request, got a closed connection. It refuses or has ended")
        if fd >= 0:
            os.set_inheritable(fd, False)
        reply = orjson.loads(data)
        if "error" in reply:
            raise restore(reply["error"], "supervisor")
        return reply, fd
