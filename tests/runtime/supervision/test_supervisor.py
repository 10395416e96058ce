"""The supervisor with real torchruns: deaths, silence, ends and leftovers. Runs are shared, since each takes seconds."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.processes import process
from rondo.runtime.processes.cgroup import Cgroup
from rondo.runtime.records.ledger import Ledger
from rondo.runtime.supervision.orders import Kill, Note
from rondo.runtime.supervision.spec import GroupSpec, SupervisorConfig
from rondo.runtime.supervision.supervisor import Supervisor, stop_signals

HERE = Path(__file__).parent
PATIENCE_S = 120.0
CTRL_C = b"\x03"

Record = dict[str, Any]
Groups = Sequence[tuple[str, int, list[str]]]
"""Name, processes, role classes."""


class Program:
    """`tiny_run.py` in a process of its own; `events` is all that it has told."""

    outcome: Record
    cpu_s: float
    """Of the program and all that it has started, as the kernel tells it."""
    before_stop: list[process.Stat]

    def __init__(
        self,
        run_dir: Path,
        groups: Groups,
        kill: Sequence[tuple[str, int]] = (),
        path: Path = HERE,
        modules: Sequence[str] = (),
        terminal: int | None = None,
        num_files: int | None = None,
        **limits: Any,
    ) -> None:
        """`path`: modules there come before the installed ones; `modules` are loaded for all. `terminal`: a
        descriptor of the one that it runs on. `num_files`: how many descriptors it may have."""

        def begin() -> None:
            if terminal is not None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if num_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))

        self.run_dir = run_dir
        given = {"run_dir": str(run_dir), "groups": groups, "kill": kill, "modules": modules, "limits": limits}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "tiny_run.py"), orjson.dumps(given).decode()],
            env={**os.environ, "PYTHONPATH": f"{path}:{HERE}", "OMP_NUM_THREADS": "1"},
            stdin=terminal,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=None if terminal is None and num_files is None else begin,
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self._partial = b""
        self.events: list[Record] = []

    def until(self, wanted: Callable[[Record], bool]) -> Record:
        """The next event that is wanted; fails when the program ends or is silent for too long."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            line, newline, rest = self._partial.partition(b"\n")
            if newline:
                self._partial = rest
                self.events.append(orjson.loads(line))
                if wanted(self.events[-1]):
                    return self.events[-1]
                continue
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"the awaited event did not come; the last ones: {self.events[-5:]}")
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                pytest.fail(f"the program ended before the awaited event; the last ones: {self.events[-5:]}")
            self._partial += chunk

    def ready(self, *groups: str, incarnation: int = 1) -> None:
        missing = set(groups)
        while missing:
            found = self.until(lambda r: r["kind"] == "ready" and r["incarnation"] == incarnation)
            missing.discard(found["group"])

    def end(self) -> Record:
        """Its outcome, after it has ended."""
        outcome = self.until(lambda r: r["kind"] == "outcome")
        assert self.process.wait(PATIENCE_S) == outcome["exit_code"]
        return outcome

    def of(self, kind: str, **facts: Any) -> list[Record]:
        return [
            r for r in self.events if r["kind"] == kind and all(r.get(name) == fact for name, fact in facts.items())
        ]

    def pid(self, group: str, rank: int = 0, incarnation: int = 1) -> int:
        (found,) = self.of("registered", group=group, rank=rank, incarnation=incarnation)
        pid: int = found["pid"]
        return pid

    @property
    def rt_dir(self) -> Path:
        return Path(self.of("started")[0]["rt_dir"])

    def leftovers(self) -> list[process.Stat]:
        return process.scan({f"RONDO_RT_DIR={self.rt_dir}".encode()})

    def nursery(self) -> process.Stat:
        """What is forked of it shows the same environment, and is younger."""
        found = process.scan({f"RONDO_RT_DIR={self.rt_dir}".encode(), b"RONDO_GROUP=nursery"})
        return min(found, key=lambda process: process.start_time)

    def told(self) -> list[Record]:
        """What the coordinators wrote down."""
        return [orjson.loads(line) for line in (self.run_dir / "coordinator.jsonl").read_bytes().splitlines()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._output.close()


@contextlib.contextmanager
def program(run_dir: Path, groups: Groups, **options: Any) -> Iterator[Program]:
    made = Program(run_dir, groups, **options)
    try:
        yield made
    finally:
        made.close()


# A run in which the nursery and one worker are killed, one worker is stopped, and a fault on purpose kills the coordinator.
# Then the store is killed, everything but the supervisor gets SIGTERM, and everything gets every signal that asks for a stop.


@pytest.fixture(scope="module")
def stormy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    groups = [("alpha-0", 2, ["Idle"]), ("beta-0", 1, ["Idle"])]
    kill = [("coordinator", 1)]
    folder, modules = tmp_path_factory.mktemp("stormy"), ["numpy.random"]
    with program(folder, groups, kill=kill, modules=modules, silence_s=600, grace_s=120) as run:
        run.ready("store", "coordinator", "alpha-0", "beta-0")
        nursery = run.nursery()
        process.kill(nursery.pid, nursery.start_time)
        os.kill(run.pid("alpha-0", rank=1), signal.SIGKILL)
        os.kill(run.pid("beta-0"), signal.SIGSTOP)
        (folder / "silent.new").write_text("beta-0 1")
        (folder / "silent.new").rename(folder / "silent")
        run.ready("alpha-0", "coordinator", "beta-0", incarnation=2)
        os.kill(run.pid("store"), signal.SIGKILL)
        run.ready("store", incarnation=2)
        run.ready("alpha-0", "beta-0", incarnation=3)
        run.before_stop = run.leftovers()
        for found in run.before_stop:
            process.kill(found.pid, found.start_time, signal.SIGTERM)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGINT):
            run.process.send_signal(number)
            for found in run.leftovers() if number != signal.SIGINT else ():
                process.kill(found.pid, found.start_time, number)
        run.outcome = run.end()
        yield run


