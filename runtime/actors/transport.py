"""Transport: frames on Unix and TCP sockets, and the values inside them.

Owns addresses, the hello, how a byte stream is cut into frames, and how JSON values with arrays and bytes at any depth
become a header and raw buffers. Does not own what a frame means: `actor.py` does. Nothing is pickled.

    hello   magic version name_bytes max_frame_bytes token_digest name        client to server, once, fixed 112 bytes
    frame   prefix(magic kind num_buffers header_bytes call_id) | sizes: num_buffers x u64 | orjson header | buffers

Invariants: a server reads not one byte past the hello before the token is compared, in constant time; no size that a
peer sends is allocated before it is checked; a large buffer is received straight into the memory that its array then
views; a frame leaves in one write. A peer that breaks the protocol is told why, and its connection ends.

What a call or a reply carries above `MAX_JOINED_BYTES` is written from the caller's own memory: whoever hands over a
large array leaves it unchanged until the call returns, and an endpoint returns arrays that nobody changes afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import orjson

from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError, Refused
from rondo.runtime.values import array_bytes, array_of

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 16 << 20
MAX_BUFFERS = 1 << 16
MAX_FRAME_BYTES = 1 << 30
"""Default limit on the buffers of one frame together."""
MAX_JOINED_BYTES = 64 << 10
HELLO_S = 10.0
"""A connection that has not said hello after so long is dropped."""
FRAME_S = 60.0
"""A caller that has begun a frame too large for the scratch memory is, once nothing more of it came for so long."""

CALL, REPLY, ERROR, CANCEL, WELCOME, REFUSAL = range(1, 7)

HELLO = struct.Struct("<4sHHQ32s64s")
HELLO_MAGIC = b"RNDO"
_PREFIX = struct.Struct("<HBxIIQ")
_PREFIX_BYTES = _PREFIX.size
_MAGIC = 0xF2D0
_SCRATCH_BYTES = 128 << 10
_DIRECT_BYTES = 16 << 10
"""What is missing of a buffer is received in place from this size on; less comes through the scratch memory."""
_MARK = "\x00buffer"
_MARK_JSON = b'{"\\u0000buffer":'
_MAX_UNIX_PATH_BYTES = 107
_LOOK_S = 0.25
"""From one look whether a socket's path is still there to the next."""

P = TypeVar("P", bound="FrameProtocol")


# ---------------------------------------------------------------------------------------------- values


def pack(value: Any) -> tuple[bytes, list[memoryview]]:
    """JSON header and raw buffers of a value. Raises TypeError for what is neither JSON, bytes nor a plain array.

    Tuples arrive as lists, dataclasses as dicts, bytes-likes as bytes, arrays as arrays of the same dtype and shape.
    NaN and infinities travel inside arrays only: a JSON number cannot hold them, and they would arrive as None.
    """
    try:
        return orjson.dumps(value), []
    except TypeError:
        pass  # arrays, bytes, or an error that the second try explains
    buffers: list[memoryview] = []

    def default(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            spec = [len(buffers), item.dtype.str, item.shape]
            buffers.append(array_bytes(item))
            return {_MARK: spec}
        if isinstance(item, (bytes, bytearray, memoryview)):
            view = memoryview(item)
            buffers.append(view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes()))
            return {_MARK: [len(buffers) - 1]}
        if isinstance(item, np.generic):
            return item.item()
        raise TypeError(
            f"a value in a call must be JSON, bytes or a numpy array, got {type(item).__qualname__}. "
            "Convert it, for instance with .numpy() or list()"
        )

    try:
        header = orjson.dumps(value, default=default)
    except TypeError as error:
        raise TypeError(str(error.__cause__ or error)) from None
    if header.count(_MARK_JSON) != len(buffers):
        raise TypeError(f"a dict key in a call must not be {_MARK!r}, got it beside arrays. Choose another key")
    return header, buffers


def unpack(header: bytes | memoryview, buffers: Sequence[memoryview]) -> Any:
    """The value of a header and its buffers. Arrays view their buffer. Raises ProtocolError when they do not fit."""
    try:
        value = orjson.loads(header)
        return _filled(value, buffers) if buffers else value
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ProtocolError(f"a frame must hold a header that fits its buffers, got {error}") from error


def _filled(node: Any, buffers: Sequence[memoryview]) -> Any:
    if type(node) is list:
        for i, item in enumerate(node):
            if type(item) is list or type(item) is dict:
                node[i] = _filled(item, buffers)
    elif type(node) is dict:
        if len(node) == 1 and _MARK in node:
            return _buffer_value(node[_MARK], buffers)
        for key, item in node.items():
            if type(item) is list or type(item) is dict:
                node[key] = _filled(item, buffers)
    return node


