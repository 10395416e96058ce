"""A public router (sglang-router, smg) in front of servers that run already: requests go through it, everything else past it.

Owns what goes where, and the check that nothing is lost on the way. Does not own the router, the servers, or how a request is
asked (`one_server.py` asks this client as it would one server's). Rondo's own dispatcher needs no router, and does more.

    /generate --------------------------> router --> one of the servers
    health, weights, pauses, aborts ----> every server itself: routers do not pass them on

Routers read a request into a schema of their own and write it anew. sglang-router 0.3.2 drops `return_routed_experts`,
`session_id` and `return_sampling_mask`, and of the sampling params `custom_params` and `logit_bias`; smg 1.13.0 drops
`logit_bias`. So routed experts are asked for once at the start, and a router that loses them is refused; of a session only the
affinity is lost.

Invariant: all servers serve one version, or none is told: what they are asked must succeed on each of them. They are updated
together, so generation pauses everywhere; one that leaves takes the router's engine with it until it is back and has the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rondo.roles.engines.sglang.client import Moved, ServerError, SGLangClient
from rondo.roles.engines.sglang.server import AttachedServer, until_there
from rondo.runtime.errors import ConfigError, PeerGone

_ASK_S = 60.0
_THROUGH = "/generate"
_MIXED = "mixed"
"""The weight version of servers that do not have the same."""


class RouterClient(SGLangClient):
    """As `SGLangClient`, for a router at `url` and its servers. Closing it closes their clients."""

    def __init__(self, url: str, servers: Sequence[SGLangClient], *, api_key: str | None = None) -> None:
        super().__init__(url, api_key=api_key)
        self._servers = tuple(servers)

    @property
    def num_heard(self) -> int:
        """Rises when all servers are heard: one that leaves takes the others with it."""
        return min(server.num_heard for server in self._servers)

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        for server in self._servers:
            await server.__aexit__()

    async def get(self, path: str, *, deadline_s: float | None) -> Any:
        """Of every server; one answer for all of them."""
        told = await asyncio.gather(*(server.get(path, deadline_s=deadline_s) for server in self._servers))
        if path == "/v1/loads":
            return {"loads": [rank for each in told for rank in each["loads"]]}
        first = told[0]
        if isinstance(first, dict) and len({each.get("weight_version") for each in told}) > 1:
            return {**first, "weight_version": _MIXED}
        if isinstance(first, dict) and "max_running_requests" in first:
            return {**first, "max_running_requests": sum(int(each["max_running_requests"] or 0) for each in told)}
        return first

    async def post(
        self, path: str, body: object | None = None, *, deadline_s: float | None, moved: Moved = None
    ) -> Any:
        if path == _THROUGH:
            return await super().post(path, body, deadline_s=deadline_s, moved=moved)
        told = await asyncio.gather(*(server.post(path, body, deadline_s=deadline_s) for server in self._servers))
        return told[0]


class RoutedServers(AttachedServer):
    """`Server` of a router and the servers behind it, all of which run already."""

    def __init__(self, url: str, servers: Sequence[str], *, key: str | None = None) -> None:
        super().__init__(url, key=key)
        self._servers = [AttachedServer(server, key=key) for server in servers]

    async def start(self, deadline_s: float) -> SGLangClient:
        """Until every server and the router answer. Raises ConfigError for a router that would lose routed experts."""
        starting = [asyncio.create_task(server.start(deadline_s)) for server in self._servers]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            for started in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(started, SGLangClient):
                    await started.__aexit__()
            raise
        client = RouterClient(self.name, [task.result() for task in starting], api_key=self._key)
        await until_there(client, _answers, name=self.name, deadline_s=deadline_s)
        return client


async def _answers(client: SGLangClient) -> bool:
    """Whether the router has found a server of its own to ask, which it looks for after its start."""
    try:
        await check_router(client)
    except (PeerGone, ServerError):
        return False
    return True


async def check_router(client: SGLangClient) -> None:
    """Raises ConfigError if an answer that comes through the router lacks what its servers would tell."""
    info = await client.get("/server_info", deadline_s=_ASK_S)
    wanted = bool(info.get("enable_return_routed_experts"))
    asked = {
        "input_ids": [1],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "return_routed_experts": wanted,
    }
    told = await client.post(_THROUGH, asked, deadline_s=_ASK_S)
    meta = told.get("meta_info", {})
    lost = [name for name in ("output_token_logprobs", "weight_version") if name not in meta]
    if wanted and not meta.get("routed_experts"):
        lost.append("routed_experts")
    if lost:
        raise ConfigError(
            f"rollout.sglang.router must pass on what its servers tell, got answers of {client.url} without {', '.join(lost)}. "
            "Remove it: rondo spreads requests over rollout.sglang.urls itself. Or use smg, or servers without "
            "enable-return-routed-experts"
        )