def test_a_killed_worker_restarts_its_whole_group_and_only_it(stormy: Program) -> None:
    (died,) = stormy.of("died", group="alpha-0")
    assert (died["rank"], died["pid"]) == (1, stormy.pid("alpha-0", rank=1))
    assert died["cause"] in ("killed by SIGKILL", "ended without a word")
    first, second = [{stormy.pid("alpha-0", rank, life) for rank in (0, 1)} for life in (1, 2)]
    assert not first & second


def test_the_death_of_the_store_starts_all_role_groups_again_with_it_in_the_same_attempt(stormy: Program) -> None:
    (died,) = stormy.of("died", group="store")
    assert died["cause"] == "killed by SIGKILL"
    assert stormy.outcome["restarts"] == {"store": 1, "alpha-0": 2, "beta-0": 2, "coordinator": 1}
    assert stormy.outcome["attempt"] == 0


def test_nobody_hears_sigterm_that_is_meant_for_the_supervisor(stormy: Program) -> None:
    assert [record["group"] for record in stormy.of("died")][-1] == "store" and len(stormy.of("died")) == 4


def test_a_stopped_worker_is_noticed_by_its_silence_and_replaced(stormy: Program) -> None:
    (died,) = stormy.of("died", group="beta-0")
    assert died["rank"] == 0 and died["cause"].startswith("silent for ") and died["cause"].endswith("limit 600 s")
    assert stormy.pid("beta-0", incarnation=2) != stormy.pid("beta-0")


def test_the_coordinator_hears_of_a_death_and_then_of_the_next_life(stormy: Program) -> None:
    heard = [(r["told"], r["group"], r["incarnation"]) for r in stormy.told() if r.get("group") == "alpha-0"]
    told = [
        each for each, _ in itertools.groupby(heard)
    ]  # one that dies with its answer unsent hears it in its next life again
    lives = [(what, "alpha-0", life) for life in (1, 2, 3) for what in ("started", "dead")]
    assert told == lives[: len(told)] and len(told) >= 5
    assert [r["num_ranks"] for r in stormy.told() if r["told"] == "started"][:2] == [2, 1]


