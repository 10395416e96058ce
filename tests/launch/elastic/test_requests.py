"""Requests for more and fewer replicas, in no time at all: a made-up supervisor does what it is told, and time is a number."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rondo.launch.elastic.request import Replica, Request, Status, Wish
from rondo.launch.elastic.requests import Add, Drain, Order, Requests, Stay
from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.orders import State

OUT, IN = "scale_out", "scale_in"


class Run:
    """The replicas that there are, and requests about them."""

    def __init__(self, num: int = 1, room: int = 100) -> None:
        self.seen = {f"rollout-{i}": up() for i in range(num)} | {"reference-0": up(), "actor-0": up()}
        self.now, self.room = 0.0, room
        self.leaving: dict[str, bool] = {}
        self.orders: list[Order] = []
        self.statuses: list[Status] = []
        self.requests = Requests(
            {"rollout": "rollout", "reference": "reference"}, {"rollout": num, "reference": 1}, self.admit,
            drain_s=300, start_s=600, wall=lambda: self.now, fixed={"actor": "actor", "critic": "actor"},
        )  # fmt: skip

    def admit(self, group: str, num: int) -> str:
        return "" if num <= self.room else f"{num} more do not fit"

    def ask(self, action: str, num: int = 0, **fields: object) -> Request:
        fields.setdefault("role", "rollout")
        wish = Wish(action=action, num_replicas=num, **fields)  # type: ignore[arg-type]
        return self.requests.ask(wish, self.seen, self.now)

    def cancel(self, request: Request) -> Request:
        found, orders = self.requests.cancel(request.request_id, self.seen, self.now)
        self.do(orders)
        return found

    def turn(self, seconds: float = 0.0) -> list[Order]:
        """Time passes, then what is to be done is done."""
        self.now += seconds
        active = self.requests.active
        orders = self.requests.advance(self.seen, self.now)
        if active is not None:
            request = self.requests.get(active.request_id)
            assert request is not None
            if self.statuses[-1:] != [request.status]:
                self.statuses.append(request.status)
        self.do(orders)
        return orders

    def do(self, orders: list[Order]) -> None:
        self.orders += orders
        for order in orders:
            match order:
                case Add():
                    assert not set(order.names) & set(self.seen)
                    self.seen |= {name: Replica(State.STARTING) for name in order.names}
                case Drain():
                    found = self.seen[order.name]
                    if order.again and found.state is not State.READY:
                        continue
                    self.leaving[order.name] = order.again
                    ends = order.deadline_s <= 0 or found.state is not State.READY
                    self.seen[order.name] = replace(found, state=State.ENDING if ends else State.DRAINING)
                case Stay():
                    if self.leaving.get(order.name) is False:
                        self.leaving[order.name] = True
                    if self.seen[order.name].state is State.DRAINING:
                        del self.leaving[order.name]
                        self.seen[order.name] = replace(self.seen[order.name], state=State.READY)

    def set(self, name: str, **fields: object) -> None:
        self.seen[name] = replace(self.seen[name], **fields)  # type: ignore[arg-type]

    def gone(self, name: str) -> None:
        """Every process of it is."""
        if self.leaving.pop(name):
            self.seen[name] = Replica(State.STARTING, self.seen[name].incarnation + 1)
        else:
            del self.seen[name]

    def settle(self) -> None:
        """Whatever comes is up, and whatever leaves is gone."""
        for _ in range(100):
            self.turn()
            for name in list(self.seen):
                if self.seen[name].state in (State.DRAINING, State.ENDING):
                    self.gone(name)
                elif self.seen[name].state is State.STARTING:
                    self.set(name, state=State.READY, registered=True)
            if self.requests.active is None:
                return
        raise AssertionError(self.requests.active)

    def last(self) -> Request:
        return self.requests.all()[0]

    def rollouts(self) -> list[str]:
        return sorted(name for name in self.seen if name.startswith("rollout"))


def up() -> Replica:
    return Replica(State.READY, registered=True)


def test_a_scale_out_goes_through_its_states_and_is_active_when_all_new_replicas_serve() -> None:
    run = Run()
    asked = run.ask(OUT, 3, reason="load")
    assert (asked.status, asked.selected_engines) == (Status.PENDING, ("rollout-1", "rollout-2"))
    assert run.turn() == [Add("rollout", ("rollout-1", "rollout-2"))]
    run.turn()
    run.set("rollout-1", state=State.READY, registered=True)
    run.turn()
    assert run.last().status is Status.CREATING and run.last().engine_ids == ("rollout-1",)
    # Loading has several sections, between which none goes back.
    sections = [{"loads": loads} for loads in (True, False, True, False)]
    for fields in ({"registered": True}, *sections, {"state": State.READY}):
        run.set("rollout-2", **fields)
        run.turn()
    done = run.last()
    assert (done.status, done.engine_ids, done.request_id) == (
        Status.ACTIVE, ("rollout-1", "rollout-2"), asked.request_id,
    )  # fmt: skip
    assert run.statuses == [Status.CREATING, Status.HEALTH_CHECKING, Status.WEIGHT_SYNCING, Status.ACTIVE]
    assert run.requests.active is None and run.turn() == []


def test_a_scale_in_takes_the_newest_and_is_over_when_they_are_gone() -> None:
    run = Run(3)
    assert run.ask(IN, 1, timeout_s=60.0).selected_engines == ("rollout-2", "rollout-1")
    assert run.turn() == [Drain("rollout-2", 60.0), Drain("rollout-1", 60.0)]
    run.gone("rollout-2")
    run.turn()
    assert (run.last().status, run.last().removed_engines) == (Status.DRAINING, ("rollout-2",))
    run.set("rollout-1", state=State.ENDING)
    run.turn()
    assert run.last().status is Status.REMOVING
    run.gone("rollout-1")
    run.turn()
    assert run.last().status is Status.COMPLETED and set(run.last().removed_engines) == {"rollout-1", "rollout-2"}
    assert run.rollouts() == ["rollout-0"]


def test_force_gives_no_time() -> None:
    run = Run(2)
    run.ask(IN, 1, force=True)
    assert run.turn() == [Drain("rollout-1", 0.0)]


def test_numbers_are_given_once() -> None:
    run = Run()
    for num, names in ((3, {"rollout-1", "rollout-2"}), (1, set()), (2, {"rollout-3"})):
        run.ask(OUT if num > len(run.rollouts()) else IN, num)
        run.settle()
        assert set(run.rollouts()) == {"rollout-0"} | names
    run.ask(OUT, 12)
    run.settle()
    run.ask(IN, 11)
    run.settle()
    assert "rollout-13" not in run.seen and "rollout-9" in run.seen  # by number, not by letter


def test_what_is_so_already_is_no_operation_and_what_cannot_be_is_refused_with_the_reason() -> None:
    run = Run(2, room=3)
    answers = [
        run.ask(OUT, 2), run.ask(IN, 2), run.ask(IN, 0), run.ask(OUT, 1), run.ask(IN, 3), run.ask(OUT, 6),
        run.ask(OUT, 3, engine_urls=("http://a:1",)),
    ]  # fmt: skip
    assert [answer.status for answer in answers] == [Status.NOOP] * 2 + [Status.REJECTED] * 5
    assert answers[0].message == "there are 2 replicas already"
    assert answers[2].message == "num_replicas must be at least 1, got 0. Stop the run to end all"
    assert answers[3].message == "num_replicas of scale_out must lead from 2 there, got 1. Use scale_in"
    assert answers[5].message == "4 more do not fit"
    assert run.requests.active is None and run.requests.all() == ()
    with pytest.raises(ConfigError, match=r"shares no process with the trainer \(rollout, reference\), got 'actor'"):
        run.ask(OUT, 2, role="actor")


def test_a_number_that_cannot_be_is_refused_before_anything_is_made_of_it() -> None:
    run = Run(room=2)
    for _ in range(2):
        refused = run.ask(OUT, 10**15)
        assert refused.status in (Status.REJECTED, Status.CONFLICT) and refused.selected_engines == ()
        run.ask(OUT, 2)


def test_one_request_is_under_way_at_a_time_whatever_its_role() -> None:
    run = Run()
    first = run.ask(OUT, 2)
    for other in (run.ask(OUT, 3), run.ask(OUT, 2, role="reference"), run.ask("restart")):
        assert other.status is Status.CONFLICT and other.message == f"request {first.request_id} is under way"
    run.settle()
    assert run.ask(OUT, 2, role="reference").status is Status.PENDING


def test_the_same_wish_under_the_same_key_is_one_request_and_another_one_is_refused() -> None:
    run = Run()
    first = run.ask(OUT, 3, idempotency_key="k")
    assert run.ask(OUT, 3, idempotency_key="k").request_id == first.request_id
    run.settle()
    again = run.ask(OUT, 3, idempotency_key="k")
    assert (again.request_id, again.status) == (first.request_id, Status.ACTIVE)
    with pytest.raises(ConfigError, match="idempotency_key must be new for another wish"):
        run.ask(IN, 1, idempotency_key="k")
    assert len(run.rollouts()) == 3


def test_a_dry_run_tells_the_choice_and_changes_nothing() -> None:
    run = Run(2)
    assert run.ask(IN, 1, dry_run=True).selected_engines == ("rollout-1",)
    assert run.ask(OUT, 4, dry_run=True).selected_engines == ("rollout-2", "rollout-3")
    assert run.requests.active is None and run.turn() == []


@pytest.mark.parametrize("policy", ["keep_partial", "rollback_all"])
def test_where_some_do_not_come_up_the_others_stay_or_leave_again_as_was_asked(policy: str) -> None:
    run = Run()
    run.ask(OUT, 3, policy=policy)
    run.turn()
    del run.seen["rollout-1"]  # given up
    run.set("rollout-2", state=State.READY, registered=True)
    orders = run.turn()
    request = run.last()
    assert set(request.failed_engines) == {"rollout-1"} and request.engine_ids == ("rollout-2",)
    assert orders == ([] if policy == "keep_partial" else [Drain("rollout-2", 300)])
    run.settle()
    assert run.last().status is (Status.PARTIAL if policy == "keep_partial" else Status.FAILED)
    assert run.last().error_message == "1 of 2 new replicas did not come up"
    assert run.rollouts() == (["rollout-0", "rollout-2"] if policy == "keep_partial" else ["rollout-0"])


def test_where_none_comes_up_it_has_failed() -> None:
    run = Run()
    run.ask(OUT, 2)
    run.turn()
    del run.seen["rollout-1"]
    run.settle()
    assert (run.last().status, run.rollouts()) == (Status.FAILED, ["rollout-0"])


def test_who_is_not_up_in_time_is_given_up_and_waited_for_until_it_is_gone() -> None:
    run = Run()
    run.ask(OUT, 3, timeout_s=100.0)
    run.turn()
    run.set("rollout-1", state=State.READY, registered=True)
    assert run.turn(99) == []
    assert run.turn(1) == [Drain("rollout-2", 0.0)]
    assert run.last().status is Status.REMOVING and run.last().failed_engines == {"rollout-2": "not up within 100 s"}
    run.turn()
    assert run.last().status is Status.REMOVING
    run.gone("rollout-2")
    run.turn()
    assert run.last().status is Status.PARTIAL


def test_who_was_up_once_counts_though_it_starts_again_while_others_come() -> None:
    run = Run()
    run.ask(OUT, 3)
    run.turn()
    run.set("rollout-1", state=State.READY, registered=True)
    run.turn()
    run.set("rollout-1", state=State.STARTING, incarnation=2)
    run.set("rollout-2", state=State.READY, registered=True)
    run.turn()
    assert run.last().status is Status.ACTIVE


@pytest.mark.parametrize("after", range(4))
def test_a_scale_out_is_cancelled_in_every_state_and_what_came_leaves(after: int) -> None:
    run = Run()
    asked = run.ask(OUT, 3)
    for _ in range(after):
        run.turn()
    if after > 1:
        run.set("rollout-1", state=State.READY, registered=True)
    if after > 2:
        run.turn()
    cancelled = run.cancel(asked)
    assert cancelled.status is (Status.CANCELLED if after == 0 else Status.REMOVING)
    if after > 1:
        assert run.orders[-2:] == [Drain("rollout-1", 300), Drain("rollout-2", 0.0)]
    run.settle()
    assert (run.last().status, run.rollouts()) == (Status.CANCELLED, ["rollout-0"])


def test_a_scale_in_is_cancelled_in_every_state_and_all_are_there_again() -> None:
    for gone in range(3):
        run = Run(4)
        asked = run.ask(IN, 1)
        run.turn()
        for name in ("rollout-3", "rollout-2")[:gone]:
            run.gone(name)
        run.turn()
        assert run.cancel(asked).status is Status.CREATING
        run.settle()
        assert run.last().status is Status.CANCELLED and len(run.rollouts()) == 4
        assert all(run.seen[name].serves for name in run.rollouts())
    run = Run(2)
    assert run.cancel(run.ask(IN, 1)).status is Status.CANCELLED and run.turn() == []


def test_who_is_being_ended_when_its_leaving_is_cancelled_comes_back() -> None:
    run = Run(2)
    asked = run.ask(IN, 1, force=True)
    run.turn()
    run.turn()
    assert run.last().status is Status.REMOVING
    run.cancel(asked)
    run.turn()
    assert run.last().status is Status.CREATING
    run.settle()
    assert run.last().status is Status.CANCELLED and run.seen["rollout-1"].incarnation == 2


def test_only_a_request_that_is_under_way_can_be_cancelled() -> None:
    run = Run()
    asked = run.ask(OUT, 2)
    run.settle()
    with pytest.raises(ConfigError, match="must be under way to be cancelled, got one that is ACTIVE"):
        run.cancel(asked)
    with pytest.raises(ConfigError, match="got none of that name"):
        run.cancel(replace(asked, request_id="x"))


def test_a_restart_takes_one_replica_after_another() -> None:
    run = Run(3)
    assert run.ask("restart").message == "3 replicas, one after another"
    for name in ("rollout-0", "rollout-1", "rollout-2"):
        assert run.turn() == [Drain(name, 300, again=True)] if name == "rollout-0" else run.orders[-1].name == name  # type: ignore[union-attr]
        assert sum(replica.serves for replica in run.seen.values()) == 4
        run.gone(name)
        run.turn()
        assert run.last().status is Status.CREATING
        run.set(name, state=State.READY)
        run.turn()
    assert (run.last().status, run.last().engine_ids) == (Status.COMPLETED, ("rollout-0", "rollout-1", "rollout-2"))
    assert {run.seen[name].incarnation for name in run.rollouts()} == {2}


def test_a_trainer_starts_again_with_all_that_share_its_processes_and_has_no_other_number() -> None:
    run = Run()
    assert run.ask("restart", role="critic").selected_engines == ("actor-0",)
    run.turn()
    assert run.leaving == {"actor-0": True}
    for action in (OUT, IN):
        with pytest.raises(ConfigError, match=r"shares no process with the trainer .rollout, reference., got 'actor'"):
            run.ask(action, 2, role="actor")
    with pytest.raises(ConfigError, match=r"one of this run .rollout, reference, actor, critic., got 'advantages'"):
        run.ask("restart", role="advantages")


def test_a_restart_stops_at_the_first_that_does_not_come_back_and_the_others_stay_as_they_were() -> None:
    run = Run(3)
    run.ask("restart", timeout_s=100.0)
    run.turn()
    run.gone("rollout-0")
    run.turn(100)
    assert run.last().status is Status.FAILED
    assert run.last().error_message == "rollout-0 was not back within 100 s; 2 replicas after it are as they were"
    assert run.seen["rollout-1"] == run.seen["rollout-2"] == up()


def test_a_restart_is_cancelled_once_the_replica_whose_turn_it_is_is_there() -> None:
    run = Run(2)
    asked = run.ask("restart")
    run.turn()
    run.cancel(asked)
    assert run.orders[-2:] == [Stay("rollout-0"), Stay("rollout-1")]
    run.turn()
    assert run.last().status is Status.CANCELLED and all(run.seen[name].serves for name in run.rollouts())


def test_one_that_starts_when_its_turn_comes_is_new_already() -> None:
    run = Run()
    run.set("rollout-0", state=State.STARTING, incarnation=5)
    run.ask("restart")
    run.turn()
    run.set("rollout-0", state=State.READY)
    run.turn()
    assert run.last().status is Status.COMPLETED and run.seen["rollout-0"].incarnation == 5


def test_what_could_not_be_done_has_failed_with_the_reason() -> None:
    run = Run()
    run.ask(OUT, 2)
    assert run.requests.fail("the run is stopping").error_message == "the run is stopping"
    assert run.last().status is Status.FAILED and run.requests.active is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["out", "in", "restart", "cancel", "turn", "up", "gone", "given_up", "time"]),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_whatever_happens_one_stays_and_every_request_ends_with_as_many_as_it_says(
    events: list[tuple[str, int, bool]],
) -> None:
    run = Run(2)
    last: Request | None = None
    for kind, num, flag in events:
        living = [name for name in run.rollouts() if name not in run.leaving or run.leaving[name]]
        name = run.rollouts()[num % len(run.rollouts())]
        if kind in ("out", "in", "restart"):
            action = {"out": OUT, "in": IN}.get(kind, kind)
            asked = run.ask(action, num, policy="keep_partial" if flag else "rollback_all", force=flag)
            last = asked if asked.status is Status.PENDING else last
        elif kind == "cancel" and run.requests.active is not None:
            run.cancel(run.requests.active)
        elif kind == "up" and run.seen[name].state is State.STARTING:
            run.set(name, state=State.READY, registered=True)
        elif kind == "gone" and name in run.leaving:
            run.gone(name)
        elif kind == "given_up" and run.seen[name].state is State.STARTING and name not in ("rollout-0", "rollout-1"):
            run.leaving.pop(name, None)
            if run.seen[name].incarnation == 1:
                del run.seen[name]
        elif kind == "time":
            run.now += 200 * num
        run.turn()
        assert "rollout-0" in run.seen and living
    if run.requests.active is not None:
        run.settle()
    if last is not None:
        request = run.requests.get(last.request_id)
        assert request is not None and request.over
        if request.status in (Status.ACTIVE, Status.COMPLETED) and request.action != "restart":
            stays = [name for name in run.rollouts() if run.leaving.get(name) is not False]
            assert len(stays) == request.num_replicas or not run.orders
