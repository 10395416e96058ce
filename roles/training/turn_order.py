"""The order in which the ranks of a group take turns: the first rank decides it, the others follow.

Every rank computes on one thread, and what it computes for a model that is cut over the group is collective. So where several
roles compute there, all ranks must take them in one order, which no rank can know from what it has itself: rounds reach ranks at
different moments, and a trainer waits for them longer on one than on another. The first rank's turns are numbered in the store of
the run as it grants them; another rank grants its own as they come out of there.

    rank 0   reference | actor | weights of version 7 | actor_fwd         as `compute_turns.py` grants them
    rank 1       reference ...... | actor | weights of version 7 ...      the same, each when who takes it is there too

Does not own who may when (`compute_turns.py`), nor what a turn is used for. Imports no torch.

Invariant: a rank begins its n-th turn when the one before is over and who takes it has come; it grants no turn that the first
rank has not. With a turn comes what the first rank says about it.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import orjson

from rondo.runtime.waits import waiting

if TYPE_CHECKING:
    from torch.distributed import Store

_IDLE = datetime.timedelta(days=20)
"""Of one wait for the next turn: longer than a run has nothing to do, and no more milliseconds than 31 bits hold."""


class TurnsTold:
    """The first rank's side."""

    def __init__(self, store: Store) -> None:
        self._store, self._number = store, 0

    def tell(self, name: str, said: Any) -> None:
        """`name` has the next turn; `said`, JSON-able, goes to all ranks."""
        self._store.set(f"turn/{self._number}", orjson.dumps([name, said]).decode())
        self._number += 1


class TurnsFollowed:
    """The side of any other rank, on its event loop. `store`: a connection of its own, which a thread waits on as long as the
    process lives. `num_others`: the ranks that follow; the last one that has read a turn takes it out of the store."""

    def __init__(self, store: Store, num_others: int) -> None:
        self._told: deque[tuple[str, Any]] = deque()
        self._asking: dict[str, asyncio.Future[Any]] = {}
        self._free = True
        self._failed: Exception | None = None
        args = (store, num_others, asyncio.get_running_loop())
        threading.Thread(target=self._read, args=args, name="turns", daemon=True).start()

    async def take(self, name: str) -> Any:
        """Waits for the next turn of `name`, and gives what was said with it. One at a time waits for each name."""
        if self._failed is not None:
            raise self._failed
        assert name not in self._asking, f"{name} must wait for one turn at a time"
        asked = self._asking[name] = asyncio.get_running_loop().create_future()
        self._grant()
        try:
            async with waiting(f"turn of {name}", peer="rank 0", deadline_s=None):  # its own waits have deadlines
                return await asked
        finally:
            self._asking.pop(name, None)

    def done(self) -> None:
        """The turn that was taken is over."""
        self._free = True
        self._grant()

    def _grant(self) -> None:
        if self._free and self._told and self._told[0][0] in self._asking:
            name, said = self._told.popleft()
            self._free = False
            self._asking.pop(name).set_result(said)

    def _hear(self, name: str, said: Any) -> None:
        self._told.append((name, said))
        self._grant()

    def _fail(self, error: Exception) -> None:
        self._failed = error
        for asked in self._asking.values():
            asked.set_exception(error)
        self._asking.clear()

    def _read(self, store: Store, num_others: int, loop: asyncio.AbstractEventLoop) -> None:
        number = 0
        try:
            while not loop.is_closed():
                turn, seen = f"turn/{number}", f"seen/{number}"
                store.wait([turn], _IDLE)
                loop.call_soon_threadsafe(self._hear, *orjson.loads(store.get(turn)))
                if store.add(seen, 1) == num_others:
                    store.delete_key(turn)
                    store.delete_key(seen)
                number += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to whoever waits for a turn
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._fail, error)
