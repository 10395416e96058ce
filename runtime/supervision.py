"""Supervision: who is started, ended and started again. A pure state machine with the words of Erlang's OTP.

Owns the decisions: what a death, a silence or a stop leads to. Does not own processes, clocks or sockets: events come in
with the time, actions go out, `supervisor.py` does them.

    children    the store, the coordinator, and the role groups; each start of a child is a new incarnation
    one_for_one a child that fails is started again alone: at once at first, then after a back-off that doubles
    one_for_all the store: everything hangs on it, so its death escalates
    intensity   more than `max_restarts` of a child within `restart_window_s` escalates
    escalate    a global restart: all children end, then start under the next attempt; itself limited; then the run fails

    life of a child:  waiting -> starting -> ready -> ending -> waiting (back-off) | done | ended
                                    leaving (asked to save and end) ---^

Invariants: a child is started only after every process of its last incarnation is proved gone; events of an incarnation
that is not the living one change nothing; the cause that is reported is the first of its chain, not the last symptom.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rondo.runtime.heartbeat import Beat
from rondo.runtime.orders import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    Action,
    Cause,
    Child,
    ChildView,
    Clear,
    DumpStacks,
    Finish,
    Kill,
    Limits,
    Note,
    Phase,
    Start,
    State,
    Strategy,
    TellDead,
    Terminate,
)


@dataclass(slots=True)
class _Life:
    """A child's state. `registered` and `ready` are of the living incarnation: rank -> time, and ranks."""

    child: Child
    incarnation: int
    state: State = State.WAITING
    due: float = 0.0
    started_at: float = 0.0
    ready_at: float | None = None
    died_at: float | None = None
    failed: bool = False
    streak: int = 0
    num_restarts: int = 0
    registered: dict[int, float] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    restarts: collections.deque[tuple[float, Cause]] = field(default_factory=collections.deque)


_RUNS = frozenset({State.STARTING, State.READY, State.LEAVING})
_OVER = frozenset({State.DONE, State.ENDED})