def _buffer_value(spec: Any, buffers: Sequence[memoryview]) -> bytes | np.ndarray:
    if type(spec) is not list:
        raise TypeError(f"{spec!r:.80} where a list tells a buffer")
    buffer = buffers[spec[0]]
    return bytes(buffer) if len(spec) == 1 else array_of(spec[1], spec[2], buffer)


# ---------------------------------------------------------------------------------------------- frames


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a connection: cuts what arrives into frames and writes frames. Subclasses say what they mean."""

    def __init__(self, peer: str, max_frame_bytes: int) -> None:
        self.peer = peer
        self.max_frame_bytes = max_frame_bytes
        self.peer_max_frame_bytes = MAX_FRAME_BYTES
        self.open = False
        self.paused = False
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any other callback
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # scratch[start:end] is received and not yet parsed
        self._end = 0
        self._direct: memoryview | None = None  # the rest of a destination that is received in place
        self._direct_from = _DIRECT_BYTES
        self._rests: list[memoryview] = []  # what is missing of the frame in hand, first to last
        self._whole: list[memoryview] = []
        self._then: Callable[[], None] | None = None  # what to do when nothing is missing; None between frames
        self._frame = (0, 0, 0, 0)
        self._sizes: Sequence[int] = ()
        self._came = 0  # bytes, ever
        self._timer: asyncio.TimerHandle | None = None  # of the hello, then of frames

    # What subclasses define.

    def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Sequence[memoryview]) -> None:
        """One frame. `header` is valid during the call only; `buffers` belong to the receiver."""
        raise NotImplementedError

    def memory(self, kind: int, header: memoryview, sizes: Sequence[int]) -> list[memoryview]:
        """Where the buffers of a frame go, one of each size; `header` is whole. ProtocolError for a frame that is none."""
        return [np.empty(size, np.uint8).data if size else memoryview(b"") for size in sizes]

    def lost(self, error: Exception | None) -> None:
        """The connection ended."""
        raise NotImplementedError

    def resumed(self) -> None:
        """Writing is possible again after `paused`."""

    # Writing.

    def send(self, kind: int, call_id: int, header: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Writes one frame. ValueError when it is too large for the peer, PeerGone when the connection has ended."""
        if not self.open:
            raise PeerGone(f"{self.peer} must be connected, got a closed connection. Call again")
        if not buffers and len(header) <= MAX_HEADER_BYTES:
            self.transport.write(_PREFIX.pack(_MAGIC, kind, 0, len(header), call_id) + header)
            return
        sizes = [len(buffer) for buffer in buffers]
        num_bytes = sum(sizes)
        most = self.peer_max_frame_bytes
        if len(header) > MAX_HEADER_BYTES or num_bytes > most or len(buffers) > MAX_BUFFERS:
            raise ValueError(
                f"a message to {self.peer} must be at most {MAX_HEADER_BYTES} bytes of JSON, {MAX_BUFFERS} buffers and "
                f"{most} bytes of buffers, got {len(header)}, {len(buffers)} and {num_bytes}. Send it in parts"
            )
        prefix = _PREFIX.pack(_MAGIC, kind, len(buffers), len(header), call_id)
        parts = [prefix, struct.pack(f"<{len(sizes)}Q", *sizes), header]
        if num_bytes <= MAX_JOINED_BYTES:
            self.transport.write(b"".join([*parts, *buffers]))
        else:
            self.transport.writelines([b"".join(parts), *(buffer for buffer in buffers if len(buffer))])

    def refuse(self, error: Exception) -> None:
        """Tells the peer why, and ends the connection. Nothing that it sent after is read."""
        if self.open:
            self.send(REFUSAL, 0, orjson.dumps([type(error).__name__, str(error)]))
            self.open = False
            self.transport.close()

    def say_hello(self, token: str, name: str) -> None:
        """Writes the hello; the other side answers with a welcome or a refusal."""
        self.transport.write(pack_hello(token, name, PROTOCOL_VERSION, self.max_frame_bytes))

    def expect_hello(self, token: str, then: Callable[[], None]) -> None:
        """Reads exactly the hello and nothing behind it; calls `then` if it is right, else refuses."""
        hello = memoryview(bytearray(HELLO.size))
        self._timer = asyncio.get_running_loop().call_later(HELLO_S, self.transport.abort)

        def check() -> None:
            self._forget_timer()
            self.peer, self.peer_max_frame_bytes = check_hello(hello, token, PROTOCOL_VERSION)
            self._look(-1)
            then()

        self._expect([hello], check)
        self._direct, self._direct_from = hello, 1  # every byte of it in place: nothing behind it is read

    def _forget_timer(self) -> None:
        self._direct_from = _DIRECT_BYTES
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, came: int) -> None:
        """Whether more has come of a frame in hand, from time to time."""
        if self._then is not None and self._came == came:
            self.transport.abort()
        else:
            self._timer = asyncio.get_running_loop().call_later(FRAME_S, self._look, self._came)

    # Reading. The loop asks for memory, fills it, and says how much.

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._direct is not None:
            return self._direct
        if self._end == 0:
            return self._view
        if _SCRATCH_BYTES - self._end < _DIRECT_BYTES:
            num_bytes = self._end - self._start
            self._view[:num_bytes] = self._view[self._start : self._end]
            self._start, self._end = 0, num_bytes
        return self._view[self._end :]

    def buffer_updated(self, num_bytes: int) -> None:
        self._came += num_bytes
        if self._direct is not None:
            self._rests[0] = self._direct[num_bytes:]
            self._direct = None
        else:
            self._end += num_bytes
        try:
            while self.open and (self._fill() if self._then is not None else self._parse()):
                pass
        except (ProtocolError, Refused) as error:
            self.refuse(error)

    def _parse(self) -> bool:
        """Hands over the small frames in the scratch memory; True when it began one that needs memory of its own."""
        view, start, end = self._view, self._start, self._end
        while end - start >= _PREFIX_BYTES:
            magic, kind, num_buffers, header_bytes, call_id = _PREFIX.unpack_from(view, start)
            body = start + _PREFIX_BYTES
            stop = body + header_bytes
            if magic == _MAGIC and num_buffers == 0 and stop <= end:
                self.frame_received(kind, call_id, view[body:stop], ())
                if not self.open:
                    return False
                start = stop
                continue
            if magic != _MAGIC:
                raise ProtocolError(f"a frame must begin with {_MAGIC:#x}, got {magic:#x}")
            if header_bytes > MAX_HEADER_BYTES or num_buffers > MAX_BUFFERS:
                raise ProtocolError(
                    f"a frame must have at most {MAX_HEADER_BYTES} bytes of header and {MAX_BUFFERS} buffers, "
                    f"got {header_bytes} and {num_buffers}"
                )
            if num_buffers == 0 and stop - start <= _SCRATCH_BYTES - _DIRECT_BYTES:
                break
            self._start = body
            self._frame = (kind, call_id, header_bytes, num_buffers)
            if num_buffers:
                self._expect([memoryview(bytearray(8 * num_buffers))], self._sizes_received)
            else:
                self._expect([memoryview(bytearray(header_bytes))], self._body_received)
            return True
        if start == end:
            start = end = 0
        self._start, self._end = start, end
        return False

    def _expect(self, memory: list[memoryview], then: Callable[[], None]) -> None:
        self._whole, self._rests, self._then = memory, [part for part in memory if len(part)], then

    def _fill(self) -> bool:
        """Moves what lies in the scratch memory to its destinations; True when nothing is missing any more."""
        rests = self._rests
        while rests:
            rest = rests[0]
            num_bytes = min(len(rest), self._end - self._start)
            if num_bytes:
                rest[:num_bytes] = self._view[self._start : self._start + num_bytes]
                self._start += num_bytes
                rest = rests[0] = rest[num_bytes:]
            if self._start == self._end:
                self._start = self._end = 0
            if len(rest):
                if len(rest) >= self._direct_from:
                    self._direct = rest
                return False
            rests.pop(0)
        then, self._then = self._then, None
        assert then is not None
        then()
        return True

    def _sizes_received(self) -> None:
        _, _, header_bytes, num_buffers = self._frame
        sizes = struct.unpack(f"<{num_buffers}Q", self._whole[0])
        if sum(sizes) > self.max_frame_bytes:
            raise ProtocolError(
                f"the buffers of a frame must have at most {self.max_frame_bytes} bytes, got {sum(sizes)}"
            )
        self._sizes = sizes
        self._expect([memoryview(bytearray(header_bytes))], self._header_received)

    def _header_received(self) -> None:
        [header] = self._whole
        buffers = self.memory(self._frame[0], header, self._sizes)
        self._expect(buffers, self._body_received)
        self._whole = [header, *buffers]

    def _body_received(self) -> None:
        header, *buffers = self._whole
        self._whole = []
        self.frame_received(self._frame[0], self._frame[1], header, buffers)

    # The rest of the loop's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's derive from nothing
        self.open = True
        self.transport.set_write_buffer_limits(high=4 << 20)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            for option, value in _TCP_OPTIONS:
                sock.setsockopt(*option, value)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._then = None
        self._forget_timer()
        self.lost(error)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.resumed()


