"""Environments of OpenEnv, which run in a server: as the environment of a sample, by a class that says where that is.

    class Echo(OpenEnv):
        url = "http://127.0.0.1:8000"
        shows = "echoed_message"

    environment = EnvironmentConfig(factory=Echo)

Owns its WebSocket protocol, one session a sample: `{"type": "reset" or "step", "data": ...}`, answered by an observation, reward
and end, or an error. Does not own the server: whoever runs it gives it room for as many sessions as samples play at once. OpenEnv
is not imported.

Invariant: a session ends with its sample, and one that the server ends, or answers with an error, fails its sample alone.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

import orjson

from rondo.roles.sampling.environments import Step
from rondo.runtime.errors import ConfigError
from rondo.runtime.values import read_json, write_json

_LOOK_S = 30.0
_MAX_BYTES = 100 << 20
"""Of a message, as in OpenEnv's own client."""


class OpenEnv:
    """One session. A subclass says the address, and with methods of its own what actions and observations are in words."""

    url: ClassVar[str]
    action: ClassVar[str] = "message"
    """The field of an action that takes what the policy says."""
    shows: ClassVar[str | None] = None
    """The field of an observation that the policy is told; None: all of them, as JSON."""

    def act(self, said: str) -> Mapping[str, Any]:
        """The action that a turn of the policy is."""
        return {self.action: said}

    def told(self, observation: Mapping[str, Any]) -> str:
        """What the policy is told of an observation."""
        found: Any = {name: each for name, each in observation.items() if name != "metadata"}
        if self.shows is not None:
            found = found[self.shows]
        return found if isinstance(found, str) else write_json(found).decode()

    async def reset(self, openenv: Mapping[str, Any] | None = None) -> str:
        """Begins an episode; a row's column `openenv` has the arguments of its reset, such as a seed."""
        import aiohttp

        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(
            f"{self.url.rstrip('/')}/ws", max_msg_size=_MAX_BYTES, heartbeat=20
        )
        return self.told((await self._asked("reset", openenv or {}))["observation"])

    async def step(self, said: str) -> Step:
        found = await self._asked("step", self.act(said))
        return Step(self.told(found["observation"]), found.get("reward"), over=bool(found.get("done")))

    async def close(self) -> None:
        if (client := getattr(self, "_client", None)) is not None:
            await client.close()

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        answer: Any = None
        with suppress(ConnectionError):  # it is told below
            await self._socket.send_str(write_json({"type": kind, "data": data}).decode())
            answer = (await self._socket.receive()).data
        if not isinstance(answer, str):
            raise ConnectionError(
                f"the server at {self.url} must answer {kind}, got the end of its session. See its log"
            )
        told = read_json(answer)
        if told["type"] == "error":
            raise RuntimeError(
                f"the server at {self.url} says {told['data'].get('code')}: {told['data'].get('message')}"
            )
        found: dict[str, Any] = told["data"]
        return found

    @classmethod
    def check_server(cls) -> None:
        """ConfigError where no server answers there, or one whose actions and observations have no such field."""
        try:
            with urllib.request.urlopen(f"{cls.url.rstrip('/')}/schema", timeout=_LOOK_S) as answer:
                schemas = orjson.loads(answer.read())
        except (OSError, ValueError, AttributeError) as error:
            url = getattr(cls, "url", None)
            raise ConfigError(
                f"{cls.__name__}.url must be the http address of a server of OpenEnv, got {url!r} ({error}). Start it, or "
                "correct it"
            ) from error
        own = cls.act is OpenEnv.act, cls.told is OpenEnv.told and cls.shows is not None
        for kind, name, way, is_own in (
            ("action", cls.action, "act", own[0]),
            ("observation", cls.shows, "told", own[1]),
        ):
            if is_own and name not in (fields := schemas[kind].get("properties", {})):
                raise ConfigError(
                    f"{cls.__name__} must name a field of the server's {kind}s, {', '.join(fields)}, got {name!r}. Correct "
                    f"`{'action' if way == 'act' else 'shows'}`, or write `{way}`"
                )
