"""What makes the samples of a row: the protocol of a workflow, and what a run does with one.

A workflow is an async function. It is called once a prompt group, asks the engine through a client that knows the group, and
hands each sample to its context as soon as that is whole:

    async def workflow(row: Row, client: Client, context: Context) -> None:
        async def one(number: int) -> Completion:
            done = await client.generate(number)                       # from the prompt on
            seen = context.tokenizer(look(done), add_special_tokens=False)["input_ids"]
            return await client.generate(number, extended(done, seen))       # the same sample, further on

        await context.each(one)

Owns that protocol, and what becomes of a workflow that fails. Does not own leases, rewards or what is put (`groups.py`), nor the
figures of an evaluation (`evaluation.py`): both run the same workflow, each with a context of its own.

What a workflow can rely on:
- It makes the samples `context.missing`: all of a group, or those that no earlier lease has put.
- A sample that was handed in is scored and put at once, and stays, whatever becomes of the workflow. One with an `error` is put
  without a reward: it trains nothing, and its siblings count as they are.
- It is cancelled, at whatever it waits for, when the lease is lost or the replica leaves; requests at the engine end with their
  `generate`. A lease lasts while the group comes further: its requests do so by themselves, `context.progress` tells of anything
  else, such as a step of an environment. So a workflow that hangs costs its own group, after `rollout.lease_deadline_s`; in an
  evaluation its own prompt.
- An error that it raises is its row's (RowError): the group is given out again `reward.max_failures` times, then quarantined.
- It shares the event loop of the rollout process with all others: what blocks or computes belongs into a thread or process.

Invariant: every missing sample is handed in exactly once, or the row fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rondo.comm.bus.group import NO_VERSION
from rondo.models.media.inputs import MediaInputs
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.engine import Completion, Request
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.reference import in_one_line, load_reference

_SETTING = "rollout.workflow"


@dataclass(frozen=True, slots=True)
class Made:
    """A sample that a workflow handed in; with an `error` it gets no reward."""

    number: int
    completion: Completion
    error: str | None = None


class Client:
    """The engine, for the samples of a prompt group. `request` makes the request of a sample by its number, `ask` answers it."""

    def __init__(self, request: Callable[[int], Request], ask: Callable[[Request], Awaitable[Completion]]) -> None:
        self._request = request
        self._ask = ask

    async def generate(self, number: int, after: Completion | None = None) -> Completion:
        """The sample with this number, from the group's prompt on; or from the end of `after`, the same sample as it was so far.
        In both cases the whole sample, which `rollout.max_new_tokens` bounds.

        The draw at a place depends on sample and place alone. Ends at the run's tokens and texts; those in `after` count no more.
        What has no room left comes back at once, cut to it and ended by "length". Raises RowError where the engine refuses this
        very request, and what an engine that ended raises.
        """
        request = self._request(number)
        if after is None or not len(after.tokens):
            return await self._ask(request)
        if len(after.tokens) >= request.params.max_new_tokens:
            return replace(after.first(request.params.max_new_tokens), finish_reason="length")
        return await self._ask(replace(request, prefix=after.as_prefix()))


class Context:
    """What a workflow is told of its prompt group, and where it hands in what it makes."""

    def __init__(
        self,
        row: Row,
        prompt: np.ndarray,
        media: MediaInputs | None,
        tokenizer: Any,
        missing: Collection[int],
        max_new_tokens: int,
        *,
        evaluates: bool = False,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.media = prompt, media
        """The row's prompt, int32 [T], and its media."""
        self.tokenizer = tokenizer
        self.missing = tuple(sorted(missing))
        """Numbers of the samples to make."""
        self.max_new_tokens = max_new_tokens
        """Most tokens of a sample behind its prompt, an environment's included."""
        self.evaluates = evaluates
        """Whether these samples are for an evaluation."""
        self.progress = progress
        """Tells that the group has come further, beside what its requests do."""
        self._row = row
        self._left = set(self.missing)
        self._ready: asyncio.Queue[Made | None] = asyncio.Queue()

    def done(self, number: int, completion: Completion, error: str | None = None) -> None:
        """Hands a sample in. RowError for one that is not missing, and for arrays that do not fit."""
        size, most = len(completion.tokens), self.max_new_tokens
        sizes = [size, len(completion.log_probs), len(completion.policy_versions)]
        if number not in self._left:
            raise self._fault(f"hand in each missing sample once, of {list(self.missing)}, got {number}")
        if len(set(sizes)) > 1 or size > most:
            raise self._fault(
                f"make samples of at most {most} tokens, each with its log-prob and version, got {sizes} for {number}"
            )
        experts = completion.routed_experts
        if experts is not None and len(experts) != len(self.prompt) + size - 1:
            experts = None  # an environment had the last word: of its tokens no engine has told any
        self._left.discard(number)
        self._ready.put_nowait(Made(number, replace(completion, routed_experts=experts), error))

    async def each(self, one: Callable[[int], Awaitable[Completion]]) -> None:
        """Makes every missing sample by `one`, all at once, and hands each in when it is whole. An error ends the others."""

        async def make(number: int) -> None:
            self.done(number, await one(number))

        async with asyncio.TaskGroup() as tasks:
            for number in self.missing:
                tasks.create_task(make(number))

    async def samples(self, workflow: Workflow, client: Client) -> AsyncGenerator[list[Made], None]:
        """What the workflow hands in: those that are there, together, in the order of their numbers. Closing this cancels it.

        Raises RowError for what the workflow raised, or did not make, and as they are errors of the engine."""

        async def run() -> None:
            try:
                await workflow(self._row, client, self)
            finally:
                self._ready.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            over = False
            while not over:
                ready = [await self._ready.get()]
                while not self._ready.empty():
                    ready.append(self._ready.get_nowait())
                over = None in ready
                if made := sorted((each for each in ready if each is not None), key=lambda each: each.number):
                    yield made
            await asyncio.wait([running])
            if running.cancelled():  # not by whoever is here
                raise self._fault("end, or raise what ended it, got a cancellation of its own")
            if (error := running.exception()) is not None:
                raise self._raised(error) from error
            if self._left:
                raise self._fault(f"hand in each missing sample once, got none of {sorted(self._left)}")
        finally:
            running.cancel()

    def _fault(self, rule: str) -> RowError:
        return RowError(f"{self._row.name}: {_SETTING} must {rule}. Correct it")

    def _raised(self, error: BaseException) -> BaseException:
        every = list(_leaves(error))
        ours = [each for each in every if isinstance(each, RondoError)]
        severe = [each for each in ours if not isinstance(each, RowError)]
        return next(iter((*severe, *ours)), None) or self._fault(f"end without errors, got {in_one_line(every[0])}")


class Workflow(Protocol):
    """An async function that makes samples of a row; see the top of this file."""

    async def __call__(self, row: Row, client: Client, context: Context, /) -> None: ...


def open_workflow(reference: str) -> Workflow:
    """The workflow that the settings name. ConfigError for what is none."""
    workflow = load_reference(reference, _SETTING)
    try:
        fits = inspect.iscoroutinefunction(workflow) and inspect.signature(workflow).bind(None, None, None)
    except TypeError:
        fits = False
    if not fits:
        raise ConfigError(
            f"{_SETTING} must be an async function of (row, client, context), got {reference}. Write `async def`, with these"
        )
    return workflow


def extended(sample: Completion, tokens: Sequence[int]) -> Completion:
    """The sample with an environment's tokens behind it: they are read, and never trained."""
    added = np.asarray(tokens, np.int32)
    return replace(
        sample,
        tokens=np.concatenate([sample.tokens, added]),
        log_probs=np.concatenate([sample.log_probs, np.zeros(len(added), np.float32)]),
        policy_versions=np.concatenate([sample.policy_versions, np.full(len(added), NO_VERSION, np.int32)]),
        top=None,
    )


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
