"""A bound on the processor time of what cannot say how long it takes, in this process.

with at_most(1.0):      # TookTooLong in the body after a second of processor time, whatever a loaded machine's clock says
    verify(right, answer)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.1


class TookTooLong(BaseException):
    """What no library catches as an error of its own."""


@contextmanager
def at_most(processor_s: float) -> Iterator[None]:
    """Raises TookTooLong in the body once this process has computed for so long, and again where that was swallowed, as in a
    destructor. Beside the main thread, which alone has signals, the body may take what it takes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, processor_s, _AGAIN_S)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:  # also where it came in between
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
