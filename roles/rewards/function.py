"""A function of the user's that judges samples, a reward or a filter: a plain one in killable processes, an `async def` here.

Owns which of the two it is, and the deadline of an async one. Does not own the processes (`runtime/processes/pool.py`) or what
the function is given and returns (`worker.py`).

    async with UserFunction(open_function, {"function": "judge.py:ask"}, source="reward.function", ...) as function:
        outcomes = await function.run([encode(...), ...])      # one an item, in order

A plain function is given one item after another in each process, and costs that process where it hangs or crashes. An async one
waits for others, such as a server that judges: in this event loop, for all items beside each other, each until its deadline. It
shares the loop with the rollout, so it must not compute or block.

Invariant: `run` returns one outcome an item, in order, whatever the function does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rondo.roles.rewards.worker import IS_ASYNC, Opened, in_worker
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, PeerGone
from rondo.runtime.processes.pool import Outcome, Pool
from rondo.runtime.processes.pool_worker import end_if_forked, failed
from rondo.runtime.reference import load_reference
from rondo.runtime.sandbox.sandbox import used
from rondo.runtime.values import Encoded, decode, encode
from rondo.runtime.waits import waiting


async def no_reward(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """What a run without rewards has in their place."""
    return 0.0


class UserFunction(Pool):
    """`open_function` names what makes `Opened` of the `settings`, JSON values; `work` and `source` are words for messages."""

    def __init__(
        self,
        open_function: str,
        settings: Mapping[str, Any],
        *,
        work: str,
        source: str,
        num_workers: int = 1,
        deadline_s: float,
        load_deadline_s: float,
    ) -> None:
        self._opens = open_function, dict(settings)
        super().__init__(
            f"{in_worker.__module__}:{in_worker.__name__}",
            {"open_function": open_function, "settings": dict(settings), "sandbox": used()},
            work=work,
            source=source,
            num_workers=num_workers,
            deadline_s=deadline_s,
            load_deadline_s=load_deadline_s,
        )
        self._here: Opened | None = None
        self._closed = False
        self.is_mixed = False
        """Of several functions, some plain and some async: all run in the processes, one after another."""
        self.takes: frozenset[str] | None = frozenset()
        """Names of its parameters, beside the first ones; None where it takes any."""

    async def start(self) -> None:
        """Loads it in processes, so that one that cannot be loaded harms nobody; an async one here, too, and these end.

        ConfigError for one that cannot be loaded or called."""
        await super().start()
        deadline_s, self._deadline_s = self._deadline_s, self._load_deadline_s
        [told] = await super().run([encode(IS_ASYNC)])  # a part of loading
        self._deadline_s = deadline_s
        if told.error is not None:
            await super().close()
            raise ConfigError(
                f"{self._source} must load without ending its process, got {told.brief}. Look at what it does while it loads"
            )
        is_async, self.takes = told.value
        self.is_mixed = is_async is None
        if is_async:
            name, settings = self._opens
            self._here = await asyncio.to_thread(load_reference(name, self._source), **settings)
            await super().close()

    async def run(self, items: Sequence[Encoded]) -> list[Outcome]:
        """One outcome an item, in order. Raises Closed after `close`, and what ends a `Pool`."""
        if self._here is None:
            return await super().run(items)
        if self._closed:
            raise Closed(f"{self._source} must be open to be asked, got a closed one. Ask it before it closes")
        return await asyncio.gather(*(self._run_here(self._here, item) for item in items))

    async def _run_here(self, opened: Opened, item: Encoded) -> Outcome:
        here = os.getpid()
        try:
            async with waiting(self._work, peer=self._source, deadline_s=self._deadline_s):
                found = opened.call(_decoded(item))
                value = _decoded(opened.check(await found if hasattr(found, "__await__") else found))
        except DeadlineExceeded:
            cause = f"{self._work} must return within {self._deadline_s:g} s, got no end. It was cancelled"
            return Outcome(error=cause, timed_out=True, brief=cause)
        except PeerGone as error:  # of a service, which says nothing of the item
            return Outcome(error=str(error), timed_out=True, brief=str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the function raises is this item's error
            _, text, kind, brief = failed(error)
            return Outcome(error=text, kind=kind, brief=brief)
        finally:
            end_if_forked(here)
        return Outcome(value)

    async def close(self) -> None:
        """Ends its processes; callers of a plain function get Closed. May be called twice."""
        self._closed = True
        await super().close()


def _decoded(encoded: Encoded) -> Any:
    """A copy, as a process would get it: what the function does to it is its own affair."""
    return decode(orjson.loads(encoded.text), [memoryview(bytes(buffer)) for buffer in encoded.buffers])