class Supervision:
    """The machine. Every method but the questions at its end takes the time and returns what is to be done, in order.

    `incarnations` are the highest numbers already used for each child; `can_restart` says whether there is a state to
    begin a new attempt from.
    """

    def __init__(
        self,
        children: Iterable[Child],
        limits: Limits,
        *,
        attempt: int = 0,
        incarnations: Mapping[str, int] | None = None,
        can_restart: Callable[[], bool] = lambda: True,
    ) -> None:
        used = incarnations or {}
        self._lives = {child.name: _Life(child, used.get(child.name, 0)) for child in children}
        self._limits = limits
        self._can_restart = can_restart
        self.attempt = attempt
        self.phase = Phase.RUNNING
        self.num_global_restarts = 0
        self.recoveries: list[tuple[str, float]] = []
        """(child, seconds from the death that was seen first to all ranks ready)."""
        self._exit_code = EXIT_DONE
        self._deadline = 0.0
        self._causes: dict[tuple[str, int], Cause] = {}
        self._chain: Cause | None = None  # the first failure since all children were ready
        self._first: Cause | None = None  # the cause of the first escalation since then
        self._ticked_at: float | None = None
        self._forgiven_at = 0.0
        self._progress_at = 0.0
        self._dead: list[tuple[str, int]] = []

    # ---- events -----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        """Starts every child, services first."""
        self._progress_at = now
        return [action for life in self._lives.values() for action in self._start(life, now)]

    def registered(self, name: str, incarnation: int, rank: int, now: float) -> bool:
        """A process names itself. False when it must not go on: it is late, unknown, or the run ends."""
        life = self._living(name, incarnation)
        if life is None or life.state not in (State.STARTING, State.READY) or not 0 <= rank < life.child.num_ranks:
            return False
        life.registered[rank] = now
        return True

    def ready(self, name: str, incarnation: int, rank: int, now: float) -> list[Action]:
        """A rank can do its work."""
        life = self._living(name, incarnation)
        if life is None or life.state is not State.STARTING or not 0 <= rank < life.child.num_ranks:
            return []
        life.ready.add(rank)
        if len(life.ready) < life.child.num_ranks:
            return []
        life.state, life.ready_at = State.READY, now
        data: dict[str, Any] = {"group": name, "incarnation": incarnation, "start_s": now - life.started_at}
        if life.died_at is not None:
            data["recovery_s"] = now - life.died_at
            self.recoveries.append((name, now - life.died_at))
            life.died_at = None
        if all(other.state in (State.READY, State.DONE) for other in self._lives.values()):
            self._chain = self._first = None
        return [Note("ready", data)]

    def failed(
        self,
        name: str,
        incarnation: int,
        what: str,
        now: float,
        *,
        rank: int | None = None,
        pid: int | None = None,
        last_lines: Sequence[str] = (),
        dump: bool = False,
    ) -> list[Action]:
        """The first sign of a death in a child; later ones of the same incarnation are ignored."""
        life = self._living(name, incarnation)
        if life is None or life.state not in _RUNS:
            return []
        life.state = State.ENDING
        cause = Cause(name, incarnation, what, rank, pid, tuple(last_lines))
        self._causes[name, incarnation] = cause
        data = {"group": name, "incarnation": incarnation, "rank": rank, "pid": pid, "cause": what}
        actions: list[Action] = [Note("died", data), Kill(name, incarnation, dump)]
        if self.phase is not Phase.RUNNING:
            return actions
        self._chain = self._chain or cause
        life.failed = True
        life.died_at = now if life.died_at is None else life.died_at
        if life.ready_at is not None and now - life.ready_at >= self._limits.healthy_s:
            life.streak = 0
        while life.restarts and now - life.restarts[0][0] > self._limits.restart_window_s:
            life.restarts.popleft()
        if life.child.strategy is Strategy.ONE_FOR_ALL:
            return actions + self._escalate(f"{name} serves all role groups", self._chain, now)
        if len(life.restarts) >= self._limits.max_restarts:
            first = life.restarts[0][1] if life.restarts else self._chain
            limits = f"{self._limits.max_restarts} restarts in {self._limits.restart_window_s:g} s"
            return actions + self._escalate(f"{name} is beyond {limits}", first, now)
        life.restarts.append((now, self._chain))
        return actions

    def gone(self, name: str, incarnation: int, now: float) -> list[Action]:
        """Every process of this incarnation is proved gone, killed or ended by itself."""
        life = self._living(name, incarnation)
        if life is None or (life.state not in _RUNS and life.state is not State.ENDING):
            return []
        if self.phase is Phase.RUNNING and not life.failed and life.child.strategy is Strategy.ONE_FOR_ALL:
            return self.failed(name, incarnation, "ended by itself", now) + self.gone(name, incarnation, now)
        self._dead.append((name, incarnation))
        if self.phase is not Phase.RUNNING:
            life.state = State.ENDED
            return self._advance(now)
        actions: list[Action] = [] if life.child.service else [TellDead(name, incarnation)]
        if life.failed:
            life.failed = False
            return actions + self._restart(life, now)
        life.state = State.DONE
        actions.append(Note("done", {"group": name, "incarnation": incarnation}))
        if all(other.state is State.DONE for other in self._lives.values() if not other.child.service):
            self._exit_code = EXIT_DONE
            actions += self._close(now)
        return actions

    def stop(self, reason: str, now: float) -> list[Action]:
        """Role groups save and leave within the grace period, then services. Asked again: everything is killed."""
        if self.phase in (Phase.FAILING, Phase.FINISHED):
            return []
        if self.phase is Phase.CLOSING or (self.phase is Phase.STOPPING):
            return [Note("stop_now", {"reason": reason}), *self._kill_all(now)]
        restarting = self.phase is Phase.RESTARTING
        self.phase, self._exit_code = Phase.STOPPING, EXIT_REQUEUE
        self._deadline = now + self._limits.grace_s
        actions: list[Action] = [Note("stopping", {"reason": reason, "grace_s": self._limits.grace_s})]
        for life in self._lives.values():
            if not life.child.service and not restarting:
                actions += self._ask_to_leave(life)
        return actions + self._advance(now)

    def fatal(self, name: str, what: str, now: float) -> list[Action]:
        """Something that no restart repairs, as told by a child: the run fails with this as its cause."""
        if self.phase not in (Phase.RUNNING, Phase.RESTARTING):
            return []
        return self._fail(what, Cause(name, self._lives[name].incarnation if name in self._lives else 0, what), now)

    def progressed(self, now: float) -> None:
        """A step was committed."""
        self._progress_at = now

    def explain(self, name: str, incarnation: int, last_lines: Sequence[str]) -> None:
        """The last lines of a failed child, where they were read after its failure was noticed."""
        old = self._causes.get((name, incarnation))
        if old is not None:
            self._causes[name, incarnation] = replace(old, last_lines=tuple(last_lines))

    def tick(self, now: float, beats: Mapping[str, Sequence[Beat]]) -> list[Action]:
        """Looks at every deadline. `beats` are the heartbeats of the living incarnations, by child."""
        late_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        if late_s > max(1.0, self._limits.silence_s / 2):
            # This process slept (a stopped run, a suspended machine), and so may have all others: they get their time.
            self._forgiven_at = now
            self._progress_at += late_s
        self._ticked_at = now
        actions: list[Action] = []
        for life in self._lives.values():
            if life.state is State.WAITING and self.phase is Phase.RUNNING and now >= life.due:
                actions += self._start(life, now)
            elif life.state in (State.STARTING, State.READY):
                actions += self._judge(life, beats.get(life.child.name, ()), now)
        if self.phase in (Phase.STOPPING, Phase.CLOSING) and now >= self._deadline:
            closing = self.phase is Phase.CLOSING
            actions += [kill for life in self._lives.values() if life.child.service is closing for kill in _kill(life)]
        if self.phase is Phase.RUNNING and now - self._progress_at > self._limits.no_progress_s:
            actions += [Note("no_progress", {"seconds": now - self._progress_at}), DumpStacks()]
            self._progress_at = now
        return actions

    # ---- questions --------------------------------------------------------------------------------------------------

    def views(self) -> tuple[ChildView, ...]:
        return tuple(
            ChildView(
                life.child.name, life.state, life.incarnation, life.child.num_ranks, len(life.ready), life.num_restarts
            )
            for life in self._lives.values()
        )

    def alive(self, name: str) -> bool:
        """Whether the child's newest incarnation was started and is not proved gone."""
        state = self._lives[name].state
        return state in _RUNS or state is State.ENDING

    def dead(self) -> tuple[tuple[str, int], ...]:
        """Every incarnation of this supervisor's life that is proved gone."""
        return tuple(self._dead)

    @property
    def first_cause(self) -> Cause | None:
        """Why the run failed; None while and where it did not."""
        if self._first is None or self._exit_code != EXIT_FAILED:
            return None
        return self._causes.get((self._first.child, self._first.incarnation), self._first)

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _living(self, name: str, incarnation: int) -> _Life | None:
        life = self._lives.get(name)
        return life if life is not None and life.incarnation == incarnation else None

    def _start(self, life: _Life, now: float) -> list[Action]:
        life.incarnation += 1
        life.state, life.started_at, life.ready_at, life.failed = State.STARTING, now, None, False
        life.registered, life.ready = {}, set()
        return [Start(life.child.name, life.incarnation, self.attempt)]

    def _restart(self, life: _Life, now: float) -> list[Action]:
        limits = self._limits
        delay_s = 0.0 if life.streak == 0 else min(limits.max_backoff_s, limits.backoff_s * 2 ** (life.streak - 1))
        life.streak += 1
        life.num_restarts += 1
        life.state, life.due = State.WAITING, now + delay_s
        data = {"group": life.child.name, "incarnation": life.incarnation + 1, "delay_s": delay_s}
        return [Note("restarting", data), *(self._start(life, now) if delay_s == 0.0 else [])]

    def _judge(self, life: _Life, beats: Sequence[Beat], now: float) -> list[Action]:
        """Whether a running child is too slow to start, or one of its ranks silent."""
        child, limits = life.child, self._limits
        arrived = life.state is State.READY or (not child.service and len(life.registered) == child.num_ranks)
        if not arrived and now - life.started_at > limits.start_s:
            what = f"not up within {limits.start_s:g} s"
            return self.failed(child.name, life.incarnation, what, now, dump=True)
        for beat in beats:
            quiet_s = now - max(beat.beat_s, life.registered.get(beat.rank, 0.0), self._forgiven_at)
            limit_s = limits.silence_s + (limits.grace_s if beat.left else 0.0)
            if beat.section_limit_s > 0:
                over_s = min(now - beat.section_limit_s, now - self._forgiven_at - limits.silence_s)
                what = f"section {beat.section!r} is {over_s:.1f} s over its limit" if over_s > 0 else ""
            else:
                what = f"silent for {quiet_s:.1f} s, limit {limit_s:g} s" if quiet_s > limit_s else ""
            if what and (beat.rank in life.registered or life.state is State.READY):
                return self.failed(child.name, life.incarnation, what, now, rank=beat.rank, dump=True)
        return []

    def _ask_to_leave(self, life: _Life) -> list[Action]:
        if life.state is State.WAITING:
            life.state = State.ENDED
        if life.state not in (State.STARTING, State.READY):
            return []
        if not life.child.service and len(life.registered) < life.child.num_ranks:
            return _kill(life)  # it has done nothing yet that could be saved
        life.state = State.LEAVING
        return [Terminate(life.child.name, life.incarnation)]

    def _escalate(self, why: str, cause: Cause, now: float) -> list[Action]:
        if self.num_global_restarts >= self._limits.max_global_restarts:
            return self._fail(f"{why}, after {self.num_global_restarts} global restarts", cause, now)
        if not self._can_restart():
            return self._fail(f"{why}, and there is no checkpoint to start again from", cause, now)
        self._first = self._first or cause
        self.num_global_restarts += 1
        self.phase = Phase.RESTARTING
        data = {"why": why, "attempt": self.attempt + 1, "cause": str(replace(cause, last_lines=()))}
        return [Note("global_restart", data), *self._kill_all(now)]

    def _fail(self, why: str, cause: Cause, now: float) -> list[Action]:
        self._first = self._first or cause
        self.phase, self._exit_code = Phase.FAILING, EXIT_FAILED
        return [Note("failed", {"why": why, "cause": str(replace(cause, last_lines=()))}), *self._kill_all(now)]

    def _close(self, now: float) -> list[Action]:
        self.phase, self._deadline = Phase.CLOSING, now + self._limits.service_grace_s
        leaving = [action for life in self._lives.values() for action in self._ask_to_leave(life)]
        return leaving + self._advance(now)

    def _kill_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for life in self._lives.values():
            if life.state is State.WAITING:
                life.state = State.ENDED
            actions += _kill(life)
        return actions + self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Goes on when what a phase waits for is over."""
        lives = self._lives.values()
        all_over = all(life.state in _OVER for life in lives)
        if self.phase is Phase.STOPPING and all(life.state in _OVER for life in lives if not life.child.service):
            return self._close(now)
        if self.phase is Phase.RESTARTING and all_over:
            self.phase, self._chain = Phase.RUNNING, None
            self.attempt += 1
            for life in lives:
                life.streak = 0
                life.restarts.clear()
            return [Clear(self.attempt), *self.begin(now)]
        if self.phase in (Phase.CLOSING, Phase.FAILING) and all_over:
            self.phase = Phase.FINISHED
            return [Finish(self._exit_code)]
        return []


def _kill(life: _Life) -> list[Action]:
    if life.state not in _RUNS:
        return []
    life.state = State.ENDING
    return [Kill(life.child.name, life.incarnation)]
