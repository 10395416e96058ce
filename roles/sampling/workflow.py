"""What makes the samples of a row: the protocol of a workflow, and what a run does with one.

A workflow is an async function. It is called once a prompt group, opens an episode for each sample, asks the engine through it,
and hands each to its context as soon as that is whole:

    async def workflow(row: Row, client: Client, context: Context) -> None:
        async def play(episode: Episode) -> None:
            while not episode.over:
                turn = await episode.generate()
                if (seen := look(turn.text)) is None:
                    return
                await episode.say(seen)

        await context.each(client, play)

Owns that protocol, and what becomes of a workflow that fails. Does not own leases, rewards or what is put (`groups.py`), what a
sample consists of (`episode.py`), nor the figures of an evaluation (`evaluation.py`): both run the same workflow, each with a
context of its own.

What a workflow can rely on:
- It makes the samples `context.missing`: all of a group, or those that no earlier lease has put.
- With `workflow.replays = True` it says that it does the same again where the policy says the same again: after the death of its
  replica, or a stop of the run, it is called anew, and turns that were sampled are not sampled again.
- A sample that was handed in is scored and put at once, and stays, whatever becomes of the workflow. One with an `error` is put
  without a reward: it trains nothing, and its siblings count as they are. In `each` the error of an episode is its sample's
  alone, and one that lasts longer than `rollout.max_episode_s` is handed in as far as it came, as aborted.
- It is cancelled, at whatever it waits for, when the lease is lost or the replica leaves; requests at the engine end with their
  `generate`. A lease lasts while the group comes further: its requests do so by themselves, and what is said to the policy;
  `with context.elsewhere():` says that a sample waits for somebody else, who has a deadline of his own, and that its place at
  the engine is another's meanwhile; `context.progress` tells of anything else. So a workflow that hangs costs its own group,
  after `rollout.lease_deadline_s`; in an evaluation its own prompt.
- An error that it raises itself is its row's (RowError): the group is given out again `reward.max_failures` times, then
  quarantined.
- It shares the event loop of the rollout process with all others: what blocks or computes belongs into a thread or process.

Invariant: every missing sample is handed in exactly once, or the row fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rondo.models.media.inputs import MediaInputs
from rondo.models.media.refs import MediaRef
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.engine import Request, sample_seed
from rondo.roles.sampling.episode import Ask, Episode, Limits, Look, Made
from rondo.roles.sampling.kept_turns import KeptTurns
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.reference import in_one_line, load_reference

_SETTING = "rollout.workflow"


class Client:
    """The engine, for the samples of a prompt group. `request` makes the first request of a sample by its number, `ask` answers
    one, and `cancel` ends one early, by its id."""

    def __init__(
        self,
        context: Context,
        request: Callable[[int], Request],
        ask: Ask,
        cancel: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._context = context
        self.request, self.ask, self.cancel = request, ask, cancel

    def episode(self, number: int) -> Episode:
        """The sample with this number, from the group's prompt on. The draw at a place depends on sample and place alone."""
        return self._opened(number, self.request(number))

    def beside(self, number: int, name: str) -> Episode:
        """Somebody of this name who talks with a sample and is none, from the group's prompt on: the policy too, but nothing that
        it says is trained, nor counts in the sample's budgets."""
        root = self.request(number)
        own = sample_seed(root.seed, name)
        return self._opened(number, replace(root, id=f"{root.id}.{name}", seed=own, prefix=None))

    def _opened(self, number: int, request: Request) -> Episode:
        at = self._context
        return Episode.opened(number, request, self.ask, at.limits, at.tokenizer, at.chat, at.progress, at.look)


class Context:
    """What a workflow is told of its prompt group, and where it hands in what it makes."""

    def __init__(
        self,
        row: Row,
        prompt: np.ndarray,
        media: MediaInputs | None,
        tokenizer: Any,
        missing: Collection[int],
        limits: Limits,
        *,
        chat: Chat | None = None,
        look: Look | None = None,
        originals: Sequence[MediaRef] = (),
        evaluates: bool = False,
        progress: Callable[[], None] = lambda: None,
        elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext,
        turns: KeptTurns | None = None,
    ) -> None:
        self.prompt, self.media = prompt, media
        """The row's prompt, int32 [T], and its media."""
        self.tokenizer = tokenizer
        self.missing = tuple(sorted(missing))
        """Numbers of the samples to make."""
        self.limits = limits
        """Budgets of each sample."""
        self.chat = chat
        """The conversation that the prompt is, None of plain text."""
        self.look = look
        """How media are read that are said behind the prompt; None in a run of text."""
        self.originals = originals
        """The row's media, as they can be read again."""
        self.evaluates = evaluates
        """Whether these samples are for an evaluation."""
        self.progress = progress
        """Tells that the group has come further, beside what its requests do."""
        self.elsewhere = elsewhere
        """Holds while a sample waits for an environment, a tool or a program, and needs nothing of the engine."""
        self.turns = turns
        """Where turns and answers are kept for the next holder of the lease; None in an evaluation."""
        self._row = row
        self._left = set(self.missing)
        self._ready: asyncio.Queue[Made | None] = asyncio.Queue()

    def done(self, made: Made) -> None:
        """Hands a sample in, as `Episode.made` gives it. RowError for one that is not missing, and for rows that do not fit."""
        number, limits = made.number, self.limits
        if number not in self._left:
            raise self._fault(f"hand in each missing sample once, of {list(self.missing)}, got {number}")
        for row in made.rows:
            done, size = row.completion, len(row.completion.tokens)
            sizes = [size, len(done.log_probs), len(done.policy_versions)]
            most = min(limits.max_new_tokens, limits.max_tokens - len(row.prompt))
            if len(set(sizes)) > 1 or not 1 <= size <= most:
                raise self._fault(
                    f"make rows of 1 to {most} tokens, each with its log-prob and version, got {sizes} for {number}"
                )
        if not 1 <= len(made.rows) <= limits.max_rows:
            raise self._fault(f"make samples of 1 to {limits.max_rows} rows (rollout.max_rows), got {len(made.rows)}")
        self._left.discard(number)
        self._ready.put_nowait(made)

    async def each(self, client: Client, play: Callable[[Episode], Awaitable[object]]) -> None:
        """Makes every missing sample by `play`, all at once, and hands each in when it is whole. What fails in one is that
        sample's alone; only what ends the engine, or a RowError, ends the others."""

        async def make(number: int) -> None:
            episode, error = client.episode(number), None
            try:
                async with asyncio.timeout(self.limits.max_s) as limit:
                    await play(episode)
            except Exception as raised:
                if limit.expired() and isinstance(raised, TimeoutError):
                    episode.abort()
                elif any(isinstance(each, RondoError) for each in _leaves(raised)):
                    raise
                else:
                    error = in_one_line(raised)
            self.done(episode.made(error))

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


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
