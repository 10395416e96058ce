"""The agreement on epochs and where it is made, without a process or a clock."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.comm.groups.epochs import Epoch, Epochs, GroupSpec, Life
from rondo.comm.groups.meeting import Meeting, fields_of
from rondo.runtime.errors import ConfigError, Refused
from tests.strength import strength

A, B, C = "actor-0/0", "rollout-0/0", "rollout-0/1"
SPEC = GroupSpec("weights", (A, B, C))


def formed(**incarnations: int) -> Epochs:
    epochs = Epochs()
    for member in SPEC.members:
        epochs.ask(SPEC, member, 1, 0)
    return epochs


def number(epochs: Epochs, member: str, incarnation: int, after: int) -> int | None:
    epoch = epochs.answer("weights", member, incarnation, after)
    return None if epoch is None else epoch.number


def test_an_epoch_is_announced_when_every_member_asked_and_is_the_same_for_all() -> None:
    epochs = Epochs()
    epochs.ask(SPEC, A, 1, 0)
    epochs.ask(SPEC, C, 1, 0)
    assert epochs.missing("weights") == (B,) and number(epochs, A, 1, 0) is None
    epochs.ask(SPEC, B, 1, 0)
    lives = (Life("actor-0", 0, 1), Life("rollout-0", 0, 1), Life("rollout-0", 1, 1))
    assert [epochs.answer("weights", member, 1, 0) for member in SPEC.members] == [Epoch("weights", 1, lives)] * 3
    assert epochs.over("weights", 1) is None


def test_a_lost_answer_is_given_again_and_begins_no_new_epoch() -> None:
    epochs = formed()
    epochs.ask(SPEC, B, 1, 0)
    assert number(epochs, B, 1, 0) == 1 and epochs.over("weights", 1) is None


def test_a_death_ends_the_epoch_and_names_the_members_that_went_with_it() -> None:
    epochs = formed()
    epochs.dead("rollout-0", 1)
    over = epochs.over("weights", 1)
    assert over is not None and over.missing == (B, C) and over.why == "rollout-0 (incarnation 1) is dead"
    assert number(epochs, A, 1, 0) is None  # nobody is sent into an epoch that is over


def test_survivors_and_the_replacement_form_the_next_epoch() -> None:
    epochs = formed()
    epochs.ask(SPEC, A, 1, 1)
    epochs.dead("rollout-0", 1)
    epochs.ask(SPEC, B, 2, 0)
    assert number(epochs, A, 1, 1) is None
    epochs.ask(SPEC, C, 2, 0)
    epoch = epochs.answer("weights", A, 1, 1)
    assert epoch is not None and epoch.number == 2
    assert [life.incarnation for life in epoch.lives] == [1, 2, 2]


def test_a_member_that_leaves_a_living_epoch_ends_it_for_the_others() -> None:
    epochs = formed()
    epochs.ask(SPEC, B, 1, 1)
    over = epochs.over("weights", 1)
    assert over is not None and over.missing == () and "rollout-0/0 left it" in over.why
    epochs.ask(SPEC, A, 1, 1)
    epochs.ask(SPEC, C, 1, 1)
    assert number(epochs, B, 1, 1) == 2


def test_a_late_life_is_refused_after_its_death_and_after_its_replacement() -> None:
    epochs = formed()
    epochs.dead("rollout-0", 1)
    with pytest.raises(Refused, match="must be 2 or a later one, got 1"):
        epochs.ask(SPEC, B, 1, 1)
    epochs.ask(SPEC, B, 4, 0)
    with pytest.raises(Refused, match="must be 4 or a later one, got 3"):
        epochs.ask(SPEC, C, 3, 0)


def test_a_replacement_that_asks_before_its_death_was_told_ends_the_old_epoch() -> None:
    epochs = formed()
    epochs.ask(SPEC, B, 2, 0)
    over = epochs.over("weights", 1)
    assert over is not None and over.missing == (B, C)


def test_the_ask_of_a_dead_life_does_not_count() -> None:
    epochs = Epochs()
    epochs.ask(SPEC, B, 1, 0)
    epochs.ask(SPEC, C, 1, 0)
    epochs.dead("rollout-0", 1)
    epochs.ask(SPEC, A, 1, 0)
    assert number(epochs, A, 1, 0) is None and epochs.missing("weights") == (B, C)


def test_a_member_that_gave_up_waiting_is_not_counted_on() -> None:
    epochs = Epochs()
    epochs.ask(SPEC, B, 1, 0)
    epochs.withdraw("weights", B, 1)
    epochs.ask(SPEC, A, 1, 0)
    epochs.ask(SPEC, C, 1, 0)
    assert epochs.missing("weights") == (B,)


def test_an_agreement_that_was_lost_goes_on_above_every_number_that_its_members_know() -> None:
    epochs = Epochs()
    epochs.ask(SPEC, A, 1, 7)
    epochs.ask(SPEC, B, 2, 0)
    epochs.ask(SPEC, C, 2, 6)
    assert number(epochs, B, 2, 0) == 8


def test_a_lost_agreement_learns_the_living_epoch_and_still_sees_it_end() -> None:
    epoch = formed().answer("weights", A, 1, 0)
    assert epoch is not None
    epochs = Epochs()
    epochs.restore(SPEC, epoch)
    assert epochs.over("weights", 1) is None and number(epochs, B, 1, 0) == 1
    epochs.dead("rollout-0", 1)
    over = epochs.over("weights", 1)
    assert over is not None and over.missing == (B, C)


def test_a_death_that_was_told_before_the_epoch_was_restored_ends_it() -> None:
    epoch = formed().answer("weights", A, 1, 0)
    assert epoch is not None
    epochs = Epochs()
    epochs.dead("actor-0", 1)
    epochs.restore(SPEC, epoch)
    over = epochs.over("weights", 1)
    assert over is not None and over.missing == (A,)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"backend": "mpi"}, "backend of group 'g' must be one of gloo, nccl, pynccl, nccl4py, got 'mpi'"),
        ({"members": ("a-0/0",)}, "must be two or more different ones, got 'a-0/0'"),
        ({"members": ("a-0/0", "a-0/0")}, "must be two or more different ones"),
        ({"members": ("a-0/0", "a-0")}, "must be written group/rank, got 'a-0'"),
        ({"timeout_s": 0.0}, "timeout_s of group 'g' must be above 0"),
    ],
)
def test_a_spec_that_breaks_a_rule_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GroupSpec(**{"name": "g", "members": ("a-0/0", "b-0/0"), **fields})  # type: ignore[arg-type]


def test_members_must_agree_on_the_spec_and_belong_to_it() -> None:
    epochs = Epochs()
    epochs.ask(SPEC, A, 1, 0)
    with pytest.raises(ConfigError, match="must be the same for all members"):
        epochs.ask(GroupSpec("weights", SPEC.members, timeout_s=5.0), B, 1, 0)
    with pytest.raises(ConfigError, match="must be one of actor-0/0, rollout-0/0, rollout-0/1, got 'genrm-0/0'"):
        epochs.ask(SPEC, "genrm-0/0", 1, 0)


@settings(max_examples=strength(quick=100, full=300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from((*SPEC.members, "spare-0/0"))), max_size=60))
def test_numbers_rise_and_an_epoch_has_one_living_life_of_each_member(steps: list[tuple[int, str]]) -> None:
    """Asks with what a member knows, deaths with replacement, and losses of the agreement, in any order."""
    epochs, lives, known, seen = Epochs(), {"actor-0": 1, "rollout-0": 1}, {}, {}  # type: ignore[var-annotated]
    for kind, member in steps:
        group = member.partition("/")[0]
        if group == "spare-0":
            continue
        if kind == 0:
            epochs.dead(group, lives[group])
            lives[group] += 1
            known = {key: value for key, value in known.items() if key.partition("/")[0] != group}
        elif kind == 1 and not known:  # lost while no epoch lives, as `restore` needs members that still watch
            epochs = Epochs()
        else:
            after = known.get(member, 0)
            epochs.ask(SPEC, member, lives[group], after)
            epoch = epochs.answer("weights", member, lives[group], after)
            if epoch is not None:
                assert epoch.number > after and seen.setdefault((id(epochs), epoch.number), epoch) == epoch
                assert all(life.incarnation == lives[life.group] for life in epoch.lives)
                assert [life.member for life in epoch.lives] == list(SPEC.members)
                known[member] = epoch.number


async def test_a_restarted_meeting_that_is_told_of_an_epoch_answers_who_waits_for_it() -> None:
    meeting = Meeting()
    spec = fields_of(GroupSpec("weights", ("actor-0/0", "rollout-0/0")))
    asking = asyncio.create_task(meeting.meet_group(spec, "rollout-0/0", 1, 0, 60.0))
    await asyncio.sleep(0)  # it has asked
    watching = asyncio.create_task(meeting.watch_group(spec, 1, [["actor-0", 0, 1], ["rollout-0", 0, 1]]))
    assert (await asking)["epoch"] == 1
    watching.cancel()
