"""Service: what every route of the server stands on, and how answers are written.

Owns the facts of one server (engine, tokenizer, names, limits), how a body is read, and the wire form: JSON, server-sent events,
errors. Owns no route.

Invariant: while a body is read and made into tokens, only a few others that are as long are in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import orjson
from aiohttp import web
from pydantic import BaseModel

from rondo.roles.engines.engine import Engine
from rondo.roles.serve.fields import shown
from rondo.roles.serve.limits import BODY_S, LONG_BODY_BYTES, MAX_LONG_BODIES, MAX_NAME
from rondo.roles.serve.pieces import pieces_of
from rondo.roles.serve.prompt_work import PromptWork
from rondo.roles.serve.requests import Ask, Requests
from rondo.roles.serve.sampling import Sampling
from rondo.roles.serve.trajectory import Prompt, Trajectories
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.admin.openapi import refuse_repeated_names
from rondo.runtime.admin.server import dumps, status_of
from rondo.runtime.errors import ConfigError, DeadlineExceeded, RondoError
from rondo.runtime.reference import uncollected
from rondo.runtime.values import read_json
from rondo.runtime.waits import wait_for

if TYPE_CHECKING:
    from rondo.roles.sampling.agent_programs import Told

SESSION = "X-Rondo-Session"
_SESSIONS = (SESSION, "X-Session-ID")
"""Headers that name one."""
BUDGETS = frozenset({"context_length_exceeded", "max_turns", "max_rows", "session_over"})
"""What a session can be at the end of: the `code` of an error, as OpenAI's first one is."""
DONE = b"data: [DONE]\n\n"
SLICE = 128
"""Values that are written at a time."""
T = TypeVar("T")


ScorePrompt = Callable[[np.ndarray, int, int], Awaitable[tuple[np.ndarray, np.ndarray, np.ndarray]]]
"""(tokens int32 [T], how many of the last are scored, K) -> log-probs float32 [R], and of the K likeliest at their places ids and
log-probs [R, K]."""


class Call(Protocol):
    """What a request of any dialect asks for (`answering.py`)."""

    session: str | None
    asks: list[Ask]
    prompts: dict[str, Prompt]
    sampling: Sampling | None
    is_repeated: bool


class Samples(Protocol):
    """Who asks, and how much, where every session is a sample of a run (`sampling/agent_sessions.py`)."""

    def session_of(self, key: str, named: str | None) -> str:
        """The session that a key opens, which a header may name too. TurnedDown without one that is open."""

    def admitted(self, asked: Call) -> AbstractContextManager[None]:
        """A call that is answered while the body lasts, with what the run says of its sampling. TurnedDown beyond a budget."""

    async def taken(self) -> Told:
        """The next sample that somebody elsewhere is to make, once there is one. It is his then."""

    def rewarded(self, session: str, given: Any) -> None:
        """What a session is worth, which ends it; {"over": true} where `reward.function` is to say so, {"error": text} where it
        failed."""


