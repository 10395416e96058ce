from __future__ import annotations

import pytest

from rondo.roles.engines.sglang.silence import DEAF_S, DEAF_TIMES, Silence


class Watched:
    """A server and its looks, on a clock of its own. What it does between them is said with each look."""

    def __init__(self, silent_s: float = 300.0) -> None:
        self.now = 0.0
        self.silence = Silence(silent_s, 0.0)
        self.made = 0

    def look(
        self, answer_s: float | None = 0.0, *, scheduled: bool | None = None, heard: bool = False, made: int = 0,
        computes: bool = False, stopped: bool = False, excused: bool = False,
    ) -> str:  # fmt: skip
        """answer_s: None where it leaves both questions without an answer; scheduled: whether the second one has one, too."""
        patience_s = self.silence.patience_s
        answered = answer_s is not None and answer_s < patience_s
        scheduled = answered if scheduled is None else scheduled
        took_s = answer_s if answered and scheduled and answer_s is not None else patience_s
        self.now += self.silence.pause_s + took_s
        self.made += made
        return self.silence.looked(
            self.now, took_s=took_s, answered=answered, scheduled=scheduled, heard=answered or heard, made=self.made,
            computes=computes, stopped=stopped, excused=excused,
        )  # fmt: skip

    def until_found(self, answer_s: float | None = None, **doing: bool) -> tuple[float, str]:
        """Seconds until it is of no use, and why."""
        began = self.now
        for _ in range(10_000):
            if why := self.look(answer_s, **doing):
                return self.now - began, why
        raise AssertionError("it is waited for without an end")


@pytest.mark.parametrize("excused", [False, True])
def test_a_server_that_answers_nothing_is_found_within_two_questions_in_an_update_as_out_of_it(excused: bool) -> None:
    watched = Watched()
    assert watched.look(0.1, made=1) == ""
    seconds, why = watched.until_found(excused=excused)
    each_s = DEAF_S + DEAF_TIMES * 0.1
    assert seconds == pytest.approx(5.0 + 2 * each_s) and why == f"it answered nothing for {2 * each_s:.1f} s"


def test_a_server_that_was_slow_to_answer_has_four_times_that() -> None:
    watched = Watched()
    assert watched.look(4.0, made=1) == ""
    assert [watched.look(answer, made=1) for answer in (20.0, 80.0)] == ["", ""]
    assert watched.silence.patience_s == (300 - 5) / 2  # no more than its silence may be


def test_an_update_of_an_hour_is_no_silence_while_a_question_or_a_bucket_is_answered() -> None:
    watched = Watched()
    assert {watched.look(0.2, excused=True) for _ in range(700)} == {""}
    assert watched.now > 3600
    assert {watched.look(None, heard=True, excused=True) for _ in range(700)} == {""}


def test_one_question_without_an_answer_says_nothing() -> None:
    watched = Watched()
    assert [watched.look(answer, made=1) for answer in (None, 0.1, None, 0.1)] == [""] * 4


def test_a_refused_connection_is_asked_again_no_sooner_than_a_question_that_waits() -> None:
    silence = Silence(300.0, 0.0)
    said = silence.looked(
        5.0,
        took_s=0.0,
        answered=False,
        scheduled=False,
        heard=False,
        made=0,
        computes=False,
        stopped=False,
        excused=False,
    )
    assert said == ""
    assert silence.pause_s == DEAF_S


def test_a_server_that_answers_and_makes_no_token_has_its_whole_silence_from_its_last_one_or_its_update() -> None:
    watched = Watched()
    assert watched.look(made=1) == watched.look(excused=True) == ""
    looks = [watched.look() for _ in range(60)]
    assert set(looks[:-1]) == {""} and looks[-1] == "it was silent for 300 s"


def test_a_short_limit_holds_for_both() -> None:
    watched = Watched(8.0)
    assert watched.look(0.1, made=1) == ""
    assert watched.until_found()[0] <= 8.0
    assert watched.until_found(0.1, scheduled=False)[0] <= 8.0


def test_a_scheduler_that_answers_nothing_behind_a_server_that_does_is_found_as_soon() -> None:
    watched = Watched()
    assert watched.look(0.1, made=1) == ""
    seconds, why = watched.until_found(0.0, scheduled=False)
    each_s = DEAF_S + DEAF_TIMES * 0.1
    assert (
        seconds == pytest.approx(5.0 + 2 * each_s) and why == f"its scheduler answered nothing for {2 * each_s:.1f} s"
    )


@pytest.mark.parametrize("excused", [False, True])
def test_a_server_with_a_stopped_process_is_found_within_two_looks_in_an_update_as_out_of_it(excused: bool) -> None:
    watched = Watched()
    looks = [watched.look(0.1, stopped=stopped, excused=excused) for stopped in (False, True) * 6]
    assert set(looks) == {""} and watched.look(0.1, excused=excused) == ""
    seconds, why = watched.until_found(0.1, stopped=True, excused=excused)
    each_s = DEAF_S + DEAF_TIMES * 0.1
    assert seconds == pytest.approx(5.0 + each_s + 0.1)
    assert why == f"a stopped process of it answered nothing for {each_s + 0.1:.1f} s"


def test_a_scheduler_that_answers_late_has_four_times_that_and_one_look_without_its_answer_says_nothing() -> None:
    watched = Watched()
    assert watched.look(3.0, made=1) == "" and watched.silence.patience_s == DEAF_S + DEAF_TIMES * 3.0
    assert {watched.look(0.1, scheduled=scheduled) for scheduled in (False, True) * 6} == {""}


@pytest.mark.parametrize("doing", [{"computes": True}, {"made": 1}, {"excused": True}])
def test_a_scheduler_that_computes_or_makes_tokens_or_takes_weights_is_not_frozen(doing: dict[str, int]) -> None:
    """A long batch, and kernels that are compiled for it, have the time of a server that is stuck."""
    watched = Watched()
    assert watched.look(0.1, made=1) == ""
    looks = [watched.look(0.0, scheduled=False, **doing) for _ in range(25)]  # type: ignore[arg-type]
    assert set(looks) == {""} and watched.now < 300
    if "computes" in doing:
        assert watched.until_found(0.0, scheduled=False, computes=True)[1] == "it was silent for 300 s"