def test_a_coordinator_that_restarts_asks_who_lives(stormy: Program) -> None:
    rosters = [r for r in stormy.told() if r["told"] == "roster"]
    assert [r["by"]["incarnation"] for r in rosters] == [1, 2]
    assert rosters[0]["roster"]["dead"] == []
    assert ["alpha-0", 1] in rosters[1]["roster"]["dead"]
    alpha = {"incarnation": 2, "ranks": 2, "alive": True, "drains": False}
    assert rosters[1]["roster"]["groups"]["alpha-0"] == alpha


def test_a_fault_on_purpose_strikes_once_when_its_step_is_committed(stormy: Program) -> None:
    assert len(stormy.of("committed")) == 2
    assert [(r["group"], r["step"]) for r in stormy.of("killed_on_purpose")] == [("coordinator", 1)]
    assert stormy.of("died", group="coordinator")[0]["cause"] == "killed by SIGKILL"


def test_memory_outlives_the_group_that_wrote_it(stormy: Program) -> None:
    assert [r["lives"] for r in stormy.of("lives", group="alpha-0")] == [1, 2, 3]


def test_a_life_begins_when_all_of_the_last_one_is_gone_however_it_hid(stormy: Program) -> None:
    assert [record["left"] for record in stormy.of("lives")] == [False] * 6


def test_workers_are_forked_of_the_root_of_their_group_which_has_loaded_torch(stormy: Program) -> None:
    roots = {(r["group"], r["incarnation"]): r["pid"] for r in stormy.of("starting")}
    assert {record["forked"] for record in stormy.of("lives")} == {True} and stormy.of("not_forked") == []
    for record in stormy.of("lives"):
        assert record["parent"] == roots[record["group"], record["lives"]]
    drawn = [record["drawn"] for record in stormy.of("lives")]
    assert len(set(drawn)) == len(drawn)


def test_recovery_is_measured_by_role(stormy: Program) -> None:
    recovery_s = stormy.outcome["recovery_s"]
    assert set(recovery_s) == {"store", "alpha", "beta", "coordinator"} and all(
        seconds > 0 for seconds in recovery_s.values()
    )
    recovered = [record["recovery_s"] for record in stormy.of("ready", group="alpha-0")[1:]]
    assert len(recovered) == 2 and max(recovered) == recovery_s["alpha"]


def test_what_was_forked_of_a_nursery_outlives_it_and_another_one_takes_its_place(stormy: Program) -> None:
    assert {record["group"] for record in stormy.of("died")} == {"alpha-0", "beta-0", "coordinator", "store"}
    assert (stormy.run_dir / "logs" / "attempt_0" / "nursery.2.log").exists()


def test_many_signals_are_one_stop_that_lets_every_worker_save_and_ends_with_the_requeue_code(stormy: Program) -> None:
    assert len(stormy.of("stopping")) == 1 and not stormy.of("stop_now")
    assert stormy.process.returncode == 75
    assert stormy.outcome["first_cause"] is None
    assert sorted((r["group"], r["rank"]) for r in stormy.of("saved")) == [
        ("alpha-0", 0),
        ("alpha-0", 1),
        ("beta-0", 0),
    ]
    assert stormy.told()[-1]["told"] == "drain"


def test_what_left_its_session_and_its_parent_was_there_and_is_gone(stormy: Program) -> None:
    # nursery, store, coordinator, and for each group: root, torchrun, a proxy and a worker for each rank
    assert len(stormy.before_stop) == 13
    hidden = [record["hidden"] for record in stormy.of("lives")]
    assert len(hidden) == 6 and {process.stat(pid) for pid in hidden} == {None}
    assert stormy.leftovers() == []
    assert not stormy.rt_dir.exists()


