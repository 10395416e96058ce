"""One SGLang server behind the `Engine` protocol.

Owns the requests in flight: their calls, what becomes of them after an answer, cancellation, and the count of what was done.
Does not own what a server is asked (`question.py`) and answers (`responses.py`), the server (`restarts.py`), how weights reach it
(`ServerWeights`), or several of them (a dispatcher).

    engine = SGLangEngine(client, weights=path, pause="in_place", capabilities=await probe(client))
    completion = await engine.generate(Request("g7/3", prompt, SamplingParams(max_new_tokens=64), seed=0x5EED))

Token ids go in and come out; no text is made on the way. What new weights do to a sequence in flight is the server's pause
mode, the same for all: in_place goes on with the cache it has, retract computes it anew, abort ends the sequence. Of those,
requests that ask for "interrupt" are handed back, and the others asked again here with what they have.

Of a request's tokens the server tells while they are made, every PART_TOKENS, where it sends new tokens alone: so it is known
which request comes further. Where it would send all tokens each time, answers come whole, and only that it generates is known.

With `adapters` (its `weights` then) versions are adapters, of which a server has several, and nothing pauses. A request ends
under the one that it began with ("in_place"), or is aborted here once a newer one is there, and goes on under that as above.

Invariant: every `generate` ends with a completion whose tokens each have their log-prob and the version they were sampled
under, or with an error: PeerGone where the server left, and then nothing of it is known.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rondo.roles.engines.engine import STALL_S, Completion, EngineStats, FinishReason, Prefix, Request, ended_with
from rondo.roles.engines.sglang.capabilities import Capabilities
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.numbers import STRANGE, integer
from rondo.roles.engines.sglang.question import body_of, check, room_for
from rondo.roles.engines.sglang.responses import Answer, Growing, joined
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, PeerGone, ProtocolError, Refused
from rondo.runtime.waits import PROCESS

if TYPE_CHECKING:
    import torch

    from rondo.roles.engines.sglang.adapters import ServerAdapters
    from rondo.roles.engines.sglang.weights import ServerWeights

Pause = Literal["in_place", "retract", "abort"]
_COUNTED = (
    "num_completed", "num_cancelled", "tokens_generated", "decode_steps", "prefill_tokens", "shared_prompt_tokens",
    "num_interrupted",
)  # fmt: skip
_ASK_S = 30.0
_ABORT_EVERY_S = 0.2
_PROGRESS_S = 5.0
_IN_ORDER_S = 30.0
"""A server begins requests in the order in which they came, but for those that were on the way together."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the server itself says it has to do, over all its data-parallel ranks."""

    num_running: int
    num_waiting: int
    num_tokens: int
    """In its cache, of sequences that run."""


@dataclass(slots=True)
class _Asked:
    """One `generate` that is under way. `rid` names its call at the server."""

    rid: str | None = None
    at: float = 0.0
    """When the server was asked."""
    num_tokens: int = 0
    """That it has told since."""
    cancelled: bool = False
    aborting: asyncio.Task[None] | None = None


