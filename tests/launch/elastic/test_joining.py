"""Engines that run already, asked for by their addresses: who is asked what, and what follows where one cannot."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.launch.elastic.joining import Attach, Detach, GiveUp
from rondo.launch.elastic.request import Status
from tests.launch.elastic.test_requests import IN, OUT, Run

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def attached(*urls: str, num: int = 2) -> Run:
    run = Run(num)
    run.requests.attached.update(dict.fromkeys(urls, "rollout-0"))
    return run


def calls(run: Run) -> list[Any]:
    """What was asked since."""
    found = [order for order in run.orders if isinstance(order, Attach | Detach | GiveUp)]
    run.orders.clear()
    return found


def test_engines_come_to_the_oldest_replica_and_leave_it_and_what_is_so_already_is_nothing() -> None:
    run = attached(A)
    assert run.ask(OUT, engine_urls=(A,)).status is Status.NOOP
    assert run.ask(OUT, engine_urls=(A, B, C), timeout_s=60.0, dry_run=True).status is Status.PENDING
    request = run.ask(OUT, engine_urls=(A, B, C), timeout_s=60.0)
    assert (request.status, request.message) == (Status.PENDING, "2 engines to be attached")
    assert run.ask(OUT, 3).status is Status.CONFLICT
    run.turn()
    assert calls(run) == [Attach("rollout-0", B, 60.0), Attach("rollout-0", C, 60.0)]
    run.requests.told(B)
    assert run.turn() == [] and run.last().engine_ids == (B,)
    run.requests.told(C)
    run.turn()
    assert (run.statuses, run.last().selected_engines) == ([Status.CONNECTING, Status.ACTIVE], (B, C))
    assert run.requests.attached == dict.fromkeys((A, B, C), "rollout-0")
    run.ask(IN, engine_urls=(B, "http://d:1"), timeout_s=30.0)
    run.turn()
    assert calls(run) == [Detach("rollout-0", B, 30.0)] and run.last().status is Status.DRAINING
    run.requests.told(B)
    run.turn()
    assert run.last().status is Status.COMPLETED and run.last().removed_engines == (B,)
    run.ask(IN, engine_urls=(C,), timeout_s=30.0, force=True)
    run.turn()
    assert calls(run) == [Detach("rollout-0", C, 0.0)]


@pytest.mark.parametrize(("policy", "ends"), [("keep_partial", Status.PARTIAL), ("rollback_all", Status.FAILED)])
def test_of_several_that_do_not_all_come_those_are_kept_or_none(policy: str, ends: Status) -> None:
    run = attached()
    run.ask(OUT, engine_urls=(A, B), policy=policy)
    run.turn()
    calls(run)
    run.requests.told(A)
    run.requests.told(B, "ConfigError: another model")
    run.turn()
    if ends is Status.FAILED:
        assert calls(run) == [Detach("rollout-0", A, 300)] and run.last().status is Status.REMOVING
        run.requests.told(A)
        run.turn()
    last = run.last()
    assert (last.status, last.failed_engines, last.error_message) == (
        ends, {B: "ConfigError: another model"}, "1 of 2 engines failed",
    )  # fmt: skip
    assert set(run.requests.attached) == ({A} if ends is Status.PARTIAL else set())


def test_a_request_is_cancelled_in_every_state_and_all_is_as_before_then() -> None:
    run = attached(C)
    run.cancel(run.ask(OUT, engine_urls=(A,)))
    assert run.last().status is Status.CANCELLED and calls(run) == []
    request = run.ask(OUT, engine_urls=(A, B))
    run.turn()
    run.requests.told(A)
    calls(run)
    assert run.cancel(request).status is Status.REMOVING
    assert calls(run) == [GiveUp(B), Detach("rollout-0", A, 300)]
    run.requests.told(A)
    assert run.turn() == []
    run.requests.told(B)  # it had come before it heard of that
    assert run.turn() == [Detach("rollout-0", B, 300)]
    run.requests.told(B)
    run.turn()
    assert run.last().status is Status.CANCELLED and set(run.requests.attached) == {C}
    request = run.ask(IN, engine_urls=(C,))
    run.turn()
    run.cancel(request)
    run.requests.told(C, "given up")
    run.turn()
    assert run.last().status is Status.CANCELLED and set(run.requests.attached) == {C}


def test_what_cannot_be_is_refused_and_what_cannot_be_undone_is_told_and_ends() -> None:
    run = attached()
    assert run.ask(OUT, 2, engine_urls=(A,)).status is Status.REJECTED
    assert run.ask(OUT, engine_urls=(A,), role="reference").status is Status.REJECTED
    request = run.ask(OUT, engine_urls=(A,))
    run.turn()
    run.cancel(request)
    run.requests.told(A)
    run.turn()
    run.requests.told(A, "PeerGone: away")
    run.turn()
    assert run.last().status is Status.CANCELLED and run.last().failed_engines == {A: "PeerGone: away"}
    run.requests._no_engines = "a run with servers alone"
    assert run.ask(OUT, engine_urls=(B,)).message == "a run with servers alone"
