"""Communicator: one epoch of a process group in one process, with a deadline on every call.

Owns the thread that alone calls the library, and the forming of the group in the store. Does not own the libraries
(`carriers.py`) or which epoch is formed (`groups.py`, which also says what was seen that made it so).

    caller's thread                       the communicator's thread
    broadcast(tensor, 0)  -- call -->     carrier.broadcast(...)          blocks as long as the library likes
          waits  <----------------------  ended
          woken too by the deadline, `abort` (any thread) and `close`: GroupBroken; the thread is abandoned and ends by itself

Invariants: every call ends by its deadline, with its result or with an error; after the first failure no call reaches the
library any more, and its group is taken down on that thread, so that the others' connections to it close.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from rondo.comm.groups.carriers import Carrier, check_backend, open_carrier, span
from rondo.comm.groups.epochs import Epoch, GroupSpec
from rondo.comm.groups.nccl_extras import Operation
from rondo.runtime.errors import Closed, ConfigError, GroupBroken, Refused, RondoError
from rondo.runtime.waits import blocking

Work = Callable[[Carrier, float], None]
"""A call on the carrier, with the seconds that are left for it."""


def _nothing(carrier: Carrier, left_s: float) -> None:
    """What an ended call still has to do."""


@dataclass(slots=True)
class _Call:
    operation: str
    work: Work
    due: float
    stream: Any
    ended: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CommunicatorStats:
    """A communicator at one moment. `blocked`: it is over, and its library still holds the thread."""

    group: str
    epoch: int
    num_calls: int
    broken: str
    blocked: bool


class Communicator:
    """One epoch of a group in this process. Usable from any one thread at a time; members make the same calls in the same order.

    Tensors must be contiguous and on the group's device; calls move their raw bytes, so every dtype goes. A call
    returns when this member's part is done, which says nothing of the others' (a broadcast's root may have sent to nobody): a
    `barrier` does. `deadline_s` defaults to the spec's `timeout_s`. Calls raise GroupBroken when the epoch is over or the
    deadline passed, ConfigError for a tensor that does not fit (nothing is broken then), and Closed. `close` it at the end.
    """

    def __init__(
        self, spec: GroupSpec, epoch: Epoch, member: str, store: tuple[str, int], *, device: str, deadline_s: float
    ) -> None:
        check_backend(spec.backend, device)
        if member not in spec.members:
            raise ConfigError(
                f"a member of group {spec.name!r} must be one of {', '.join(spec.members)}, got {member!r}."
            )
        self.spec, self.epoch = spec, epoch
        self.rank = spec.members.index(member)
        self.size = len(spec.members)
        self._device = torch.device(device)
        self._changed = threading.Condition()
        self._calls: list[_Call] = []
        self._carrier: Carrier | None = None
        self._broken: tuple[str, tuple[str, ...], Exception | None] | None = None
        self._closed = False
        self._interrupted = False
        self._num_calls = 0
        self._forming = _Call("form", _nothing, time.monotonic() + deadline_s, None)
        self._thread = threading.Thread(
            target=self._run, args=(store,), name=f"group {spec.name}/{epoch.number}", daemon=True
        )
        self._thread.start()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def wait_formed(self) -> None:
        """Returns when the group stands. GroupBroken, past the deadline too, names the members that did not come."""
        self._wait(self._forming, f"{self.spec.name}/{self.epoch.number}", ())

    def broadcast(self, tensor: Any, root: int, deadline_s: float | None = None) -> None:
        """`tensor` of rank `root` arrives in `tensor` of all."""
        if not 0 <= root < self.size:
            raise ConfigError(f"root of broadcast must be a rank below {self.size}, got {root}.")
        data = self._bytes(tensor)
        self._call("broadcast", lambda c, left_s: c.move("broadcast", data, root, left_s), deadline_s)

    def send(self, tensor: Any, peer: int, deadline_s: float | None = None) -> None:
        """To rank `peer`, which receives as many bytes."""
        self._pair("send", tensor, peer, deadline_s)

    def recv(self, tensor: Any, peer: int, deadline_s: float | None = None) -> None:
        """From rank `peer`."""
        self._pair("recv", tensor, peer, deadline_s)

    def _pair(self, operation: Operation, tensor: Any, peer: int, deadline_s: float | None) -> None:
        data = self._bytes(tensor)
        if not (0 <= peer < self.size and peer != self.rank):
            raise ConfigError(f"peer of {operation} must be another rank below {self.size}, got {peer}.")
        self._call(operation, lambda c, left_s: c.move(operation, data, peer, left_s), deadline_s, peer)

    def barrier(self, deadline_s: float | None = None) -> None:
        """Returns when every member has come here: it then has a byte from each."""
        self._call("barrier", self._meet, deadline_s)

    # ---- end --------------------------------------------------------------------------------------------------------

    def abort(self, why: str = "it was aborted here", missing: tuple[str, ...] = ()) -> None:
        """This epoch is over: a call that waits raises GroupBroken now. From any thread, the event loop's too; never blocks."""
        self._break(why, missing, None)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Lets go of everything. True when nothing is left, False when the library still blocks the thread it was given.

        Calls must have ended; one that waits raises Closed. The last to leave waits for nobody.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def stats(self) -> CommunicatorStats:
        with self._changed:
            broken = self._broken[0] if self._broken is not None else ""
            held = self._thread.is_alive() and (self._broken is not None or self._closed)
            return CommunicatorStats(self.spec.name, self.epoch.number, self._num_calls, broken, held)

    # ---- the caller's side ------------------------------------------------------------------------------------------

    def _call(self, operation: str, work: Work, deadline_s: float | None, peer: int | None = None) -> None:
        deadline_s = self.spec.timeout_s if deadline_s is None else deadline_s
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        call = _Call(operation, work, time.monotonic() + deadline_s, stream)
        with self._changed:
            self._raise_if_over(operation)
            self._calls.append(call)
            self._num_calls += 1
            self._changed.notify_all()
        silent = () if peer is None else (self.spec.members[peer],)
        self._wait(call, *(silent or (f"{self.spec.name}/{self.epoch.number}",)), silent)

    def _wait(self, call: _Call, peer: str, silent: tuple[str, ...]) -> None:
        left_s = max(0.0, call.due - time.monotonic())
        with blocking(f"group {call.operation}", peer=peer, deadline_s=left_s):
            with self._changed:
                over = self._changed.wait_for(
                    lambda: call.ended or self._broken is not None or self._closed, timeout=left_s
                )
        error = call.error
        if isinstance(error, (ConfigError, Refused)):
            raise error
        if error is not None:
            missing = error.missing if isinstance(error, GroupBroken) else silent
            self._break(error.why if isinstance(error, GroupBroken) else str(error).partition("\n")[0], missing, error)
            if not isinstance(error, (RuntimeError, RondoError)):
                raise error  # torch says what it has to say in RuntimeErrors: this is a bug
        elif not over:
            self._break(f"no end within {left_s:g} s", silent, None)
        if not call.ended or call.error is not None:
            self._raise_if_over(call.operation)

    def _raise_if_over(self, operation: str) -> None:
        if self._broken is not None:
            why, missing, cause = self._broken
            raise GroupBroken(self.spec.name, self.epoch.number, operation, why, missing) from cause
        if self._closed:
            raise Closed(f"group {self.spec.name!r} must be open for {operation}, got closed. Join it again")

    def _break(self, why: str, missing: tuple[str, ...], cause: Exception | None) -> None:
        """The first reason counts, but one that names who is missing is better than one that does not."""
        with self._changed:
            known = self._broken
            if known is not None and (known[1] or not missing):
                return
            self._broken = (why, missing, cause)
            self._changed.notify_all()
            carrier = self._carrier
            interrupt = carrier is not None and carrier.interrupted_by_abort and not self._interrupted
            self._interrupted |= interrupt
        if carrier is not None and interrupt:
            threading.Thread(target=carrier.abort, name="group abort", daemon=True).start()  # it may block as well

    def _bytes(self, tensor: Any) -> Any:
        if tensor.device.type != self._device.type or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else "strided"
            raise ConfigError(
                f"a tensor of group {self.spec.name!r} must be contiguous and on {self._device}, got {layout} on "
                f"{tensor.device}. Copy it there first"
            )
        return tensor.detach().view(-1).view(torch.uint8)

    # ---- the communicator's thread ----------------------------------------------------------------------------------

    def _run(self, address: tuple[str, int]) -> None:
        """Forms, then makes one call after the other. Blocks where the library blocks; nobody waits for this thread."""
        self._make(self._forming, lambda: self._form(address))
        while (call := self._next()) is not None:
            self._make(call, functools.partial(self._work, call))
        with self._changed:
            failed = self._broken is not None or self._forming.error is not None
            carrier, self._carrier = self._carrier, None
        if carrier is None or self._interrupted:
            return
        with contextlib.suppress(RuntimeError):  # a library that cannot even let go has nothing left to tell
            (carrier.abort if failed else carrier.close)()

    def _work(self, call: _Call) -> None:
        assert self._carrier is not None
        call.work(self._carrier, max(0.001, call.due - time.monotonic()))

    def _make(self, call: _Call, work: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            with torch.cuda.stream(call.stream) if call.stream is not None else contextlib.nullcontext():
                work()
        except Exception as failure:  # noqa: BLE001  # it is raised where the call was made
            error = failure
        with self._changed:
            call.error, call.ended = error, True
            call.work = _nothing  # frees the tensors
            self._changed.notify_all()

    def _next(self) -> _Call | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._calls or self._broken is not None or self._closed or self._forming.error is not None
            )
            if self._broken is not None or self._closed or self._forming.error is not None:
                return None
            return self._calls.pop(0)

    def _form(self, address: tuple[str, int]) -> None:
        """Meets the other members in the store under this epoch's own prefix, then makes the group."""
        name, number = self.spec.name, self.epoch.number
        host, port = address
        store = dist.TCPStore(host, port, is_master=False, timeout=span(self._left()))
        _fence(store, name, number)
        here = dist.PrefixStore(f"groups/{name}/{number}/here", store)
        mine = f"{os.getpid()}.{time.monotonic_ns()}".encode()
        if bytes(here.compare_set(str(self.rank), "", mine.decode())) != mine:
            raise Refused(
                f"rank {self.rank} of group {name!r} must join epoch {number} once, got a second time. Join the next epoch"
            )
        self._all_here(here)
        store.set_timeout(span(self._left()))
        keys = dist.PrefixStore(f"groups/{name}/{number}/keys", store)
        carrier = open_carrier(self.spec.backend, keys, self.rank, self.size, str(self._device), self._left())
        with self._changed:
            self._carrier = carrier
        self._meet(carrier, self._left())  # gloo has connections to members that died since, and calls that formed

    def _meet(self, carrier: Carrier, left_s: float) -> None:
        byte, due = torch.zeros(1, dtype=torch.uint8, device=self._device), time.monotonic() + left_s
        for rank in range(self.size):
            carrier.move("broadcast", byte, rank, max(0.001, due - time.monotonic()))

    def _all_here(self, here: Any) -> None:
        """Looks until every member wrote its key: a wait inside the store could not be ended before its time-out."""
        keys = [str(rank) for rank in range(self.size)]
        pause_s = 0.001
        due = self._forming.due - min(2.0, 0.25 * self._left())  # whoever waits still hears who is missing
        while not here.check(keys):
            with self._changed:
                self._changed.wait_for(lambda: self._broken is not None or self._closed, timeout=pause_s)
                self._raise_if_over("form")
            pause_s = min(2 * pause_s, 0.05)
            if time.monotonic() > due:
                missing = tuple(
                    member for member, key in zip(self.spec.members, keys, strict=True) if not here.check([key])
                )
                raise GroupBroken(self.spec.name, self.epoch.number, "form", "silence", missing)

    def _left(self) -> float:
        return max(0.001, self._forming.due - time.monotonic())


def _fence(store: Any, name: str, number: int) -> None:
    """Makes `number` the newest epoch that was begun; Refused when a later one was."""
    key = f"groups/{name}/newest"
    newest = bytes(store.compare_set(key, "", str(number)))
    while int(newest) < number:
        newest = bytes(store.compare_set(key, newest.decode(), str(number)))
    if int(newest) > number:
        raise Refused(f"epoch of group {name!r} must be {int(newest)} or later, got {number}. Join the next epoch")


def open_group(
    spec: GroupSpec, epoch: Epoch, member: str, store: tuple[str, int], *, device: str = "cpu", deadline_s: float
) -> Communicator:
    """Forms `epoch` of a group with the members that do the same, by its deadline. Blocks: for the compute thread.

    Raises GroupBroken (names who is missing), Refused (an old epoch, or this rank is in it already), ConfigError.
    """
    made = Communicator(spec, epoch, member, store, device=device, deadline_s=deadline_s)
    try:
        made.wait_formed()
    except BaseException:
        made.abort()
        raise
    return made
