"""Whether a server that runs is of no use any more: nobody there answers, or nothing comes of what it has to do.

A pure fold over looks at it, each of which asks it two questions: one that whoever speaks HTTP there answers, and one that its
scheduler does, between two batches. Does not own the questions, nor the clock (`restarts.py`).

    deaf    two looks in a row were not answered, each within DEAF_S and DEAF_TIMES its slowest answer, and meanwhile nothing else
            was either: no call, no bucket of new weights, no token. Whatever it does: who answers has no weights to load
    frozen  as deaf, but of its scheduler alone: no token came, and none of the server's processes computed. A long batch, kernels
            that are compiled, and a device that is waited for by asking it take a processor's time, and are `stuck` at most
    stopped two looks in a row, a process of it was (SIGSTOP), as the kernel says: nothing comes of what it takes part in
    stuck   it answers, and for `silent_s` makes no token for requests that it has (or has none, and no answer of its scheduler)

New weights and sleep excuse all but `deaf` and `stopped`: a server that waits for the trainer computes nothing either, and its
time is that of the update (`Patience`). An update that failed, from its limit on, excuses nothing.

    silence = Silence(silent_s=300, now=clock())
    why = silence.looked(clock(), took_s=0.01, answered=True, scheduled=True, heard=True, made=512, computes=True, stopped=False,
                         excused=False)

Invariant: no server is called deaf that has answered anything since it was asked, however slow it is, nor frozen that computes.
"""

from __future__ import annotations

DEAF_S, DEAF_TIMES = 5.0, 4.0
_LOOK_S = 5.0


class Silence:
    """Of one server; seconds on the caller's clock. `silent_s`: within it both kinds are told."""

    def __init__(self, silent_s: float, now: float) -> None:
        self._silent_s = silent_s
        self._look_s = min(_LOOK_S, silent_s / 4)
        self.pause_s = self._look_s
        """Until the next look."""
        self._slowest_s = 0.0
        self._unheard: dict[str, float] = {}
        """Since when, of those who were not heard at the last look."""
        self._made, self._moved_at = -1, now

    @property
    def patience_s(self) -> float:
        """How long a question waits for its answer."""
        return min(DEAF_S + DEAF_TIMES * self._slowest_s, (self._silent_s - self._look_s) / 2)

    def looked(
        self, now: float, *, took_s: float, answered: bool, scheduled: bool, heard: bool, made: int, computes: bool,
        stopped: bool, excused: bool,
    ) -> str:  # fmt: skip
        """Why it is of no use; empty while it may be. `took_s`: both questions, of which `scheduled` says that the second one was
        answered, or not asked; `heard`: anything since then; `made`: tokens until now; `computes`: its processes meanwhile, or
        they may; `stopped`: one of them is; `excused`: it rightly makes none."""
        moved = made != self._made or excused
        silent = {
            "it": not (answered or heard),
            "its scheduler": answered and not (scheduled or moved or computes),
            "a stopped process of it": stopped,
        }
        self.pause_s = max(0.0, self.patience_s - took_s) if any(silent.values()) else self._look_s
        if answered and scheduled:
            self._slowest_s = max(self._slowest_s, took_s)
        if moved:
            self._made, self._moved_at = made, now
        for who, is_silent in silent.items():
            if not is_silent:
                self._unheard.pop(who, None)
            elif who in self._unheard:
                return f"{who} answered nothing for {now - self._unheard[who]:.1f} s"
            else:
                self._unheard[who] = now - took_s
        return f"it was silent for {self._silent_s:g} s" if now - self._moved_at >= self._silent_s else ""
