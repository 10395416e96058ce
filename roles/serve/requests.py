"""Requests: each one of the server on its way through the engine, and back as text with its exact tokens.

Owns what an `Engine` does not do: parts of an answer while it grows, aborts by name, and pauses. Does not own HTTP, what is asked
for (`generate.py`, `openai.py`), or where stop strings end an answer (`stops.py`).

    pause        in flight                                 new ones
    abort        end as "abort" with what they have        wait
    retract      leave the engine, keep their tokens,      wait
                 and are computed anew from them
    in_place     stand still in the engine                 wait            of engines with `pause` and `resume`

Invariant: tokens, log-probs and versions of an answer are the engine's, or a beginning of them where a stop string ended it;
nothing is ever re-tokenised. Whoever stops waiting for an answer takes its request out of the engine.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from rondo.roles.engines.engine import Completion, Engine, Prefix, Request, SamplingParams, ended_with
from rondo.roles.engines.stops import Reading
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.errors import Closed, ConfigError, CorruptData, RondoError
from rondo.runtime.waits import until

PauseMode = Literal["abort", "retract", "in_place"]


@runtime_checkable
class Pausable(Protocol):
    """An engine that can stand still between two decode steps."""

    async def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample to answer a request with. Several of one request have its `rid` and their `index`."""

    rid: str
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    index: int = 0
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    session: str | None = None

    @property
    def key(self) -> str:
        return f"{self.rid}/{self.index}"


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended; `matched` is the token or the string that ended a "stop"."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A sample so far; all of it once `finish` is set. `text` is without its stop string, and while the answer grows without what
    may become one."""

    sampled: Prefix
    text: str
    finish: Finish | None
    num_retractions: int = 0
    seconds: float = 0.0

    def likeliest(self, place: int) -> list[tuple[int, float]]:
        """The tokens that are known to be likeliest there, with their log-probs."""
        top = self.sampled.top
        if top is None:
            raise TurnedDown(501, "top_logprobs must be 0 with this engine, which does not tell them. Remove them")
        pairs = zip(top.tokens[place].tolist(), top.log_probs[place].tolist(), strict=True)
        return [(token, value) for token, value in pairs if not math.isnan(value)]


@dataclass(slots=True, eq=False)
class _Asked:
    """One ask on its way. `inside`: its request is in the engine, under the name `request_id`."""

    ask: Ask
    reading: Reading
    request_id: str
    inside: bool = False
    aborted: bool = False
    retracted: bool = False
    num_retractions: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class _Turn:
    """Lets `most` samples of one request into the engine at a time, the others as these leave, in order. `most` is what is the
    request's share then, at least 1."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._inside = 0
        self._line = asyncio.Lock()
        self._left = asyncio.Event()

    async def __aenter__(self) -> None:
        async with self._line:
            await until(self._left, lambda: self._inside < self._most())
            self._inside += 1

    async def __aexit__(self, *_: object) -> None:
        self._inside -= 1
        self._left.set()


OnPart = Callable[[Answer], None]


