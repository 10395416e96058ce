"""Answers that come in parts: over a real socket, cut anywhere, and what the parts are together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rondo.roles.engines.engine import Completion, Prefix
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.roles.engines.sglang.question import body_of
from rondo.roles.engines.sglang.responses import Growing
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError
from rondo.runtime.waits import PROCESS
from tests.roles.engines.sglang.test_connections import PLAIN, Server, serving
from tests.roles.engines.sglang.test_one_server import engine, request

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def part(
    tokens: list[int], *, total: int | None = None, finish: str | None = None, version: str = "1", **more: Any
) -> Any:
    meta: dict[str, Any] = {
        "finish_reason": finish and {"type": finish} | more, "weight_version": version,
        "output_token_logprobs": [[-float(token), token, None] for token in tokens],
        "completion_tokens": len(tokens) if total is None else total,
    }  # fmt: skip
    if finish:
        meta["weight_versions"] = [{"version": version, "start": 0, "end": meta["completion_tokens"]}]
    return {"output_ids": tokens, "meta_info": meta}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(told: Any) -> bytes:
    return chunk(b"data: " + json.dumps(told).encode() + b"\n\n")


def stream(*parts: Any) -> bytes:
    return HEAD + b"".join(map(event, parts)) + chunk(b"data: [DONE]\n\n") + END


WHOLE = stream(part([1]), part([1, 2, 3]), part([1, 2, 3, 4], finish="length"))
NEW = stream(part([1]), part([2, 3], total=3), part([4], total=4, finish="length"))


@asynccontextmanager
async def over(*answers: bytes | None, piece: int | None = None) -> AsyncIterator[tuple[Server, SGLangEngine]]:
    """An engine over a socket that answers so."""
    async with serving(*answers, piece=piece) as (server, pool):
        made = engine(SGLangClient(f"http://127.0.0.1:{pool._port}"))
        try:
            yield server, made
        finally:
            await made.close()


@pytest.mark.parametrize("piece", [None, 1, 7, 64])
@pytest.mark.parametrize("answer", [WHOLE, NEW], ids=["cumulative", "incremental"])
async def test_a_sample_is_told_as_it_grows_and_is_whole_at_the_end_wherever_its_bytes_are_cut(
    answer: bytes, piece: int | None
) -> None:
    told: list[Prefix] = []
    async with over(answer, answer, piece=piece) as (server, made):
        for _ in range(2):
            done = await made.generate(request(progress=told.append))
            assert done.tokens.tolist() == [1, 2, 3, 4] and done.log_probs.tolist() == [-1.0, -2.0, -3.0, -4.0]
            assert done.policy_versions.tolist() == [1] * 4 and done.finish_reason == "length"
        assert server.num_connections == 1 and b'"stream":true' in server.asked[0]
    found = [so_far.tokens.tolist() for so_far in told]
    assert found == ([] if piece is None else [[1], [1, 2, 3]] * 2)
    assert all(so_far.log_probs.tolist() == [-float(token) for token in so_far.tokens] for so_far in told)


@pytest.mark.parametrize("log_prob", [None, 3.0])
async def test_what_cannot_be_a_log_prob_is_told_to_nobody(log_prob: float | None) -> None:
    bad = part([2], total=2)
    bad["meta_info"]["output_token_logprobs"][0][0] = log_prob
    told: list[Prefix] = []
    async with over(stream(part([1]), bad, part([3, 4], total=4, finish="length"))) as (_, made):
        with pytest.raises(ProtocolError, match="log-prob"):
            await made.generate(request(progress=told.append))
    assert all(np.isfinite(so_far.log_probs).all() for so_far in told)


async def test_engines_of_one_server_never_give_a_call_the_name_of_another() -> None:
    """A server ends a streamed call by its name once more, a while after its answer."""
    async with over(NEW, NEW) as (server, made):
        other = engine(made.client)
        for each in (made, other):
            await each.generate(request(progress=lambda _: None))
        names = [json.loads(asked.partition(b"\r\n\r\n")[2])["rid"] for asked in server.asked]
    assert len(names) == len({*names}) == 2


@pytest.mark.parametrize(
    ("kind", "read", "every"),
    [("train", False, 128), ("train", True, 16), ("evaluation", True, 16), ("agent", True, None)],
)
def test_parts_come_as_often_as_somebody_has_a_use_for_them(kind: Any, read: bool, every: int | None) -> None:
    made = engine(SGLangClient("http://127.0.0.1:1"), tells_new_tokens=True)
    asked = replace(request(progress=print if read else None), kind=kind)
    sampling = body_of(asked, "r", 8, made.capabilities)["sampling_params"]
    assert sampling.get("stream_interval") == every
    untold = replace(made.capabilities, tells_new_tokens=False)  # it may not know the word
    assert "stream_interval" not in body_of(asked, "r", 8, untold)["sampling_params"]


class Streams:
    """A server that tells a request what it is told to, and nothing else."""

    def __init__(self) -> None:
        self.bodies: dict[str, Any] = {}
        self.writers: dict[str, asyncio.StreamWriter] = {}
        self.asked, self.left = asyncio.Queue[str](), asyncio.Queue[str]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")]
        body = json.loads(await reader.readexactly(length))
        name = body["rid"].partition("#")[0]
        self.bodies[name], self.writers[name] = body, writer
        writer.write(HEAD)
        self.asked.put_nowait(name)
        await reader.read()
        self.left.put_nowait(name)
        writer.close()


async def test_a_request_that_is_never_answered_comes_no_further_once_later_ones_have_begun_and_leaves_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "clock", lambda: now)
    now, streams = 0.0, Streams()
    server = await asyncio.start_server(streams.serve, "127.0.0.1", 0)
    made = engine(SGLangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), tells_new_tokens=True)
    asking: dict[str, asyncio.Task[Completion]] = {}

    async def ask(*names: str) -> None:
        for name in names:
            asking[name] = asyncio.create_task(made.generate(replace(request(), id=name)))
        assert {await streams.asked.get() for _ in names} == set(names)

    async def tell(name: str, num: int) -> dict[str, int]:
        streams.writers[name].write(event(part([num], total=num)))
        while made.progress()[name] != num:  # noqa: ASYNC110 - it is asked, and calls nobody
            await asyncio.sleep(0)
        return dict(made.progress())

    async with asyncio.timeout(60):
        await ask("hangs", "first")
        assert streams.bodies["hangs"]["sampling_params"]["stream_interval"] == 128
        waits = [(await tell("first", 1))["hangs"], (await tell("first", 2))["hangs"]]
        assert waits[1] < waits[0] < 0  # as far as one can see it waits: both were asked together
        now = 40.0
        await ask("young", "later")
        found = await tell("later", 1)
        assert (found["hangs"], found["first"], found["later"]) == (0, 2, 1) and found["young"] < 0
        found = await tell("first", 3)
        assert (found["hangs"], found["first"], found["later"]) == (0, 3, 1)
        made.capabilities = replace(made.capabilities, in_order=False)
        assert made.progress()["hangs"] < 0  # there, later ones say nothing of it
        asking["hangs"].cancel()  # its lease was lost
        assert await streams.left.get() == "hangs"
        assert made.progress().keys() == {"first", "young", "later"} and streams.left.empty()
        await made.close()
        await asyncio.wait(asking.values())
        server.close()


async def test_a_server_that_would_send_all_tokens_with_each_part_answers_whole_and_its_requests_come_further_together() -> (
    None
):
    async with over() as (server, made):
        asking = asyncio.create_task(made.generate(request()))
        await server.got_one.wait()
        assert b"stream" not in server.asked[0]
        before = made.progress()
        made._counts["decode_steps"] += 1  # the server's load was seen to change
        assert made.progress()["r"] < before["r"] < 0
        asking.cancel()
        await asyncio.wait([asking])


async def test_a_prefix_is_the_beginning_of_what_is_told() -> None:
    prefix = Prefix(np.array([8], np.int32), np.array([-0.5], np.float32), np.array([0], np.int32))
    told: list[Prefix] = []
    answer = stream(part([1]), part([1, 2, 3], finish="length"))
    async with over(answer, piece=1) as (_, made):
        await made.generate(request(prefix=prefix, progress=told.append))
    [so_far] = told
    assert so_far.tokens.tolist() == [8, 1] and so_far.policy_versions.tolist() == [0, 1]
    assert so_far.log_probs.tolist() == [-0.5, -1.0]


LEAVES = HEAD.replace(b"\r\n\r\n", b"\r\nX: close\r\n\r\n")
BEGUN = LEAVES + event(part([1]))


@pytest.mark.parametrize(
    ("cut", "num_told"),
    [(LEAVES, 0), (BEGUN, 1), (BEGUN + b"1f\r\ndata: {", 1), (BEGUN + event(part([1, 2, 3, 4], finish="length")), 0)],
    ids=["before a token", "between parts", "within a part", "after the last part"],
)
async def test_a_server_that_leaves_in_mid_stream_is_gone_and_what_it_told_was_told(cut: bytes, num_told: int) -> None:
    told: list[Prefix] = []
    async with over(cut) as (_, made):
        with pytest.raises(PeerGone, match="must answer /generate, got ConnectionResetError"):
            await made.generate(request(progress=told.append))
    assert len(told) == num_told


async def test_a_stream_that_ends_without_saying_so_is_no_answer() -> None:
    async with over(HEAD + event(part([1])) + END, PLAIN) as (_, made):
        with pytest.raises(PeerGone, match=r"must end its stream of /generate with \[DONE\]"):
            await made.generate(request(progress=lambda so_far: None))


async def test_errors_in_a_stream_are_those_of_a_plain_answer() -> None:
    no = {"error": {"message": "longer than the context", "code": 400}}
    failed = part([], finish="abort", message="no memory", status_code=503)
    head = b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n%b" % (len(json.dumps(no)), json.dumps(no).encode())
    async with over(stream(no), head, stream(failed)) as (_, made):
        for _ in range(2):
            with pytest.raises(ConfigError, match="longer than the context"):
                await made.generate(request(progress=lambda so_far: None))
        with pytest.raises(ServerError, match="HTTP 503: no memory"):
            await made.generate(request(progress=lambda so_far: None))


async def test_a_stream_that_is_left_closes_its_connection() -> None:
    grown = asyncio.Event()
    async with over(HEAD + event(part([1])), stream(part([1, 2, 3, 4], finish="length"))) as (server, made):
        asking = asyncio.create_task(made.generate(request(progress=lambda so_far: grown.set())))
        await grown.wait()
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        await server.gone.wait()
        assert (await made.generate(request(progress=lambda so_far: None))).finish_reason == "length"
        assert server.num_connections == 2


async def test_what_a_caller_does_wrong_with_its_progress_ends_its_request_alone() -> None:
    def wrong(so_far: Prefix) -> None:
        raise KeyError("wrong")

    async with over(HEAD + event(part([1])), stream(part([1, 2, 3, 4], finish="length"))) as (server, made):
        with pytest.raises(KeyError, match="wrong"):
            await made.generate(request(progress=wrong))
        await server.gone.wait()
        assert (await made.generate(request(progress=wrong))).finish_reason == "length"


async def test_a_connection_whose_answer_made_no_sense_is_closed() -> None:
    async with over(stream(part([1], total=3))) as (server, made):
        with pytest.raises(ProtocolError, match="a part of an answer must tell all 3 tokens"):
            await made.generate(request(progress=lambda so_far: None))
        await server.gone.wait()


def took(growing: Growing, *parts: Any) -> bool:
    return growing.take([json.dumps(each).encode() for each in parts])


def test_a_token_keeps_the_version_it_was_first_told_with_and_the_whole_has_the_exact_ones() -> None:
    growing = Growing()
    assert took(growing, part([1], version="3")) and took(growing, part([1, 2], version="4"))
    assert growing.so_far().policy_versions.tolist() == [3, 4]
    last = part([1, 2, 3], finish="length", version="4")
    last["meta_info"]["weight_versions"] = [
        {"version": "3", "start": 0, "end": 2},
        {"version": "4", "start": 2, "end": 3},
    ]
    assert not took(growing, last)
    assert growing.answer(num_before=2, most=3).new.policy_versions.tolist() == [3, 3, 4]


def test_parts_that_come_together_are_all_read_where_each_tells_new_tokens() -> None:
    growing = Growing()
    assert took(growing, part([1]), part([2], total=2), part([3, 4], total=4))
    assert growing.so_far().tokens.tolist() == [1, 2, 3, 4]
    assert not took(growing, part([], total=4, finish="length"))
    assert growing.answer(num_before=2, most=4).new.tokens.tolist() == [1, 2, 3, 4]


def test_an_abort_that_tells_all_tokens_behind_those_that_were_not_sent_yet_is_read_once() -> None:
    """As SGLang joins them, where it tells new tokens alone and ends a request that has left its batch."""
    growing = Growing()
    assert took(growing, part([1, 2]))
    assert not took(growing, part([3, 1, 2, 3], total=3, finish="abort"))
    assert growing.so_far().tokens.tolist() == [1, 2, 3]
    assert growing.answer(num_before=2, most=4).new.log_probs.size == 3


def test_a_long_answer_keeps_all_it_was_told_and_what_was_handed_out_does_not_change() -> None:
    growing, told = Growing(num_top=2), []
    for token in range(1000):
        each = part([token], total=token + 1, version=str(token // 500))
        each["meta_info"]["output_top_logprobs"] = [[[-1.0, token, None], [-2.0, token + 1, None]]]
        assert took(growing, each)
        told.append(growing.so_far())
    for num, so_far in enumerate(told, 1):
        assert so_far.tokens.tolist() == list(range(num)) and len(so_far.log_probs) == num
        assert so_far.top is not None and so_far.top.tokens.tolist()[-1] == [num - 1, num]
    assert told[-1].policy_versions.tolist() == [0] * 500 + [1] * 500


@pytest.mark.parametrize("wrong", [[part([1], total=3)], [part([1, 2]), part([1])], ["x"], [{}]])
def test_parts_that_do_not_fit_together_are_refused(wrong: list[Any]) -> None:
    growing = Growing()
    with pytest.raises(ProtocolError, match="a part of an answer must"):
        for each in wrong:
            took(growing, each)
