"""Who may ask, and how often who asks may be wrong: with a clock that the test moves."""

from __future__ import annotations

import pytest

from rondo.runtime.admin.guard import Guard, Rate, Scope, TurnedDown

OWN, FILE = "o" * 64, "f" * 16


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(guard: Guard, scope: Scope, token: str | None, peer: str = "10.0.0.1") -> str | int:
    """Whose token it was, or the status of the refusal."""
    try:
        who = guard.who(scope, "/x", None if token is None else f"Bearer {token}", peer)
        guard.allow(scope, "/x", who)
        return who or "nobody"
    except TurnedDown as error:
        return error.status


@pytest.mark.parametrize(
    ("open_reads", "scope", "answers"),
    [
        # shown:            nothing   wrong  file    own
        (True, "open", ["nobody", "nobody", "nobody", "nobody"]),
        (False, "open", ["nobody", "nobody", "nobody", "nobody"]),
        (True, "read", ["nobody", "nobody", "nobody", "nobody"]),
        (False, "read", [401, 401, "file", "own"]),
        (True, "content", [401, 401, "file", "own"]),
        (False, "content", [401, 401, "file", "own"]),
        (True, "control", [401, 401, 403, "own"]),
        (False, "control", [401, 401, 403, "own"]),
    ],
)
def test_each_scope_takes_the_tokens_that_it_says(open_reads: bool, scope: Scope, answers: list[str | int]) -> None:
    guard = Guard([OWN], [FILE], open_reads=open_reads)
    assert [told(guard, scope, token) for token in (None, "x", FILE, OWN)] == answers


def test_what_is_no_bearer_token_is_a_wrong_one() -> None:
    guard = Guard([OWN], [FILE])
    for shown in ("", OWN, f"Basic {OWN}", f"Bearer {OWN} ", "Bearer", "Bearer \udcff"):
        with pytest.raises(TurnedDown) as caught:
            guard.who("read", "/x", shown, "10.0.0.1")
        assert caught.value.status == 401 and caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert told(Guard([], []), "read", "") == 401


def test_a_peer_that_is_wrong_too_often_waits_and_no_file_token_helps_it_meanwhile() -> None:
    clock = Clock()
    guard = Guard([OWN], [FILE], clock=clock)
    assert [told(guard, "read", f"guess {n}") for n in range(10)] == [401] * 10
    assert [told(guard, "read", token) for token in ("another", FILE)] == [429, 429]
    assert told(guard, "read", OWN) == "own" and told(guard, "control", OWN) == "own"
    assert told(guard, "read", FILE, peer="10.0.0.2") == "file"
    assert told(guard, "read", None) == 401  # nothing shown is no guess
    with pytest.raises(TurnedDown) as caught:
        guard.who("read", "/x", "Bearer x", "10.0.0.1")
    assert caught.value.headers == {"Retry-After": "6"}
    clock.now += 6.0
    assert [told(guard, "read", token) for token in (FILE, "another", "another")] == ["file", 401, 429]
    clock.now += 60.0
    assert [told(guard, "read", f"guess {n}") for n in range(11)] == [401] * 10 + [429]


def test_addresses_of_one_network_of_version_6_are_one_peer() -> None:
    guard = Guard([OWN], [FILE], clock=Clock())
    assert [told(guard, "read", "x", peer=f"2001:db8::{n}") for n in range(11)] == [401] * 10 + [429]
    assert told(guard, "read", "x", peer="2001:db8:0:1::1") == 401
    assert [told(guard, "read", "x", peer="::1") for _ in range(11)] == [401] * 10 + [429]
    assert told(guard, "read", "x", peer="fe80::1%eth0") == 401 and told(guard, "read", "x", peer="") == 401


def test_only_so_many_names_are_remembered_and_the_quietest_goes_first() -> None:
    clock = Clock()
    rate = Rate(2, 10.0, 100, clock)
    for n in range(1000):
        rate.add(f"peer {n}")
        rate.add("busy")
    assert len(rate) == 100 and rate.wait_s("busy") > 0 and rate.wait_s("peer 0") == 0