class Requests:
    """Those of one server. In the engine they are an agent's, named apart from others there, and no new weights end them."""

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._asked: dict[str, _Asked] = {}
        self._num_answered = self._num_requests = 0
        self.closing = False
        self.paused: PauseMode | None = None
        self._changed = asyncio.Event()

    @property
    def num_asked(self) -> int:
        """Requests that are being answered, those that wait for the end of a pause included."""
        return len(self._asked)

    # ---- answers ----------------------------------------------------------------------------------------------------

    async def answers(self, asks: Sequence[Ask]) -> list[Answer]:
        """All of them whole, in order. Where one fails, the others are dropped and its error is raised."""
        with self._sharing() as turn:
            tasks = [asyncio.ensure_future(self.answer(ask, turn=turn)) for ask in asks]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                await _drop(tasks)

    async def parts(self, asks: Sequence[Ask]) -> AsyncGenerator[tuple[int, Answer], None]:
        """(position in `asks`, answer so far) as they grow, and each at last with its `finish`. Close it to drop the rest."""
        newest: dict[int, Answer] = {}  # a slow reader gets fewer, longer parts
        come = asyncio.Event()

        def put(index: int, part: Answer) -> None:
            newest[index] = part
            come.set()

        with self._sharing() as turn:
            tasks = [
                asyncio.ensure_future(self.answer(ask, functools.partial(put, index), turn=turn))
                for index, ask in enumerate(asks)
            ]
            for task in tasks:
                task.add_done_callback(lambda _: come.set())
            left = dict(enumerate(tasks))
            try:
                while left:
                    await come.wait()
                    come.clear()
                    while newest:
                        index = next(iter(newest))
                        yield index, newest.pop(index)
                    for index in [index for index, task in left.items() if task.done()]:
                        newest.pop(index, None)  # its end says it all
                        yield index, left.pop(index).result()
            finally:
                await _drop(tasks)

    @contextmanager
    def _sharing(self) -> Iterator[_Turn]:
        """While one request is answered."""
        self._num_requests += 1
        try:
            yield _Turn(lambda: max(1, self.engine.stats().num_slots // self._num_requests))
        finally:
            self._num_requests -= 1

    async def answer(self, ask: Ask, on_part: OnPart | None = None, *, turn: _Turn | None = None) -> Answer:
        """One sample, whole; `on_part` is told of its beginnings. ConfigError for what the engine cannot take. Samples of one
        `turn` wait for each other."""
        if self.closing:
            raise Closed("the server must be open for a request, got one while it ends. Ask another server")
        if ask.key in self._asked:
            raise ConfigError(f"rid must be unique among the requests in flight, got {ask.rid!r} twice. Rename one")
        self._num_answered += 1
        reading = Reading(
            self.tokenizer, ask.stops, keep_stop=ask.keep_stop, skip_special_tokens=ask.skip_special_tokens
        )
        asked = self._asked[ask.key] = _Asked(ask, reading, f"http/{self._num_answered}/{ask.key}")
        began = time.monotonic()
        try:
            async with turn or nullcontext():
                done = await self._sample(asked, on_part)
            return self._whole(asked, done, time.monotonic() - began)
        finally:
            del self._asked[ask.key]
            self._changed.set()

    async def _sample(self, asked: _Asked, on_part: OnPart | None) -> Completion:
        """The engine's completion, over retractions and interruptions."""
        ask = asked.ask
        request = Request(
            asked.request_id, ask.prompt, ask.params, ask.seed, kind="agent", priority=ask.priority, session=ask.session,
            progress=(lambda so_far: self._grown(asked, so_far, on_part)) if on_part or ask.stops else None,
        )  # fmt: skip
        done = ended_with(request, "cancelled", None)
        while True:
            await until(asked.wake, lambda: self.paused is None or asked.aborted)
            if asked.aborted:
                return done
            asked.retracted, asked.inside = False, True
            try:
                done = await self.engine.generate(request)
            except RondoError:
                raise
            except Exception as error:  # whatever a step failed with, who asked is told
                raise TurnedDown(500, f"the engine must not fail, got {type(error).__name__}: {error}") from error
            finally:
                asked.inside = False
                self._changed.set()
            asked.reading.check(done.tokens, shown=on_part is not None, whole=True)
            if asked.reading.torn:
                raise CorruptData(f"the answer to {ask.rid!r} must grow, got another beginning for it. Ask again")
            again = done.finish_reason == "interrupted" or (done.finish_reason == "cancelled" and asked.retracted)
            if not again or asked.aborted or asked.reading.over:
                return done
            asked.num_retractions += 1
            if len(done.tokens):
                request = request.resumed(done)

    def _grown(self, asked: _Asked, so_far: Prefix, on_part: OnPart | None) -> None:
        """Told by the engine. Ends the request when a stop string is complete."""
        reading = asked.reading
        if not asked.inside:
            return
        more = reading.take(so_far.tokens, shown=on_part is not None)
        if reading.over:
            self.engine.cancel(asked.request_id)
        elif more and on_part is not None:
            on_part(Answer(so_far, reading.reader.shown, None, asked.num_retractions))

    def _whole(self, asked: _Asked, done: Completion, seconds: float) -> Answer:
        reading, cut = asked.reading, asked.reading.cut(done)
        if reading.num_kept is not None:
            finish = Finish("stop", reading.reader.matched)
        elif cut.finish_reason == "stop":
            finish = Finish("stop", int(cut.tokens[-1]))
        else:
            finish = Finish("length" if cut.finish_reason == "length" else "abort")
        return Answer(cut.as_prefix(), reading.reader.text, finish, asked.num_retractions, seconds)

    # ---- aborts and pauses ------------------------------------------------------------------------------------------

    def abort(self, rid: str | None) -> int:
        """Ends the request of this name, or all of them, with what they have; how many samples that were."""
        chosen = [asked for asked in self._asked.values() if rid is None or asked.ask.rid == rid]
        for asked in chosen:
            asked.aborted = True
            asked.wake.set()
            self.engine.cancel(asked.request_id)
        return len(chosen)

    async def pause(self, mode: PauseMode) -> None:
        """On return nothing is being sampled for this server, until `resume`."""
        engine = self.engine
        if mode == "in_place" and not isinstance(engine, Pausable):
            raise TurnedDown(
                501, "mode must be 'retract' or 'abort' with this engine, which cannot stand still, got 'in_place'"
            )
        self.paused = mode
        if mode == "in_place":
            assert isinstance(engine, Pausable)
            await engine.pause()
            return
        if isinstance(engine, Pausable):
            engine.resume()  # it may stand still since an earlier pause, and must let go of what it has
        for asked in self._asked.values():
            asked.aborted |= mode == "abort"
            asked.retracted = True
            asked.wake.set()
            if asked.inside:
                engine.cancel(asked.request_id)
        await until(self._changed, lambda: not any(asked.inside for asked in self._asked.values()))

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = None
        if isinstance(self.engine, Pausable):
            self.engine.resume()
        for asked in self._asked.values():
            asked.wake.set()

    async def drain(self) -> None:
        """Takes no more requests, and returns once those in flight are answered. What waits behind a pause is aborted."""
        self.closing = True
        if self.paused is not None:
            self.abort(None)
            self.resume()
        await until(self._changed, lambda: not self._asked)


async def _drop(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels what is left and waits until it has left the engine; errors other than the first are of no more interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def one_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with `seed`: of the first one the seed itself."""
    return (seed + index * 0x9E3779B97F4A7C15) & (2**63 - 1) if index else seed & (2**63 - 1)
