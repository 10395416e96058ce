"""Whether this machine keeps the promises that the ring stands on, tried between two real processes.

Owns the experiment that `rondo check` and the tests run: two processes, one piece of shared memory, two doorbells. Owns
no part of the bus.

    litmus(num_rounds=20_000)  # Litmus(num_rounds=20000, lost=0, torn=0, unseen=0)

Two things are tried. In the first part the producer runs freely and the consumer looks without draining (only where
`PEEK_IS_SAFE`): every head it sees must be whole, and the payload stored before it must be there. In the second each
round is forced: both sides sleep on their doorbell until the other has stored and rung, so that one lost wake-up stops
everything.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass

from rondo.comm.ring.words import LINE_BYTES, PEEK_IS_SAFE, Words, drain, new_doorbell, ring_doorbell
from rondo.runtime.processes.guard import module_command

_HEAD, _PAYLOAD, _REPLY, _NUM_WORDS = range(4)
_PATTERN = 0x0000_0001_0000_0001  # n * _PATTERN has equal halves: half a store would show


@dataclass(frozen=True, slots=True)
class Litmus:
    """What went wrong in `num_rounds`: wake-ups that never came, words seen half-stored, payloads older than their
    head."""

    num_rounds: int
    lost: int
    torn: int
    unseen: int

    @property
    def ok(self) -> bool:
        return not (self.lost or self.torn or self.unseen)


def litmus(num_rounds: int = 20_000, deadline_s: float = 10.0) -> Litmus:
    """Run both parts with a child process. `deadline_s` is how long one wake-up may take before it counts as lost."""
    memory_fd = os.memfd_create("litmus", os.MFD_CLOEXEC)
    os.ftruncate(memory_fd, mmap.PAGESIZE)
    fds = (memory_fd, new_doorbell(), new_doorbell())
    command = module_command("rondo.comm.ring.litmus", *map(str, fds), str(num_rounds), str(deadline_s))
    child = subprocess.Popen(command, pass_fds=fds)
    try:
        return _consume(*_open(*fds), num_rounds, deadline_s)
    finally:
        child.kill()
        child.wait()
        for fd in fds:
            os.close(fd)


def _open(memory_fd: int, there: int, back: int) -> tuple[Words, int, int]:
    view = memoryview(mmap.mmap(memory_fd, mmap.PAGESIZE))
    return Words(view, 0, mmap.PAGESIZE // LINE_BYTES), there, back


def _wait(doorbell: int, deadline_s: float) -> bool:
    poller = select.poll()
    poller.register(doorbell, select.POLLIN)
    return bool(poller.poll(deadline_s * 1000))


def _consume(words: Words, there: int, back: int, num_rounds: int, deadline_s: float) -> Litmus:
    torn = unseen = head = 0
    limit = time.monotonic() + deadline_s
    while head < num_rounds:
        if not PEEK_IS_SAFE:
            _wait(there, deadline_s)
            drain(there)
        seen = words.load(_HEAD)
        payload = words.load(_PAYLOAD)
        if time.monotonic() > limit:
            return Litmus(num_rounds, 1, torn, unseen)
        if seen != head * _PATTERN:
            head = seen & 0xFFFF_FFFF
            limit = time.monotonic() + deadline_s
        torn += seen != head * _PATTERN
        unseen += payload < seen
    ring_doorbell(back)
    for number in range(num_rounds + 1, 2 * num_rounds + 1):
        seen = 0
        while seen < number * _PATTERN:
            if not _wait(there, deadline_s):
                return Litmus(num_rounds, 1, torn, unseen)
            drain(there)
            seen = words.load(_HEAD)
        unseen += words.load(_PAYLOAD) < seen
        words.store(_REPLY, number)
        ring_doorbell(back)
    return Litmus(num_rounds, 0, torn, unseen)


def _produce(words: Words, there: int, back: int, num_rounds: int, deadline_s: float) -> None:
    for number in range(1, 2 * num_rounds + 1):
        words.store(_PAYLOAD, number * _PATTERN)
        words.store(_HEAD, number * _PATTERN)
        ring_doorbell(there)
        if number < num_rounds:
            continue
        answered = False
        while not answered:
            if not _wait(back, deadline_s):
                return  # the consumer counts it
            drain(back)
            answered = number == num_rounds or words.load(_REPLY) >= number


if __name__ == "__main__":
    memory, there, back, rounds = map(int, sys.argv[1:5])
    _produce(*_open(memory, there, back), rounds, float(sys.argv[5]))