def test_every_life_has_its_own_log_and_events_are_in_the_run_directory(stormy: Program) -> None:
    logs = {path.name for path in (stormy.run_dir / "logs" / "attempt_0").iterdir()}
    assert logs == {
        "nursery.1.log", "nursery.2.log", "store.1.log", "store.2.log",
        *[f"coordinator.{life}.log" for life in (1, 2)],
        *[f"{name}.{life}.log" for name in ("alpha-0", "beta-0") for life in (1, 2, 3)],
    }  # fmt: skip
    written = [orjson.loads(line) for line in (stormy.run_dir / "events.jsonl").read_bytes().splitlines()]
    assert written == [r for r in stormy.events if r["kind"] not in ("outcome", "metrics")]


# A run that is done.


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    group = ("gamma-0", 2, ["Sum", "Also"])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with program(tmp_path_factory.mktemp("calm"), [group]) as run:
        run.outcome = run.end()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        run.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        yield run


def test_a_run_whose_groups_are_done_ends_with_zero_and_leaves_nothing(calm: Program) -> None:
    assert calm.process.returncode == 0
    assert calm.outcome["restarts"] == {} and calm.outcome["first_cause"] is None
    assert calm.leftovers() == [] and not calm.rt_dir.exists()
    assert calm.of("done", group="gamma-0")


def test_ranks_of_a_group_meet_in_the_runs_store(calm: Program) -> None:
    lines = (calm.run_dir / "metrics.jsonl").read_bytes().splitlines()
    told = [record for record in map(orjson.loads, lines) if record["source"] != "supervisor"]  # which tells of memory
    metrics = sorted(told, key=lambda record: record["rank"])
    assert [(m["total"], m["rank"], m["world_size"]) for m in metrics] == [(3, 0, 2), (3, 1, 2)]
    assert {(m["source"], m["role_group"], m["threads"]) for m in metrics} == {("gamma-0", "gamma", "1")}


def test_role_classes_are_imported_on_the_one_compute_thread(calm: Program) -> None:
    assert (
        {m["imported_on"] for m in calm.of("metrics") if "memory_bytes" not in m}
        == {r["thread"] for r in calm.of("late")}
        == {"compute_0"}
    )


def test_a_group_is_ready_when_every_role_of_it_is(calm: Program) -> None:
    kinds = [
        r["kind"] for r in calm.events if r["kind"] == "late" or (r["kind"], r.get("group")) == ("ready", "gamma-0")
    ]
    assert kinds == ["late", "late", "ready"]


def test_the_supervisor_never_imports_torch(calm: Program) -> None:
    assert calm.outcome["light"] is True


def test_memory_and_processor_time_are_measured(calm: Program) -> None:
    memory = calm.outcome["memory_bytes"]
    assert (
        set(memory) == {"supervisor", "nursery", "store", "coordinator", "gamma-0"} and min(memory.values()) > 10 << 20
    )
    cores = calm.outcome["cores"]
    assert set(cores) == set(memory)
    # Looked at four times a second, so that something of the end is missing, and rounded to ticks of 10 ms a process.
    assert 0.3 * calm.cpu_s < sum(cores.values()) * calm.outcome["wall_s"] < calm.cpu_s + 0.1
    assert cores["nursery"] > cores["coordinator"] > 0  # which has loaded torch
    assert calm.outcome["cpu_share"] == pytest.approx(sum(cores.values()) / len(os.sched_getaffinity(0))) != 0


# Runs that end badly.


