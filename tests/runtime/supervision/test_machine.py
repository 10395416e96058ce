"""The state machine of supervision, in no time at all: events with a made-up clock go in, actions come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.supervision.heartbeat import Beat
from rondo.runtime.supervision.machine import Supervision
from rondo.runtime.supervision.orders import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_REQUEUE,
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

STORE = Child("store", service=True, strategy=Strategy.ONE_FOR_ALL)
CHILDREN = (STORE, Child("coordinator", service=True), Child("actor-0", 2, saves=True), Child("rollout-0"))
FORGETFUL = (Child("store", service=True, strategy=Strategy.ESCALATE), *CHILDREN[1:])
LIMITS = SupervisionConfig(
    max_restarts=3,
    restart_window_s=600,
    max_global_restarts=1,
    silence_s=15,
    start_s=300,
    grace_s=20,
    no_progress_s=900,
)


class Run:
    """A machine with its clock. Notes are kept apart from what is to be done."""

    def __init__(
        self,
        limits: SupervisionConfig = LIMITS,
        *,
        children: tuple[Child, ...] = CHILDREN,
        can_restart: bool = True,
        find_state: Callable[[], bool] = lambda: True,
        incarnations: dict[str, int] | None = None,
    ) -> None:
        self.machine = Supervision(
            children, limits, incarnations=incarnations, can_restart=lambda: can_restart, find_state=find_state
        )
        self.now = 1000.0
        self.notes: list[Note] = []
        self.begun = self.do(self.machine.begin(self.now))

    def do(self, actions: list[Action]) -> list[Action]:
        self.notes += [action for action in actions if isinstance(action, Note)]
        return [action for action in actions if not isinstance(action, Note)]

    def incarnation(self, name: str) -> int:
        return next(view.incarnation for view in self.machine.views() if view.name == name)

    def state(self, name: str) -> State:
        return next(view.state for view in self.machine.views() if view.name == name)

    def up(self) -> Run:
        """All that runs registers and becomes ready."""
        for view in self.machine.views():
            if view.state is State.STARTING:
                for rank in range(view.num_ranks):
                    self.machine.registered(view.name, view.incarnation, rank, self.now)
                    self.do(self.machine.ready(view.name, view.incarnation, rank, self.now))
        return self

    def fail(self, name: str, what: str = "exit code 1") -> list[Action]:
        return self.do(self.machine.failed(name, self.incarnation(name), what, self.now))

    def gone(self, name: str) -> list[Action]:
        return self.do(self.machine.gone(name, self.incarnation(name), self.now))

    def tick(self, seconds: float = 0.0, **beats: Beat) -> list[Action]:
        """The time passes in whole seconds, as the shell would tick; what the last tick asked for is returned."""
        actions: list[Action] = []
        end = self.now + seconds
        while self.now < end - 1:
            self.now += 1
            actions += self.do(self.machine.tick(self.now, {}))
        self.now = end
        return actions + self.do(
            self.machine.tick(self.now, {name.replace("_", "-"): [beat] for name, beat in beats.items()})
        )

    def crash(self, name: str) -> list[Action]:
        """A child dies, is proved gone, and is started again after whatever back-off it has; all is ready again."""
        actions = self.fail(name) + self.gone(name)
        while self.state(name) is State.WAITING:
            actions += self.tick(1)
        self.up()
        return actions


def test_everything_starts_services_first_with_its_first_incarnation() -> None:
    names = ["store", "coordinator", "actor-0", "rollout-0"]
    assert Run().begun == [Start(name, 1, 0) for name in names]


def test_incarnations_go_on_where_an_earlier_life_of_the_run_ended() -> None:
    assert Run(incarnations={"actor-0": 7}).begun[2] == Start("actor-0", 8, 0)


def test_a_child_is_ready_when_all_its_ranks_are() -> None:
    run = Run()
    run.machine.ready("actor-0", 1, 1, run.now)
    run.machine.ready("actor-0", 1, 1, run.now)
    assert run.state("actor-0") is State.STARTING
    run.machine.ready("actor-0", 1, 0, run.now)
    assert run.state("actor-0") is State.READY


def test_a_failed_group_is_killed_and_only_it_is_started_again_when_it_is_proved_gone() -> None:
    run = Run().up()
    assert run.fail("rollout-0") == [Kill("rollout-0", 1)]
    assert run.tick(5) == []
    assert run.gone("rollout-0") == [TellDead("rollout-0", 1), Start("rollout-0", 2, 0)]
    assert [view.incarnation for view in run.machine.views()] == [1, 1, 1, 2]


def test_the_coordinator_restarts_alone_and_is_told_of_no_death_of_its_own() -> None:
    run = Run().up()
    assert run.fail("coordinator") == [Kill("coordinator", 1)]
    assert run.gone("coordinator") == [Start("coordinator", 2, 0)]


def test_later_signs_of_the_same_death_and_those_of_past_lives_change_nothing() -> None:
    run = Run().up()
    run.fail("actor-0")
    assert run.fail("actor-0") == []
    run.gone("actor-0")
    assert run.do(run.machine.failed("actor-0", 1, "late", run.now)) == []
    assert run.do(run.machine.gone("actor-0", 1, run.now)) == []
    assert run.do(run.machine.ready("actor-0", 1, 0, run.now)) == []
    assert not run.machine.registered("actor-0", 1, 0, run.now)
    assert run.machine.registered("actor-0", 2, 0, run.now)
    assert not run.machine.registered("actor-0", 2, 2, run.now)
    assert not run.machine.registered("critic-0", 1, 0, run.now)


def test_recovery_lasts_from_the_first_death_to_all_ranks_ready() -> None:
    run = Run().up()
    run.fail("rollout-0")
    run.tick(2)
    run.gone("rollout-0")
    run.tick(3)
    run.fail("rollout-0")  # it dies again before it is ready: the same recovery
    run.gone("rollout-0")
    run.tick(5)
    run.up()
    assert run.machine.recoveries == [("rollout-0", 10.0)]


@pytest.mark.parametrize(
    ("longest_s", "expected"),
    [(60.0, [0, 1, 2, 4, 8, 16, 32, 60, 60]), (3.0, [0, 1, 2, 3, 3, 3, 3, 3, 3]), (0.0, [0] * 9)],
)
def test_the_first_restart_is_immediate_and_the_back_off_doubles(longest_s: float, expected: list[float]) -> None:
    run = Run(SupervisionConfig(max_restarts=100, max_backoff_s=longest_s)).up()
    delays = []
    for _ in range(9):
        run.fail("rollout-0")
        run.gone("rollout-0")
        delays.append(run.notes[-1].data["delay_s"])
        run.tick(delays[-1])
        assert run.state("rollout-0") is State.STARTING
        run.up()
    assert delays == expected


def test_a_back_off_is_waited_out() -> None:
    run = Run().up()
    run.crash("rollout-0")
    run.fail("rollout-0")
    assert run.gone("rollout-0") == [TellDead("rollout-0", 2)]
    assert run.tick(0.5) == []
    assert run.tick(0.5) == [Start("rollout-0", 3, 0)]


def test_a_healthy_spell_resets_the_back_off() -> None:
    run = Run(SupervisionConfig(max_restarts=100, no_progress_s=1e9)).up()
    for _ in range(3):
        run.crash("rollout-0")
    run.tick(600)
    run.fail("rollout-0")
    run.gone("rollout-0")
    assert run.notes[-1].data["delay_s"] == 0


def test_restarts_beyond_the_intensity_are_a_global_restart() -> None:
    run = Run().up()
    for _ in range(3):
        run.crash("rollout-0")
    assert run.fail("rollout-0") == [Kill("rollout-0", 4), Kill("store", 1), Kill("coordinator", 1), Kill("actor-0", 1)]
    assert run.machine.phase is Phase.RESTARTING
    assert run.gone("store") == run.gone("coordinator") == run.gone("rollout-0") == []
    assert run.gone("actor-0") == [
        Clear(1), Start("store", 2, 1), Start("coordinator", 2, 1), Start("actor-0", 2, 1), Start("rollout-0", 5, 1)
    ]  # fmt: skip
    assert run.machine.attempt == 1


def test_restarts_spread_over_more_than_the_window_do_not_escalate() -> None:
    run = Run(SupervisionConfig(max_restarts=3, restart_window_s=600, no_progress_s=1e9)).up()
    for _ in range(10):
        run.crash("rollout-0")
        run.tick(201)
    assert run.machine.attempt == 0 and run.machine.phase is Phase.RUNNING


def test_each_child_has_its_own_intensity_and_a_new_attempt_forgets_it() -> None:
    run = Run().up()
    for _ in range(3):
        run.crash("rollout-0")
        run.crash("actor-0")
    assert run.machine.attempt == 0
    run.fail("actor-0")
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        run.gone(name)
    assert run.machine.attempt == 1
    run.up()
    for _ in range(3):
        run.crash("rollout-0")
    assert run.machine.attempt == 1 and run.machine.phase is Phase.RUNNING


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_new_attempt_chooses_its_checkpoint_once_nothing_runs_and_without_a_whole_one_the_run_ends(
    is_whole: bool,
) -> None:
    looks = list[State]()

    def find_state() -> bool:
        looks.extend(view.state for view in run.machine.views())
        return is_whole

    run = Run(find_state=find_state).up()
    for _ in range(LIMITS.max_restarts):
        run.crash("actor-0")
    run.fail("actor-0")
    last = [action for view in run.machine.views() if looks == [] for action in run.gone(view.name)]
    assert State.READY not in looks and State.STARTING not in looks and looks
    assert run.machine.phase is (Phase.RUNNING if is_whole else Phase.FINISHED)
    assert (last[-1] == Finish(1)) is not is_whole
    assert is_whole or run.notes[-1].data["why"] == "no checkpoint is whole to start again from"


def test_the_store_and_all_role_groups_start_again_together_when_all_are_gone_and_the_coordinator_goes_on() -> None:
    run = Run(can_restart=False).up()
    assert run.fail("store", "killed by SIGKILL") == [Kill("store", 1), Kill("actor-0", 1), Kill("rollout-0", 1)]
    assert run.fail("actor-0") == []  # a symptom
    assert run.gone("store") == [] and run.gone("actor-0") == [TellDead("actor-0", 1)]
    assert run.tick(5) == [] and run.machine.phase is Phase.RUNNING
    assert run.gone("rollout-0") == [
        TellDead("rollout-0", 1), Start("store", 2, 0), Start("actor-0", 2, 0), Start("rollout-0", 2, 0)
    ]  # fmt: skip
    run.tick(3)
    run.up()
    assert [view.restarts for view in run.machine.views()] == [1, 0, 1, 1]
    assert run.machine.recoveries == [("store", 8.0), ("actor-0", 8.0), ("rollout-0", 8.0)]


def test_role_groups_in_back_off_wait_for_the_store_and_those_that_are_done_stay_so() -> None:
    run = Run().up()
    run.gone("rollout-0")
    run.crash("actor-0")
    run.fail("actor-0")
    run.gone("actor-0")
    assert run.fail("store") == [Kill("store", 1)]
    assert run.tick(5) == []
    assert run.gone("store") == [Start("store", 2, 0), Start("actor-0", 3, 0)]
    run.up()
    run.fail("store")
    run.gone("actor-0")
    assert run.gone("store") == [] and run.notes[-1].data["delay_s"] == 1
    assert run.tick(1) == [Start("store", 3, 0), Start("actor-0", 4, 0)]


def test_a_coordinator_that_dies_beside_the_store_starts_again_at_once() -> None:
    run = Run().up()
    run.fail("store")
    run.fail("coordinator")
    assert run.gone("coordinator") == [Start("coordinator", 2, 0)]
    run.gone("actor-0")
    run.gone("rollout-0")
    assert run.gone("store")[0] == Start("store", 2, 0)


def test_a_store_beyond_its_limit_is_a_global_restart_and_the_cause_is_its_first_death() -> None:
    run = Run(SupervisionConfig(max_restarts=2, max_global_restarts=0)).up()
    run.fail("rollout-0", "killed by SIGSEGV")
    run.gone("rollout-0")
    for number in range(3):
        run.fail("store", f"death {number}")
        for name in ("store", "actor-0", "rollout-0"):
            run.gone(name)
        run.tick(5)
        run.up()
    cause = run.machine.first_cause
    assert cause is not None and (cause.child, cause.what) == ("store", "death 0")
    assert run.machine.phase is Phase.FAILING


@pytest.mark.parametrize("name", ["store", "coordinator"])
def test_a_service_that_ends_by_itself_has_failed_and_starts_again(name: str) -> None:
    run = Run().up()
    actions = run.gone(name)
    assert Kill(name, 1) not in actions  # it is gone
    for group in ("actor-0", "rollout-0") if name == "store" else ():
        actions += run.gone(group)
    assert Start(name, 2, 0) in actions and run.machine.attempt == 0
    assert next(note.data["cause"] for note in run.notes if note.kind == "died") == "ended by itself"


def test_a_store_whose_role_groups_would_find_nothing_is_a_global_restart() -> None:
    run = Run(children=FORGETFUL).up()
    assert run.fail("store", "killed by SIGKILL")[0] == Kill("store", 1)
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        run.gone(name)
    assert run.machine.attempt == 1


def test_without_a_checkpoint_either_the_run_fails_and_its_cause_is_the_store_not_a_group_that_had_recovered() -> None:
    run = Run(children=FORGETFUL, can_restart=False)
    run.crash("rollout-0")
    run.fail("actor-0", "killed by SIGKILL")  # it is not back yet
    run.gone("actor-0")
    run.fail("store", "killed by SIGKILL")
    assert run.machine.phase is Phase.FAILING
    for name in ("store", "coordinator", "actor-0"):
        assert run.gone(name) == []
    assert run.gone("rollout-0") == [Finish(EXIT_FAILED)]
    assert str(run.machine.first_cause) == "store of incarnation 1: killed by SIGKILL"
    assert run.notes[-1].data["why"] == "store serves all role groups, and there is no checkpoint to start again from"


def test_a_group_that_recovered_is_not_the_cause_of_another_one_that_fails_again_and_again() -> None:
    run = Run(SupervisionConfig(max_restarts=1, max_global_restarts=0, start_s=1e9)).up()
    run.fail("rollout-0", "killed by SIGKILL")
    run.gone("rollout-0")
    run.fail("actor-0", "exit code 7")
    run.gone("actor-0")
    run.machine.ready("rollout-0", 2, 0, run.now)
    run.fail("actor-0", "exit code 1")
    cause = run.machine.first_cause
    assert cause is not None and (cause.child, cause.what) == ("actor-0", "exit code 7")


def test_global_restarts_are_limited_and_the_first_cause_is_kept() -> None:
    run = Run(SupervisionConfig(max_restarts=0, max_global_restarts=1)).up()
    run.do(run.machine.failed("actor-0", 1, "exit code 3", run.now, rank=1, pid=77, last_lines=["ValueError: no"]))
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        run.gone(name)
    run.tick(30)
    run.fail("rollout-0", "exit code 1")
    for name in ("store", "coordinator", "actor-0"):
        run.gone(name)
    assert run.gone("rollout-0") == [Finish(EXIT_FAILED)]
    assert str(run.machine.first_cause) == ("actor-0 rank 1 of incarnation 1 (pid 77): exit code 3\n    ValueError: no")


def test_a_failure_after_all_were_ready_again_is_a_cause_of_its_own() -> None:
    run = Run(SupervisionConfig(max_restarts=0, max_global_restarts=1), children=FORGETFUL).up()
    run.fail("store", "killed by SIGKILL")
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        run.gone(name)
    run.up()
    run.fail("rollout-0", "exit code 1")
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        run.gone(name)
    cause = run.machine.first_cause
    assert cause is not None and cause.child == "rollout-0"


def test_the_cause_of_a_chain_is_what_failed_first() -> None:
    run = Run(SupervisionConfig(max_restarts=1, max_global_restarts=0)).up()
    run.fail("rollout-0", "killed by SIGSEGV")
    run.fail("actor-0", "PeerGone")
    for _ in range(2):  # the actor cannot come up while rollout-0 is away
        run.gone("actor-0")
        run.tick(1)
        run.fail("actor-0", "PeerGone")
    assert run.machine.phase is Phase.FAILING
    cause = run.machine.first_cause
    assert cause is not None and (cause.child, cause.what) == ("rollout-0", "killed by SIGSEGV")


def test_last_lines_that_are_read_later_belong_to_the_cause() -> None:
    run = Run(SupervisionConfig(max_restarts=0, max_global_restarts=0)).up()
    run.fail("actor-0", "silent")
    run.machine.explain("actor-0", 1, ["Thread 0x1 (most recent call first):"])
    cause = run.machine.first_cause
    assert cause is not None and cause.last_lines == ("Thread 0x1 (most recent call first):",)


def test_a_silent_rank_is_killed_with_its_stacks_dumped() -> None:
    run = Run().up()
    born = run.now
    assert run.tick(15, actor_0=Beat(1, born, 5)) == []
    assert run.tick(0.5, actor_0=Beat(1, born, 5)) == [Kill("actor-0", 1, dump=True)]
    assert run.notes[-1].data == {
        "group": "actor-0", "incarnation": 1, "rank": 1, "pid": None, "cause": "silent for 15.5 s, limit 15 s",
    }  # fmt: skip


def test_a_rank_that_beats_lives() -> None:
    run = Run().up()
    for _ in range(100):
        run.now += 1
        assert run.do(run.machine.tick(run.now, {"actor-0": [Beat(0, run.now - 1, 0)]})) == []


def test_a_rank_that_has_not_beaten_yet_counts_from_its_registration() -> None:
    run = Run()
    for rank in (0, 1):
        assert run.machine.registered("actor-0", 1, rank, run.now)
    assert run.tick(14, actor_0=Beat(0, 0.0, 0)) == []
    assert run.tick(2, actor_0=Beat(0, 0.0, 0)) == [Kill("actor-0", 1, dump=True)]


def test_a_service_may_be_silent_while_it_starts_and_for_no_longer_than_others_once_it_is_ready() -> None:
    run = Run()
    assert run.machine.registered("coordinator", 1, 0, run.now)
    assert run.tick(100, coordinator=Beat(0, run.now, 0)) == []
    last = Beat(0, run.up().now, 0)
    assert run.tick(15, coordinator=last) == []
    assert run.tick(1, coordinator=last) == [Kill("coordinator", 1, dump=True)]


def test_a_section_has_its_own_limit_instead_of_the_silence() -> None:
    run = Run().up()
    begun = run.now
    in_section = Beat(0, begun, 0, "load", begun + 120, silent=True)
    for _ in range(120):
        assert run.tick(1, actor_0=in_section) == []
    assert run.tick(1, actor_0=in_section) == [Kill("actor-0", 1, dump=True)]
    assert run.notes[-1].data["cause"] == "section 'load' is 1.0 s over its limit"


def test_a_process_that_leaves_on_purpose_gets_the_grace_too() -> None:
    run = Run().up()
    begun = run.now
    assert run.tick(35, actor_0=Beat(0, begun, 0, left=True)) == []
    assert run.tick(1, actor_0=Beat(0, begun, 0, left=True)) == [Kill("actor-0", 1, dump=True)]


def test_after_the_supervisor_slept_nobody_is_called_silent_before_having_had_the_time_to_speak() -> None:
    run = Run().up()
    born = run.now
    run.tick(1, actor_0=Beat(0, born, 0))
    run.now += 3600  # the machine was suspended
    stale = Beat(0, born, 0), Beat(0, born, 0, "save", born + 60)
    for beat in stale:
        assert run.do(run.machine.tick(run.now, {"actor-0": [beat]})) == []
    assert run.tick(14, actor_0=stale[0]) == []
    assert run.tick(2, actor_0=stale[0]) == [Kill("actor-0", 1, dump=True)]


def test_a_group_that_never_registers_is_killed() -> None:
    run = Run()
    run.machine.registered("actor-0", 1, 0, run.now)
    run.tick(300)
    assert run.tick(1) == [
        Kill("store", 1, dump=True), Kill("actor-0", 1), Kill("rollout-0", 1), Kill("coordinator", 1, dump=True)
    ]  # fmt: skip
    run = Run(SupervisionConfig(start_s=300))
    for name in ("store", "coordinator"):
        run.machine.ready(name, 1, 0, run.now)
    run.machine.registered("rollout-0", 1, 0, run.now)
    run.machine.registered("actor-0", 1, 0, run.now)
    run.tick(300)
    assert run.tick(1) == [Kill("actor-0", 1, dump=True)]  # rollout-0 has registered: its beats are looked at instead


def test_a_run_is_done_when_all_groups_are_and_services_leave_last() -> None:
    run = Run().up()
    assert run.gone("actor-0") == [TellDead("actor-0", 1)]
    assert run.state("actor-0") is State.DONE
    assert run.gone("rollout-0") == [TellDead("rollout-0", 1), Terminate("store", 1), Terminate("coordinator", 1)]
    assert run.gone("store") == []
    assert run.gone("coordinator") == [Finish(EXIT_DONE)]
    assert run.machine.first_cause is None


def test_a_group_that_is_done_stays_done_while_others_restart() -> None:
    run = Run().up()
    run.gone("rollout-0")
    run.crash("actor-0")
    assert run.state("rollout-0") is State.DONE
    assert run.gone("actor-0")[-1] == Terminate("coordinator", 1)


def test_a_global_restart_starts_groups_that_were_done_too() -> None:
    run = Run(children=FORGETFUL).up()
    run.gone("rollout-0")
    run.fail("store")
    run.gone("store")
    run.gone("coordinator")
    assert Start("rollout-0", 2, 1) in run.gone("actor-0")


def test_a_stop_lets_groups_save_then_services_leave_with_the_requeue_code() -> None:
    run = Run().up()
    assert run.do(run.machine.stop("SIGTERM", run.now)) == [Terminate("actor-0", 1), Terminate("rollout-0", 1)]
    assert run.gone("rollout-0") == []
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]
    run.gone("store")
    assert run.gone("coordinator") == [Finish(EXIT_REQUEUE)]


def test_who_does_not_leave_within_the_grace_is_killed() -> None:
    run = Run().up()
    run.do(run.machine.stop("SIGTERM", run.now))
    run.gone("rollout-0")
    assert run.tick(19) == []
    assert run.tick(1) == [Kill("actor-0", 1)]
    run.gone("actor-0")
    assert run.tick(4) == []
    assert run.tick(1) == [Kill("store", 1), Kill("coordinator", 1)]


def test_who_saves_is_not_cut_off_by_the_grace_but_by_the_limit_of_its_save() -> None:
    for saved_after, kill in ((100, Kill("actor-0", 1)), (500, Kill("actor-0", 1, dump=True))):
        run = Run().up()
        run.do(run.machine.stop("SIGTERM", run.now))
        run.gone("rollout-0")
        save = Beat(0, run.now, 0, "save", run.now + 300, save_limit_s=run.now + 300)
        for _ in range(min(saved_after, 300)):
            assert run.tick(1, actor_0=save) == []
        done = Beat(0, run.now, 0) if saved_after < 300 else save
        for _ in range(4):  # a moment to leave
            assert run.tick(1, actor_0=done) == []
        assert run.tick(1, actor_0=done) == [kill]


def test_a_notice_leaves_its_own_time_and_ends_a_save_that_is_over_it() -> None:
    run = Run().up()
    run.do(run.machine.stop("SIGUSR1", run.now, within_s=100))
    assert run.notes[-1].data == {"reason": "SIGUSR1", "grace_s": 100}
    save = Beat(0, run.now, 0, "save", run.now + 300, save_limit_s=run.now + 300)
    for _ in range(99):  # who does not listen has as long: the grace of other stops is over
        assert run.tick(1, actor_0=save) == []
    everything = [Kill(name, 1) for name in ("store", "coordinator", "actor-0", "rollout-0")]
    assert run.tick(1, actor_0=save) == everything
    assert [run.gone(kill.child) for kill in everything][-1] == [Finish(EXIT_REQUEUE)]


def test_a_notice_during_a_stop_is_the_same_stop_with_a_deadline_and_of_several_the_first_one_counts() -> None:
    run = Run().up()
    run.do(run.machine.stop("SIGTERM", run.now))
    save = Beat(0, run.now, 0, "save", run.now + 300, save_limit_s=run.now + 300)
    assert run.do(run.machine.stop("notice", run.now, within_s=50)) == []
    assert run.do(run.machine.stop("notice", run.now + 10, within_s=90)) == []
    run.gone("rollout-0")
    for _ in range(49):
        assert run.tick(1, actor_0=save) == []
    assert Kill("actor-0", 1) in run.tick(1, actor_0=save)


def test_a_save_that_takes_longer_than_the_grace_is_told_and_told_again_when_that_has_doubled() -> None:
    run = Run()
    told = [bool(run.machine.saved(save_s)) for save_s in (19, 21, 41, 43, 80, 90)]
    assert told == [False, True, False, True, False, True]


def test_however_often_a_stop_is_asked_for_it_is_one_stop() -> None:
    run = Run().up()
    run.do(run.machine.stop("SIGUSR1", run.now))
    for _ in range(3):
        assert run.do(run.machine.stop("SIGTERM", run.now)) == []
    assert run.gone("rollout-0") == []
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]
    assert run.do(run.machine.stop("SIGTERM", run.now)) == []
    run.gone("store")
    assert run.gone("coordinator") == [Finish(EXIT_REQUEUE)]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_quick_stop_kills_at_once_also_a_stop_that_lasts(asked: int) -> None:
    run = Run().up()
    for _ in range(asked):
        run.do(run.machine.stop("SIGINT", run.now))
    kills = [Kill(name, 1) for name in ("store", "coordinator", "actor-0", "rollout-0")]
    assert run.do(run.machine.stop("SIGINT", run.now, quick=True)) == kills
    for name in ("store", "coordinator", "actor-0"):
        assert run.gone(name) == []
    assert run.gone("rollout-0") == [Finish(EXIT_REQUEUE)]


def test_a_stop_after_the_last_role_group_has_done_its_work_changes_nothing() -> None:
    run = Run().up()
    run.gone("actor-0")
    run.gone("rollout-0")
    assert run.do(run.machine.stop("SIGTERM", run.now)) == []
    run.gone("store")
    assert run.gone("coordinator") == [Finish(EXIT_DONE)]


def test_a_coordinator_that_dies_during_a_stop_starts_again_for_who_saves() -> None:
    run = Run().up()
    run.do(run.machine.stop("SIGTERM", run.now))
    assert run.gone("coordinator") == [Start("coordinator", 2, 0)]
    run.fail("coordinator")
    assert run.gone("coordinator") == [] and run.tick(1) == [Start("coordinator", 3, 0)]
    run.gone("rollout-0")
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 3)]
    run.gone("store")
    assert run.gone("coordinator") == [Finish(EXIT_REQUEUE)]


def test_a_stop_without_a_checkpoint_to_go_on_from_has_failed_with_the_reason() -> None:
    def cause(*happens: str) -> str:
        run = Run(can_restart=False).up()
        run.do(run.machine.stop("SIGTERM", run.now, quick="quick" in happens))
        if "told" in happens:
            run.machine.unsaved("actor-0", "nothing yet")
        if "fatal" in happens:
            assert run.do(run.machine.fatal("actor-0", "no room", run.now)) == []
        if "error" in happens:
            run.fail("actor-0", "exit code 1")
        if "late" in happens:
            run.tick(21)
        ends = [run.gone(name) for name in ("rollout-0", "actor-0", "store", "coordinator")]
        assert ends[-1] == [Finish(EXIT_FAILED)] and run.notes[-1].data["cause"] == str(run.machine.first_cause)
        return str(run.machine.first_cause)

    assert cause() == "supervisor of incarnation 0: stopped before a version was committed"
    assert cause("quick") == "supervisor of incarnation 0: stopped at once, without saving: SIGTERM"
    assert cause("late") == "actor-0 of incarnation 1: not left within supervision.grace_s, 20 s"
    assert cause("error", "late") == "actor-0 of incarnation 1: exit code 1"
    assert cause("fatal", "error") == "actor-0 of incarnation 1: no room"
    assert cause("told", "late") == "actor-0 of incarnation 1: nothing yet"


@pytest.mark.parametrize("happens", ["", "told", "over", "nothing"])
def test_who_dies_while_it_leaves_takes_its_other_ranks_along_and_has_one_more_try_to_save(happens: str) -> None:
    """Unless it has told why it saves nothing, is over its time, or there is nothing to save."""
    run = Run().up()
    if happens != "nothing":
        run.machine.committed(run.now)
    run.do(run.machine.stop("SIGTERM", run.now))
    if happens == "told":
        run.machine.fatal("actor-0", "no room", run.now)
    if happens == "over":
        run.tick(21)
        assert run.state("actor-0") is State.ENDING
    else:
        assert run.fail("actor-0") == [Kill("actor-0", 1)]
    if happens:
        assert run.gone("actor-0") == []  # the rollout is still there
        assert run.state("actor-0") is State.ENDED
        return
    assert run.gone("actor-0")[-1:] == [Start("actor-0", 2, 0)]
    run.gone("rollout-0")
    for rank in range(2):
        assert run.machine.registered("actor-0", 2, rank, run.now)
    assert run.tick(1) == [Terminate("actor-0", 2)]
    assert run.fail("actor-0") == [Kill("actor-0", 2)]
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]


def test_a_group_that_is_still_starting_has_nothing_to_save() -> None:
    run = Run()
    run.machine.registered("actor-0", 1, 0, run.now)
    run.machine.registered("rollout-0", 1, 0, run.now)
    assert run.do(run.machine.stop("SIGTERM", run.now)) == [Kill("actor-0", 1), Terminate("rollout-0", 1)]


def test_a_stop_during_back_off_or_a_global_restart_starts_nothing_any_more() -> None:
    run = Run().up()
    run.crash("rollout-0")
    run.fail("rollout-0")
    run.gone("rollout-0")
    run.do(run.machine.stop("SIGTERM", run.now))
    assert run.tick(2) == []
    assert run.state("rollout-0") is State.ENDED

    for children in (CHILDREN, FORGETFUL):
        run = Run(children=children).up()
        run.machine.committed(run.now)
        run.fail("store")
        run.do(run.machine.stop("SIGTERM", run.now))
        ends = [run.gone(name) for name in ("store", "actor-0", "rollout-0", "coordinator")]
        assert ends[-1] == [Finish(EXIT_REQUEUE)]
        assert not any(isinstance(action, Start) for end in ends for action in end)


def stopped_while_the_actor_is(where: str, *, committed: bool = True) -> Run:
    """The actor dies, and a stop comes while it is on its way back."""
    run = Run().up()
    if committed:
        run.machine.committed(run.now)
    if where == "waiting":
        run.crash("actor-0")
    run.fail("actor-0")
    if where != "ending":
        run.gone("actor-0")
    assert run.state("actor-0") is State(where)
    run.do(run.machine.stop("SIGTERM", run.now))
    run.gone("rollout-0")
    return run


@pytest.mark.parametrize("where", ["ending", "waiting", "starting"])
def test_who_has_something_to_save_and_is_started_again_at_a_stop_comes_up_and_saves(where: str) -> None:
    run = stopped_while_the_actor_is(where)
    if where != "starting":
        life = 3 if where == "waiting" else 2
        started = run.tick(0) if where == "waiting" else run.gone("actor-0")
        assert started[-1:] == [Start("actor-0", life, 0)]
    assert run.tick(100) == []  # the grace is for who is there
    life = run.incarnation("actor-0")
    for rank in range(2):
        assert run.machine.registered("actor-0", life, rank, run.now)
    assert run.tick(1) == [Terminate("actor-0", life)]
    for name in ("load", "save"):
        for _ in range(100):
            limit = run.now + 300
            beat = Beat(0, run.now, 0, name, limit, patient=True, save_limit_s=limit if name == "save" else 0)
            assert run.tick(1, actor_0=beat) == []
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]
    run.gone("store")
    assert run.gone("coordinator") == [Finish(EXIT_REQUEUE)]


@pytest.mark.parametrize("where", ["ending", "waiting", "starting"])
def test_who_is_started_again_at_a_stop_with_nothing_to_save_ends_at_once(where: str) -> None:
    run = stopped_while_the_actor_is(where, committed=False)
    if where != "waiting":
        assert run.state("actor-0") is State.ENDING
        assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]
    assert run.machine.phase is Phase.CLOSING


def test_who_comes_up_at_a_stop_has_one_try_and_its_own_limits() -> None:
    run = stopped_while_the_actor_is("starting")
    assert run.fail("actor-0") == [Kill("actor-0", 2)]
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]

    run = stopped_while_the_actor_is("starting")
    assert run.tick(300) == [] and run.tick(1) == [Kill("actor-0", 2, dump=True)]  # not up within start_s

    run = stopped_while_the_actor_is("starting")
    for rank in range(2):
        run.machine.registered("actor-0", 2, rank, run.now)
    loads = Beat(0, run.now, 0, "load", run.now + 50, patient=True)
    assert run.tick(0, actor_0=loads) == [Terminate("actor-0", 2)]
    for _ in range(69):  # its limit, and the grace
        assert run.tick(1, actor_0=loads) == []
    assert run.tick(1, actor_0=loads) == [Kill("actor-0", 2)]

    run = stopped_while_the_actor_is("starting")
    assert run.do(run.machine.stop("SIGINT", run.now, quick=True))[-1] == Kill("actor-0", 2)


def test_something_fatal_ends_the_run_with_it_as_the_cause() -> None:
    run = Run().up()
    assert len(run.do(run.machine.fatal("coordinator", "admitted 10 is not 9", run.now))) == 4
    for name in ("store", "coordinator", "actor-0"):
        run.gone(name)
    assert run.gone("rollout-0") == [Finish(EXIT_FAILED)]
    assert str(run.machine.first_cause) == "coordinator of incarnation 1: admitted 10 is not 9"


def test_a_setting_that_breaks_a_rule_ends_the_run_with_2_and_starts_nobody_again() -> None:
    run = Run().up()
    actions = run.do(run.machine.fatal("actor-0", "model.path must be whole", run.now, 2))
    for name in ("store", "coordinator", "actor-0"):
        actions += run.gone(name)
    assert run.gone("rollout-0") == [Finish(2)] and not any(isinstance(each, Start) for each in actions)
    assert str(run.machine.first_cause) == "actor-0 of incarnation 1: model.path must be whole"


def test_a_computation_that_is_over_its_limit_is_ended_while_the_loop_beats_on_and_a_silent_loop_beside_one_too() -> (
    None
):
    run = Run().up()
    limit = run.now + 120
    for _ in range(120):
        assert run.tick(1, actor_0=Beat(0, run.now, 0, "train", limit)) == []
    assert run.tick(1, actor_0=Beat(0, run.now, 0, "train", limit)) == [Kill("actor-0", 1, dump=True)]
    run = Run().up()
    silent = Beat(0, run.now, 0, "train", run.now + 1000)
    assert run.tick(15, actor_0=silent) == []
    assert run.tick(1, actor_0=silent) == [Kill("actor-0", 1, dump=True)]


STANDING = {"rollout-0": [Beat(0, 0, 7)], "actor-0": [Beat(0, 0, 3, "a", 1e9, section_since_s=1300.0), Beat(1, 0, 3)]}


def stand(run: Run, beats: dict[str, list[Beat]], seconds: int = 901) -> list[Action]:
    """Nothing but loops that beat for so long; what is done at the end of it, stacks dumped if need be."""
    actions: list[Action] = []
    for _ in range(seconds):
        assert actions == []
        run.now += 1
        beaten = {name: [replace(beat, beat_s=run.now) for beat in each] for name, each in beats.items()}
        actions = run.do(run.machine.tick(run.now, beaten))
    return run.do(run.machine.dumped(run.now, beats)) if actions == [DumpStacks()] else actions


def test_a_run_without_progress_restarts_whose_section_stands_longest_then_all_role_groups_then_itself() -> None:
    run = Run(SupervisionConfig(no_progress_s=900, max_global_restarts=1)).up()
    other = {**STANDING, "rollout-0": [Beat(0, 0, 7, "b", 1e9, section_since_s=1301.0)]}
    run.do(run.machine.tick(run.now, other))  # what was done so far
    assert stand(run, other) == [Kill("actor-0", 1)]
    what = "no progress for 900 s; section 'a' stands for 601 s"
    assert run.notes[-1].data["cause"] == what and run.notes[-1].data["rank"] == 0
    run.gone("actor-0")
    run.up()
    assert stand(run, {}) == [Kill("store", 1), Kill("actor-0", 2), Kill("rollout-0", 1)]
    for name in ("store", "actor-0", "rollout-0"):
        run.gone(name)
    run.tick(2)
    run.up()
    assert stand(run, {})[0] == Kill("store", 2) and run.machine.phase is Phase.RESTARTING
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        run.gone(name)
    run.up()
    stand(run, {})
    assert run.machine.phase is Phase.FAILING
    cause = run.machine.first_cause
    assert cause is not None and (cause.child, cause.what) == ("actor-0", what)


def test_where_nobody_computes_it_is_the_coordinator_that_all_wait_for() -> None:
    run = Run().up()
    assert stand(run, {}) == [Kill("coordinator", 1)]
    run.gone("coordinator")
    run.up()
    run.machine.progressed(run.now)  # that was it
    assert stand(run, {}) == [Kill("coordinator", 2)]


def test_what_moves_while_stacks_are_dumped_is_left_alone() -> None:
    run = Run().up()
    run.tick(900)
    assert run.tick(1) == [DumpStacks()]
    run.machine.progressed(run.now)
    assert run.do(run.machine.dumped(run.now, STANDING)) == []


def test_anything_that_a_role_has_done_is_progress() -> None:
    run = Run().up()
    for done in range(1, 10):
        assert run.tick(600, rollout_0=Beat(0, run.now + 600, done)) == []


@pytest.mark.parametrize("excuse", ["patient", "starts"])
def test_who_saves_or_starts_has_limits_of_its_own_and_no_progress_is_no_fault_meanwhile(excuse: str) -> None:
    run = Run(SupervisionConfig(no_progress_s=900, start_s=1e9)).up()
    saves = {"actor-0": [Beat(0, 0, 0, "save", 1e9, patient=True)]}
    if excuse == "starts":
        run.crash("actor-0")
        run.fail("actor-0")
        run.gone("actor-0")
        run.tick(2)
    assert stand(run, saves if excuse == "patient" else {}, 2000) == []


def test_the_dead_are_listed_and_the_living_are_alive() -> None:
    run = Run().up()
    run.crash("rollout-0")
    run.fail("actor-0")
    assert run.machine.dead() == (("rollout-0", 1),)
    assert run.machine.alive("actor-0")  # killed, but not proved gone
    run.gone("actor-0")
    run.fail("actor-0")
    run.gone("actor-0")
    assert not run.machine.alive("actor-0")  # in back-off


def left(name: str, incarnation: int = 1) -> TellDead:
    return TellDead(name, incarnation, left=True)


def test_a_child_that_is_added_starts_beside_the_others_and_counts_on_from_what_ran_before() -> None:
    run = Run(incarnations={"rollout-1": 4}).up()
    assert run.do(run.machine.add(Child("rollout-1"), run.now)) == [Start("rollout-1", 5, 0)]
    run.up()
    assert run.state("rollout-1") is State.READY
    assert run.crash("rollout-1")[-1] == Start("rollout-1", 6, 0)


def test_a_child_that_drains_is_told_so_ends_by_itself_and_is_forgotten() -> None:
    run = with_another().up()
    assert run.do(run.machine.drain("rollout-1", run.now, deadline_s=60)) == [TellDraining("rollout-1", 1)]
    assert [view.name for view in run.machine.views() if view.passing] == ["rollout-1"]
    assert run.state("rollout-1") is State.DRAINING and run.machine.phase is Phase.RUNNING
    assert run.tick(59) == []
    assert run.gone("rollout-1") == [left("rollout-1")]
    assert [view.name for view in run.machine.views()] == [child.name for child in CHILDREN]
    assert not run.machine.registered("rollout-1", 1, 0, run.now) and run.machine.dead() == (("rollout-1", 1),)


def test_who_has_not_left_at_its_deadline_is_killed_and_with_none_at_once() -> None:
    run = with_another().up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=60))
    assert run.tick(60) == [Kill("rollout-1", 1)] and run.notes[-1].kind == "forced"
    assert run.gone("rollout-1") == [left("rollout-1")]
    run = with_another().up()
    drained = run.do(run.machine.drain("rollout-1", run.now, deadline_s=0))
    assert drained == [TellDraining("rollout-1", 1), Kill("rollout-1", 1)]


def test_a_deadline_of_one_that_drains_comes_nearer_and_never_goes_away() -> None:
    run = with_another().up()
    for deadline_s in (60, 600):
        run.do(run.machine.drain("rollout-1", run.now, deadline_s=deadline_s))
    assert run.tick(59) == [] and run.tick(1) == [Kill("rollout-1", 1)]
    run = with_another().up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=60))
    assert run.do(run.machine.drain("rollout-1", run.now, deadline_s=0)) == [Kill("rollout-1", 1)]


@pytest.mark.parametrize("where", ["starting", "ending", "waiting"])
def test_who_is_not_up_has_nothing_to_drain(where: str) -> None:
    run = with_another()
    if where != "starting":
        run.up().crash("rollout-1")
        run.fail("rollout-1")
    if where == "waiting":
        run.gone("rollout-1")
    assert run.state("rollout-1") is State(where)
    number = run.incarnation("rollout-1")
    asked = run.do(run.machine.drain("rollout-1", run.now, deadline_s=60))
    if where == "waiting":
        assert asked == [left("rollout-1", number)]
        return
    assert asked == ([Kill("rollout-1", number)] if where == "starting" else [])
    assert run.gone("rollout-1") == [left("rollout-1", number)]


def test_who_drains_to_start_again_does_so_under_the_next_incarnation_without_having_failed() -> None:
    run = Run(SupervisionConfig(max_restarts=0)).up()
    assert run.do(run.machine.drain("rollout-0", run.now, deadline_s=60, again=True)) == [TellDraining("rollout-0", 1)]
    assert run.gone("rollout-0") == [TellDead("rollout-0", 1), Start("rollout-0", 2, 0)]
    run.up()
    assert run.machine.restarts() == {}
    assert run.gone("rollout-0") == [TellDead("rollout-0", 2)] and run.state("rollout-0") is State.DONE
    assert run.do(run.machine.drain("rollout-0", run.now, deadline_s=60, again=True)) == []


def test_a_death_while_it_drains_is_the_end_that_was_asked_for() -> None:
    for again in (False, True):
        run = with_another(SupervisionConfig(max_restarts=0)).up()
        run.do(run.machine.drain("rollout-1", run.now, deadline_s=60, again=again))
        assert run.fail("rollout-1") == [Kill("rollout-1", 1)]
        then = [TellDead("rollout-1", 1), Start("rollout-1", 2, 0)] if again else [left("rollout-1")]
        assert run.gone("rollout-1") == then and run.machine.phase is Phase.RUNNING


def test_a_silent_one_that_drains_is_noticed_before_its_deadline() -> None:
    run = with_another().up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=600))
    assert run.tick(16, rollout_1=Beat(0, run.now, 0)) == [Kill("rollout-1", 1, dump=True)]


def test_who_was_to_leave_stays_and_comes_back_where_it_had_left_already() -> None:
    run = with_another().up()
    assert run.do(run.machine.stay("rollout-1")) == []
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=60))
    assert run.do(run.machine.stay("rollout-1")) == [TellDraining("rollout-1", 1, stays=True)]
    assert run.state("rollout-1") is State.READY and run.tick(61) == []
    assert not any(view.passing for view in run.machine.views())
    assert run.gone("rollout-1") == [TellDead("rollout-1", 1), Start("rollout-1", 2, 0)]  # it had been told to end
    run.up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=0))
    assert run.do(run.machine.stay("rollout-1")) == []  # it is being killed
    assert run.gone("rollout-1")[-1] == Start("rollout-1", 3, 0)


def test_who_never_was_ready_is_given_up_beyond_its_limit_and_nothing_escalates() -> None:
    run = with_another()
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        for rank in range(2):
            run.machine.ready(name, 1, rank, run.now)
    for number in range(1, 4):
        run.fail("rollout-1", "out of memory")
        run.gone("rollout-1")
        run.tick(10)
        assert run.incarnation("rollout-1") == number + 1
    assert run.fail("rollout-1", "out of memory") == [Kill("rollout-1", 4)]
    assert run.notes[-1] == Note("given_up", {"group": "rollout-1", "incarnation": 4, "cause": "out of memory"})
    assert run.gone("rollout-1") == [left("rollout-1", 4)] and run.machine.phase is Phase.RUNNING
    assert run.machine.restarts()["rollout-1"] == 3
    assert (run.machine.last_failure("rollout-1"), run.machine.last_failure("rollout-0")) == ("out of memory", "")


def test_a_run_that_stands_still_is_seen_while_one_more_comes_and_while_another_leaves() -> None:
    run = with_another()
    for name in ("store", "coordinator", "actor-0", "rollout-0"):
        for rank in range(2):
            run.machine.ready(name, 1, rank, run.now)
    loads = {"rollout-1": [Beat(0, run.now, 0, "load", 1e9, patient=True)]}
    run.machine.registered("rollout-1", 1, 0, run.now)
    assert stand(run, loads) == [Kill("coordinator", 1)]
    run = with_another().up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=1e9))
    assert stand(run, {}) == [Kill("coordinator", 1)]


def test_a_run_is_done_when_the_last_that_is_not_has_left() -> None:
    run = with_another().up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=60))
    run.gone("actor-0")
    run.gone("rollout-0")
    assert run.gone("rollout-1") == [left("rollout-1"), Terminate("store", 1), Terminate("coordinator", 1)]


def test_a_stop_asks_those_that_drain_to_leave_and_waits_for_them() -> None:
    run = with_another().up()
    run.do(run.machine.drain("rollout-1", run.now, deadline_s=600))
    run.do(run.machine.stop("SIGTERM", run.now))
    assert run.state("rollout-1") is State.LEAVING
    run.gone("actor-0")
    run.gone("rollout-0")
    assert run.tick(20) == [Kill("rollout-1", 1)]
    assert run.gone("rollout-1") == [left("rollout-1"), Terminate("store", 1), Terminate("coordinator", 1)]


@pytest.mark.parametrize("told", ["before", "after"])
def test_a_trainer_that_left_without_saving_to_start_again_comes_up_and_saves_at_a_stop(told: str) -> None:
    run = Run().up()
    run.machine.committed(run.now)
    run.do(run.machine.drain("actor-0", run.now, deadline_s=600, again=True))
    if told == "before":
        run.machine.kept("actor-0", run.now)
    run.do(run.machine.stop("SIGTERM", run.now))
    run.machine.kept("actor-0", run.now)
    assert run.gone("actor-0") == [TellDead("actor-0", 1), Start("actor-0", 2, 0)]
    run.up()
    assert run.tick(1) == [Terminate("actor-0", 2)]
    run.gone("rollout-0")
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]


def test_a_trainer_that_saves_at_a_stop_though_it_was_to_start_again_does_not_come_up() -> None:
    run = Run().up()
    run.machine.committed(run.now)
    run.do(run.machine.drain("actor-0", run.now, deadline_s=600, again=True))
    assert Terminate("actor-0", 1) in run.do(run.machine.stop("SIGTERM", run.now))
    run.gone("rollout-0")
    assert run.gone("actor-0") == [Terminate("store", 1), Terminate("coordinator", 1)]


def test_who_leaves_does_not_come_back_with_the_store_nor_with_another_attempt_and_who_was_added_does() -> None:
    for children in (CHILDREN, FORGETFUL):
        run = with_another(children=children).up()
        run.do(run.machine.add(Child("rollout-2"), run.now))
        run.do(run.machine.drain("rollout-1", run.now, deadline_s=60))
        run.fail("store")
        assert run.gone("rollout-1") == [left("rollout-1")]
        started = [run.gone(view.name) for view in run.machine.views() if view.state is State.ENDING][-1]
        names = [action.child for action in started if isinstance(action, Start)]
        assert "rollout-2" in names and "rollout-1" not in names


def test_who_is_added_while_the_store_is_away_starts_with_it() -> None:
    run = Run().up()
    run.fail("store")
    assert run.do(run.machine.add(Child("rollout-1"), run.now)) == []
    for name in ("actor-0", "rollout-0"):
        run.gone(name)
    assert Start("rollout-1", 1, 0) in run.gone("store")


def with_another(limits: SupervisionConfig = LIMITS, *, children: tuple[Child, ...] = CHILDREN) -> Run:
    run = Run(limits, children=children)
    run.do(run.machine.add(Child("rollout-1"), run.now))
    return run


@pytest.mark.filterwarnings("error")
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [
                    "failed",
                    "gone",
                    "ready",
                    "registered",
                    "committed",
                    "stop",
                    "fatal",
                    "tick",
                    "add",
                    "drain",
                    "again",
                    "stay",
                ]
            ),
            st.sampled_from([*(child.name for child in CHILDREN), "rollout-1"]),
            st.integers(0, 2),
            st.floats(0, 700),
        ),
        max_size=80,
    )
)
def test_whatever_happens_no_incarnation_starts_before_the_last_is_gone_and_a_stop_ends_it(
    events: list[tuple[str, str, int, float]],
) -> None:
    run, living, finished = Run(), {child.name for child in CHILDREN}, False

    def follow(actions: list[Action]) -> None:
        nonlocal finished
        for action in actions:
            assert not finished, action
            if isinstance(action, Start):
                assert action.child not in living
                living.add(action.child)
            elif isinstance(action, (Kill, Terminate)):
                assert action.incarnation == run.incarnation(action.child)
            finished |= isinstance(action, Finish)

    def gone(name: str) -> None:
        living.discard(name)
        follow(run.gone(name))

    for kind, name, back, seconds in events:
        machine = run.machine
        known = {view.name for view in machine.views()}
        run.now += seconds
        if kind == "add" and "rollout-1" not in known | living and machine.phase is Phase.RUNNING:
            follow(run.do(machine.add(Child("rollout-1"), run.now)))
            continue
        if kind == "add" or name not in known:
            continue
        incarnation = run.incarnation(name) - back
        if kind == "gone":
            gone(name)
        elif kind in ("drain", "again", "stay"):
            if name.startswith("rollout") and machine.phase is Phase.RUNNING:
                again = kind == "again"
                drained = machine.drain(name, run.now, deadline_s=seconds, again=again) if kind != "stay" else None
                follow(run.do(machine.stay(name) if drained is None else drained))
        elif kind == "failed":
            follow(run.do(machine.failed(name, incarnation, "exit code 1", run.now)))
        elif kind == "ready":
            follow(run.do(machine.ready(name, incarnation, 0, run.now)))
        elif kind == "registered":
            for rank in range(2):
                machine.registered(name, incarnation, rank, run.now)
        elif kind == "committed":
            machine.committed(run.now)
        elif kind == "tick":
            follow(run.do(machine.tick(run.now, {})))
        else:
            follow(run.do(machine.stop("x", run.now) if kind == "stop" else machine.fatal(name, "x", run.now)))
    if not finished:
        follow(run.do(run.machine.stop("the end", run.now)))
        for _ in range(3):
            run.now += 1000
            if not finished:
                follow(run.do(run.machine.tick(run.now, {})))
            for name in sorted(living):
                gone(name)
    assert finished and not living
