"""The admin endpoint: what it shows, to whom, and in which form."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import BaseModel, Field

from rondo.runtime.actors.broadcast import Broadcast
from rondo.runtime.admin.endpoint import AdminServer, Family
from rondo.runtime.admin.openapi import BODY, Operation
from rondo.runtime.admin.server import json_answer
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError, Refused
from rondo.runtime.section import Section

RUN_TOKEN = "r" * 64
READ_TOKEN = "f" * 32


class Numbers:
    """A provider with fixed answers."""

    def __init__(self) -> None:
        self.broadcast = Broadcast()
        self.healthy = True
        self.stopped_for: list[str] = []

    def health(self) -> dict[str, Any]:
        return {"ready": self.healthy, "healthy": self.healthy, "step": 3}

    def roles(self) -> list[dict[str, Any]]:
        return [{"name": "actor-0", "state": "running"}]

    def waits(self) -> list[dict[str, Any]]:
        return [{"waiter": "actor-0", "peer": "rollout", "name": "round", "seconds": 1.5}]

    def bus(self) -> dict[str, Any]:
        return {"groups": {1: "trained"}}

    def weights(self) -> dict[str, Any]:
        return {"version": 3}

    def samples(self) -> list[dict[str, Any]]:
        return [{"prompt": "2+2=", "reward": 1.0}]

    def metrics(self) -> list[Family]:
        return [
            Family("rondo_step", "gauge", "The step.", {(): 3}),
            Family(
                "rondo_restarts_total", "counter", "Of a group.", {(("group", "actor"),): 1, (("group", "b"),): 0.25}
            ),
        ]

    def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        return self.broadcast.subscribe()

    def stop(self, reason: str, *, quick: bool) -> None:
        self.stopped_for.append((reason, quick))


@contextlib.asynccontextmanager
async def endpoint(config: AdminConfig | None = None) -> AsyncIterator[tuple[AdminServer, Numbers]]:
    provider = Numbers()
    server = AdminServer(config or AdminConfig(), provider, token=RUN_TOKEN)
    await server.start()
    try:
        yield server, provider
    finally:
        await server.close()


async def ask(server: AdminServer, method: str, path: str, token: str | None = None, **options: Any) -> tuple[int, Any]:
    headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {token}"} if token is not None else {})
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}{path}"
        async with session.request(method, url, headers=headers, **options) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(READ_TOKEN + "\n")
    file.chmod(0o600)
    return file


async def test_reading_is_open_on_loopback() -> None:
    async with endpoint() as (server, provider):
        for path, expected in [
            ("/healthz", provider.health()),
            ("/roles", provider.roles()),
            ("/waits", provider.waits()),
            ("/bus", {"groups": {"1": "trained"}}),
            ("/weights", provider.weights()),
        ]:
            assert await ask(server, "GET", path) == (200, expected)


async def test_prompts_and_answers_need_a_token_on_loopback_too(token_file: Path) -> None:
    async with endpoint(AdminConfig(token_file=token_file)) as (server, provider):
        assert (await ask(server, "GET", "/samples"))[0] == 401
        assert (await ask(server, "GET", "/samples", token="x"))[0] == 401
        for token in (RUN_TOKEN, READ_TOKEN):
            assert await ask(server, "GET", "/samples", token=token) == (200, provider.samples())


async def test_probes_tell_alive_from_ready() -> None:
    async with endpoint() as (server, provider):
        provider.healthy = False
        assert await ask(server, "GET", "/livez") == (200, "ok\n")
        assert await ask(server, "GET", "/readyz") == (503, "not ready\n")
        assert (await ask(server, "GET", "/healthz"))[0] == 503


async def test_metrics_are_prometheus_text() -> None:
    async with endpoint() as (server, _):
        status, text = await ask(server, "GET", "/metrics")
    assert status == 200
    assert text.splitlines() == [
        "# HELP rondo_step The step.", "# TYPE rondo_step gauge", "rondo_step 3", "# HELP rondo_restarts_total Of a group.",
        "# TYPE rondo_restarts_total counter", 'rondo_restarts_total{group="actor"} 1', 'rondo_restarts_total{group="b"} 0.25',
    ]  # fmt: skip


async def test_control_needs_the_runs_token_on_loopback_too() -> None:
    async with endpoint() as (server, provider):
        assert (await ask(server, "POST", "/stop"))[0] == 401
        assert (await ask(server, "POST", "/stop", token="wrong"))[0] == 401
        assert provider.stopped_for == []
        assert (await ask(server, "POST", "/stop", token=RUN_TOKEN, json={"reason": "enough"}))[0] == 202
        assert provider.stopped_for == [("enough", False)]
        assert (await ask(server, "POST", "/stop", token=RUN_TOKEN, json={"now": True}))[0] == 202
        assert provider.stopped_for[1:] == [("asked over HTTP", True)]


async def test_another_address_needs_a_token_for_everything_but_probes(token_file: Path) -> None:
    async with endpoint(AdminConfig(host="0.0.0.0", token_file=token_file)) as (server, provider):
        assert (await ask(server, "GET", "/livez"))[0] == 200
        assert (await ask(server, "GET", "/samples"))[0] == 401
        assert (await ask(server, "GET", "/samples", token="x"))[0] == 401
        assert (await ask(server, "GET", "/what", token="x"))[0] == 401
        assert (await ask(server, "GET", "/what", token=READ_TOKEN))[0] == 404
        assert (await ask(server, "GET", "/samples", token=READ_TOKEN))[0] == 200
        assert (await ask(server, "GET", "/samples", token=RUN_TOKEN))[0] == 200
        assert (await ask(server, "POST", "/stop", token=READ_TOKEN))[0] == 403
        assert provider.stopped_for == []


async def test_a_name_that_only_resolves_to_this_machine_is_refused() -> None:
    async with endpoint() as (server, _):
        status, body = await ask(server, "GET", "/roles", headers={"Host": "evil.example:80"})
        assert (status, body["error"]["message"]) == (
            403,
            f"Host must name this machine, got 'evil.example:80'. Use {server.url}",
        )
        assert (await ask(server, "GET", "/roles", headers={"Host": "localhost:8000"}))[0] == 200


async def test_errors_are_json() -> None:
    async with endpoint() as (server, _):
        status, body = await ask(server, "GET", "/nothing")
        assert (status, body["error"]["message"]) == (404, "GET /nothing: Not Found")
        status, body = await ask(server, "POST", "/stop", token=RUN_TOKEN, data=b"{")
        assert (status, body["error"]["type"]) == (400, "ConfigError")
        status, body = await ask(server, "POST", "/stop", token=RUN_TOKEN, json={"why": "?"})
        assert status == 400


class Scale(Section):
    num_replicas: int = Field(ge=1)
    force: bool = False


class Scaled(BaseModel):
    num_replicas: int


SCALE = Operation("Have so many replicas.", Scaled, takes=Scale, status=202)


@contextlib.asynccontextmanager
async def with_scaling() -> AsyncIterator[AdminServer]:
    async def scale(request: web.Request) -> web.StreamResponse:
        asked: Scale = request[BODY]
        if asked.num_replicas > 8:
            raise Refused("replicas must be in range, got 9. Ask for fewer")
        return json_answer({"num_replicas": asked.num_replicas}, status=202)

    server = AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    server.route("POST", "/{role}/scale_out", scale, scope="control", operation=SCALE)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_a_mounted_route_keeps_to_its_scope_and_its_errors_are_json() -> None:
    async with with_scaling() as server:
        assert (await ask(server, "POST", "/rollout/scale_out"))[0] == 401
        token = {"token": RUN_TOKEN}
        assert await ask(server, "POST", "/rollout/scale_out", **token, json={"num_replicas": 2}) == (
            202,
            {"num_replicas": 2},
        )
        status, body = await ask(server, "POST", "/rollout/scale_out", **token, json={"num_replicas": 9})
    assert (status, body["error"]["message"]) == (503, "replicas must be in range, got 9. Ask for fewer")


async def test_a_body_and_a_query_are_what_the_operation_says_or_refused() -> None:
    where = "POST /rollout/scale_out"
    wrong = [
        ("", b"", f"num_replicas must be set, got nothing. Set it in the body of {where}."),
        ("", b"{", "must be valid"),
        ("", b"[]", "must"),
        (
            "",
            b'{"num_replicas": "2"}',
            f"num_replicas must be a valid integer, got '2'. Change it in the body of {where}.",
        ),
        ("", b'{"num_replicas": true}', "num_replicas must be a number, got True. Write the number"),
        (
            "",
            b'{"num_replicas": 2, "forced": true}',
            "forced must be a field of Scale, got an unknown name. Did you mean 'force'?",
        ),
        ("?now=1", b'{"num_replicas": 2}', f"the query of {where} must be empty, got 'now=1'. Remove the rest"),
    ]
    async with with_scaling() as server:
        for query, sent, words in wrong:
            status, body = await ask(server, "POST", f"/rollout/scale_out{query}", RUN_TOKEN, data=sent)
            assert (status, body["error"]["type"]) == (400, "ConfigError") and words in body["error"]["message"], body


async def test_what_a_route_states_is_served_as_openapi() -> None:
    async with with_scaling() as server:
        status, told = await ask(server, "GET", "/openapi.json")
    assert status == 200 and told["openapi"] == "3.1.0"
    assert told["paths"].keys() >= {"/livez", "/stop", "/events", "/openapi.json", "/{role}/scale_out"}
    operation = told["paths"]["/{role}/scale_out"]["post"]
    schemas = told["components"]["schemas"]
    assert operation["summary"] == "Have so many replicas." and operation["x-scope"] == "control"
    assert operation["security"] == [{"token": []}] and told["paths"]["/roles"]["get"]["security"] == []
    assert [(each["name"], each["in"]) for each in operation["parameters"]] == [("role", "path")]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Scale"}
    assert schemas["Scale"]["additionalProperties"] is False and schemas["Scale"]["required"] == ["num_replicas"]
    assert operation["responses"].keys() == {"202", "default"}
    unready = told["paths"]["/readyz"]["get"]["responses"]["503"]["content"]
    assert unready.keys() == {"text/plain", "application/json"}  # told so, or refused as every route refuses
    failed = operation["responses"]["default"]["content"]["application/json"]["schema"]
    assert failed == {"$ref": "#/components/schemas/Failed"} and schemas["Failed"]["required"] == ["error"]


async def nothing(request: web.Request) -> web.StreamResponse:
    return web.Response()


def test_a_route_without_a_scope_or_an_operation_cannot_be_mounted() -> None:
    server = AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    route: Any = server.route
    for missing in ({"scope": "read"}, {"operation": SCALE}):
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
            route("GET", "/x", nothing, **missing)
    for scope in ("all", "Read", "", None):
        with pytest.raises(ConfigError, match="the scope of /x must be one of open, read, content, control, got"):
            route("GET", "/x", nothing, scope=scope, operation=SCALE)
    with pytest.raises(ConfigError, match=r"the method of /x must be one of GET, POST, PUT, PATCH, DELETE, got '\*'"):
        route("*", "/x", nothing, scope="control", operation=SCALE)


async def test_events_reach_every_subscriber_and_closing_ends_their_streams() -> None:
    async with endpoint() as (server, provider), aiohttp.ClientSession() as session:
        url = f"{server.url}/events"
        async with session.get(url) as first, session.get(url) as second:
            await subscribed(provider.broadcast, 2)
            provider.broadcast.publish({"kind": "step", "step": 1})
            for response in (first, second):
                assert await response.content.readline() == b'data: {"kind":"step","step":1}\n'
            await server.close()
            assert (await first.content.read()).strip() == b""
    assert not provider.broadcast._readers


async def test_a_subscriber_that_leaves_is_forgotten() -> None:
    async with endpoint() as (server, provider), aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/events"):
            await subscribed(provider.broadcast, 1)
        while provider.broadcast._readers:
            provider.broadcast.publish({"kind": "step"})
            await asyncio.sleep(0)


async def test_more_than_so_many_followers_of_events_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo.runtime.admin.endpoint._MAX_STREAMS", 1)
    async with endpoint() as (server, provider), aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/events"):
            await subscribed(provider.broadcast, 1)
            status, body = await ask(server, "GET", "/events")
            assert (status, body["error"]["type"]) == (503, "TurnedDown")
        while provider.broadcast._readers:  # until it is seen that the first has left
            provider.broadcast.publish({"kind": "step"})
            await asyncio.sleep(0)
        async with session.get(f"{server.url}/events") as answer:
            assert answer.status == 200


async def test_a_slow_reader_loses_the_oldest_records_and_is_told_how_many() -> None:
    broadcast = Broadcast(capacity=2)
    records = broadcast.subscribe()
    first = asyncio.ensure_future(anext(records))
    await asyncio.sleep(0)
    for step in range(5):
        broadcast.publish({"step": step})
    assert await first == {"step": 3, "missed": 3}
    assert await anext(records) == {"step": 4}
    broadcast.close()
    assert [record async for record in records] == []


async def test_a_port_in_use_is_told() -> None:
    async with endpoint() as (server, _):
        with pytest.raises(ConfigError, match=f"admin.port must be free on 127.0.0.1, got {server.port} "):
            await AdminServer(AdminConfig(port=server.port), Numbers(), token=RUN_TOKEN).start()


def test_a_token_file_that_others_can_read_is_refused(token_file: Path) -> None:
    assert read_token_file(token_file) == READ_TOKEN
    token_file.chmod(0o640)
    with pytest.raises(ConfigError) as caught:
        read_token_file(token_file)
    assert str(caught.value) == f"admin.token_file must have mode 0600, got 0640. Run: chmod 600 {token_file}"


def test_a_token_file_that_is_missing_or_short_is_refused(token_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"admin.token_file must be readable, got .*No such file"):
        read_token_file(token_file.with_name("none"))
    token_file.write_text("short")
    with pytest.raises(ConfigError, match="at least 16 characters and at most 4096, got 5"):
        read_token_file(token_file)


async def subscribed(broadcast: Broadcast, count: int) -> None:
    while len(broadcast._readers) < count:  # noqa: ASYNC110 - the server is real: only its readers tell
        await asyncio.sleep(0)
