"""The tree of errors, and how an error crosses a wire.

Owns every error type that rondo raises on purpose, the two functions that turn an error into JSON and back, and how a text
names what was meant. Does not own who catches what. Each type is also a standard one, so that `except TimeoutError` keeps
working. Texts read `<what> must <rule>, got <value>. <what to do>`.

Invariant: an error of this tree, or one of the builtins in `TRAVELLERS`, arrives at the caller as its own type; a
subclass of an error of this tree arrives as its nearest type here; anything else arrives as `RemoteError`, which names
the type. All of them carry `remote_traceback`, also as a note, so that an ordinary traceback shows both sides.

    restore(describe(Refused("epoch must be 4, got 3. Ask for a new lease")), peer="coordinator")  # a Refused
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Collection
from typing import Any

MAX_TEXT = 64 * 1024
"""Characters of a message or traceback that travel; the rest is cut in the middle."""


class RondoError(Exception):
    """Root of the tree. `remote_traceback` is the other side's traceback when the error came over a wire, else None."""

    remote_traceback: str | None = None


class ConfigError(RondoError, ValueError):
    """A setting, or something a user handed in, breaks a rule."""


class Fatal(ConfigError):
    """What no restart repairs. A role that raises it ends the run at once, with its text as the cause."""


class DeadlineExceeded(RondoError, TimeoutError):
    """The wait `name` of `waiter` for `peer` lasted longer than `deadline_s` seconds."""

    def __init__(self, name: str, waiter: str, peer: str, deadline_s: float) -> None:
        super().__init__(
            f"wait {name!r} of {waiter!r} for {peer!r} must end within {deadline_s:g} s, got no end. "
            f"Look at what {peer!r} waits for, or raise the deadline"
        )
        self.name = name
        self.waiter = waiter
        self.peer = peer
        self.deadline_s = deadline_s


class PeerGone(RondoError, ConnectionError):
    """The other side is not there, or left before it answered. The call may have run: repeat it only if idempotent."""


class GroupBroken(PeerGone):
    """Epoch `epoch` of process group `group` is over for this member: `operation` did not come to its end.

    `missing` are members known to be dead or silent ("rollout-0/1"), empty when nobody can tell. What the operation wrote into
    its tensors is of no use; the next epoch is formed anew.
    """

    def __init__(self, group: str, epoch: int, operation: str, why: str, missing: tuple[str, ...] = ()) -> None:
        who = f"; missing: {', '.join(missing)}" if missing else ""
        super().__init__(
            f"group {group!r} must be whole in epoch {epoch} for {operation}, got {why}{who}. Join the next epoch"
        )
        self.group = group
        self.epoch = epoch
        self.operation = operation
        self.why = why
        self.missing = missing


class ProtocolError(RondoError, ConnectionError):
    """The other side broke the wire protocol, or speaks another version of it."""


class Closed(RondoError, RuntimeError):
    """What was asked is closed, and stays closed."""


class Refused(RondoError, RuntimeError):
    """The other side understood and said no: a late epoch, another attempt, a wrong token."""


class Stopping(RondoError, RuntimeError):
    """The run is being stopped: what was waited for comes no more. A role that raises it has left as it should."""


