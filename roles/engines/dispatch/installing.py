"""New weights for one engine: how long that may take, how its death is noticed meanwhile, and what becomes of one that fails.

Owns an update of one engine, and giving weights to one that has none that may be served. Does not own how an engine takes them,
nor in which order several do (`rolling.py`).

Invariant: an engine that fails an update is out, with what it has in flight, until it has been given whole weights. It is asked
again for ever, with growing pauses, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from rondo.roles.engines.dispatch.fleet import DispatchLimits, Fleet, Member
from rondo.runtime.errors import ConfigError, DeadlineExceeded, PeerGone, RondoError
from rondo.runtime.waits import blocking, waiter

if TYPE_CHECKING:
    import torch

Reload = Callable[[], AbstractAsyncContextManager[tuple[int, "Mapping[str, torch.Tensor]"]]]
"""Opens the newest published weights: (version, tensors), readable inside `async with`."""

_REMEMBERED = 32
_TIMES = 4.0
_FIRST_S, _FIRST_BYTES_PER_S = 600.0, 100e6


class Patience:
    """How long an update of an engine may take: four times what the slowest of the last ones took, more where there are more
    bytes, and twice as long after each that failed; before the first one ten minutes, or what 100 MB/s need. Pure."""

    def __init__(self, limits: DispatchLimits) -> None:
        self._set_s, self._least_s = limits.update_deadline_s, limits.least_update_s
        self._took: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)

    def took(self, seconds: float, num_bytes: int) -> None:
        self._took.append((seconds, num_bytes))

    def allowed_s(self, num_bytes: int, num_failed: int = 0) -> float:
        """`num_failed`: of the engine, since it took weights."""
        if self._set_s is not None:
            return self._set_s
        if not self._took:
            return max(_FIRST_S, num_bytes / _FIRST_BYTES_PER_S)
        slowest_s = max(seconds * max(1.0, num_bytes / max(1, size)) for seconds, size in self._took)
        return max(self._least_s, _TIMES * slowest_s) * 2 ** min(num_failed, 6)


class Installer:
    """Gives weights to the engines of one fleet, one or several at a time."""

    def __init__(self, fleet: Fleet, reload: Reload) -> None:
        self.patience = Patience(fleet.limits)
        self.wanted: frozenset[Member] = frozenset()
        """Those that an update under way is about to give weights to."""
        self._fleet = fleet
        self._reload = reload
        self._let_go: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        if self._let_go:
            await asyncio.wait(self._let_go, timeout=self._fleet.limits.probe_deadline_s)

    async def repair(self, member: Member) -> None:
        """Gives an engine that answers the newest weights, where it has none that may be served."""
        if not self._may_repair(member):
            return
        promised = self._fleet.promised
        try:
            async with self._reload() as (version, tensors):
                if promised is not None and version < promised:
                    raise PeerGone(f"the newest weights must be of version {promised} or newer, got {version}")
                if self._may_repair(member):
                    await self.install(member, version, tensors)
        except RondoError as error:
            member.why = f"it must be given the newest weights, got {type(error).__name__}: {error}"
            self._put_off(member)

    def _may_repair(self, member: Member) -> bool:
        promised = self._fleet.promised
        old = promised is not None and (member.proved is None or member.proved < promised)
        free = not (member.updating or member in self.wanted)
        return old and free and member.takes_weights and self._fleet.clock() >= member.repair_at

    async def install(self, member: Member, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Until the engine serves this version, or is out, whatever it failed with. Raises ConfigError if it refuses the tensors,
        and keeps its own."""
        fleet = self._fleet
        member.updating = True
        fleet.update()
        began, num_bytes = fleet.clock(), sum(tensor.nbytes for tensor in tensors.values())
        updating = asyncio.ensure_future(member.engine.update_weights(version, tensors))
        try:
            await self._until_taken(member, updating, began, num_bytes)
            if member.engine.version != version:
                raise PeerGone(
                    f"the engine {member.name} must prove version {version}, got {member.engine.version}. Read its log"
                )
        except ConfigError:
            raise
        except asyncio.CancelledError:
            self._take_out(member, PeerGone(f"the engine {member.name} must take weights in time, got no end"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, this engine is out and its error told
            self._take_out(member, error)
            return
        finally:
            if not updating.done():
                await self._end(updating)
            member.updating = False
            member.ready_at = fleet.clock()
            member.wake.set()
            fleet.update()
        self.patience.took(fleet.clock() - began, num_bytes)
        member.installed = member.proved = version
        member.torn = None
        member.alive, member.suspect = True, False
        member.updates_failed, member.repair_at = 0, 0.0
        member.breaker.recovered()
        fleet.update()

    async def _until_taken(self, member: Member, updating: asyncio.Future[None], began: float, num_bytes: int) -> None:
        """Raises what the update failed with, or DeadlineExceeded past its time. An engine that is gone, or hears nobody, ends
        its update itself (`sglang/silence.py`)."""
        fleet, failed = self._fleet, member.updates_failed
        with blocking("update engine", peer=member.name, deadline_s=self.patience.allowed_s(num_bytes, failed)):
            while True:
                await asyncio.wait([updating], timeout=fleet.limits.health_interval_s)
                if updating.done():
                    return updating.result()
                allowed_s = self.patience.allowed_s(num_bytes, failed)  # others may have shown how long it takes
                if fleet.clock() - began >= allowed_s:
                    raise DeadlineExceeded("update engine", waiter(), member.name, allowed_s)

    async def _end(self, updating: asyncio.Future[None]) -> None:
        """Ends an update that is given up. A server that hangs may not let go of it: it is not waited for for ever."""
        updating.cancel()
        await asyncio.wait([updating], timeout=self._fleet.limits.probe_deadline_s)
        if not updating.done():
            self._let_go.add(updating)
            updating.add_done_callback(self._let_go.discard)
        elif not updating.cancelled():
            updating.exception()

    def _take_out(self, member: Member, error: BaseException) -> None:
        """Its weights are not known any more: what it has in flight is lost."""
        member.suspect = True
        self._put_off(member)
        member.proved, member.torn = None, member.engine.version
        member.why = f"its update failed, {type(error).__name__}: {error}"
        self._fleet.owner.lose(member, silent=False)

    def _put_off(self, member: Member) -> None:
        """It is not given weights again at once."""
        limits = self._fleet.limits
        pause_s = limits.open_s * 2 ** min(member.updates_failed, 16)
        member.repair_at = self._fleet.clock() + min(pause_s, limits.longest_open_s)
        member.updates_failed += 1
