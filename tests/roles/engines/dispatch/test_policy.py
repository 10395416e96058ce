"""The pure parts of dispatching: placement, the fair queue, the breaker, what a failure says, suspicion, patience."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from rondo.roles.engines.dispatch.breaker import Breaker
from rondo.roles.engines.dispatch.fleet import DispatchLimits, NoEngine
from rondo.roles.engines.dispatch.installing import Patience
from rondo.roles.engines.dispatch.placement import Placement
from rondo.roles.engines.dispatch.queue import SHARES, FairQueue
from rondo.roles.engines.dispatch.suspicion import Suspicion
from rondo.roles.engines.engine import Kind, Prefix, Request
from rondo.roles.engines.faults import NotThere, RequestFailed, fault_of, may_have_killed
from rondo.roles.engines.sglang.client import ServerError
from rondo.roles.serve.service import status_of
from rondo.runtime.errors import ConfigError, CorruptData, DeadlineExceeded, PeerGone, ProtocolError, Refused
from tests.roles.engines.dispatch.engines import asked

# ---- placement ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Engine:
    load: float = 0.0


def place(placement: Placement, request: Request, *engines: Any) -> Any:
    """Where it goes; its load goes with it."""
    cost = placement.cost(request)
    chosen = placement.choose(placement.key(request), cost, engines)
    assert chosen is not None
    chosen.load += cost
    return chosen


def test_the_engine_with_the_fewest_tokens_is_chosen_not_the_one_with_the_fewest_requests() -> None:
    a, b = Engine(), Engine()
    placement = Placement()
    place(placement, asked("long", 1000, group=1), a, b)
    assert [place(placement, asked(f"s{i}", 10, group=10 + i), a, b) for i in range(5)] == [b] * 5


def test_a_response_is_expected_to_be_as_long_as_those_of_its_class_were_and_no_longer_than_it_may() -> None:
    placement = Placement()
    assert placement.cost(asked("r", 500, prompt=6)) == 506
    placement.ended("train", 100)
    assert placement.cost(asked("r", 500, prompt=6)) == 106
    assert placement.cost(asked("r", 50, prompt=6)) == 56
    assert placement.cost(asked("r", 500, prompt=6, kind="judge")) == 506


def test_tokens_that_are_there_already_count() -> None:
    placement = Placement()
    placement.ended("train", 10)
    tokens = asked("p", prompt=40).prompt
    request = asked("r", 500, prompt=6, prefix=Prefix(tokens, tokens.astype("f4"), tokens))
    assert placement.cost(request) == 46


def test_the_samples_of_a_prompt_stay_together_and_the_next_prompt_goes_elsewhere() -> None:
    a, b = Engine(), Engine()
    placement = Placement()
    assert {id(place(placement, asked(f"r{i}", 50, group=1), a, b)) for i in range(8)} == {id(a)}
    assert {id(place(placement, asked(f"q{i}", 50, group=2), a, b)) for i in range(8)} == {id(b)}


def test_a_session_stays_with_its_engine_while_its_prompt_grows() -> None:
    a, b = Engine(), Engine()
    placement = Placement()
    first = place(placement, asked("t0", session="s"), a, b)
    others = [place(placement, asked(f"o{i}", group=50 + i), a, b) for i in range(6)]
    assert {id(o) for o in others} == {id(a), id(b)}
    assert all(place(placement, asked(f"t{i}", prompt=6 + 9 * i, session="s"), a, b) is first for i in range(1, 4))


def test_affinity_yields_to_an_engine_with_much_less_to_do_and_its_samples_stay_there() -> None:
    placement = Placement()
    a, b = Engine(), Engine(1.0)
    request = asked("r", 94, prompt=6, group=1)  # 100 tokens
    assert place(placement, request, a, b) is a
    a.load, b.load = 1.5 * 1000 + 8 * 100, 1000.0
    assert place(placement, request, a, b) is a, "at the bound"
    a.load = 1.5 * 1000 + 8 * 100 + 1
    assert place(placement, request, a, b) is b, "beyond it"
    assert place(placement, request, a, b) is b, "b has the prompt now"


def test_a_full_engine_is_passed_by() -> None:
    placement = Placement()
    a, b = Engine(), Engine(1.0)
    request = asked("r", group=1)
    assert place(placement, request, a, b) is a
    assert place(placement, request, b) is b, "a is not among those that have room"
    assert placement.choose(placement.key(request), 1.0, []) is None


def test_loads_stay_balanced_whatever_comes() -> None:
    chance = random.Random(3)
    placement = Placement()
    engines = [Engine() for _ in range(4)]
    under_way: list[tuple[Engine, float]] = []
    for i in range(4000):
        request = asked(f"r{i}", chance.choice([10, 100, 1000]), group=i // 8)
        before = [e.load for e in engines]
        chosen = place(placement, request, *engines)
        assert before[engines.index(chosen)] <= 1.5 * min(before) + 8 * placement.cost(request)
        under_way.append((chosen, placement.cost(request)))
        if len(under_way) > 200:
            engine, cost = under_way.pop(chance.randrange(len(under_way)))
            engine.load -= cost
    assert max(e.load for e in engines) <= 1.6 * min(e.load for e in engines)


# ---- the fair queue -------------------------------------------------------------------------------------------------


def served(queue: FairQueue[str], num_places: int, num_rounds: int, seed: int = 0) -> Counter[str]:
    """How often each class is in flight, when places free one at a time at random."""
    chance = random.Random(seed)
    under_way: list[Kind] = []
    seen: Counter[str] = Counter()
    for _ in range(num_rounds):
        if len(under_way) == num_places:
            queue.ended(under_way.pop(chance.randrange(num_places)))
        while len(under_way) < num_places and queue.num_waiting:
            kind: Kind = queue.pop()  # type: ignore[assignment]
            queue.began(kind)
            under_way.append(kind)
        seen.update(under_way)
    return seen


def filled(counts: dict[Kind, int]) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for kind, count in counts.items():
        for _ in range(count):
            queue.add(kind, 0, queue.age(), kind)
    return queue


def test_classes_that_all_want_places_get_them_by_their_shares() -> None:
    seen = served(filled({"train": 9000, "judge": 9000, "agent": 9000, "evaluation": 9000}), 18, 5000)
    total = sum(seen.values())
    for kind, share in SHARES.items():
        assert abs(seen[kind] / total - share / 9) < 0.02


def test_a_class_that_comes_late_is_not_starved_by_one_with_a_long_queue() -> None:
    queue = filled({"train": 10_000})
    served(queue, 16, 100)
    for _ in range(5):
        queue.add("evaluation", 0, queue.age(), "evaluation")
    first = [queue.pop() for _ in range(1)]
    assert first == ["evaluation"], "it has nothing in flight, so the next place is its"


def test_what_a_class_does_not_use_is_lent() -> None:
    assert served(filled({"train": 10_000}), 16, 500) == {"train": 16 * 500}


def test_within_a_class_priority_goes_first_then_age_and_one_that_returns_keeps_its_age() -> None:
    queue: FairQueue[str] = FairQueue()
    ages = [queue.age() for _ in range(4)]
    queue.add("train", 0, ages[1], "second")
    queue.add("train", 0, ages[2], "third")
    queue.add("train", 5, ages[3], "urgent")
    queue.add("train", 0, ages[0], "returned")
    assert [queue.pop() for _ in range(4)] == ["urgent", "returned", "second", "third"]
    assert queue.num_waiting == 0


def test_what_is_removed_is_never_popped() -> None:
    queue: FairQueue[int] = FairQueue()
    ages = [queue.age() for _ in range(10)]
    for age in ages:
        queue.add("train", 0, age, age)
    for age in (0, 3, 4, 9):
        queue.remove("train", 0, age)
    assert sorted(queue.all()) == [1, 2, 5, 6, 7, 8] and queue.num_waiting == 6
    assert [queue.pop() for _ in range(6)] == [1, 2, 5, 6, 7, 8]
    assert queue.all() == []


# ---- the breaker ----------------------------------------------------------------------------------------------------


def breaker() -> Breaker:
    return Breaker(failures=3, open_s=10.0, longest_open_s=30.0, chance=random.Random(0))


def test_requests_that_fail_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    it = breaker()
    for now in range(5):
        it.failed(now, "a", "x")
        it.failed(now, "b", "x")
        it.succeeded()
    it.failed(5, "a", "x")
    it.failed(5, "b", "x")
    assert it.closed
    it.failed(5, "c", "x")
    assert it.state(5) == "open" and 7.5 <= it.rests_s(5) <= 12.5


def test_one_request_that_fails_again_and_again_opens_nothing() -> None:
    it = breaker()
    for now in range(9):
        it.failed(now, "poison", "x")
    assert it.closed and it.fails_only("poison")
    it.failed(9, "another", "x")
    assert it.closed and not it.fails_only("poison")


def test_a_full_engine_rests_at_once_and_until_one_of_its_requests_ends_well() -> None:
    it = breaker()
    it.failed(0, "a", "full", full=True)
    assert it.state(0) == "open"
    it.succeeded()
    assert it.closed


def test_rests_grow_until_a_request_ends_well_and_differ_by_chance() -> None:
    it, now, lasted = breaker(), 0.0, []
    for _ in range(4):
        it.failed(now, "a", "x", full=True)
        lasted.append(it.rests_s(now))
        now += lasted[-1]
        assert it.state(now) == "half-open"
        it.recovered()  # its trial ended well: it is given requests, and is full again
    assert [round(pause_s / 10) for pause_s in lasted] == [1, 2, 3, 3] and len({*lasted}) == 4
    it.succeeded()
    it.failed(now, "a", "x", full=True)
    assert 7.5 <= it.rests_s(now) <= 12.5


def test_a_trial_that_fails_is_a_longer_rest() -> None:
    it = breaker()
    it.failed(0, "a", "x", full=True)
    it.failed(5, "b", "late")
    assert it.rests_s(5) <= 7.5, "while it rests nothing is counted"
    it.failed(20, "trial", "x")
    assert it.state(20) == "open" and it.rests_s(20) >= 15


# ---- what a failure says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        *((ServerError("u", "/generate", status, "no"), "request") for status in (400, 413, 422)),
        *((ServerError("u", "/generate", status, "no"), "moment") for status in (408, 429, 500, 502, 503)),
        *((ServerError("u", "/generate", status, "no"), "engine") for status in (401, 403, 404)),
        (ConfigError("too long"), "request"),
        (CorruptData("a NaN of its own"), "request"),
        (RequestFailed("poison"), "request"),
        (ProtocolError("an answer without meta_info"), "moment"),
        (PeerGone("it left"), "engine"),
        (NotThere("it is started again"), "engine"),
        (DeadlineExceeded("generate", "me", "it", 1.0), "engine"),
        (Refused("tokens of other weights"), "engine"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{type(value).__name__}-{getattr(value, 'status', '')}",
)
def test_a_failure_is_of_the_request_the_engine_or_the_moment(error: Exception, fault: str) -> None:
    assert fault_of(error) == fault


def test_who_asks_over_http_is_told_400_of_the_own_request_and_503_of_anything_else() -> None:
    assert status_of(RequestFailed("it kills")) == status_of(ConfigError("too long")) == 400
    others = (NoEngine("an engine must take it", ()), PeerGone("it left"), ServerError("u", "/generate", 503, "full"))
    assert [status_of(error) for error in others] == [503] * 3


def test_only_a_request_that_reached_its_engine_may_have_killed_it() -> None:
    assert may_have_killed(PeerGone("it left")) and not may_have_killed(NotThere("it was not there"))
    assert not may_have_killed(Refused("other weights"))


def test_a_suspect_is_cleared_by_a_token_and_found_out_by_a_second_death_before_one() -> None:
    it = Suspicion(2)
    assert not it.suspected
    it.died(begun=False)
    assert it.suspected and not it.found_out
    assert it.has_token() and not it.suspected
    it.died(begun=False)
    it.died(begun=False)
    assert it.found_out


def test_one_that_had_tokens_is_suspected_from_the_second_death_to_its_end_and_found_out_by_the_third() -> None:
    it = Suspicion(2)
    it.died(begun=True)
    assert not it.suspected
    it.died(begun=True)
    assert it.suspected and not it.has_token() and not it.found_out
    it.died(begun=True)
    assert it.found_out


def test_patience_follows_what_updates_took_and_their_bytes_unless_it_is_set() -> None:
    it = Patience(DispatchLimits())
    assert it.allowed_s(1 << 30) == 600 and it.allowed_s(470_000_000_000) == 4700
    it.took(0.05, 100)
    assert it.allowed_s(100) == 60 and it.allowed_s(100, num_failed=2) == 240
    it.took(32.0, 100)
    assert it.allowed_s(100) == 128 and it.allowed_s(300) == 384 and it.allowed_s(50) == 128
    for _ in range(32):
        it.took(0.05, 100)
    assert it.allowed_s(100) == 60, "one slow update is not remembered for ever"
    assert Patience(DispatchLimits(update_deadline_s=7.0)).allowed_s(1 << 40) == 7
