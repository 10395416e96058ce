"""Frames survive any cut of the stream, and nothing that a peer claims is believed before it is checked."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import socket
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rondo.runtime.actors import transport as wire
from rondo.runtime.actors.transport import FrameProtocol, connect, listen, pack, parse_address, unpack
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError, Refused
from tests.strength import strength

TOKEN = "a token of this run"
PREFIX = struct.Struct("<HBxIIQ")
MAGIC = 0xF2D0


Frame = tuple[int, int, bytes, list[memoryview]]


class Pipe:
    """A transport whose other end is a list of bytes."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.num_writes = 0
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data
        self.num_writes += 1

    def writelines(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self.written += part
        self.num_writes += 1

    def close(self) -> None:
        self.closed = True

    abort = close

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_extra_info(self, name: str) -> None: ...


class Recorder(FrameProtocol):
    """Keeps the frames it receives."""

    def __init__(self, max_frame_bytes: int = 1 << 30) -> None:
        super().__init__("the other end", max_frame_bytes)
        self.frames: list[Frame] = []
        self.pipe = Pipe()
        self.connection_made(self.pipe)  # type: ignore[arg-type]

    def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Sequence[memoryview]) -> None:
        self.frames.append((kind, call_id, bytes(header), list(buffers)))

    def lost(self, error: Exception | None) -> None: ...

    def receive(self, data: bytes, sizes: Callable[[int], int] = lambda room: room) -> int:
        """Hands over bytes as a loop does, `sizes(room)` at a time. Returns how many were taken."""
        taken = 0
        while taken < len(data) and not self.pipe.closed:
            memory = self.get_buffer(-1)
            assert len(memory) > 0
            num_bytes = min(len(memory), max(1, sizes(len(memory))), len(data) - taken)
            memory[:num_bytes] = data[taken : taken + num_bytes]
            taken += num_bytes
            self.buffer_updated(num_bytes)
        return taken


def sent(*frames: Frame) -> bytes:
    sender = Recorder()
    for frame in frames:
        sender.send(*frame)
    return bytes(sender.pipe.written)


def contents(frames: Sequence[Frame]) -> list[tuple[int, int, bytes, list[bytes]]]:
    return [(kind, call_id, header, [bytes(buffer) for buffer in buffers]) for kind, call_id, header, buffers in frames]


def refusal(recorder: Recorder) -> tuple[str, str]:
    """What the peer is told."""
    reader = Recorder()
    reader.receive(bytes(recorder.pipe.written))
    kind, _, header, _ = reader.frames[-1]
    assert kind == wire.REFUSAL
    assert recorder.pipe.closed
    return tuple(orjson.loads(header))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def over_a_wire(value: Any) -> Any:
    """The value after it was cut into frames and put together again."""
    recorder = Recorder()
    recorder.receive(sent((wire.CALL, 1, *pack(value))))
    _, _, header, buffers = recorder.frames[0]
    return unpack(header, buffers)


# ---------------------------------------------------------------------------------------------- values

ARRAYS = {
    "0-d": np.array(2.5, np.float32),
    "empty": np.empty(0, np.int64),
    "empty with shape": np.empty((3, 0, 2), np.float64),
    "bfloat16 as uint16": np.arange(7, dtype=np.uint16).reshape(7, 1),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "big-endian": np.arange(3, dtype=">i4"),
    "fortran order": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "strided": np.arange(20, dtype=np.uint8)[::3],
    "reversed": np.arange(5.0)[::-1],
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "dates": np.array(["2026-11-21", "NaT"], "M8[D]"),
    "not a number": np.array([np.nan, np.inf], np.float16),
    "read-only": np.frombuffer(b"12345678", np.int32),
    "large": np.arange(300_000, dtype=np.int32).reshape(3, 100_000),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_an_array_arrives_with_its_dtype_shape_and_bytes(array: np.ndarray) -> None:
    arrived = over_a_wire({"deep": [1, {"er": [array, None]}], "again": array})
    assert same(arrived, {"deep": [1, {"er": [array, None]}], "again": array})


def test_an_array_that_arrived_is_writable_and_owned_by_the_receiver() -> None:
    array = np.arange(10)
    arrived = over_a_wire(array)
    arrived += 1
    assert array[0] == 0 and arrived[0] == 1


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(b"abc"), memoryview(b"abcdef")[::2], np.arange(3).data])
def test_bytes_likes_arrive_as_bytes(data: Any) -> None:
    assert same(over_a_wire([data, {"x": data}]), [bytes(data), {"x": bytes(data)}])


