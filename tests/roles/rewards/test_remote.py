"""A reward that an HTTP service gives: what is asked of a real server, and every way in which one fails."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rondo.roles.config.data import RewardConfig
from rondo.roles.rewards.hub import remote
from rondo.roles.rewards.hub import service as hub_service
from rondo.roles.rewards.pool import RewardItem, RewardPool, RewardResult
from rondo.runtime.errors import ConfigError, PeerGone
from tests.schedules import later

PATIENCE_S = 60.0
"""For what a service that is well has to answer, however busy the machine."""
Told = int | bytes | dict[str, Any] | list[Any] | float
"""A status, raw bytes of a body, or JSON."""


class Service:
    """What it was asked so far, with the bearer token of the last call and the most calls at a time."""

    def __init__(self, answer: Callable[[int, Any], Told | None]) -> None:
        self.answer, self.bodies, self.token, self.paths = answer, list[Any](), "", set[str]()
        self.busy = self.most = 0
        self.lock, self.closing = threading.Lock(), threading.Event()


@contextmanager
def serving(answer: Callable[[int, Any], Told | None]) -> Iterator[tuple[str, Service]]:
    """`answer`: of the number of a call and its body; None is never answered."""
    service = Service(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with service.lock:
                service.bodies.append(body)
                number = len(service.bodies)
                service.token, service.busy = self.headers.get("Authorization", ""), service.busy + 1
                service.paths.add(self.path)
                service.most = max(service.most, service.busy)
            told = service.answer(number, body)
            if told is None:
                service.closing.wait(60)
                return
            with service.lock:
                service.busy -= 1
            status = told if isinstance(told, int) and not isinstance(told, bool) and told > 99 else 200
            text = told if isinstance(told, bytes) else json.dumps({"error": "no"} if status != 200 else told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", service
    finally:
        service.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def equal(_: int, body: Any) -> Told:
    return {"scores": [float(each["response"] == each["label"]) for each in body["answers"]]}


ITEMS = [RewardItem(text, label="7", prompt="3 + 4", metadata={"source": "sums"}) for text in ("7", "8", "7", "9")]


async def asked(url: str, **args: Any) -> list[Any]:
    """What each of `ITEMS` is given, or its error."""
    args = {"retry_s": PATIENCE_S} | args
    calls = (
        remote(each.response, each.label, prompt=each.prompt, metadata=each.metadata, url=url, **args) for each in ITEMS
    )
    return await asyncio.gather(*calls, return_exceptions=True)


async def scored(
    url: str, items: list[RewardItem] = ITEMS, function: Any = "remote", settings: Any = None, **args: Any
) -> list[RewardResult]:
    args, settings = {"url": url, "retry_s": PATIENCE_S} | args, {"deadline_s": 2 * PATIENCE_S} | (settings or {})
    config = RewardConfig(function=function, args=args, **settings)
    given = config.model_dump(include={"function", "per", "components", "by", "args", "deadline_s"})
    async with RewardPool(load_deadline_s=60, **given) as pool:
        return await pool.score(items)


async def test_responses_that_come_together_are_one_call_of_at_most_a_batch() -> None:
    with serving(equal) as (url, service):
        assert await asked(url + "/score") == [1, 0, 1, 0]
        assert [len(body["answers"]) for body in service.bodies] == [4] and service.paths == {"/score"}
        told = {"prompt": "3 + 4", "response": "7", "label": "7", "metadata": {"source": "sums"}}
        assert service.bodies[0]["answers"][0] == told
        service.bodies.clear()
        assert await asked(url, batch=3) == [1, 0, 1, 0]
        assert sorted(len(body["answers"]) for body in service.bodies) == [1, 3]


async def test_relax_form_asks_for_each_alone_and_is_answered_with_a_number_or_a_dict() -> None:
    def answer(_: int, body: Any) -> Told:
        assert body.keys() == {"prompt", "response", "label"}
        return {"score": 0.5, "why": "late"} if body["response"] == "8" else float(body["response"] == body["label"])

    with serving(answer) as (url, _):
        assert await asked(url, form="relax") == [1, {"score": 0.5, "why": "late"}, 1, 0]


async def test_a_token_of_the_environment_is_shown_and_one_that_is_not_set_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    with serving(equal) as (url, service):
        await asked(url, token_env="REWARD_TOKEN")
        assert service.token == "Bearer secret"
        [first, *_] = await asked(url, token_env="NOT_SET")
    assert isinstance(first, ConfigError) and "must name a variable that is set, got NOT_SET" in str(first)


@pytest.mark.parametrize(
    "first", [500, 503, 429, b"<html>", b'{"scores": [1]}', b'{"scores": 1}', b"", b"x" * (17 << 20)]
)
async def test_what_fails_for_the_moment_is_asked_again(first: Told) -> None:
    with serving(lambda number, body: first if number == 1 else equal(number, body)) as (url, service):
        assert await asked(url) == [1, 0, 1, 0]
        assert len(service.bodies) == 2


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refused_key_or_path_is_told_at_once_and_is_no_failure_of_the_service(status: int) -> None:
    with serving(lambda *_: status) as (url, service):
        found = await asked(url)
        assert len(service.bodies) == 1
    assert all(isinstance(each, ConfigError) for each in found)
    assert all(f"got HTTP {status}: no. Correct reward.args url or token_env" in str(each) for each in found)


async def test_a_row_that_the_service_refuses_fails_alone() -> None:
    def answer(number: int, body: Any) -> Told:
        return 422 if any(each["response"] == "8" for each in body["answers"]) else equal(number, body)

    with serving(answer) as (url, _):
        found = await asked(url)
    assert [found[0], *found[2:]] == [1, 1, 0] and "got HTTP 422" in str(found[1])
    with serving(lambda *_: {"scores": [1, None, float("1"), 2], "errors": [None, "too long", None, None]}) as (url, _):
        found = await asked(url)
    assert [found[0], *found[2:]] == [1, 1, 2] and "got of this one: too long" in str(found[1])


async def test_a_service_that_hangs_or_is_not_there_is_told_in_time_and_counted_apart() -> None:
    with serving(lambda *_: None) as (url, service):
        asking = asyncio.create_task(scored(url, settings={"deadline_s": 9000}, retry_s=3600, call_deadline_s=0.05))
        while len(service.bodies) < 2:  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0)
        later(3600)
        found = await asking
    assert all(each.timed_out and "must answer within 3600 s" in (each.error or "") for each in found)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        asks = asyncio.create_task(asked(url, retry_s=3600))
        of_url = (asyncio.get_running_loop(), (url,), None, "rondo", 32, 64, 4.0, 3600)
        while not hub_service._service(*of_url)._servers.num_failed:  # noqa: ASYNC110 - a count
            await asyncio.sleep(0)
        later(3600)
        gone = await asks
    assert all(isinstance(each, PeerGone) and "ConnectionRefusedError" in str(each) for each in gone)


async def test_one_that_hangs_once_is_asked_again_and_no_more_calls_are_made_than_may_be() -> None:
    with serving(lambda number, body: None if number == 1 else equal(number, body)) as (url, service):
        args: Any = {"url": url, "call_deadline_s": 3600, "retry_s": 9000, "batch": 1, "num_calls": 2}
        calls = [asyncio.create_task(remote(text, "7", prompt="", metadata={}, **args)) for text in "7879"]
        while sum(call.done() for call in calls) < 3:  # noqa: ASYNC110 - of several
            await asyncio.sleep(0)
        later(3600)
        assert await asyncio.gather(*calls) == [1, 0, 1, 0]
        assert service.most == 2  # the server has not seen the first one end


async def test_beside_plain_functions_all_calls_are_made_at_a_time() -> None:
    """A process would make them one after another."""
    met = threading.Barrier(4)

    def answer(number: int, body: Any) -> Told:
        met.wait(60)
        return equal(number, body)

    settings: Any = {"components": {"right": 1.0, "service": 0.5}}
    with serving(answer) as (url, _):
        found = await scored(url, ITEMS, {"right": "exact", "service": "remote"}, settings, batch=1)
    assert [each.score for each in found] == [1.5, 0, 1.5, 0]
    assert found[0].details == {"right": 1.0, "service": 1.0}


async def test_rows_choose_between_plain_functions_and_a_service() -> None:
    rows = [RewardItem("7", label="7", metadata={"source": name}) for name in ("sums", "other", "service")]
    functions = {"sums": "exact", "service": "remote", "*": "boxed"}
    with serving(equal) as (url, service):
        found = await scored(url, rows, functions, {"by": "source"})
        assert len(service.bodies) == 1
    assert [each.score for each in found] == [1, 0, 1]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"url": "http://me:secret@host/score"}, "without a password or a query"),
        ({"form": "xml"}, "form must be 'rondo' or 'relax', got 'xml'"),
        ({"batch": 0}, "batch and num_calls must be 1 or more"),
        ({"url": "host:80"}, "must look like http://"),
    ],
)
async def test_settings_that_cannot_be_are_refused_before_anything_is_asked(args: Any, says: str) -> None:
    [first, *_] = await asked(**({"url": "http://127.0.0.1:1"} | args))
    assert isinstance(first, ConfigError) and says in str(first) and "secret" not in str(first)


async def test_a_service_without_an_address_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"missing a required argument: 'url'.*give them in reward\.args"):
        async with RewardPool(RewardConfig(function="remote").function, load_deadline_s=60):
            pass


async def test_a_caller_that_is_cancelled_costs_no_other_its_score() -> None:
    with serving(equal) as (url, _):
        calls = [asyncio.create_task(remote(text, "7", prompt="", metadata={}, url=url)) for text in ("7", "8", "7")]
        await asyncio.sleep(0)
        calls[0].cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError) and found[1:] == [0, 1]
