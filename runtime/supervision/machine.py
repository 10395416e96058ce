"""Supervision: who is started, ended and started again. A pure state machine with the words of Erlang's OTP.

Owns the decisions: what a death, a silence or a stop leads to. Does not own processes, clocks or sockets: events come in
with the time, actions go out, `supervisor.py` does them.

    children    the store, the coordinator, and the role groups; each start of a child is a new incarnation
    one_for_one a child that fails is started again alone: at once at first, then after a back-off that doubles
    one_for_all the store: all role groups end with it, then it and they start again; the coordinator goes on
    intensity   more than `max_restarts` of a child within `restart_window_s` escalates
    escalate    a global restart: all children end, then start under the next attempt; itself limited; then the run fails
    add         a role group more, in a run that goes on: until it was ready once, it cannot make anything escalate
    drain       a role group ends what it has and leaves: to be forgotten, or to start again as a new incarnation
    no progress nothing moves (`standstill.py`): the group whose section stands longest starts again (where nobody computes, the
                coordinator), then all role groups with the store, then it escalates
    stop        role groups save and leave, then services; asked for again, it is the same stop, unless it is to be quick.
                Who holds what there is to save, and is being started (again), comes up for it first
    notice      a stop with a deadline: who is left by then is killed, also one that saves

    life of a child:  waiting -> starting -> ready -> ending -> waiting (back-off) | done | ended | forgotten
                                               `-> draining ---^
                                    leaving (asked to save and end) ---^

Invariants: a child is started only after every process of its last incarnation is proved gone; events of an incarnation
that is not the living one change nothing; a service that ends before it is asked to has failed, whatever its exit code; a stop
ends with EXIT_REQUEUE only where there is something to go on from; the cause that is reported is the first of its chain, not
the last symptom.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondo.runtime.supervision.heartbeat import Beat
from rondo.runtime.supervision.life import COMING, OVER, RUNS, Life, kill, view
from rondo.runtime.supervision.orders import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
    EXIT_USAGE,
    Action,
    Cause,
    Child,
    ChildView,
    Clear,
    Finish,
    Kill,
    Note,
    Phase,
    Start,
    State,
    Strategy,
    TellDead,
    TellDraining,
    Terminate,
)
from rondo.runtime.supervision.standstill import Standstill

if TYPE_CHECKING:
    from rondo.runtime.config import SupervisionConfig

_BACKOFF_S = 1.0
_HEALTHY_S = 600.0
"""A child that was ready for so long starts again at once, as after its first death."""
_SERVICE_GRACE_S = 5.0
"""From when a service is asked to leave until it is killed."""
_SERVES = frozenset({State.STARTING, State.READY, State.DRAINING})
_UP = frozenset({State.READY, State.DRAINING, State.DONE})


class Supervision:
    """The machine. Every method but the questions at its end takes the time and returns what is to be done, in order.

    `incarnations` are the highest numbers already used for each child; `can_restart` says whether there is a state to
    begin a new attempt from, in this run or in one that is resumed; `find_state` chooses it, once nothing runs any more, and
    says whether there was one.
    """

    def __init__(
        self,
        children: Iterable[Child],
        limits: SupervisionConfig,
        *,
        attempt: int = 0,
        incarnations: Mapping[str, int] | None = None,
        can_restart: Callable[[], bool] = lambda: True,
        find_state: Callable[[], bool] = lambda: True,
    ) -> None:
        self._used = incarnations or {}
        self._lives = {child.name: Life(child, self._used.get(child.name, 0)) for child in children}
        self._restarts_of_left: Counter[str] = Counter()
        self._limits = limits
        self._can_restart, self._find_state = can_restart, find_state
        self.attempt = attempt
        self.phase = Phase.RUNNING
        self.num_global_restarts = 0
        self.recoveries: list[tuple[str, float]] = []
        """(child, seconds from the death that was seen first to all ranks ready)."""
        self._exit_code = EXIT_DONE
        self._committed = False  # in this attempt
        self._causes: dict[tuple[str, int], Cause] = {}
        self._open: dict[str, Cause] = {}  # the first failure of each child since it was ready, in their order
        self._first: Cause | None = None  # the cause of the first escalation since all children were ready
        self._unsaved: Cause | None = (
            None  # the first role group that failed while it left, or told why it saves nothing
        )
        self._late: Cause | None = None  # the first that did not leave in time
        self._gone_by = math.inf  # when a stop is made quick
        self._meeting: Life | None = None  # a service that starts again with all role groups, once all are gone
        self._save_s = 0.0
        self._ticked_at: float | None = None
        self._forgiven_at = 0.0
        self._standstill = Standstill(limits.no_progress_s)
        self._stood: Cause | None = None  # what its first turn was for
        self._dead: list[tuple[str, int]] = []

    # ---- events -----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> list[Action]:
        """Starts every child, services first."""
        self._standstill.begin(now)
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
        life.state, life.ready_at, life.on_trial = State.READY, now, False
        data: dict[str, Any] = {"group": name, "incarnation": incarnation, "start_s": now - life.started_at}
        if life.died_at is not None:
            data["recovery_s"] = now - life.died_at
            self.recoveries.append((name, now - life.died_at))
            life.died_at = None
        self._open.pop(name, None)
        if self._all_up():
            self._first = None
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
        if life is None or life.state not in RUNS:
            return []
        leaving, draining, life.state = life.state is State.LEAVING, life.state is State.DRAINING, State.ENDING
        cause = Cause(name, incarnation, what, rank, pid, tuple(last_lines))
        self._causes[name, incarnation] = cause
        data = {"group": name, "incarnation": incarnation, "rank": rank, "pid": pid, "cause": what}
        actions: list[Action] = [Note("died", data), Kill(name, incarnation, dump)]
        if life.removed or (life.again and draining):
            return actions
        stopping = self.phase is Phase.STOPPING
        # Who dies while it leaves has another try to save, unless it told that it cannot, or is over its time.
        saves = stopping and leaving and life.child.saves and self._committed and not (life.comes_up or self._unsaved)
        if stopping and not life.child.service:
            self._unsaved = self._unsaved or cause
        if saves and now < life.leave_by:
            life.comes_up, life.leave_by = True, now + self._limits.grace_s
        # Who saves asks the coordinator: it is there until the last role group has left.
        elif self.phase is not Phase.RUNNING and not (stopping and life.serves_alone):
            return actions
        self._open.setdefault(name, cause)
        life.failed = True
        life.died_at = now if life.died_at is None else life.died_at
        if life.ready_at is not None and now - life.ready_at >= _HEALTHY_S:
            life.streak = 0
        while life.restarts and now - life.restarts[0][0] > self._limits.restart_window_s:
            life.restarts.popleft()
        if life.child.strategy is Strategy.ESCALATE:
            return actions + self._escalate(f"{name} serves all role groups", cause, now)
        if len(life.restarts) >= self._limits.max_restarts:
            life.failed = False
            if stopping:
                return actions
            if life.on_trial:
                life.removed = True
                return [*actions, Note("given_up", {"group": name, "incarnation": incarnation, "cause": what})]
            limits = f"{self._limits.max_restarts} restarts in {self._limits.restart_window_s:g} s"
            return actions + self._escalate(f"{name} is beyond {limits}", self._origin(life, cause), now)
        life.restarts.append((now, cause))
        return actions + (self._end_groups(life, now) if life.child.strategy is Strategy.ONE_FOR_ALL else [])

    def gone(self, name: str, incarnation: int, now: float) -> list[Action]:
        """Every process of this incarnation is proved gone, killed or ended by itself."""
        life = self._living(name, incarnation)
        if life is None or (life.state not in RUNS and life.state is not State.ENDING):
            return []
        if life.child.service and life.state in (State.STARTING, State.READY):
            signs = self.failed(name, incarnation, "ended by itself", now)
            return [sign for sign in signs if sign != Kill(name, incarnation)] + self.gone(name, incarnation, now)
        self._dead.append((name, incarnation))
        if life.removed:
            return self._forget(life, now)
        actions: list[Action] = [] if life.child.service else [TellDead(name, incarnation)]
        if life.again and not life.failed and self.phase is Phase.RUNNING:
            return [*actions, *self._start(life, now)]
        if life.failed and self.phase in (Phase.RUNNING, Phase.STOPPING):
            life.failed = False
            if self._meeting is None or (life is not self._meeting and life.child.service):
                return actions + self._restart(life, now)
            life.state, life.due = State.WAITING, math.inf
            return actions + self._start_groups(now)
        if self.phase is not Phase.RUNNING:
            life.state = State.ENDED
            return self._advance(now)
        life.state = State.DONE
        return [*actions, Note("done", {"group": name, "incarnation": incarnation}), *self._close_if_done(now)]

    def add(self, child: Child, now: float) -> list[Action]:
        """A role group more. Its name is new in this run."""
        assert self.phase is Phase.RUNNING and child.name not in self._lives
        life = self._lives[child.name] = Life(child, self._used.get(child.name, 0), on_trial=True)
        if self._meeting is not None:  # it starts with all others
            life.due = math.inf
            return []
        return self._start(life, now)

    def drain(self, name: str, now: float, *, deadline_s: float, again: bool = False) -> list[Action]:
        """A role group ends what it has (one that trains, its step), and leaves; killed after `deadline_s`. Then it is forgotten,
        or starts `again`. One that is not up has nothing to end: it is forgotten at once, or goes on to start."""
        assert self.phase is Phase.RUNNING
        life = self._lives[name]
        if again and life.state in COMING | OVER:
            return []
        life.removed, life.again = not again, again
        data = {"group": name, "incarnation": life.incarnation, "deadline_s": deadline_s, "again": again}
        actions: list[Action] = [Note("draining", data)]
        if life.state is State.READY:
            life.state, life.leave_by = State.DRAINING, math.inf
            actions.append(TellDraining(name, life.incarnation))
        if life.state is State.DRAINING:
            life.leave_by = min(life.leave_by, now + deadline_s)
            return actions + (kill(life) if deadline_s <= 0 else [])
        if life.state in (State.WAITING, *OVER):
            return actions + self._forget(life, now)
        return actions + kill(life)

    def stay(self, name: str) -> list[Action]:
        """A role group that was to leave stays, or comes back where it cannot any more."""
        life = self._lives[name]
        if not (life.removed or life.again):
            return []
        life.removed, life.again = False, True
        if life.state is not State.DRAINING:
            return []
        life.state, life.leave_by = State.READY, math.inf
        note = Note("stays", {"group": name, "incarnation": life.incarnation})
        return [note, TellDraining(name, life.incarnation, stays=True)]

    def stop(self, reason: str, now: float, *, quick: bool = False, within_s: float | None = None) -> list[Action]:
        """Role groups save and leave, then services. However often it is asked for, it is one stop; `quick` kills everything, as
        does the end of `within_s` seconds, the shortest that was asked for."""
        if self.phase in (Phase.FAILING, Phase.FINISHED):
            return []
        grace_s = self._limits.grace_s if within_s is None else within_s
        self._gone_by = min(self._gone_by, math.inf if within_s is None else now + within_s)
        if self.phase in (Phase.RUNNING, Phase.RESTARTING):
            restarting = self.phase is Phase.RESTARTING
            self.phase, self._exit_code = Phase.STOPPING, EXIT_REQUEUE
            comes_up = self._committed and self._meeting is None and not (restarting or quick)
            self._meeting = None
            actions: list[Action] = [Note("stopping", {"reason": reason, "grace_s": grace_s})]
            for life in self._lives.values():
                life.leave_by = now + grace_s
                life.failed = life.failed or life.kept
                life.comes_up = comes_up and life.child.saves and (life.failed or life.state in COMING)
                life.failed = life.failed and (life.serves_alone or life.comes_up)
                if life.comes_up:
                    life.due, life.streak = now, 0
                if not (life.child.service or restarting or quick):
                    actions += self._ask_to_leave(life)
            actions += self._advance(now)
        else:
            actions = [] if quick else [Note("stops_already", {"reason": reason, "grace_s": grace_s})]
        if quick:
            self._late = self._late or Cause("supervisor", self.attempt, f"stopped at once, without saving: {reason}")
        return actions + ([Note("stop_now", {"reason": reason}), *self._kill_all(now)] if quick else [])

    def saved(self, save_s: float) -> list[Action]:
        """A checkpoint is whole, after so many seconds. A grace that is shorter is told: others may hold the run to it."""
        longer = save_s > max(self._limits.grace_s, 2 * self._save_s)
        self._save_s = max(save_s, self._save_s) if longer else self._save_s
        what = "a save takes longer than supervision.grace_s; whoever stops this run must wait for it, up to supervision.save_s"
        return (
            [Note("short_grace", {"save_s": save_s, "grace_s": self._limits.grace_s, "what": what})] if longer else []
        )

    def unsaved(self, name: str, what: str) -> None:
        """Why a role group that leaves saves nothing, as it tells."""
        if name in self._lives:
            self._unsaved = self._unsaved or Cause(name, self._lives[name].incarnation, what)

    def kept(self, name: str, now: float) -> None:
        """A role group that was to start again leaves its newest version in its hot snapshot: at a stop it comes up to save."""
        life = self._lives.get(name)
        if life is not None:
            life.kept = True
            if self.phase is Phase.STOPPING and life.state is State.LEAVING and now < life.leave_by:
                life.failed = life.comes_up = True

    def fatal(self, name: str, what: str, now: float, exit_code: int = EXIT_FAILED) -> list[Action]:
        """Something that no restart repairs, as told by a child: the run fails with this as its cause, and ends with that exit
        code; one that is being stopped does so if it has nothing to go on from."""
        if self.phase is Phase.STOPPING:
            self.unsaved(name, what)
        if self.phase not in (Phase.RUNNING, Phase.RESTARTING):
            return []
        return self._fail(
            what, Cause(name, self._lives[name].incarnation if name in self._lives else 0, what), now, exit_code
        )

    def committed(self, now: float) -> None:
        """There is a version that this attempt has made."""
        self._committed = True
        self.progressed(now)

    def progressed(self, now: float) -> None:
        """A role has done something."""
        self._standstill.moved(now)

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
            self._standstill.slept(late_s)
        self._ticked_at = now
        actions: list[Action] = []
        for life in self._lives.values():
            if life.state is State.WAITING and self.phase in (Phase.RUNNING, Phase.STOPPING) and now >= life.due:
                actions += self._start(life, now)
            elif life.state is State.DRAINING and now >= life.leave_by and self.phase is Phase.RUNNING:
                actions += [Note("forced", {"group": life.child.name, "incarnation": life.incarnation}), *kill(life)]
            elif life.state in _SERVES:
                actions += self._judge(life, beats.get(life.child.name, ()), now)
                actions += self._ask_to_leave(life) if life.comes_up else []
        if self.phase in (Phase.STOPPING, Phase.CLOSING):
            if now >= self._gone_by:
                self._gone_by = math.inf
                return actions + self.stop("the time that a notice left is over", now, quick=True)
            for life in self._lives.values():
                if life.child.service is (self.phase is Phase.CLOSING):
                    actions += self._insist(life, beats.get(life.child.name, ()), now)
        if self.phase is Phase.RUNNING:
            seen = {name: beats.get(name, ()) for name, life in self._lives.items() if not life.on_trial}
            actions += self._standstill.watch(now, seen, all_up=self._all_up())
        return actions

    def dumped(self, now: float, beats: Mapping[str, Sequence[Beat]]) -> list[Action]:
        """All stacks are written down, and still nothing has moved."""
        if self.phase is not Phase.RUNNING or not self._all_up():
            return []
        lives = self._lives
        seen = {
            name: beats.get(name, ()) for name, life in lives.items() if life.state in (State.READY, State.DRAINING)
        }
        standing = self._standstill.dumped(now, seen)
        if standing is None:
            return []
        what = standing.what
        if standing.turn == 1:
            if standing.child is not None:
                life = lives[standing.child]
            else:
                life = next(life for life in lives.values() if life.serves_alone)
                what += ", and nobody computes: all wait for it"
            actions = self.failed(life.child.name, life.incarnation, what, now, rank=standing.rank)
            self._stood = self._causes[life.child.name, life.incarnation]
            return actions
        assert self._stood is not None
        what += f" after a restart of {self._stood.child}"
        if standing.turn == 2:
            store = next(life for life in lives.values() if life.child.service and not life.serves_alone)
            return self.failed(store.child.name, store.incarnation, what, now)
        return self._escalate(f"{what} and of all role groups", self._stood, now)

    # ---- questions --------------------------------------------------------------------------------------------------

    def views(self) -> tuple[ChildView, ...]:
        return tuple(map(view, self._lives.values()))

    def restarts(self) -> dict[str, int]:
        """Of every child that had any, those that have left too."""
        counts = self._restarts_of_left + Counter({name: life.num_restarts for name, life in self._lives.items()})
        return dict(counts)

    def alive(self, name: str) -> bool:
        """Whether the child's newest incarnation was started and is not proved gone."""
        state = self._lives[name].state
        return state in RUNS or state is State.ENDING

    def last_failure(self, name: str) -> str:
        """What a child failed of last, one that was given up too; empty where it has not."""
        return next((cause.what for (child, _), cause in reversed(self._causes.items()) if child == name), "")

    def dead(self) -> tuple[tuple[str, int], ...]:
        """Every incarnation of this supervisor's life that is proved gone."""
        return tuple(self._dead)

    @property
    def first_cause(self) -> Cause | None:
        """Why the run failed; None while and where it did not."""
        if self._first is None or self._exit_code not in (EXIT_FAILED, EXIT_USAGE):
            return None
        told = self._causes.get((self._first.child, self._first.incarnation), self._first)
        return told if told.what == self._first.what else self._first  # the same, by now with its last lines

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _living(self, name: str, incarnation: int) -> Life | None:
        life = self._lives.get(name)
        return life if life is not None and life.incarnation == incarnation else None

    def _start(self, life: Life, now: float) -> list[Action]:
        life.incarnation += 1
        life.state, life.started_at, life.ready_at, life.failed, life.again = State.STARTING, now, None, False, False
        life.registered, life.ready, life.kept = {}, set(), False
        self._standstill.started(life.child.name)
        return [Start(life.child.name, life.incarnation, self.attempt)]

    def _restart(self, life: Life, now: float) -> list[Action]:
        delay_s = 0.0 if life.streak == 0 else min(self._limits.max_backoff_s, _BACKOFF_S * 2 ** (life.streak - 1))
        life.streak += 1
        life.num_restarts += 1
        life.state, life.due = State.WAITING, now + delay_s
        data = {"group": life.child.name, "incarnation": life.incarnation + 1, "delay_s": delay_s}
        return [Note("restarting", data), *(self._start(life, now) if delay_s == 0.0 else [])]

    def _judge(self, life: Life, beats: Sequence[Beat], now: float) -> list[Action]:
        """Whether a running child is too slow to start, or one of its ranks silent."""
        child, limits = life.child, self._limits
        arrived = life.state is not State.STARTING or (not child.service and life.all_registered)
        if not arrived and now - life.started_at > limits.start_s:
            what = f"not up within {limits.start_s:g} s"
            return self.failed(child.name, life.incarnation, what, now, dump=True)
        for beat in beats:
            quiet_s = now - max(beat.beat_s, life.registered.get(beat.rank, 0.0), self._forgiven_at)
            limit_s = limits.silence_s + (limits.grace_s if beat.left else 0.0)
            over_s = min(now - beat.section_limit_s, now - self._forgiven_at - limits.silence_s)
            what = ""
            if beat.section_limit_s > 0 and over_s > 0:
                what = f"section {beat.section!r} is {over_s:.1f} s over its limit"
            elif quiet_s > limit_s and not beat.silent:
                what = f"silent for {quiet_s:.1f} s, limit {limit_s:g} s"
            # A service reads its journal on its loop, for as long as it may take to start.
            if what and (life.state is not State.STARTING or (beat.rank in life.registered and not child.service)):
                return self.failed(child.name, life.incarnation, what, now, rank=beat.rank, dump=True)
        return []

    def _all_up(self) -> bool:
        return all(life.on_trial or life.state in _UP for life in self._lives.values())

    def _ask_to_leave(self, life: Life) -> list[Action]:
        if life.state is State.WAITING and not life.comes_up:
            life.state = State.ENDED
        if life.state not in _SERVES:
            return []
        if not (life.child.service or life.all_registered):
            return [] if life.comes_up else kill(life)  # it has done nothing yet that could be saved
        life.state = State.LEAVING
        return [Terminate(life.child.name, life.incarnation)]

    def _insist(self, life: Life, beats: Sequence[Beat], now: float) -> list[Action]:
        """Who saves has the time of its save, and a moment to leave; who comes up for it has that time, and the grace then."""
        if any(now <= beat.save_limit_s for beat in beats):
            life.leave_by = max(life.leave_by, now + _SERVICE_GRACE_S)
        elif life.comes_up and (not life.all_registered or any(b.patient and now <= b.section_limit_s for b in beats)):
            life.leave_by = now + self._limits.grace_s
        if life.state not in RUNS or now < life.leave_by:
            return []
        if any(beat.save_limit_s for beat in beats):
            return self.failed(life.child.name, life.incarnation, "its save is over supervision.save_s", now, dump=True)
        if not life.child.service:
            what = f"not left within supervision.grace_s, {self._limits.grace_s:g} s"
            self._late = self._late or Cause(life.child.name, life.incarnation, what)
        return kill(life)

    def _origin(self, life: Life, cause: Cause) -> Cause:
        """What a child that fails again and again fails of: another one that is not back yet, else its own first failure."""
        first = next(iter(self._open.values()))
        return first if first.child != life.child.name or not life.restarts else life.restarts[0][1]

    def _end_groups(self, service: Life, now: float) -> list[Action]:
        """All role groups end with the service that they meet in."""
        self._meeting = service
        why = f"{service.child.name} serves all role groups, which start again with it"
        actions: list[Action] = [Note("restarting_groups", {"why": why})]
        for life in self._lives.values():
            if life.child.service or life.state in OVER:
                continue
            if life.state is State.WAITING:
                life.due = math.inf
                continue
            life.failed = not life.removed
            life.died_at = now if life.died_at is None else life.died_at
            actions += kill(life)
        return actions

    def _start_groups(self, now: float) -> list[Action]:
        """Once the service and all role groups are gone, it starts and they with it; after its back-off, if it has one."""
        service = self._meeting
        assert service is not None
        groups = [life for life in self._lives.values() if not life.child.service and life.state not in OVER]
        if any(life.state is not State.WAITING for life in (service, *groups)):
            return []
        self._meeting = None
        actions = self._restart(service, now)
        for life in groups:
            life.num_restarts += 1
            life.due = service.due
            actions += self._start(life, now) if service.state is State.STARTING else []
        return actions

    def _escalate(self, why: str, cause: Cause, now: float) -> list[Action]:
        self._meeting = None
        if self.num_global_restarts >= self._limits.max_global_restarts:
            return self._fail(f"{why}, after {self.num_global_restarts} global restarts", cause, now)
        if not self._can_restart():
            return self._fail(f"{why}, and there is no checkpoint to start again from", cause, now)
        self._first = self._first or cause
        self.num_global_restarts += 1
        self.phase = Phase.RESTARTING
        data = {"why": why, "attempt": self.attempt + 1, "cause": str(replace(cause, last_lines=()))}
        return [Note("global_restart", data), *self._kill_all(now)]

    def _fail(self, why: str, cause: Cause, now: float, exit_code: int = EXIT_FAILED) -> list[Action]:
        self._first = self._first or cause
        self.phase, self._exit_code = Phase.FAILING, exit_code
        self._meeting = None
        return [self._told(why, cause), *self._kill_all(now)]

    def _forget(self, life: Life, now: float) -> list[Action]:
        """It is gone for good; who waited for that goes on."""
        name = life.child.name
        del self._lives[name]
        self._open.pop(name, None)
        self._restarts_of_left[name] += life.num_restarts
        data = {"group": name, "incarnation": life.incarnation}
        actions: list[Action] = [TellDead(name, life.incarnation, left=True), Note("left", data)]
        if self.phase is not Phase.RUNNING:
            return actions + self._advance(now)
        return actions + (self._start_groups(now) if self._meeting is not None else self._close_if_done(now))

    def _close_if_done(self, now: float) -> list[Action]:
        """The run is over when all role groups are done."""
        if any(life.state is not State.DONE for life in self._lives.values() if not life.child.service):
            return []
        self._exit_code = EXIT_DONE
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        self.phase = Phase.CLOSING
        actions: list[Action] = []
        for life in self._lives.values():
            life.leave_by = now + _SERVICE_GRACE_S
            actions += self._ask_to_leave(life)
        return actions + self._advance(now)

    def _kill_all(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for life in self._lives.values():
            life.failed = False
            if life.state is State.WAITING:
                life.state = State.ENDED
            actions += kill(life)
        return actions + self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Goes on when what a phase waits for is over."""
        lives = self._lives.values()
        all_over = all(life.state in OVER for life in lives)
        if self.phase is Phase.STOPPING and all(life.state in OVER for life in lives if not life.child.service):
            return self._close(now)
        if self.phase is Phase.RESTARTING and all_over:
            if not self._find_state():
                assert self._first is not None
                return self._fail("no checkpoint is whole to start again from", self._first, now)
            self.phase = Phase.RUNNING
            self._open.clear()
            self._committed = False
            self.attempt += 1
            for life in lives:
                life.streak, life.failed = 0, False
                life.restarts.clear()
            return [Clear(self.attempt), *self.begin(now)]
        if self.phase in (Phase.CLOSING, Phase.FAILING) and all_over:
            self.phase = Phase.FINISHED
            if self._exit_code == EXIT_REQUEUE and not self._can_restart():
                self._exit_code = EXIT_FAILED
                nothing = Cause("supervisor", self.attempt, "stopped before a version was committed")
                self._first = self._unsaved or self._late or nothing
                return [self._told("stopped without a checkpoint to go on from", self._first), Finish(EXIT_FAILED)]
            return [Finish(self._exit_code)]
        return []

    def _told(self, why: str, cause: Cause) -> Note:
        return Note("failed", {"why": why, "cause": str(replace(cause, last_lines=()))})
