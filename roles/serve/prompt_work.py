"""Prompt work: chat templates and tokenizing, in processes of their own, so that no caller's prompt holds up another's.

Owns which process does a piece of work, how much of it may wait and how long it may take. Does not own what is computed
(`prompt_worker.py`).

    quick    what is told in up to `QUICK_BYTES`, for `QUICK_CPU_S` of CPU
    long     what is longer, and what has used that up, for `LONG_CPU_S`

    async with prompt_work("Qwen/Qwen3-8B", num_workers=1) as work:
        text = await work.render({"messages": [...]}, most=32768)
        tokens = await work.encode(text, special=False)

Invariant: whoever brings little waits for nobody who brings much. What takes too long is its caller's error, what finds too many
waiting before it a 503; nothing that a caller sends ends the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import numpy as np

from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.pool import Outcome, Pool
from rondo.runtime.values import encode, write_json

QUICK_BYTES = 1 << 15
QUICK_CPU_S, LONG_CPU_S = 0.1, 10.0
MAX_WAITING = {"quick": 1024, "long": 32}
_DEADLINE_S = {"quick": 5.0, "long": 40.0}
"""Before what cannot be interrupted is ended with its process: on a busy machine a second of CPU takes several."""
_LOAD_S = 300.0
_WORKER = "rondo.roles.serve.prompt_worker:open_function"

Lane = Literal["quick", "long"]
Run = Callable[[Lane, bytes], Awaitable[Outcome]]
"""Has a piece of work done, which is told in JSON."""


class PromptWork:
    """`run` has a piece of work done; TurnedDown (503) where too many wait."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def render(self, asked: Mapping[str, Any], *, most: int) -> str:
        """The text of a conversation: `messages`, `tools`, and of the template's other arguments the operator's `own` and those
        that the caller has `given`; control tokens that a caller spells are marked. ConfigError for what it cannot take, and for
        more than `most` characters."""
        text: str = await self._do({"render": dict(asked), "most": most})
        return text

    async def behind(self, asked: Mapping[str, Any], depth: int) -> str | None:
        """What the template writes behind the first `depth` messages, of which the last is a reply, where `asked` is as of
        `render`. None where it rewrites what stands in front of that, or leaves out what comes next."""
        text: str | None = await self._do({"behind": dict(asked), "depth": depth})
        return text

    async def encode(
        self, text: str, *, special: bool, after: int | None = None, marked: bool = False
    ) -> np.ndarray | None:
        """Its tokens, int32 [T]; with `special` those that the tokenizer puts in front of a prompt too, of one that was `marked`
        by `render` what it says. None for text that no tokens say exactly behind the token `after`."""
        found: np.ndarray | None = await self._do(
            {"encode": text, "special": special, "after": after, "marked": marked}
        )
        return found

    async def _do(self, asked: dict[str, Any]) -> Any:
        told = json_of(asked | {"cpu_s": QUICK_CPU_S})
        outcome = await self._run("quick", told) if len(told) <= QUICK_BYTES else None
        if outcome is None or outcome.kind == "OverTime" or outcome.timed_out:
            outcome = await self._run("long", json_of(asked | {"cpu_s": LONG_CPU_S}))
        if outcome.error is None:
            return outcome.value
        if outcome.kind == "ConfigError":
            raise ConfigError(outcome.error)
        if outcome.kind is None or outcome.kind == "OverTime":  # what it cost its worker is the request's own doing
            raise ConfigError(
                f"a prompt must be made within {LONG_CPU_S:g} s, got one that is not. Shorten or simplify it"
            )
        raise TurnedDown(500, f"a prompt must be made of what was sent, got {outcome.error}")


@asynccontextmanager
async def prompt_work(path: str, *, num_workers: int = 1) -> AsyncIterator[PromptWork]:
    """Works while the body lasts, with the tokenizer at `path`: `num_workers` processes for each of the two kinds of work."""
    pools = {
        lane: Pool(
            _WORKER, {"path": path}, work="prompt", source="the model's tokenizer", num_workers=num_workers,
            deadline_s=deadline_s, load_deadline_s=_LOAD_S,
        )
        for lane, deadline_s in _DEADLINE_S.items()
    }  # fmt: skip

    async def run(lane: Lane, asked: bytes) -> Outcome:
        waiting = pools[lane].stats().num_waiting
        if waiting >= MAX_WAITING[lane]:
            raise TurnedDown(
                503, f"fewer than {MAX_WAITING[lane]} prompts must wait to be made, got {waiting}. Ask again soon"
            )
        [outcome] = await pools[lane].run([encode(asked)])
        return outcome

    async with pools["quick"], pools["long"]:
        yield PromptWork(run)


def json_of(asked: Any) -> bytes:
    """What a prompt is made of as JSON. ConfigError for what has none."""
    try:
        return write_json(asked)
    except TypeError as error:
        raise ConfigError(f"what a prompt is made of must be JSON of few levels, got {error}. Flatten it") from error
