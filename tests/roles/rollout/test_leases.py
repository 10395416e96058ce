from __future__ import annotations

from rondo.roles.rollout.leases import Progress

A, B = (1, 0), (2, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def held(clock: Clock) -> Progress:
    progress = Progress(10.0, clock)
    for key in (A, B):
        progress.begin(key)
    assert progress.since_last(0, 0) == [A, B]
    assert progress.since_last(0, 0) == []  # nothing came further
    return progress


def test_tokens_renew_only_groups_that_have_requests_at_the_engine() -> None:
    progress = held(Clock())
    with progress.generating(A):
        assert progress.since_last(100, 0) == [A]
        assert progress.since_last(100, 0) == []  # the engine stands still
    assert progress.since_last(100, 0) == [A]  # a sample has ended
    assert progress.since_last(200, 0) == []


def test_a_reward_in_computation_renews_its_group_where_nothing_decodes_up_to_its_deadline_and_no_other() -> None:
    clock = Clock()
    progress = held(clock)
    with progress.scoring(B):
        for clock.now in (3.0, 9.0):
            assert progress.since_last(0, 0) == [B]
        clock.now = 11.0
        assert progress.since_last(0, 0) == []  # it hangs
        clock.now = 12.0
        assert progress.since_last(0, 1) == [B]  # it waits for a worker: others are scored
    assert progress.since_last(0, 1) == [B] and progress.since_last(0, 1) == []


def test_a_group_that_is_given_up_is_renewed_no_more() -> None:
    progress = held(Clock())
    with progress.generating(A):
        progress.end(A)
        assert progress.since_last(5, 0) == []