def _torch(folder: Path, program: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(program)
    return folder


def test_a_torch_that_does_not_load_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    path = _torch(tmp_path / "modules", "raise ImportError('libtorch.so: not found')")
    with program(tmp_path / "run", [("alpha-0", 1, ["Idle"])], path=path, max_global_restarts=0) as run:
        outcome = run.end()
        assert run.leftovers() == [] and not run.rt_dir.exists()
    assert outcome["exit_code"] == 1
    assert "not started: the nursery must start what it is told, got exit code 1" in outcome["first_cause"]
    assert "ImportError: libtorch.so: not found" in outcome["first_cause"]


def test_what_was_loaded_with_a_thread_is_not_forked_and_says_why_and_a_killed_root_leaves_nothing(
    tmp_path: Path,
) -> None:
    threaded = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "threaded.py").write_text(threaded)
    path = Path(f"{tmp_path}:{HERE}")
    with program(tmp_path / "run", [("alpha-0", 1, ["Idle"])], path=path, modules=["threaded"]) as run:
        run.ready("alpha-0", "store")
        os.kill(run.of("starting", group="alpha-0")[0]["pid"], signal.SIGKILL)
        run.ready("alpha-0", incarnation=2)
        run.process.send_signal(signal.SIGTERM)
        assert run.end()["exit_code"] == 75
    why = "a fork copies one thread alone, and there are 2: python, python"
    assert [(r["rank"], r["why"]) for r in run.of("not_forked")] == [(0, why)] * 2
    # Its root was killed too, and with it the proof by descent: what came to the supervisor was of no living group.
    assert [record["left"] for record in run.of("lives")] == [False, False]