def test_tuples_numpy_numbers_and_dataclasses_arrive_as_json() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Row:
        group: int
        tokens: np.ndarray

    value = {"row": Row(3, np.arange(2)), "pair": (1, 2), "number": np.float32(0.5), "count": np.int64(4)}
    expected = {"row": {"group": 3, "tokens": np.arange(2)}, "pair": [1, 2], "number": 0.5, "count": 4}
    assert same(over_a_wire(value), expected)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary(max_size=50)
    | st.builds(
        lambda shape, dtype: np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape),
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from(["<f4", "<i8", "|u1", "<f2"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=strength(quick=50, full=150), deadline=None)
@given(values)
def test_any_nesting_of_values_comes_back_equal(value: Any) -> None:
    assert same(over_a_wire(value), value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1, 2}, "a value in a call must be JSON, bytes or a numpy array, got set"),
        ([np.array([object()])], "an array that travels must have a plain dtype, got object"),
        (np.zeros(2, [("a", "<i4")]), "an array that travels must have a plain dtype, got"),
        (2**70, "Integer exceeds 64-bit range"),
        ({1: 2}, "Dict key must be str"),
    ],
)
def test_what_cannot_travel_is_refused_at_the_sender(value: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        pack(value)
    assert str(caught.value).startswith(text)


def test_a_key_that_looks_like_a_buffer_is_refused_beside_arrays_and_travels_without() -> None:
    alike = {"\x00buffer": [0]}
    assert over_a_wire(alike) == alike
    assert over_a_wire(['{"\\u0000buffer":[0]}', b"x"]) == ['{"\\u0000buffer":[0]}', b"x"]
    with pytest.raises(TypeError, match="Choose another key"):
        pack([alike, b"x"])


@pytest.mark.parametrize(
    "spec",
    [
        [1, "<i4", [2]],  # no such buffer
        [0, "<i4", [3]],  # more than there is
        [0, "<i4", [1]],  # less than there is
        [0, "<i4", [-2, -1]],
        [0, "<i4", [2.0]],
        [0, "|O", [1]],  # a pointer into our memory
        [0, "<i2,<i2", [2]],
        [0, "nonsense", [2]],
        [0, "<i4"],
        "text",
        [],
        {},
        {"0": 0},
    ],
)
def test_a_buffer_that_does_not_fit_its_description_is_a_protocol_error(spec: Any) -> None:
    with pytest.raises(ProtocolError, match="header that fits its buffers"):
        unpack(orjson.dumps({"\x00buffer": spec}), [memoryview(bytes(8))])


@pytest.mark.parametrize("header", [b"", b"{", b"\xff", b"[" * 2000 + b"]" * 2000])
def test_a_header_that_is_not_json_is_a_protocol_error(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(header, [])


# ---------------------------------------------------------------------------------------------- frames

small: st.SearchStrategy[Any] = st.tuples(
    st.integers(1, 6), st.integers(0, 2**64 - 1), st.binary(max_size=300), st.just([])
)
with_buffers = st.tuples(
    st.integers(1, 6),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=300),
    st.lists(
        st.sampled_from([0, 1, 63, 5_000, 20_000, 200_000]).map(lambda n: memoryview(bytes([n % 251]) * n)), max_size=4
    ),
)
long_header: st.SearchStrategy[Any] = st.sampled_from([120_000, 131_072, 300_000]).map(lambda n: (1, n, b"h" * n, []))


@settings(max_examples=strength(quick=20, full=60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(small | with_buffers | long_header, max_size=8), st.randoms(use_true_random=False))
def test_frames_survive_any_cut_of_the_stream(frames: list[Any], random: Any) -> None:
    recorder = Recorder()
    most = random.choice([40, 3_000, 10**6])
    recorder.receive(sent(*frames), lambda room: random.randint(1, most))
    assert contents(recorder.frames) == contents(frames)


def test_frames_survive_a_stream_of_single_bytes() -> None:
    buffers = [memoryview(b"abc"), memoryview(b""), memoryview(b"d")]
    frames: list[Frame] = [(1, 7, b"{}", []), (2, 8, b"[]", buffers), (3, 9, b"", [])]
    recorder = Recorder()
    recorder.receive(sent(*frames), lambda room: 1)
    assert contents(recorder.frames) == contents(frames)


def test_a_frame_leaves_in_one_write() -> None:
    recorder = Recorder()
    for buffers in ([], [memoryview(b"small")], [memoryview(bytes(1 << 20)), memoryview(b"small")]):
        before = recorder.pipe.num_writes
        recorder.send(wire.CALL, 1, b"{}", buffers)
        assert recorder.pipe.num_writes == before + 1


def test_a_large_buffer_is_received_straight_into_the_memory_of_its_array() -> None:
    recorder = Recorder()
    data = sent((wire.CALL, 1, *pack(np.arange(1 << 17, dtype=np.int32))))
    recorder.receive(data[: 1 << 18])
    memory = recorder.get_buffer(-1)
    memory[:] = data[1 << 18 :]
    recorder.buffer_updated(len(memory))
    _, _, header, buffers = recorder.frames[0]
    array = unpack(header, buffers)
    assert np.shares_memory(array, np.frombuffer(memory, np.uint8))
    assert array[-1] == (1 << 17) - 1


def refused_frame(prefix: bytes, max_frame_bytes: int = 1 << 20) -> tuple[str, str]:
    """What is answered to such a beginning, with the proof that nothing of the claimed size was allocated."""
    recorder = Recorder(max_frame_bytes)
    tracemalloc.start()
    try:
        recorder.receive(prefix)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert recorder.frames == []
    return refusal(recorder)


def test_an_oversize_header_is_refused_before_allocation() -> None:
    assert refused_frame(PREFIX.pack(MAGIC, wire.CALL, 0, 2**32 - 1, 1)) == (
        "ProtocolError",
        "a frame must have at most 16777216 bytes of header and 65536 buffers, got 4294967295 and 0",
    )


def test_too_many_buffers_are_refused_before_allocation() -> None:
    assert "got 2 and 4294967295" in refused_frame(PREFIX.pack(MAGIC, wire.CALL, 2**32 - 1, 2, 1))[1]


@pytest.mark.parametrize("sizes", [[1 << 21], [1 << 19, 1 << 19, 1], [2**64 - 1, 2**64 - 1]])
def test_oversize_buffers_are_refused_before_allocation(sizes: list[int]) -> None:
    prefix = PREFIX.pack(MAGIC, wire.CALL, len(sizes), 2, 1) + struct.pack(f"<{len(sizes)}Q", *sizes)
    assert refused_frame(prefix) == (
        "ProtocolError",
        f"the buffers of a frame must have at most 1048576 bytes, got {sum(sizes)}",
    )


def test_a_frame_without_the_magic_is_refused_and_nothing_behind_it_is_read() -> None:
    recorder = Recorder()
    recorder.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + sent((wire.CALL, 1, b"{}", [])))
    assert recorder.frames == []
    assert refusal(recorder)[1].startswith("a frame must begin with")


def test_the_sender_is_told_before_it_sends_what_its_peer_will_not_take() -> None:
    recorder = Recorder()
    recorder.peer_max_frame_bytes = 100
    with pytest.raises(ValueError, match="Send it in parts"):
        recorder.send(wire.CALL, 1, b"{}", [memoryview(bytes(101))])
    with pytest.raises(ValueError, match="Send it in parts"):
        recorder.send(wire.CALL, 1, bytes((16 << 20) + 1))
    assert not recorder.pipe.written


def test_a_closed_connection_sends_nothing() -> None:
    recorder = Recorder()
    recorder.connection_lost(None)
    with pytest.raises(PeerGone):
        recorder.send(wire.CALL, 1, b"{}")


# ---------------------------------------------------------------------------------------------- hello


def hello(token: str = TOKEN, name: str = "rollout-0.0") -> bytes:
    caller = Recorder()
    caller.say_hello(token, name)
    return bytes(caller.pipe.written)


def greeted(data: bytes, sizes: Callable[[int], int] = lambda room: room) -> tuple[Recorder, list[str], int]:
    """A server's end after `data`, who was let in, and how many bytes were taken."""
    recorder = Recorder()
    entered: list[str] = []
    recorder.expect_hello(TOKEN, lambda: entered.append(recorder.peer))
    taken = recorder.receive(data, sizes)
    recorder.connection_lost(None)
    return recorder, entered, taken


@pytest.mark.parametrize("step", [1, 50, 1 << 20])
async def test_the_right_token_opens_the_connection_and_frames_follow(step: int) -> None:
    call: Frame = (wire.CALL, 1, b"{}", [])
    recorder, entered, _ = greeted(hello() + sent(call), lambda room: step)
    assert entered == ["rollout-0.0"]
    assert contents(recorder.frames) == contents([call])


@pytest.mark.parametrize("step", [1, 50, 1 << 20])
async def test_a_wrong_token_is_refused_before_anything_else_is_read(step: int) -> None:
    data = hello("another token") + sent((wire.CALL, 1, b"{}", []))
    recorder, entered, taken = greeted(data, lambda room: step)
    assert (entered, recorder.frames, taken) == ([], [], len(hello()))
    assert refusal(recorder)[0] == "Refused"


async def test_another_protocol_version_is_refused_and_both_are_named() -> None:
    recorder, entered, _ = greeted(hello()[:4] + struct.pack("<H", 9) + hello()[6:])
    assert entered == []
    assert "got version 9 from the caller and 1 here" in refusal(recorder)[1]


async def test_a_stranger_is_refused() -> None:
    recorder, entered, _ = greeted(b"GET / HTTP/1.1\r\n".ljust(200))
    assert entered == []
    assert refusal(recorder)[1].startswith("a connection to rondo must begin with its hello")


async def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HELLO_S", 0.0)
    recorder = Recorder()
    dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    recorder.pipe.abort = lambda: dropped.set_result(None)  # type: ignore[method-assign]
    recorder.expect_hello(TOKEN, lambda: None)
    await dropped


async def test_who_does_not_end_a_frame_is_dropped_and_who_is_between_two_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "FRAME_S", 0.0)
    recorder = Recorder()
    dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    recorder.pipe.abort = lambda: dropped.set_result(None)  # type: ignore[method-assign]
    recorder.expect_hello(TOKEN, lambda: None)
    call: Frame = (wire.CALL, 1, b"{}", [])
    recorder.receive(hello() + sent(call), lambda room: room)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not dropped.done()
    recorder.receive(sent((wire.CALL, 2, b"{}", [memoryview(bytes(1 << 20))]))[:100], lambda room: room)
    await dropped
    assert contents(recorder.frames) == contents([call])
    recorder.connection_lost(None)