@dataclass(slots=True)
class Service:
    """One server. `work` makes prompts, with the same tokenizer. `max_length` is in tokens, prompt included; the bytes of a
    body follow from it unless they are given.

    `stop_token_ids` end every answer; by default the tokenizer's end of sequence does. `control` False refuses what changes the
    engine for others: pauses, weights, the abort of everything. `seeds`: whether the engine's draws are decided by the seed of a
    request. `tells_experts`: whether its answers have their routed experts.
    """

    engine: Engine
    tokenizer: Any
    work: PromptWork
    model_name: str
    _: KW_ONLY
    max_length: int
    model_path: str = ""
    stop_token_ids: tuple[int, ...] | None = None
    control: bool = True
    seeds: bool = True
    tells_experts: bool = False
    dtype: str = "auto"
    """Of the engine's weights."""
    weights: Callable[[], Iterable[tuple[str, Any]]] | None = None
    """What the engine holds: tensors under their names on disk."""
    scores: ScorePrompt | None = None
    """Scores given tokens under the engine's weights."""
    max_body_bytes: int | None = None
    trajectories: Trajectories = field(default_factory=Trajectories)
    samples: Samples | None = None
    """Where there are some, no one else is answered."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, unless a request says otherwise."""
    requests: Requests = field(init=False)
    started: float = field(default_factory=time.time)
    _long: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LONG_BODIES))

    def __post_init__(self) -> None:
        self.requests = Requests(self.engine, self.tokenizer)
        self.model_path = self.model_path or self.model_name
        if self.stop_token_ids is None:
            end = self.tokenizer.eos_token_id
            self.stop_token_ids = () if end is None else (end,)

    @property
    def max_chars(self) -> int:
        """Of one prompt: no more can be of few enough tokens."""
        return self.max_length * pieces_of(self.tokenizer).longest

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[Any]:
        """The body as JSON, an empty one as {}; it is to be made into tokens within the context. ConfigError for anything else,
        TurnedDown (408, 503) for one that does not come and one for which there is no room."""
        size = request.content_length
        if size is not None and size <= LONG_BODY_BYTES:
            yield await self._read(request)
            return
        try:
            await wait_for(self._long.acquire(), name="room for a body", peer="other bodies", deadline_s=BODY_S)
        except DeadlineExceeded as late:
            raise TurnedDown(
                503, f"at most {MAX_LONG_BODIES} long bodies must come at a time, got more. Ask again"
            ) from late
        try:
            yield await self._read(request)
        finally:
            self._long.release()

    async def _read(self, request: web.Request) -> Any:
        try:
            content = await wait_for(request.read(), name="a body", peer="its caller", deadline_s=BODY_S)
            return parsed(content, request.path) if content else {}
        except DeadlineExceeded as late:
            raise TurnedDown(408, f"a body must come within {BODY_S:g} s, got part of it. Ask again") from late
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"the body of {request.path} must be JSON, got {error}. Correct it") from error

    def session_of(self, request: web.Request) -> str | None:
        """The session that a call belongs to, as its headers say; of samples its key says it, and programs that route by
        X-Session-ID may put their own name for a conversation there."""
        known = _SESSIONS if self.samples is None else (SESSION,)
        names = {request.headers[name] for name in known if name in request.headers}
        named = min(names, default=None)
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(_SESSIONS)} must name one session, got two. Send one of them")
        if named is not None and not (1 <= len(named) <= MAX_NAME and named.isascii() and named.isprintable()):
            raise ConfigError(
                f"{SESSION} must be 1 to {MAX_NAME} printable ASCII characters, got {len(named)}. Change it"
            )
        if self.samples is None:
            return named
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        return self.samples.session_of(key.strip() if kind.lower() == "bearer" else "", named)

    def require_model(self, name: str | None) -> None:
        """TurnedDown (404) for a model that is not served here."""
        if name not in (None, self.model_name, "default"):
            raise TurnedDown(
                404, f"model must be {self.model_name!r}, the one that is served, got {shown(name)}. Change it"
            )


def parsed(content: bytes, path: str = "a call") -> Any:
    """The value of JSON, without the garbage collector: a body may have a million values, none of them in a circle, and walking
    them again and again while they come holds everybody up. ConfigError for an object with two values of one name."""
    with uncollected():
        value = read_json(content)
        refuse_repeated_names(content, path)
        return value


async def in_slices(values: Sequence[T], told: Callable[[T], Any]) -> orjson.Fragment:
    """What is told of each value, as a list in JSON. It is made a slice at a time, so that a long one holds nobody up."""
    slices = []
    for start in range(0, len(values), SLICE):
        slices.append(dumps(list(map(told, values[start : start + SLICE])))[1:-1])
        await asyncio.sleep(0)
    return orjson.Fragment(b"[" + b",".join(slices) + b"]")


class Failure(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: int | str


class Failed(BaseModel):
    """What is wrong, in the form that both dialects have."""

    error: Failure


def failed(status: int, why: str, words: str) -> Failed:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return Failed(error=Failure(message=words, type=kind, code=why if why in BUDGETS else status))


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[Any, None],
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Each event as one `data:` line, then [DONE]. An error before the first is an ordinary answer, a later one an event.

    `events` is closed in every end: so a caller that leaves takes its request out of the engine.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", **(headers or {})}
    )
    try:
        try:
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b"data: " + dumps(event) + b"\n\n")
            if not response.prepared:
                await response.prepare(request)
        except RondoError as error:
            if not response.prepared:
                raise
            told = failed(status_of(error), type(error).__name__, str(error))
            await response.write(b"data: " + dumps(told.model_dump()) + b"\n\n")
        await response.write(DONE)
    except ConnectionError:
        pass  # whoever asked has left, and there is nobody to tell
    finally:
        await events.aclose()
    return response