class SGLangEngine:
    """`Engine` over one server, whose client it closes. Made and used on one event loop."""

    def __init__(
        self,
        client: SGLangClient,
        *,
        weights: ServerWeights | ServerAdapters,
        pause: Pause,
        capabilities: Capabilities,
        version: int = STRANGE,
        adapters: ServerAdapters | None = None,
    ) -> None:
        if pause != "abort" and not capabilities.version_spans and adapters is None:
            raise ConfigError(
                f"sglang.pause must be 'abort' with SGLang {capabilities.version} of {client.url}, which does not tell under "
                f"which weights a token was sampled, got {pause!r}. Set it, or use SGLang 0.5.20 or newer"
            )
        self.client = client
        self.capabilities = capabilities
        self._weights, self._adapters = weights, adapters
        self._pause = pause
        self._prefixes: str | None = str(version)
        """What requests share prefixes under; None while weights change."""
        self._version = self._given = version
        """What it serves, and the newest that it was ever given, perhaps just now."""
        self.asleep = False
        """It has given the server's memory back. What is asked meanwhile waits for `wake`, or there for the next weights."""
        self.wake: Callable[[], Awaitable[None]] | None = None
        self._asked: dict[str, _Asked] = {}
        self._num_calls = 0
        self._name = secrets.token_hex(4)
        """Part of its calls' names: two seconds after a streamed answer a server ends what has its name by then."""
        self._closed: Exception | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._watching: asyncio.Task[None] | None = None
        self._seen: Load | None = None
        self._begun_at = -math.inf
        """When the newest of those training requests was asked that the server has told a token of."""
        self._moved_at = PROCESS.clock()

    def _moved(self) -> float:
        """When the server was last seen to make tokens. One that sleeps waits for weights itself."""
        return PROCESS.clock() if self.asleep else self._moved_at

    @property
    def version(self) -> int:
        return self._version

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        self._raise_if_closed()
        check(request, self.capabilities, self.client.url)
        if request.id in self._asked:
            raise ConfigError(
                f"the id of a request must be unique in its engine, got {request.id!r} twice. Rename one."
            )
        self._asked[request.id] = asked = _Asked()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_progress(), name="sglang progress")
        try:
            return await self._generate(request, asked)
        finally:
            del self._asked[request.id]
            if asked.aborting is not None:
                asked.aborting.cancel()

    def cancel(self, request_id: str) -> None:
        asked = self._asked.get(request_id)
        if asked is None or asked.cancelled:
            return
        asked.cancelled = True
        self._end(asked)

    def _end(self, asked: _Asked) -> None:
        """What it has under way at the server, if anything."""
        if asked.rid is not None and asked.aborting is None:
            asked.aborting = asyncio.create_task(self._abort(asked.rid), name="sglang abort")

    async def _generate(self, request: Request, asked: _Asked) -> Completion:
        """Asks until the sample is whole; what an answer brings is the beginning of the next question."""
        while not asked.cancelled:
            self._raise_if_closed()
            if self.asleep and self.wake is not None:
                await self.wake()
                continue
            room = room_for(request, self.capabilities)
            if room < 1:  # only of what there is a beginning of
                return self._completion(request, "length", request.prefix)
            answer = await self._ask(request, asked, room)
            done = joined(request.prefix, answer.new)
            reason = self._reason(request, answer, 0 if done is None else len(done.tokens), asked)
            if reason is not None:
                return self._completion(request, reason, done)
            request = replace(request, prefix=done)
        return self._completion(request, "cancelled", request.prefix)

    def _reason(self, request: Request, answer: Answer, num_done: int, asked: _Asked) -> FinishReason | None:
        """Why the sample ends with this answer; None where it goes on with another question."""
        if answer.finish == "stop" and answer.matched in request.params.stop_token_ids:
            return "stop"
        if num_done == request.params.max_new_tokens or (answer.finish == "length" and num_done):
            return "length"  # the request's own limit or the server's, which may be less than it tells where its cache is small
        if answer.finish == "length":
            raise ConfigError(
                f"request {request.id!r} must leave room for a token on {self.client.url}, got a prompt of "
                f"{request.prompt.size}. Shorten it, or give the server more memory"
            )
        if answer.finish == "stop":
            return None  # at a token that ends sequences for the server, but not for this request
        if asked.cancelled:
            return "cancelled"
        if self._pause == "in_place" or (self._pause == "retract" and self._adapters is None):
            raise Refused(
                f"request {request.id!r} must end by itself on {self.client.url}, got aborted: {answer.why}. "
                "See who else controls this server"
            )
        self._counts["num_interrupted"] += 1
        handed_back = request.on_new_weights == "interrupt" and request.interruptions != 0 and num_done > 0
        return "interrupted" if handed_back else None

    async def _ask(self, request: Request, asked: _Asked, room: int) -> Answer:
        """One call, for `room` tokens. The answer has none where the request is aborted before its first one."""
        self._num_calls += 1
        asked.rid = f"{request.id}#{self._name}.{self._num_calls}"
        asked.at, asked.num_tokens = PROCESS.clock(), 0
        sent_under, found = self._version, self.capabilities
        growing = Growing(request.params.num_top, found.vocabulary, None if self._adapters is None else sent_under)
        using = nullcontext() if self._adapters is None else self._adapters.used(sent_under)
        try:
            with using as adapter:
                body = body_of(request, asked.rid, room, found, adapter)
                if adapter is None and self._pause == "in_place":
                    # The server keeps the cache that older weights filled: a prompt that comes again must not meet it. What is in
                    # the caches of older versions is the first to be evicted.
                    body["extra_key"] = asked.rid if self._prefixes is None else self._prefixes
                if request.progress is not None or found.tells_new_tokens:
                    await self._stream(growing, request, asked, body, sent_under)
                else:
                    growing.take_whole(await self.client.post("/generate", body, deadline_s=STALL_S, moved=self._moved))
        except ServerError as error:
            if error.status == 400:
                raise ConfigError(
                    f"request {request.id!r} must fit the server {self.client.url}: {error.words}"
                ) from error
            raise
        except PeerGone:
            self._raise_if_closed()
            raise
        finally:
            asked.rid = None
            if asked.aborting is not None and not asked.cancelled:
                asked.aborting.cancel()
                asked.aborting = None
        self._moved_at = PROCESS.clock()
        num_before = len(request.sequence)
        answer = growing.answer(num_before=num_before, most=room, experts=found.experts)
        meta, versions = growing.meta, answer.new.policy_versions
        self._check_versions(meta.get("weight_version"), versions)
        shared = min(integer(meta, "cached_tokens", 0), num_before)
        self._count_old_cache(versions, sent_under)
        self._counts["tokens_generated"] += len(versions)
        self._counts["shared_prompt_tokens"] += shared
        self._counts["prefill_tokens"] += num_before - shared
        return answer

    def _check_versions(self, told: object, versions: np.ndarray) -> None:
        """Refused for an answer under weights that this engine did not give."""
        if self._adapters is not None:
            given = self._adapters.is_base(told)
        else:
            given = self._version == STRANGE or not (STRANGE in versions or versions.max(initial=0) > self._given)
        if not given:
            raise Refused(
                f"the server {self.client.url} must sample under weights that it was given, {self._given} the newest, got "
                f"tokens of version {told!r}. It was restarted, or somebody else gave it weights"
            )

    def _count_old_cache(self, versions: np.ndarray, sent_under: int) -> None:
        """Of new tokens, int32 [R], changed here: the first one counts as of the weights that the request was sent under.

        A request whose prompt is read while the server pauses in place, or that waits in its queue meanwhile, may go on over what
        older weights have computed, and the server tells all of its tokens as the new version's: it looks at the tokens that had
        left when the version changed.
        """
        if self._pause == "in_place" and sent_under != STRANGE and len(versions):
            versions[0] = sent_under

    async def _stream(
        self, growing: Growing, request: Request, asked: _Asked, body: dict[str, Any], sent_under: int
    ) -> None:
        """One call whose answer comes in parts, of which `request.progress` is told."""
        progress = request.progress

        def come(events: list[bytes]) -> None:
            self._moved_at = PROCESS.clock()
            grown = growing.take(events)
            if growing.num_tokens > asked.num_tokens:
                asked.num_tokens = growing.num_tokens
                self._counts["decode_steps"] += 1
                if request.kind == "train":
                    self._begun_at = max(self._begun_at, asked.at)
            if grown and progress is not None:
                so_far = growing.so_far()
                self._count_old_cache(so_far.policy_versions, sent_under)
                progress(joined(request.prefix, so_far) or so_far)

        await self.client.stream("/generate", body | {"stream": True}, come, deadline_s=STALL_S, moved=self._moved)
        finish: Any = growing.meta.get("finish_reason")
        status = finish.get("status_code") if isinstance(finish, dict) and finish.get("type") == "abort" else None
        if isinstance(status, int) and 400 <= status < 600:
            # The head of a stream is sent before the server knows: without one this is the status of the answer.
            raise ServerError(self.client.url, "/generate", status, str(finish.get("message")))

    def _completion(self, request: Request, reason: FinishReason, done: Prefix | None) -> Completion:
        if reason != "interrupted":
            self._counts["num_cancelled" if reason == "cancelled" else "num_completed"] += 1
        return ended_with(request, reason, done)

    async def _abort(self, rid: str) -> None:
        """Until its call ends: an abort that overtakes its request on the way is forgotten by the server."""
        while True:
            with suppress(PeerGone, DeadlineExceeded, ServerError):  # then `generate` itself learns what is wrong
                await self.client.post("/abort_request", {"rid": rid}, deadline_s=_ASK_S)
            await asyncio.sleep(_ABORT_EVERY_S)

    # ---- weights ----------------------------------------------------------------------------------------------------

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._raise_if_closed()
        # Until it is over, nobody here knows under which of the two weights a request is begun: it shares no prefix.
        self._prefixes = None
        self._given = max(self._given, version)
        try:
            await self._weights.update(version, tensors)
        finally:
            self.asleep = self._weights.asleep
        before, self._version, self._prefixes = self._version, version, str(version)
        if self._adapters is not None and self._pause != "in_place" and version != before:
            for asked in self._asked.values():
                self._end(asked)

    async def sleep(self) -> None:
        """Gives the server's memory back until the next weights, unless it has requests or gives it already."""
        if self._asked or self.asleep:
            return
        self._raise_if_closed()
        self.asleep, self._prefixes = True, None
        try:
            await self._weights.release()
        finally:
            self.asleep = self._weights.asleep

    # ---- health -----------------------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Whether the server takes requests now: it is there, healthy and not paused."""
        if self._closed is not None:
            return False
        if self.asleep:  # paused, and awake as soon as somebody asks
            return await self._says_yes("/model_info")
        try:
            return await self._says_yes("/ready")
        except ServerError:  # a server that is too old to tell whether it is paused
            return await self._says_yes("/health")

    async def _says_yes(self, path: str) -> bool:
        try:
            await self.client.get(path, deadline_s=_ASK_S)
        except ServerError as error:
            if error.status == 404:
                raise
            return False
        except (PeerGone, DeadlineExceeded):
            return False
        return True

    async def load(self) -> Load:
        """Raises as every call does. Of servers without /v1/loads: what this engine has in flight."""
        try:
            told = await self.client.get("/v1/loads", deadline_s=_ASK_S)
        except ServerError as error:
            if error.status != 404:
                raise
            return Load(len(self._asked), 0, 0)
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        try:
            return Load(*(sum(integer(rank, name, 0) for rank in told["loads"]) for name in names))
        except (TypeError, LookupError, AttributeError) as error:
            raise ProtocolError(f"/v1/loads of {self.client.url} must tell its ranks, got {told!r:.200}") from error

    def progress(self) -> Mapping[str, int]:
        """A request without a token waits in the server's queue, and comes further with the server; but not if one that was asked
        much later has begun before it, where they begin in order."""
        waits = -1 - self._counts["tokens_generated"] - self._counts["decode_steps"]
        overtaken_before = self._begun_at - _IN_ORDER_S if self.capabilities.in_order else -math.inf
        return {
            name: asked.num_tokens if asked.num_tokens or asked.at < overtaken_before else waits
            for name, asked in self._asked.items()
        }

    def stats(self) -> EngineStats:
        """`decode_steps` counts how often the server was seen to have made tokens, not its steps."""
        num_slots = self.capabilities.max_running
        in_flight = len(self._asked)
        num_running = min(in_flight, num_slots) if num_slots else in_flight
        room = self.capabilities.max_cached_tokens * self.capabilities.data_parallel  # which each of them has
        cached = self._seen.num_tokens if self._seen is not None and in_flight else 0
        return EngineStats(
            self._version, num_slots, num_running, in_flight - num_running, cached_tokens=cached, cache_tokens=room,
            **self._counts,
        )  # fmt: skip

    async def _watch_progress(self) -> None:
        """Tokens are counted when their answer comes; meanwhile the server's cache shows that sequences grow."""
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if not self._asked:
                continue
            with suppress(PeerGone, DeadlineExceeded, ServerError, ProtocolError):
                load = await self.load()
                if load != self._seen and load.num_running > 0:
                    self._counts["decode_steps"] += 1
                    self._moved_at = PROCESS.clock()
                self._seen = load

    async def close(self, why: Exception | None = None) -> None:
        """Idempotent. Requests in flight end with `why`, Closed by default; the server stays as it is. With `why` it is of no
        use, and nobody takes leave of it."""
        if self._closed is not None:
            return
        self._closed = why or Closed("the engine must be open, got a call after close. Start another engine")
        if self._watching is not None:
            self._watching.cancel()
        if why is not None:
            await self.client.__aexit__()
        with suppress(PeerGone, DeadlineExceeded, ServerError):  # it may be gone, and takes what it had with it
            await self._weights.close()
        await self.client.__aexit__()

    def _raise_if_closed(self) -> None:
        if self._closed is not None:
            raise self._closed