# ---------------------------------------------------------------------------------------------- addresses


def test_addresses_are_parsed() -> None:
    assert parse_address("unix:/run/x/a.sock") == Path("/run/x/a.sock")
    assert parse_address("tcp:10.0.0.1:80") == ("10.0.0.1", 80)
    assert parse_address("tcp:[::1]:80") == ("::1", 80)


@pytest.mark.parametrize(
    "address", ["", "unix:", "/run/a.sock", "tcp:80", "tcp::80", "tcp:host:http", "tcp:host:65536"]
)
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="an address must look like 'unix:/path' or 'tcp:host:port'"):
        parse_address(address)


def test_a_socket_path_that_the_system_cannot_hold_is_refused() -> None:
    assert parse_address("unix:/" + "x" * 106)
    with pytest.raises(ConfigError, match="at most 107 bytes, got 108"):
        parse_address("unix:/" + "x" * 107)


async def test_nobody_at_the_address_is_a_gone_peer(tmp_path: Path) -> None:
    with pytest.raises(PeerGone, match="must have a listener"):
        await connect(f"unix:{tmp_path}/a", Recorder)


async def test_the_path_of_a_dead_listener_is_taken_over_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = await listen(f"unix:{path}", Recorder)
    listener.close()
    assert not path.exists()


async def test_a_listener_whose_path_was_removed_listens_there_again_once_its_folder_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_LOOK_S", 0.001)
    folder = tmp_path / "rt"
    folder.mkdir()
    address = f"unix:{folder}/a.sock"
    listener = await listen(address, Recorder)
    for removed in (folder / "a.sock", folder):
        shutil.rmtree(folder) if removed == folder else removed.unlink()
        with pytest.raises(PeerGone):
            await connect(address, Recorder)
        folder.mkdir(exist_ok=True)
        async with asyncio.timeout(60):
            while not (folder / "a.sock").exists():  # noqa: ASYNC110
                await asyncio.sleep(0)
        await connect(address, asyncio.Protocol)
    listener.close()
    assert not (folder / "a.sock").exists()


async def test_a_living_listener_keeps_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(Refused, match="must be free to listen on"):
            await listen(f"unix:{path}", Recorder)
    assert path.exists()


async def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("precious")
    with pytest.raises(Refused, match="is not a socket"):
        await listen(f"unix:{path}", Recorder)
    assert path.read_text() == "precious"


async def test_a_listener_leaves_the_path_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "a"
    first = await listen(f"unix:{path}", Recorder)
    path.unlink()
    second = await listen(f"unix:{path}", Recorder)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()