class NotYet(RondoError, RuntimeError):
    """The other side lives and has no answer yet: it is to be asked again, in `after_s` seconds."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what, after_s)
        self.what = what
        self.after_s = after_s

    def __str__(self) -> str:
        return self.what


class RemoteError(RondoError, RuntimeError):
    """An error of the other side whose type does not travel; `type_name` names it."""

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message


class CorruptData(RondoError, ValueError):
    """Bytes that do not match their checksum, or a record that was never finished."""


class OutOfSpace(RondoError, MemoryError):
    """A bounded memory is full."""


class WorkerDied(RondoError, RuntimeError):
    """A process that worked for us ended before its time."""


class SamplerFailed(RondoError, RuntimeError):
    """A sampler of a partition raised, or broke its contract."""


_SHORT_OF = {
    errno.EMFILE: "This process has as many files open as it may: raise `ulimit -n`",
    errno.ENFILE: "The system has as many files open as it may: raise fs.file-max, or end what else runs here",
    errno.ENOSPC: "There is no room, or no inode: see `df -h` and `df -i`, and make room",
    errno.EDQUOT: "Your quota is used up: see `quota`, and make room",
    errno.ENOMEM: "There is no memory: end what else runs here",
    errno.EAGAIN: "There are as many processes as there may be: raise `ulimit -u`, or the pids limit of the control group",
}


def shortage(error: BaseException) -> str | None:
    """What the system is short of where that is why a call failed, and what to do; None for any other error."""
    if isinstance(error, BaseExceptionGroup):
        return next((words for each in error.exceptions if (words := shortage(each)) is not None), None)
    advice = _SHORT_OF.get(error.errno or 0) if isinstance(error, OSError) else None
    return None if advice is None else f"{error}. {advice}"


TRAVELLERS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        RondoError, ConfigError, DeadlineExceeded, PeerGone, ProtocolError, Closed, Refused, Stopping, NotYet, RemoteError,
        CorruptData, OutOfSpace, WorkerDied, SamplerFailed, ValueError, KeyError, TypeError, TimeoutError,
    )
}  # fmt: skip


def describe(error: BaseException) -> dict[str, Any]:
    """The error as JSON values: its type, what its constructor needs, and its traceback with causes; of a cancellation, which
    whoever asked for it knows of, none."""
    from asyncio import CancelledError  # here, since a worker of a pool that imports this module does without

    kind = type(error)
    text = "" if isinstance(error, CancelledError) else _cut("".join(traceback.format_exception(error)))
    if TRAVELLERS.get(kind.__name__) is not kind:
        nearest = next((base for base in kind.__mro__ if base in TRAVELLERS.values()), None)
        if nearest is None or not issubclass(nearest, RondoError):
            return {"type": "RemoteError", "args": [_qualified(kind), _message(error)], "traceback": text}
        kind = nearest
    if isinstance(error, DeadlineExceeded):
        arguments: list[Any] = [error.name, error.waiter, error.peer, error.deadline_s]
    elif isinstance(error, RemoteError):
        arguments = [error.type_name, error.message]
    elif kind is type(error):
        arguments = [_plain(argument) for argument in error.args]
    else:
        arguments = [_message(error)]
    return {"type": kind.__name__, "args": arguments, "traceback": text}


def restore(described: dict[str, Any], peer: str) -> Exception:
    """The error that `describe` described, as raised by `peer`."""
    kind = TRAVELLERS.get(described["type"])
    if kind is None:  # a peer of another build knows a type that this one does not
        kind, arguments = RemoteError, [described["type"], " ".join(map(str, described["args"]))]
    else:
        arguments = described["args"]
    error = kind(*arguments)
    text = described["traceback"]
    error.remote_traceback = text  # type: ignore[attr-defined]  # builtins take attributes too
    error.add_note(f"Remote traceback ({peer}):\n{text}")
    return error


def closest(name: str, known: Collection[str]) -> str | None:
    """The known name that an unknown one is nearest to, if it is near."""
    import difflib  # most processes never need it

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Collection[str], otherwise: str) -> str:
    """What a text about an unknown name ends with."""
    near = closest(name, known)
    return f"Did you mean {near!r}?" if near is not None else otherwise


def _message(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except Exception as failure:  # noqa: BLE001  # an error whose text fails must still arrive
        return f"<its text failed with {_qualified(type(failure))}>"


def _qualified(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _plain(argument: object) -> str | int | float | bool | None:
    if argument is None or isinstance(argument, (bool, float)):
        return argument
    if isinstance(argument, int) and -(2**53) < argument < 2**53:
        return argument
    return _cut(argument if isinstance(argument, str) else repr(argument))


def _cut(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]}\n... {len(text) - MAX_TEXT} characters cut ...\n{text[-MAX_TEXT // 2 :]}"
    # A lone surrogate has no UTF-8 form, and a message must never be the reason that an error does not arrive.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