def token_digest(token: str) -> bytes:
    return hashlib.blake2b(token.encode(), digest_size=32).digest()


def pack_hello(token: str, name: str, version: int, max_frame_bytes: int = 0) -> bytes:
    """What a caller says first, in a protocol of that version."""
    label = name.encode()[:64]
    return HELLO.pack(HELLO_MAGIC, version, len(label), max_frame_bytes, token_digest(token), label)


def check_hello(hello: bytes | bytearray | memoryview, token: str, version: int) -> tuple[str, int]:
    """The caller's name, and the most bytes that a frame to it may have. Raises ProtocolError for what is no hello of this
    version, Refused for a wrong token."""
    magic, told, name_bytes, max_frame_bytes, digest, label = HELLO.unpack(hello)
    if magic != HELLO_MAGIC:
        raise ProtocolError(f"a connection to rondo must begin with its hello, got {magic!r}")
    if told != version:
        raise ProtocolError(
            f"both sides must speak the same protocol, got version {told} from the caller and {version} here. "
            "Run one version of rondo on all nodes"
        )
    if not hmac.compare_digest(digest, token_digest(token)):
        raise Refused("the token must be the run's own, got another. Read it from the run-time directory")
    return label[:name_bytes].decode(errors="replace"), max_frame_bytes


