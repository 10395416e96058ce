"""Supervisor: the process that starts, watches and restarts everything of a run on its node.

Owns the processes and the records of a run; what it owns beside them is its `Estate`. Does not own decisions: every event
goes to `supervision.py`, and this shell does what comes back.

    pidfds, registrations, ready, heartbeats, signals, reports  ->  Supervision  ->  start, signal, kill, tell, note

Invariants: no await without a deadline; a life is replaced only after every process of it is proved gone; when `run`
returns, or this process dies in any way, no process of the run is left, and its run-time directory is gone.

    outcome = await Supervisor(config, on_event=print).run()        # on the main thread: children die with their thread
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import DeadlineExceeded, Refused, RondoError, shortage
from rondo.runtime.memory.segments import Registration
from rondo.runtime.processes import process
from rondo.runtime.processes.place import oom_kills, place
from rondo.runtime.records.ledger import Ledger
from rondo.runtime.records.logs import LOGS
from rondo.runtime.records.telling import telling
from rondo.runtime.supervision.announcer import Announcer
from rondo.runtime.supervision.estate import Estate
from rondo.runtime.supervision.heartbeat import Beat, segment_bytes, segment_name
from rondo.runtime.supervision.incarnation import Incarnation, Main
from rondo.runtime.supervision.launcher import Job, used_incarnations
from rondo.runtime.supervision.machine import Supervision
from rondo.runtime.supervision.nursery import NAME as NURSERY
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.supervision.orders import (
    EXIT_FAILED,
    Action,
    Child,
    Clear,
    DumpStacks,
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
from rondo.runtime.supervision.spec import (
    COORDINATOR_NAME,
    STORE_NAME,
    GroupSpec,
    GroupView,
    Outcome,
    SupervisorConfig,
    SupervisorView,
)

TICK_S = 0.25
_MORE_DIGITS = "000"
"""Replicas that come later have longer names."""
_ANSWER_S, _REGISTER_S = 5.0, 30.0
_NUM_SPARE = 16
"""Descriptors that are held from the start, for when there are no others: role groups end and start again with these."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Supervisor(Actor):
    """One run. `on_event` gets every record that is written, as a dict, in the event loop. `nursery`: one that has loaded
    something before there was a run; it ends with this one."""

    def __init__(
        self,
        config: SupervisorConfig,
        on_event: Callable[[dict[str, Any]], None] = lambda record: None,
        nursery: Nursery | None = None,
    ) -> None:
        self._config = config
        self._nursery = nursery or Nursery()
        self._on_event = on_event
        self._groups = {group.name: group for group in config.groups}
        self._services = {COORDINATOR_NAME: config.coordinator}
        self._machine = Supervision(
            [
                Child(
                    STORE_NAME,
                    service=True,
                    strategy=Strategy.ONE_FOR_ALL if config.finds_state else Strategy.ESCALATE,
                ),
                *(Child(name, service=True) for name in self._services),
                *(Child(group.name, group.num_processes, saves=group.saves) for group in config.groups),
            ],
            config.limits,
            attempt=config.attempt,
            incarnations=used_incarnations(config.run_dir),
            can_restart=lambda: self._has_state(config.can_restart_globally),
            find_state=lambda: self._has_state(config.find_state),
        )
        self._lives: dict[str, Incarnation] = {}
        self._actions, self._acts = deque[Action](), False
        self._faults = list(config.kill)
        self._shortages: set[int | None] = set()
        self._num_dumps = 0
        self._num_interrupts = 0
        self.leave_by = math.inf
        """When everything is to be gone after a notice, in monotonic seconds."""
        self._outcome: Outcome | None = None
        self._finished = asyncio.Event()

    # ---- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Runs everything to its end. Whatever this raises, nothing of the run is left behind."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a supervisor must run on the main thread: what it starts dies with the starting thread")
        process.set_child_subreaper()
        self._loop = asyncio.get_running_loop()
        run_dir = self._config.run_dir
        longest = max((f"{name}.{g.num_processes}" for name, g in self._groups.items()), key=len) + _MORE_DIGITS
        with contextlib.ExitStack() as ends:
            self._spare = ends.enter_context(contextlib.ExitStack())
            for _ in range(_NUM_SPARE):
                self._spare.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            ends.enter_context(self._signals())
            self._estate = ends.enter_context(Estate(run_dir, longest, self._on_register))
            self._ledger = ends.enter_context(Ledger(run_dir, self._on_event))
            refs = [ends.enter_context(self._ref(name)) for name in self._services]
            self._announcers = {ref.peer: Announcer(ref, self._on_undelivered) for ref in refs}
            ends.enter_context(self._nursery)
            place = self._estate.surroundings.place(NURSERY, self._config.attempt)
            self._nursery.belong(place, self._config.loaded(), self._config.limits.start_s)
            if self._estate.cgroup is not None:
                for pid in self._nursery.pids.values():  # one that was there before the group
                    self._estate.cgroup.add(pid)
            ends.callback(LOGS.settle)
            ends.callback(self._close_lives)
            async with await serve(
                self, self._estate.address("supervisor"), token=self._estate.token, name="supervisor"
            ) as self._server:
                return await self._supervise()

    def request_stop(self, reason: str, *, quick: bool = False, notice: bool = False) -> None:
        """Role groups save and leave; asked again, it is the same stop. `quick`: everything is killed at once. `notice`: it is,
        when the time is over that a notice leaves."""
        now, within_s = time.monotonic(), self._config.notice_s if notice else None
        self.leave_by = min(self.leave_by, math.inf if within_s is None else now + within_s)
        self._do(self._machine.stop(reason, now, quick=quick, within_s=within_s))
        self._announcers[COORDINATOR_NAME].tell("drain")

    def add_group(self, spec: GroupSpec) -> None:
        """Starts a role group more, of a name that is new in this run. Refused unless the run goes on."""
        self._check_goes_on()
        self._groups[spec.name] = spec
        self._do(self._machine.add(Child(spec.name, spec.num_processes), time.monotonic()))

    def drain_group(self, name: str, *, deadline_s: float, again: bool = False) -> None:
        """A role group ends what it has and leaves: for good, where it has no state, or to start again. Refused unless the run
        goes on."""
        self._check_goes_on()
        self._do(self._machine.drain(name, time.monotonic(), deadline_s=deadline_s, again=again))

    def last_failure(self, name: str) -> str:
        """What a role group failed of last, one that was given up too; empty where it has not."""
        return self._machine.last_failure(name)

    def keep_group(self, name: str) -> None:
        """A role group that was to leave stays, or comes back."""
        self._do(self._machine.stay(name))

    def _check_goes_on(self) -> None:
        if self._machine.phase is not Phase.RUNNING:
            raise Refused(f"the run must go on for replicas to come or go, got {self._machine.phase.value}. Ask again")

    def _on_signal(self, number: signal.Signals) -> None:
        """Batch systems repeat themselves, and give notice by SIGUSR1; a person at a terminal who presses Ctrl-C twice does not
        want to wait."""
        self._num_interrupts += number == signal.SIGINT
        quick = number == signal.SIGINT and self._num_interrupts > 1 and _at_terminal()
        self.request_stop(number.name, quick=quick, notice=number == signal.SIGUSR1)

    async def _supervise(self) -> Outcome:
        async with asyncio.TaskGroup() as self._tasks:
            self._ledger.listen()
            pids = {"pid": os.getpid(), "janitor_pid": self._estate.janitor.pid}
            here = {"place": place(), "oom_kills": oom_kills()}
            self._ledger.record("supervisor", "started", {"rt_dir": str(self._estate.rt_dir), **pids, **here})
            self._helpers: set[asyncio.Task[None]] = set()
            for announcer in self._announcers.values():
                self._help(announcer.run())
            self._do(self._machine.begin(time.monotonic()))
            while self._outcome is None:
                with self._going_on():  # the next look may see more
                    self._look()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._finished.wait(), TICK_S)
            for helper in self._helpers:
                helper.cancel()
        return self._outcome

    def _look(self) -> None:
        self._do(self._machine.tick(time.monotonic(), self._beats()))
        with telling("run-time directory"):
            self._estate.keep()
        with telling("memory and processor time"):
            self._ledger.sample(self._lives.values(), self._nursery.pids, self._segment_bytes())
        process.reap(self.strays())  # what roles left behind: servers of theirs have processes of their own

    def _help(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

    # ---- what is to be done -----------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        """Does the actions in the order of the decisions: those that an action leads to (a start that fails at once) come behind
        all that was decided before, so that nobody is killed before its start."""
        self._actions.extend(actions)
        if self._acts:
            return
        self._acts = True
        try:
            while self._actions:
                # One that fails leaves the others: who was not asked to leave is killed when its time is over.
                with self._going_on():
                    self._act(self._actions.popleft())
        finally:
            self._acts = False

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Tells a shortage that ends the body. Other errors pass."""
        try:
            yield
        except OSError as error:
            if shortage(error) is None:
                raise
            self.short_of(error)

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Terminate():
                self._lives[action.child].ask_to_leave()
            case Kill():
                self._end(self._lives[action.child], dump=action.dump)
            case TellDead():
                self._announce("member_dead", action.child, action.incarnation, action.left)
                if action.left:
                    self._lives.pop(action.child, None)
            case TellDraining():
                told = action.child, action.incarnation, action.stays
                self._announcers[COORDINATOR_NAME].tell("member_drains", *told)
            case Clear():
                for announcer in self._announcers.values():
                    announcer.clear()
                self._estate.segments.clear()
            case DumpStacks():
                self._help(self._dump_stacks())
            case Note():
                with telling("notes"):  # what comes after it is done in any case
                    self._note(action)
            case Finish():
                roles = {name: spec.role for name, spec in self._groups.items()}
                self._outcome = self._ledger.sum_up(self._machine, roles, action.exit_code)
                self._finished.set()

    def _start(self, order: Start) -> None:
        name, number, around = order.child, order.incarnation, self._estate.surroundings
        num_ranks = self._groups[name].num_processes if name in self._groups else 1
        life = Incarnation(name, number, around.log_path(name, number, order.attempt), self)
        self._lives[name] = life
        try:
            self._estate.keep()
            self._server.look()
            life.heartbeat = self._estate.segments.segment(segment_name(name, number), segment_bytes(num_ranks))
            life.beats(), life.heartbeat.view()  # mapped while there are descriptors for it
            if name in self._services:
                self._begin(life, around.start_service(name, self._services[name], number, order.attempt))
                return
        except (OSError, RondoError) as error:
            self._not_started(life, error)
            return
        if name == STORE_NAME:
            job = around.store_job(name, number, order.attempt, self._estate.store_socket.fileno())
        else:
            spec = self._groups[name]
            self._announce("member_started", name, number, num_ranks)
            job = around.group_job(spec, number, order.attempt, self._config.limits)
        life.starting = self._tasks.create_task(self._fork(life, job))

    async def _fork(self, life: Incarnation, job: Job) -> None:
        try:
            self._begin(life, await self._nursery.start(job))
        except (OSError, RondoError) as error:
            self._not_started(life, error)

    def _begin(self, life: Incarnation, main: Main) -> None:
        life.begin(main)
        data = {"group": life.name, "incarnation": life.number, "pid": main.pid}
        self._ledger.record("supervisor", "starting", data)

    def _not_started(self, life: Incarnation, error: Exception) -> None:
        self.short_of(error)
        self._failed(life, f"not started: {shortage(error) or error}")

    def _has_state(self, look: Callable[[], bool]) -> bool:
        """A checkpoint that cannot be looked for is none: the machine asks in the middle of a transition, which must end."""
        try:
            return look()
        except OSError as error:
            self.short_of(error)
            return False

    def short_of(self, error: BaseException) -> None:
        """Tells what this process is short of, once, and lets go of the descriptors that are held for that."""
        words = shortage(error)
        kind = getattr(error, "errno", None)
        if words is not None and kind not in self._shortages:
            self._shortages.add(kind)
            self._ledger.record("supervisor", "short", {"why": words})
        if words is not None:
            self._spare.close()

    def _end(self, life: Incarnation, *, dump: bool = False) -> None:
        if life.ending is None:
            life.ending = self._tasks.create_task(self._end_all_of(life, dump))

    async def _end_all_of(self, life: Incarnation, dump: bool) -> None:
        if dump:
            await life.dump()
            self._machine.explain(life.name, life.number, LOGS.last_lines(life.log))
        try:
            await life.end()
        except DeadlineExceeded as error:  # held in the kernel: nothing may be built on its being gone
            self._do(self._machine.fatal(life.name, str(error), time.monotonic()))
        life.close()
        self._estate.segments.drop(segment_name(life.name, life.number))
        with contextlib.suppress(OSError):  # the next look collects them
            process.reap(self.strays())
        self._do(self._machine.gone(life.name, life.number, time.monotonic()))

    def strays(self) -> list[process.Stat]:
        """Processes of no living life that came to this one, as its subreaper."""
        nursery = {*self._nursery.pids.values()}
        own = nursery.union(*[life.own_pids for life in self._lives.values()])
        strays = self._estate.strays(own)
        return [
            stray for stray in strays if not (stray.alive and stray.session in nursery)
        ]  # it is about to be started

    def _note(self, note: Note) -> None:
        data = dict(note.data)
        if note.kind == "died":
            data |= {"log": str(self._lives[data["group"]].log), "oom_kills": oom_kills()}
        self._ledger.record("supervisor", note.kind, data)

    async def _dump_stacks(self) -> None:
        """Who waits for what, in dumps/; every worker's stacks, in its log."""
        self._num_dumps += 1
        path = self._config.run_dir / "dumps" / f"no_progress_{self._machine.attempt}_{self._num_dumps}.json"
        names = [
            f"{life.name}.{rank}" for life in self._lives.values() if life.name in self._groups for rank in life.workers
        ]
        answers = await asyncio.gather(*[self._waits_of(name) for name in [*self._services, *names]])
        with telling("dumps"):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(orjson.dumps(dict(answers), option=orjson.OPT_INDENT_2))
        # Who stands is killed next: the stacks are in the logs before.
        await asyncio.gather(*[life.dump() for life in self._lives.values() if life.workers and life.ending is None])
        self._ledger.record("supervisor", "dumped", {"path": str(path)})
        self._do(self._machine.dumped(time.monotonic(), self._beats()))

    async def _waits_of(self, name: str) -> tuple[str, Any]:
        with self._ref(name) as actor:
            try:
                return name, await actor.call("rondo.waits", deadline_s=_ANSWER_S)
            except RondoError as error:
                return name, str(error)

    # ---- what happens -----------------------------------------------------------------------------------------------

    def worker_exited(self, life: Incarnation, worker: Registration, code: int | None) -> None:
        if life.name not in self._groups:
            return  # a service's main process, which tells of itself
        if life.ending is None and not self._expected(life, code):
            self._failed(life, process.exit_text(code), rank=worker.rank, pid=worker.pid)

    def main_exited(self, life: Incarnation, code: int) -> None:
        try:
            if life.ending is None and not self._expected(life, code):
                main = "torchrun: " if life.name in self._groups else ""
                self._failed(life, main + process.exit_text(code), pid=None if life.main is None else life.main.pid)
        finally:
            self._end(life)  # also what a group leaves behind that is done

    def _expected(self, life: Incarnation, code: int | None) -> bool:
        """0 is an end, of a service once it was asked; and so is SIGTERM for a process that we asked before it could listen."""
        leaving = self._state(life.name) is State.LEAVING
        return (code == 0 and (leaving or life.name in self._groups)) or (code == -signal.SIGTERM and leaving)

    def _failed(self, life: Incarnation, what: str, *, pid: int | None = None, rank: int | None = None) -> None:
        lines = LOGS.last_lines(life.log)
        now = time.monotonic()
        self._do(self._machine.failed(life.name, life.number, what, now, rank=rank, pid=pid, last_lines=lines))

    def _on_register(self, registration: Registration) -> None:
        """On a thread of the segment server: hands the process over to the loop and waits for its word."""
        if process.start_time(registration.pid) != registration.start_time:
            raise Refused(f"start_time must be that of pid {registration.pid}, got {registration.start_time}")
        accepted: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._register, registration, accepted)
        if not accepted.result(_REGISTER_S):
            named = f"{registration.group} incarnation {registration.incarnation} rank {registration.rank}"
            raise Refused(f"a process must belong to a life that is being started, got {named}. It ends")

    def _register(self, registration: Registration, accepted: concurrent.futures.Future[bool]) -> None:
        group, number, rank = registration.group, registration.incarnation, registration.rank
        welcome = self._machine.registered(group, number, rank, time.monotonic())
        if welcome:
            try:
                self._lives[group].add(registration)
            except ProcessLookupError:
                welcome = False  # dead meanwhile: its main process tells
            except OSError as error:
                welcome = False
                self._not_started(self._lives[group], error)
            else:
                data = {"group": group, "incarnation": number, "rank": rank, "pid": registration.pid}
                self._ledger.record("supervisor", "registered", data)
        accepted.set_result(welcome)

    def _announce(self, method: str, *arguments: Any) -> None:
        for announcer in self._announcers.values():
            announcer.tell(method, *arguments)

    def _on_undelivered(self, method: str, error: Exception) -> None:
        self._ledger.record("supervisor", "undelivered", {"method": method, "error": str(error)})

    def _inject(self, version: int) -> None:
        """Faults on purpose, each once: a role's workers are killed when so many steps are committed."""
        for fault in [fault for fault in self._faults if version >= fault[1]]:
            self._faults.remove(fault)
            for name, life in self._lives.items():
                spec = self._groups.get(name)
                if fault[0] in ((name,) if spec is None else (name, spec.role, *spec.role_names)):
                    self._ledger.record("supervisor", "killed_on_purpose", {"group": name, "step": version})
                    life.signal(signal.SIGKILL)

    # ---- endpoints --------------------------------------------------------------------------------------------------

    @endpoint
    async def ready(self, group: str, incarnation: int, rank: int) -> None:
        """All roles of a process can do their work. Idempotent."""
        self._do(self._machine.ready(group, incarnation, rank, time.monotonic()))

    @endpoint
    async def report(self, source: str, kind: str, data: dict[str, Any]) -> None:
        """A record of `source`. Kinds with a meaning here: "metrics" (goes to metrics.jsonl), "committed" (progress; its
        "version" counts committed steps), "journal_waits" (progress), "checkpoint" (took "save_s"), "unsaved" ("cause": why a
        stop saves nothing), "kept" (it leaves to start again, without saving), "stop" (for a "reason"), "fatal" ("cause" ends the
        run, with "exit_code")."""
        self._ledger.record(source, kind, data)
        if kind == "committed":
            self._machine.committed(time.monotonic())
            self._inject(data.get("version") or 0)
        elif kind == "checkpoint" and "save_s" in data:
            self._do(self._machine.saved(data["save_s"]))
        elif kind == "unsaved":
            self._machine.unsaved(source, str(data.get("cause", "unknown")))
        elif kind == "kept":
            self._machine.kept(source, time.monotonic())
        elif kind == "journal_waits":  # everything waits, and it is known for what
            self._machine.progressed(time.monotonic())
        elif kind == "stop":
            self.request_stop(str(data.get("reason", "unknown")))
        elif kind == "fatal":
            told = str(data.get("cause", "unknown")), time.monotonic(), data.get("exit_code", EXIT_FAILED)
            self._do(self._machine.fatal(source, *told))

    @endpoint
    async def roster(self) -> dict[str, Any]:
        """Who lives and who is proved dead, for a coordinator that starts."""
        views = [view for view in self._machine.views() if view.name in self._groups]
        return {
            "attempt": self._machine.attempt,
            "draining": self._machine.phase is not Phase.RUNNING,
            "groups": {
                v.name: {
                    "incarnation": v.incarnation,
                    "ranks": v.num_ranks,
                    "alive": self._machine.alive(v.name),
                    "drains": v.state is State.DRAINING,
                }
                for v in views
            },
            "dead": [[name, number] for name, number in self._machine.dead() if name in self._groups],
        }

    @endpoint
    async def status(self) -> SupervisorView:
        return self.snapshot()

    # ---- questions --------------------------------------------------------------------------------------------------

    def snapshot(self) -> SupervisorView:
        """The run now, for the status view and the admin endpoint."""
        machine = self._machine
        groups = []
        for view in machine.views():
            life, spec = self._lives.get(view.name), self._groups.get(view.name)
            here = life is not None and machine.alive(view.name)
            beats = life.beats() if life is not None and here else ()
            groups.append(
                GroupView(
                    **asdict(view),
                    role=spec.role if spec is not None else view.name,
                    pids=life.pids if life is not None and here else (),
                    rss_bytes=life.usage().rss_bytes if life is not None and here else 0,
                    progress=sum(beat.progress for beat in beats),
                    section=next((beat.section for beat in beats if beat.section), ""),
                )
            )
        return SupervisorView(
            machine.attempt, machine.phase.value, machine.num_global_restarts, tuple(groups), self._segment_bytes()
        )

    def write_stacks(self, name: str, rank: int) -> bool:
        """Have a ready worker of a role group write the stacks of its threads to its log. False where there is none, or no more:
        a process that has got its pid since is not signalled."""
        life = self._lives.get(name)
        worker = life.workers.get(rank) if life is not None and self._state(name) is State.READY else None
        return worker is not None and process.kill(worker.pid, worker.start_time, signal.SIGUSR2)

    def _segment_bytes(self) -> int:
        return self._estate.segments.stats().num_bytes if self._lives else 0

    def _state(self, name: str) -> State:
        return next(view.state for view in self._machine.views() if view.name == name)

    def _beats(self) -> Mapping[str, tuple[Beat, ...]]:
        return {name: self._beats_of(life) for name, life in self._lives.items() if life.ending is None}

    def _beats_of(self, life: Incarnation) -> tuple[Beat, ...]:
        """Nothing while they cannot be mapped: time passes for the machine all the same."""
        try:
            return life.beats()
        except OSError as error:
            self.short_of(error)
            return ()

    def _ref(self, name: str) -> ActorRef:
        return ActorRef(self._estate.address(name), token=self._estate.token, peer=name)

    def _close_lives(self) -> None:
        for life in self._lives.values():
            life.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in stop_signals()}
        for number in before:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, before)  # one that comes now finds the handler from before
            for number, handler in before.items():
                self._loop.remove_signal_handler(number)
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for a stop. A program that was started to outlive its terminal (`nohup`) does not hear SIGHUP."""
    deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in _STOP_SIGNALS if number != signal.SIGHUP or not deaf)


def _at_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