def test_a_stop_while_torch_loads_starts_nothing_more(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    path = _torch(tmp_path / "modules", f"print('loading', flush=True); open({str(tmp_path / 'never')!r}).read()")
    with program(tmp_path / "run", [("alpha-0", 1, ["Idle"])], path=path) as run:
        run.until(lambda record: record["kind"] == "started")
        run.process.send_signal(signal.SIGTERM)
        outcome = run.end()
        assert run.leftovers() == [] and not run.rt_dir.exists()
    assert outcome["exit_code"] == 75 and outcome["first_cause"] is None
    assert [record["group"] for record in run.of("starting")] == ["coordinator"]


def test_the_death_of_the_store_is_another_attempt_and_a_failure_there_is_reported_as_the_first_cause(
    tmp_path: Path,
) -> None:
    limits = {"max_restarts": 0, "max_global_restarts": 1}
    with program(tmp_path, [("crash-0", 1, ["Crash"])], kill=[("store", 1)], **limits) as run:
        outcome = run.end()
        assert run.leftovers() == [] and not run.rt_dir.exists()
    assert [r["group"] for r in run.of("died")] == ["store", "crash-0"]
    assert [(r["attempt"], r["cause"]) for r in run.of("global_restart")] == [
        (1, f"store of incarnation 1 (pid {run.of('died')[0]['pid']}): killed by SIGKILL")
    ]
    assert outcome["exit_code"] == 1 and outcome["attempt"] == 1
    assert outcome["first_cause"].startswith(f"crash-0 rank 0 of incarnation 2 (pid {run.pid('crash-0', 0, 2)}): ")
    assert "ValueError: the pot is empty" in outcome["first_cause"]
    for attempt, life in ((0, 1), (1, 2)):
        logs = sorted(path.name for path in (tmp_path / "logs" / f"attempt_{attempt}").iterdir())
        names = [f"{name}.{life}.log" for name in ("coordinator", "crash-0", "store")]
        assert logs == sorted(names if attempt else [*names, "nursery.1.log"])  # one for all attempts
    rosters = [(r["by"]["attempt"], r["roster"]["attempt"]) for r in run.told() if r["told"] == "roster"]
    assert rosters == [(0, 0), (1, 1)]
    # Shared memory does not survive into another attempt.
    assert [r["lives"] for r in run.of("lives")] == [1, 1]


def test_a_run_without_progress_says_who_waits_and_restarts_who_computes_and_a_second_ctrl_c_kills_what_will_not_leave(
    tmp_path: Path,
) -> None:
    person, terminal = os.openpty()
    with program(tmp_path, [("mule-0", 1, ["Stubborn"])], terminal=terminal, grace_s=600) as run:
        run.ready("store", "coordinator", "mule-0")
        path = Path(run.until(lambda r: r["kind"] == "dumped")["path"])
        died = run.until(lambda r: r["kind"] == "died")
        assert (died["group"], died["rank"]) == ("mule-0", 0)
        assert died["cause"].startswith("no progress for 600 s; section 'train' stands for ")
        written(tmp_path / "logs/attempt_0/mule-0.1.log", "most recent call first")
        run.ready("mule-0", incarnation=2)
        os.write(person, CTRL_C)
        run.until(lambda r: r["kind"] == "stopping")
        os.write(person, CTRL_C)
        assert run.end()["exit_code"] == 75
        assert run.of("stop_now") and run.leftovers() == [] and not run.rt_dir.exists()
    os.close(person)
    os.close(terminal)
    waits = orjson.loads(path.read_bytes())
    assert set(waits) == {"coordinator", "mule-0.0"} and waits["mule-0.0"]["waiter"] == "mule-0.0"


def written(path: Path, text: str) -> None:
    """Returns once another process has written this."""
    due = time.monotonic() + PATIENCE_S
    while text not in path.read_text():
        assert time.monotonic() < due, f"{text!r} must come into {path}"
        os.sched_yield()


def test_a_program_that_was_started_to_outlive_its_terminal_is_not_stopped_by_its_end() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert set(stop_signals()) == {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_is_left_when_the_supervisor_itself_is_killed(tmp_path: Path) -> None:
    """With a root where control groups can be made: then nobody is left above what it kept, which shows nothing of the run."""
    group = Cgroup.make(f"rondo-test-{os.getpid()}")
    with program(tmp_path, [("alpha-0", 2, ["Idle"])]) as run:
        run.ready("alpha-0")
        watched = [os.pidfd_open(found.pid) for found in run.leftovers()]
        janitor = os.pidfd_open(run.of("started")[0]["janitor_pid"])
        watched.append(os.pidfd_open(run.of("lives")[0]["hidden"]))
        assert len(watched) == 10
        if group is not None:
            group.remove()
            run.process.send_signal(signal.SIGSTOP)
            os.kill(run.of("starting", group="alpha-0")[0]["pid"], signal.SIGKILL)
        run.process.kill()
        for descriptor in (*watched, janitor):
            assert select.select([descriptor], [], [], PATIENCE_S)[0]
            os.close(descriptor)
        assert run.leftovers() == [] and not run.rt_dir.exists()
        assert group is None or not group.path.with_name(run.rt_dir.name).exists()


def test_what_follows_a_note_is_done_also_where_it_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GroupSpec("actor-0", "actor", 1, ("tiny_roles:Idle",))
    config = SupervisorConfig(run_dir=tmp_path, groups=(group,), coordinator="none", limits=SupervisionConfig())

    def on_event(record: Record) -> None:
        raise BrokenPipeError

    def gone(order: Any, **_: Any) -> None:
        killed.append(order)

    supervisor, killed = Supervisor(config, on_event), list[Any]()
    life: Any = SimpleNamespace(log=tmp_path / "log")
    monkeypatch.setattr(supervisor, "_end", gone)
    supervisor._lives = {"actor-0": life}
    shutil.rmtree(tmp_path)  # nothing can be written any more
    supervisor._ledger = Ledger(tmp_path, on_event)
    noted = [Note("died", {"group": "actor-0"}), Note("died", {"group": "nobody"})]
    supervisor._do([*noted, Kill("actor-0", 1)])
    assert killed == [life]


async def test_a_journal_that_waits_for_room_is_no_hang_and_a_saving_that_does_so_beside_the_training_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GroupSpec("actor-0", "actor", 1, ("tiny_roles:Idle",))
    config = SupervisorConfig(run_dir=tmp_path, groups=(group,), coordinator="none", limits=SupervisionConfig())
    supervisor, progress = Supervisor(config), list[float]()
    monkeypatch.setattr(supervisor._machine, "progressed", progress.append)
    supervisor._ledger = Ledger(tmp_path, lambda record: None)
    await supervisor.report("actor-0", "no_room", {"version": 4})
    assert not progress
    await supervisor.report("coordinator", "journal_waits", {"why": "the disk is full"})
    assert len(progress) == 1
