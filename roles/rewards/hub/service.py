"""A reward that an HTTP service gives, such as a reward model of somebody else's or a checker that is not Python.

Owns what is sent together, and both forms of asking. Does not own retries, back-off and deadlines
(`engines/equal_servers.py`), or HTTP (`engines/sglang/client.py`).

    {"answers": [{"prompt", "response", "label", "metadata"}, ...]} -> {"scores": [1.0, {"score": 0.5, "why": "late"}, ...]}
    form "relax": {"prompt", "response", "label"} -> 0.5, or a dict

Invariant: each response has one outcome: its score, what is wrong with it alone, or why the service could not be asked, which
is PeerGone. What comes together, and what waits while all calls are under way, goes together.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson

from rondo.roles.engines.equal_servers import EqualServers
from rondo.roles.engines.faults import fault_of
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.rewards.scores import RewardError
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError, RondoError
from rondo.runtime.section import may_hold_secret

Form = Literal["rondo", "relax"]
_WHAT = "reward service"
_MAX_ANSWER_BYTES = 16 << 20


async def remote(
    response: str,
    label: Any,
    *,
    prompt: Any,
    metadata: Any,
    url: str | Sequence[str],
    token_env: str | None = None,
    form: Form = "rondo",
    batch: int = 32,
    num_calls: int = 64,
    call_deadline_s: float = 4.0,
    retry_s: float = 8.0,
) -> Any:
    """What the service at `url`, or any of several equal ones, gives the response: a number, or a dict as of any reward.

    At most `num_calls` calls are under way, each of at most `batch` responses and `call_deadline_s`; one that fails for the
    moment is made again, later each time, for `retry_s` in all. `token_env` names the environment variable with a bearer token.
    """
    urls = (url,) if isinstance(url, str) else tuple(url)
    loop = asyncio.get_running_loop()
    service = _service(loop, urls, token_env, form, batch, num_calls, call_deadline_s, retry_s)
    item = {"prompt": prompt, "response": response, "label": label}
    return await service.score(item if form == "relax" else item | {"metadata": metadata})


class _Service:
    """Of one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        token_env: str | None,
        form: Form,
        batch: int,
        num_calls: int,
        call_deadline_s: float,
        retry_s: float,
    ) -> None:
        if not urls or any(map(may_hold_secret, urls)):
            raise ConfigError(
                f"reward.args url must be of a service, without a password or a query, since settings are saved and shown, got "
                f"{len(urls)} of another kind. Export a token, and name its variable in token_env"
            )
        if form not in ("rondo", "relax"):
            raise ConfigError(f"reward.args form must be 'rondo' or 'relax', got {form!r}. Choose one")
        if min(batch, num_calls) < 1 or min(call_deadline_s, retry_s) <= 0:
            raise ConfigError(
                "reward.args batch and num_calls must be 1 or more, and call_deadline_s and retry_s above 0, got "
                f"{batch}, {num_calls}, {call_deadline_s} and {retry_s}. Raise them"
            )
        token = None if token_env is None else os.environ.get(token_env, "").strip()
        if token == "":
            raise ConfigError(
                f"reward.args token_env must name a variable that is set, got {token_env}, which is not. Export it before the run"
            )
        self._paths: dict[SGLangClient, str] = {}
        for url in urls:
            parts = urlsplit(url)
            origin = f"{parts.scheme}://{parts.netloc}"
            client = SGLangClient(origin, api_key=token, what=_WHAT, max_body_bytes=_MAX_ANSWER_BYTES)
            self._paths[client] = parts.path or "/"
        self._servers = EqualServers(
            lambda: list(self._paths), what=_WHAT, num_calls=num_calls, deadline_s=retry_s,
            settings="reward.args url or token_env",
        )  # fmt: skip
        self._form, self._batch, self._call_s = form, 1 if form == "relax" else batch, call_deadline_s
        self._waiting: dict[asyncio.Future[Any], orjson.Fragment] = {}

    async def score(self, item: dict[str, Any]) -> Any:
        try:
            text = orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise RewardError(f"a row must be JSON to be sent to a {_WHAT}, got {error}. Leave it out") from error
        own: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[own] = orjson.Fragment(text)
        try:
            await asyncio.sleep(0)  # what comes with it goes with it
            try:
                await self._send({}, own, hashlib.sha256(text).hexdigest())
            except RondoError:
                if own in self._waiting:
                    raise
            return await own
        finally:
            self._waiting.pop(own, None)

    async def _send(
        self, part: dict[asyncio.Future[Any], orjson.Fragment], own: asyncio.Future[Any], seed: str
    ) -> None:
        """Settles `part`: what is given, or, once there is room, `own` and what waits with it."""

        async def call(client: SGLangClient) -> list[Any]:
            if not part and own in self._waiting:
                for each in (own, *(each for each in self._waiting if each is not own)):
                    if len(part) < self._batch:
                        part[each] = self._waiting.pop(each)
            return await self._asked(client, list(part.values())) if part else []

        found: Sequence[Any] = ()
        why: Exception = PeerGone(f"a {_WHAT} must be waited for, got a caller that was cancelled. Ask again")
        try:
            found = await self._servers.ask(call, seed=seed)
        except RondoError as error:
            if len(part) > 1 and isinstance(error, ConfigError) and fault_of(error.__cause__ or error) == "request":
                await asyncio.gather(*(self._send({each: item}, each, seed) for each, item in part.items()))
            elif not part:
                raise
            why = error
        finally:
            for future, value in zip(part, found or [why] * len(part), strict=True):
                if future.done():
                    continue
                if isinstance(value, Exception):
                    future.set_exception(value)
                else:
                    future.set_result(value)

    async def _asked(self, client: SGLangClient, items: list[orjson.Fragment]) -> list[Any]:
        """A score, or the error of it alone, of each."""
        if self._form == "relax":
            told = await client.post(self._paths[client], items[0], deadline_s=self._call_s)
            if isinstance(told, dict | int | float):
                return [told]
        else:
            told = await client.post(self._paths[client], {"answers": items}, deadline_s=self._call_s)
            scores, errors = (told.get("scores"), told.get("errors")) if isinstance(told, dict) else (None, None)
            errors = [None] * len(items) if errors is None else errors
            if all(isinstance(each, list) and len(each) == len(items) for each in (scores, errors)):
                assert isinstance(scores, list)
                return [_one(*each) for each in zip(scores, errors, strict=True)]
        wanted = "a number or a dict" if self._form == "relax" else f'{{"scores": [...]}} with {len(items)} of them'
        raise ProtocolError(
            f"the {_WHAT} {client.url} must answer with {wanted}, got {told!s:.200}. See what it serves"
        )


def _one(score: Any, error: Any) -> Any:
    if error is None and score is not None:
        return score
    return RewardError(f"a {_WHAT} must score each response, got of this one: {error}. See its log")


@functools.lru_cache(maxsize=16)
def _service(loop: asyncio.AbstractEventLoop, *settings: Any) -> _Service:
    return _Service(*settings)