# ------------------------------------------------------------------------------------------- addresses

# A node that vanishes without a word is noticed after about half a minute, so that its calls here are cancelled.
_TCP_OPTIONS = (
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 15),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 5),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 3),
)


def parse_address(address: str) -> Path | tuple[str, int]:
    """The path of "unix:/path", or host and port of "tcp:host:port". Raises ConfigError."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        if len(rest.encode()) > _MAX_UNIX_PATH_BYTES:
            raise ConfigError(
                f"the path of a Unix socket must have at most {_MAX_UNIX_PATH_BYTES} bytes, got {len(rest.encode())} "
                f"({rest}). Use a shorter directory"
            )
        return Path(rest)
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) < 1 << 16:
        return host.strip("[]"), int(port)
    raise ConfigError(f"an address must look like 'unix:/path' or 'tcp:host:port', got {address!r}")


async def connect(address: str, factory: Callable[[], P]) -> P:
    """A connected protocol. Raises PeerGone when nobody listens there."""
    loop = asyncio.get_running_loop()
    target = parse_address(address)
    try:
        if isinstance(target, Path):
            _, protocol = await loop.create_unix_connection(factory, str(target))
        else:
            _, protocol = await loop.create_connection(factory, *target)
    except OSError as error:
        raise PeerGone(f"{address} must have a listener, got {error}. Start it, or wait with retry=True") from error
    return protocol


class Listener:
    """A listening socket. `address` is where it listens, with the port that the system chose for port 0. One at a path listens
    anew where somebody has removed that, once its directory is there: connections stay."""

    def __init__(
        self, server: asyncio.Server, address: str, path: Path | None, factory: Callable[[], FrameProtocol]
    ) -> None:
        self._server = server
        self.address = address
        self._path, self._factory = path, factory
        self._inode = path.stat().st_ino if path is not None else 0
        self._renewing: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look) if path is not None else None

    def close(self) -> None:
        """Stops listening and removes the socket's path, if it is still this socket's."""
        self._server.close()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._path is not None:
            try:
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
            except FileNotFoundError:
                pass  # its directory went first
            self._path = None

    def look(self) -> None:
        """Begins to listen anew where the path is gone and can be made."""
        renewing = self._renewing is not None and not self._renewing.done()
        if self._path is not None and not renewing and not self._path.exists() and self._path.parent.is_dir():
            self._renewing = asyncio.get_running_loop().create_task(self._renew(self._path))

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        self.look()

    async def _renew(self, path: Path) -> None:
        before = self._server
        with contextlib.suppress(OSError):  # the next look tries it again
            self._server = await _listen_at(path, self._factory)
            self._inode = os.stat(path).st_ino  # noqa: PTH116 - at once, on the loop
            before.close()


async def listen(address: str, factory: Callable[[], FrameProtocol]) -> Listener:
    """Listens. Takes over the path that a dead process left; raises Refused while somebody listens there."""
    loop = asyncio.get_running_loop()
    target = parse_address(address)
    try:
        if not isinstance(target, Path):
            server = await loop.create_server(factory, *target, backlog=1024)
            host, port = server.sockets[0].getsockname()[:2]
            return Listener(server, f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}", None, factory)
        _take_over(target)
        return Listener(await _listen_at(target, factory), address, target, factory)
    except OSError as error:
        raise Refused(f"{address} must be free to listen on, got {error}. Stop its user, or choose another") from error


async def _listen_at(path: Path, factory: Callable[[], FrameProtocol]) -> asyncio.Server:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        return await asyncio.get_running_loop().create_unix_server(factory, sock=sock, backlog=1024)
    except BaseException:
        sock.close()
        raise


def _take_over(path: Path) -> None:
    """Removes the socket that a dead listener left at `path`; a living one answers, and stays."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(f"{path} is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog must not hold the loop; it is a sign of life too
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise FileExistsError(f"{path} has a listener")
