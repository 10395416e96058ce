from __future__ import annotations

import itertools
import random
from dataclasses import replace

import orjson
import pytest

from rondo.comm.bus.audit import Ledger, count
from rondo.comm.bus.index import Index
from rondo.comm.bus.rounds import groups_of
from rondo.comm.ring.spans import num_rows, rows_of
from tests.comm.cost import lines
from tests.comm.driver import BASE, STREAMS, Driver, by_field


def totals(driver: Driver):
    return count(driver.events, Ledger(driver.index.rules.samples_per_group, driver.index.rules.groups_per_step, 2, 5))


def test_a_step_is_admitted_leased_put_scored_trained_and_forgotten():
    bus = Driver()
    rows = bus.step(0)
    assert len(rows) == 6
    assert bus.index.counts["trained"] == bus.index.counts["admitted"] == 3
    assert bus.index.groups == {}
    assert all(ring.idle and ring.tail == ring.head for ring in bus.index.space.rings.values())
    assert bus.index.imbalance() == ""


def test_a_group_trains_at_the_step_it_was_admitted_for_and_at_no_other():
    bus = Driver()
    first, second = bus.admit(0), bus.admit(1)
    for group in [*second, *first]:
        bus.fill(group)
    bus.score()
    assert bus.index.membership(0) == first
    assert {g for event in bus.train_rounds(0) for g, *_ in event["spans"][0]} == set(first)
    assert {g for g, *_ in bus.commit(1)} == set(first)
    assert bus.index.membership(1) == second


def test_a_step_is_its_first_survivors_in_admission_order_however_slow_they_are():
    bus = Driver(spare_groups=1)
    slow, *quick = bus.admit(0)
    for group in quick:
        bus.fill(group)
    bus.score()
    assert bus.index.membership(0) == quick[:2]  # the third quick one is not certain while the slow one may still come
    assert {g for event in bus.train_rounds(0) for g, *_ in event["spans"][0]} == set(quick[:2])
    bus.fill(slow)
    bus.score()
    (last,) = bus.train_rounds(0)
    assert last["last"] and {g for g, *_ in last["spans"][0]} == {slow}
    bus.commit(1)
    assert bus.index.counts["surplus"] == 1 and bus.index.counts["trained"] == 3


def test_engines_work_only_for_steps_within_their_staleness():
    index = Driver(max_staleness=2).index
    assert index.open_steps(0) == range(0, 3)
    index.version = 2
    assert index.open_steps(0) == range(2, 3)
    assert index.open_steps(2) == range(2, 4)  # the run has four steps


def test_the_death_of_a_replica_gives_its_groups_back_with_a_higher_epoch_and_keeps_what_was_put():
    bus = Driver()
    group, other, _ = bus.admit(0)
    bus.grant(group)
    bus.put(group, [1])
    bus.grant(other, "rollout-1")
    bus.die("rollout-0", 1)
    lost = bus.index.groups[group]
    assert (lost.state, lost.epoch, lost.numbers()) == ("waiting", 1, [1])
    assert bus.index.groups[other].state == "running"
    assert bus.index.entries(lost) == [256]  # one sample is missing
    bus.start("rollout-0", 2)
    bus.grant(group, incarnation=2)
    bus.put(group, [0])
    assert bus.index.groups[group].state == "ready"


def test_a_late_result_of_an_old_epoch_is_refused_and_its_memory_returned():
    bus = Driver()
    group, *_ = bus.admit(0)
    bus.grant(group)
    bus.emit(event="lose", group=group, epoch=0, why="no progress")
    bus.grant(group, "rollout-1")
    bus.put(group, [0, 1], epoch=0)
    assert bus.index.refused_rows == 2 and bus.index.groups[group].numbers() == []
    bus.put(group, [0, 1], member="rollout-1")
    assert bus.index.groups[group].state == "ready"
    assert bus.index.space.rings["ring/rollout-0/0"].records == {}


def test_the_first_visible_column_wins_and_a_second_is_refused():
    bus = Driver()
    group, *_ = bus.admit(0)
    bus.fill(group)
    bus.forward("actor_fwd", "log_probs", ack=False)
    (key,) = bus.index.rounds._by_key
    bus.put_columns(key, [[group, 0, 0], [group, 1, 0]], ["log_probs"], "actor_fwd-0")
    extents = list(bus.index.groups[group].extents)
    bus.put_columns(key, [[group, 0, 0], [group, 1, 0]], ["log_probs"], "actor_fwd-0")
    assert bus.index.groups[group].extents == extents and [extent for extent in extents if "log_probs" in extent[0]]
    assert bus.index.refused_rows == 2


def test_rounds_of_a_dead_scorer_are_planned_again_and_finished_ones_are_not():
    bus = Driver()
    done, undone, _ = bus.admit(0)
    bus.fill(done)
    bus.forward("actor_fwd", "log_probs")
    bus.fill(undone)
    bus.forward("actor_fwd", "log_probs", ack=False)
    bus.die("actor_fwd-0", 1)
    bus.start("actor_fwd-0", 2)
    assert list(bus.index.rounds.lanes["actor_fwd"].in_order()) == [undone]
    assert bus.forward("actor_fwd", "log_probs", incarnation=2) == [[[undone, 0, 0], [undone, 1, 0]]]


def test_a_returning_trainer_gets_the_same_rounds_and_another_layout_new_ones():
    bus = Driver()
    for group in bus.admit(0):
        bus.fill(group)
    bus.score()
    planned = bus.train_rounds(0)
    bus.die("actor-0", 1)
    bus.start("actor-0", 2)
    bus.join()
    assert bus.index.rounds.find("actor", "step0", 0)[0]["spans"] == planned[0]["spans"]
    bus.emit(event="join", stream="actor", member="actor-0", ranks=2, tokens=1 << 20)
    assert bus.index.rounds.find("actor", "step0", 0) == []
    (anew,) = bus.train_rounds(0)
    assert len(anew["spans"]) == 2
    assert sorted(rows_of(anew["spans"][0] + anew["spans"][1])) == sorted(rows_of(planned[0]["spans"][0]))


def test_rounds_balance_ranks_by_tokens_and_cut_at_the_budget():
    bus = Driver(groups_per_step=6)
    bus.join(tokens=30)
    for group in bus.admit(0):
        bus.fill(group)
    bus.emit(event="join", stream="actor_fwd", member="actor_fwd-0", ranks=2, tokens=30)
    planned = bus.index.plan_rounds("actor_fwd", "actor_fwd-0", 1, None)
    loads = [[10 * num_rows(rank) for rank in event["spans"]] for event in planned]
    assert all(max(load) <= 30 for load in loads)
    assert sum(load[0] for load in loads) == sum(load[1] for load in loads) == 30


def test_filtered_groups_are_replaced_for_the_same_step():
    bus = Driver()
    group, *_ = bus.admit(0)
    bus.grant(group)
    bus.emit(event="settle", group=group, epoch=0, outcome="filtered", why="equal rewards")
    assert bus.index.counts["filtered"] == 1 and bus.index.consecutive_filtered == 1
    (replacement,) = bus.admit(0)
    assert bus.index.groups[replacement].step == 0


def test_a_poison_prompt_is_quarantined_after_its_limit_and_infrastructure_failures_count_apart():
    bus = Driver(max_data_failures=2, max_infra_failures=5)
    group, *_ = bus.admit(0)
    for epoch in range(3):
        bus.grant(group)
        bus.emit(event="error", group=group, epoch=epoch, why="reward raised ZeroDivisionError")
    assert bus.index.counts["quarantined"] == 1
    other = bus.admit(0)[0]
    for epoch in range(3):
        bus.grant(other)
        bus.emit(event="lose", group=other, epoch=epoch, why="no progress")
    assert bus.index.groups[other].state == "waiting"


def test_memory_stays_while_a_scorer_reads_a_settled_group():
    bus = Driver(spare_groups=1)
    *needed, spare = bus.admit(0)
    for group in needed:
        bus.fill(group)
    bus.score()
    bus.fill(spare)
    bus.forward("actor_fwd", "log_probs", ack=False)
    while bus.train_rounds(0):
        pass
    bus.commit(1)
    ring = bus.index.space.rings["ring/rollout-0/0"]
    assert bus.index.counts["surplus"] == 1 and ring.tail < ring.head
    (key,) = bus.index.rounds._by_key
    bus.emit(event="ack", key=key, rank=0)
    assert ring.tail == ring.head and bus.index.groups == {}


def test_a_new_attempt_admits_nothing_twice_and_forgets_leases_and_rows():
    bus = Driver()
    bus.step(0)
    group, *_ = bus.admit(1)
    bus.fill(group)
    state = bus.index.dump()
    bus.emit(event="snapshot", state=orjson.loads(orjson.dumps(state)))
    bus.emit(event="attempt", attempt=1)
    again = bus.index.groups[group]
    assert (again.state, again.numbers(), again.epoch, bus.index.version) == ("waiting", [], 1, 1)
    assert bus.index.next_position == 6 and bus.index.imbalance() == ""


def test_a_replay_of_the_journal_gives_the_same_index():
    for seed in range(30):
        bus = random_run(seed)
        copy = Index(bus.index.rules)
        for event in orjson.loads(orjson.dumps(bus.events)):
            copy.apply(event)
        assert copy.dump() == bus.index.dump()
        assert Index.load(copy.rules, orjson.loads(orjson.dumps(copy.dump()))).dump() == copy.dump()


def test_whatever_dies_groups_balance_and_nothing_is_lost_or_trained_twice():
    for seed in range(30):
        bus = random_run(seed)
        assert bus.index.imbalance() == ""
        assert bus.index.version == 4
        found = totals(bus)
        assert (found.num_lost, found.num_trained_twice, found.num_unexpected) == (0, 0, 0)
        assert found.num_trained == 4 * 3 * 3
        assert found.outcomes["surplus"] == 3 * bus.index.counts["surplus"]
        assert found.staleness == dict(sorted(bus.index.staleness.items()))
        for ring in bus.index.space.rings.values():
            assert ring.records == {} and ring.tail == ring.head


def test_the_first_visible_media_of_a_group_count_and_a_second_holder_s_are_refused_and_freed():
    bus = Driver(media_bytes=512)
    group, *_ = bus.admit(0)
    found = bus.grant(group)
    assert bus.index.entries(found) == [512, 256, 256]
    bus.put_media(group, encoder=100)
    place = found.media["pixel_values"]
    bus.die("rollout-0", 1)
    assert bus.index.entries(bus.grant(group, "rollout-1")) == [256, 256]
    bus.put_media(group, member="rollout-1", encoder=999)
    assert (found.media["pixel_values"], found.encoder) == (place, 100)
    assert bus.index.refused_rows == 1 and bus.index.space.rings["ring/rollout-1/0"].records == {}
    assert (bus.index.media_bytes, bus.index.row_bytes) == (1024, 0)


def test_media_put_for_an_old_epoch_or_a_settled_group_are_refused():
    bus = Driver(media_bytes=512)
    group, other, _ = bus.admit(0)
    bus.grant(group)
    bus.grant(other)
    bus.emit(event="lose", group=group, epoch=0, why="no progress")
    bus.grant(group, "rollout-1")
    bus.put_media(group, epoch=0)
    bus.emit(event="settle", group=other, epoch=0, outcome="filtered", why="equal rewards")
    bus.put_media(other, epoch=0)
    assert bus.index.groups[group].media == {} and bus.index.refused_rows == 2
    assert bus.index.space.rings["ring/rollout-0/0"].records == {}


def test_a_group_of_text_in_a_run_with_media_uses_up_no_more_than_was_reserved():
    bus = Driver(media_bytes=512)
    group, *_ = bus.admit(0)
    bus.grant(group)
    bus.put(group, [1])
    assert bus.index.space.rings["ring/rollout-0/0"].reserved_bytes >= 256
    bus.put(group, [0])
    assert bus.index.groups[group].state == "ready"
    assert bus.index.space.rings["ring/rollout-0/0"].reserved == {}


def test_a_new_attempt_forgets_media_with_everything_else_that_was_put():
    bus = Driver(media_bytes=512)
    group, *_ = bus.admit(0)
    bus.grant(group)
    bus.put_media(group, encoder=9)
    bus.put(group, [0])
    bus.emit(event="attempt", attempt=1)
    again = bus.index.groups[group]
    assert (again.media, again.encoder, again.numbers(), again.records) == ({}, 0, [], [])


def test_the_audit_counts_media_as_nobody_s_sample():
    bus = Driver(media_bytes=512)
    for group in bus.admit(0):
        bus.grant(group)
        bus.put_media(group)
        bus.put(group, [0, 1])
    bus.score()
    while bus.train_rounds(0):
        pass
    bus.commit(1)
    found = totals(bus)
    assert (found.num_put, found.num_trained, found.num_lost, found.num_unexpected) == (6, 6, 0, 0)


def test_rounds_count_encoder_work_and_keep_samples_that_share_media_together():
    bus = Driver(media_bytes=512, groups_per_step=4)
    bus.emit(event="join", stream="actor_fwd", member="actor_fwd-0", ranks=2, tokens=60)
    for group in bus.admit(0):  # samples of 10 tokens, beside 40 encoder positions for two of the groups
        bus.grant(group)
        if group < 2:
            bus.put_media(group, encoder=40)
        bus.put(group, [0, 1])
    (first,) = bus.index.plan_rounds("actor_fwd", "actor_fwd-0", 1, None)[:1]
    assert all(
        len({s for g, s, _ in rank if g == group}) in (0, 2)
        for rank in map(rows_of, first["spans"])
        for group in (0, 1)
    )
    assert all({g for g, *_ in rank} & {0, 1} for rank in first["spans"])


def test_the_audit_passes_over_a_settlement_that_came_after_its_lease_was_lost():
    bus = Driver(spare_groups=1)
    late, *rest = bus.admit(0)
    bus.grant(late)
    bus.emit(event="lose", group=late, epoch=0, why="no progress")
    bus.emit(event="settle", group=late, epoch=0, outcome="filtered", why="equal rewards")
    for group in (late, *rest):
        bus.fill(group)
    bus.score()
    bus.train_rounds(0)
    bus.commit(1)
    found = count(bus.events, Ledger(2, 3, 2, 5))
    assert found.num_lost == 0 and found.num_trained == 6
    assert (found.outcomes["filtered"], found.outcomes["surplus"]) == (0, 2)


def test_the_audit_counts_leases_that_samples_put_twice_cost_and_the_quarantine_they_end_in():
    bus = Driver(max_data_failures=1)
    twice, *rest = bus.admit(0)
    for _ in range(2):
        bus.grant(twice)
        while twice in bus.index.groups and bus.index.groups[twice].state == "running":
            bus.put(twice, [0])
    assert bus.index.counts["quarantined"] == 1
    for group in (*rest, *bus.admit(0)):
        bus.fill(group)
    bus.score()
    bus.train_rounds(0)
    bus.commit(1)
    found = count(bus.events, Ledger(2, 3, 1, 5))
    assert (found.num_lost, found.num_leases_lost, found.num_trained) == (0, 2, 6)
    assert found.outcomes["quarantined"] == 2


def test_the_audit_turns_red_on_a_planted_loss_and_a_planted_duplicate():
    bus = random_run(1)
    commits = [event for event in bus.events if event["event"] == "commit" and event["spans"]]
    (group, _, first, count), *others = commits[1]["spans"]
    commits[1]["spans"] = [[group, 0, first + 1, count - 1], *others]
    assert totals(bus).num_lost == 1
    group, _, first, _ = commits[0]["spans"][0]
    commits[1]["spans"] = [[group, 0, first, 1], *commits[1]["spans"]]
    assert totals(bus).num_trained_twice == 1


@pytest.mark.parametrize("every", [1, 7, 100])
def test_an_audit_that_begins_anywhere_with_what_a_snapshot_carries_says_the_same(every: int):
    for seed in range(4):
        bus = random_run(seed)
        carried = Ledger(3, 3)
        for number, event in enumerate(bus.events):
            if number % every == 0:
                state = orjson.loads(orjson.dumps({"audit": carried.dump()}))
                carried = Ledger(3, 3)
                carried.apply({"event": "snapshot", "state": state})
            carried.apply(event)
        whole = Ledger(3, 3)
        assert carried.totals() == count(bus.events, whole) and carried.dump() == whole.dump()
        assert not whole.open and len(orjson.dumps(whole.dump())) < 300


def random_run(seed: int) -> Driver:
    """Four steps in a random order of grants, media, partial puts, deaths, lost leases, errors and filters. Odd positions have
    media, which come before their samples; some holders put what is there already."""
    draw = random.Random(seed)
    bus = Driver(spare_groups=1, samples_per_group=3, media_bytes=512)
    told: set[tuple[int, int]] = set()  # (group, epoch) whose holder has put media
    first: dict[int, list] = {}  # group -> where its media lie
    lives = {"rollout-0": 1, "rollout-1": 1, "actor_fwd-0": 1, "actor-0": 1}
    while bus.index.version < 4:
        step = bus.index.step
        for at in bus.index.open_steps(max(0, step - 1)):
            bus.admit(at)
        group = draw.choice([g for g in bus.index.groups.values() if g.state in ("waiting", "running")] or [None])
        act = draw.random()
        if group is None or act < 0.1:
            pass
        elif group.state == "waiting":
            member = draw.choice(["rollout-0", "rollout-1"])
            bus.grant(group.id, member, lives[member])
        elif (
            act < 0.7 and group.position % 2 and (not group.media or act < 0.2) and (group.id, group.epoch) not in told
        ):
            told.add((group.id, group.epoch))
            bus.put_media(group.id, member=group.holder, encoder=7)
            assert first.setdefault(group.id, group.media["pixel_values"]) == group.media["pixel_values"]
        elif act < 0.7:
            missing = [s for s in range(3) if s not in group.numbers()]
            bus.put(group.id, missing[: draw.randint(1, 3)], member=group.holder)
        elif act < 0.75 and group.infra_failures < 5:
            bus.emit(event="lose", group=group.id, epoch=group.epoch, why="no progress")
        elif act < 0.78:
            bus.emit(event="error", group=group.id, epoch=group.epoch, why="reward")
        elif act < 0.8:
            bus.emit(event="settle", group=group.id, epoch=group.epoch, outcome="filtered", why="equal")
        if draw.random() < 0.05:
            member = draw.choice(list(lives))
            bus.die(member, lives[member])
            lives[member] += 1
            bus.start(member, lives[member])
            bus.join()
        if draw.random() < 0.4:
            bus.forward("actor_fwd", "log_probs", lives["actor_fwd-0"])
            bus.forward("advantages", "advantages")
        while bus.train_rounds(step):
            pass
        planned = {
            g for r in bus.index.rounds.lanes["actor"].rounds.get(f"step{step}", {}).values() for g in groups_of(r)
        }
        assert all(g.encoder == 7 * (g.position % 2) for g in bus.index.groups.values() if g.state == "ready")
        if len(planned) == bus.index.rules.groups_per_step:
            bus.commit(step + 1)
    return bus


def test_admit_grant_put_score_train_and_commit_take_as_many_steps_however_many_rows_wait():
    costs = []
    # A step has 16 rows, all of them scored and waiting for the trainer. What is made once and kept is made by the first.
    for num_steps in (3, 3, 60):
        bus = Driver(num_steps=1 << 20, max_staleness=1 << 20, groups_per_step=4, samples_per_group=4)
        for step in range(num_steps):
            for group in bus.admit(step):
                bus.fill(group)
        bus.score()
        groups: list[int] = []

        def train(bus: Driver = bus) -> None:
            while bus.train_rounds(0):
                pass

        acts = (
            lambda bus=bus, groups=groups, step=num_steps: groups.extend(bus.admit(step)),
            lambda bus=bus, groups=groups: [bus.grant(group) for group in groups],
            lambda bus=bus, groups=groups: [bus.put(group, [0, 1, 2, 3]) for group in groups],
            bus.score, train, lambda bus=bus: bus.commit(1),
        )  # fmt: skip
        costs.append([lines(act, "/comm/") for act in acts])
    assert costs[1] == costs[2] and min(costs[1]) > 0


def test_a_run_whose_data_end_trains_whole_steps_and_is_done() -> None:
    bus = Driver(num_positions=8)
    for step in range(2):
        bus.step(step)
    assert bus.index.done and bus.index.version == 2 and bus.index.next_position == 6
    assert bus.index.plan_admissions(2) == [] and bus.index.imbalance() == "" and bus.index.starving() == ""


def test_columns_for_the_media_of_a_group_are_refused() -> None:
    bus = Driver(media_bytes=64)
    group = bus.admit(0)[0]
    bus.grant(group)
    bus._put("ring/rollout-0/0", [[group, -1, 0]], ["log_probs"], epoch=0, reservation="x")
    assert bus.index.refused_rows == 1


def fixed(budget: int, order: list[int], *, ranks: int = 1, **changes: int) -> list[list[list[list[int]]]]:
    """[round][rank] -> rows of a step of four groups that become ready in `order`, planned as soon as anything is."""
    streams = [replace(stream, fixed=True) for stream in STREAMS]
    streams[-1] = replace(streams[-1], **changes)
    bus = Driver(groups_per_step=4, streams=tuple(streams))
    bus.emit(event="join", stream="actor", member="actor-0", ranks=ranks, tokens=budget)
    admitted = bus.admit(0)
    rounds = []
    for at in order:
        bus.fill(admitted[at])
        assert all(len({group for group, *_ in rows}) == 1 for rows in bus.forward("actor_fwd", "log_probs"))
        bus.forward("advantages", "advantages")
        while planned := bus.train_rounds(0):
            rounds += planned
    assert [made["last"] for made in rounds] == [False] * (len(rounds) - 1) + [True]
    return [[rows_of(rank) for rank in made["spans"]] for made in rounds]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [10, 20, 30, 45, 1000])
def test_fixed_rounds_are_the_same_in_whatever_order_groups_become_ready(budget: int, ranks: int) -> None:
    orders = list(itertools.permutations(range(4)))
    assert all(fixed(budget, list(order), ranks=ranks) == fixed(budget, [0, 1, 2, 3], ranks=ranks) for order in orders)


@pytest.mark.parametrize("budget", [10, 30, 45, 1000])
def test_fixed_rounds_of_several_updates_and_passes_are_the_same_too(budget: int) -> None:
    updates = {"mini_batches": 2, "passes": 2}
    first, *others = (fixed(budget, list(order), **updates) for order in itertools.permutations(range(4)))
    assert all(other == first for other in others)
    seen = [row for made in first for row in made[0]]
    assert sorted(seen) == sorted([[group, sample, 0] for group in range(4) for sample in range(2)] * 2)


def test_fixed_rounds_are_trained_as_soon_as_they_are_certain() -> None:
    bus = Driver(groups_per_step=4, streams=tuple(replace(stream, fixed=True) for stream in STREAMS))
    bus.join(tokens=20)  # one group of two samples of ten tokens
    groups = bus.admit(0)
    for group, num_ready in ((groups[1], 0), (groups[0], 1), (groups[2], 1), (groups[3], 2)):
        bus.fill(group)
        bus.score()
        planned = []
        while more := bus.train_rounds(0):
            planned += more
        assert len(planned) == num_ready


def test_a_forward_stream_of_whole_steps_takes_the_groups_that_train_all_at_once() -> None:
    streams = tuple(replace(each, whole_step=each.name == "advantages") for each in STREAMS)
    bus = Driver(groups_per_step=2, spare_groups=1, streams=streams)
    bus.emit(event="join", stream="advantages", member="advantages-0", ranks=2, tokens=20)  # less than a step
    slow, quick, third = bus.admit(0)
    for group in (quick, third):
        bus.fill(group)
    assert bus.forward("advantages", "advantages") == []  # the third is of the step where the slow one is not
    bus.grant(slow)
    bus.emit(event="settle", group=slow, epoch=0, outcome="filtered", why="equal rewards")
    [made] = bus.index.plan_rounds("advantages", "advantages-0", 1, None)
    assert [rows_of(rank) for rank in made["spans"]] == [
        [[group, at, 0] for group in (quick, third) for at in (0, 1)],
        [],
    ]
    assert len(bus.forward("advantages", "advantages")) == 1 and bus.forward("advantages", "advantages") == []


def test_a_whole_step_is_taken_again_where_its_taker_died() -> None:
    streams = tuple(replace(each, whole_step=each.name == "advantages") for each in STREAMS)
    bus = Driver(groups_per_step=2, streams=streams)
    for group in (groups := bus.admit(0)):
        bus.fill(group)
    wanted = [[group, at, 0] for group in groups for at in (0, 1)]
    assert bus.index.plan_rounds("advantages", "advantages-0", 1, None) != []
    bus.emit(event="rounds", rounds=bus.index.plan_rounds("advantages", "advantages-0", 1, None))
    assert bus.index.plan_rounds("advantages", "advantages-0", 1, None) == []
    bus.die("advantages-0", 1)
    bus.start("advantages-0", 2)
    assert bus.forward("advantages", "advantages", incarnation=2) == [wanted]


def test_a_filtered_group_does_not_hold_fixed_rounds_up() -> None:
    bus = Driver(groups_per_step=2, streams=tuple(replace(stream, fixed=True) for stream in STREAMS))
    first, second = bus.admit(0)
    bus.fill(second)
    bus.score()
    assert bus.train_rounds(0) == []
    bus.grant(first)
    bus.emit(event="settle", group=first, epoch=0, outcome="filtered", why="equal rewards")
    (third,) = bus.admit(0)
    bus.fill(third)
    bus.score()
    (made,) = bus.train_rounds(0)
    assert made["last"] and sorted({group for group, *_ in rows_of(made["spans"][0])}) == [second, third]


class Stopped:
    """A run over `num_positions`, up to two versions stale, that is stopped at version `at` with groups in every state, and goes
    on from its checkpoint as the next attempt."""

    def __init__(self, num_positions: int, at: int | None) -> None:
        self.bus = Driver(num_steps=6, max_staleness=2, num_positions=num_positions)
        self.consumed: list[tuple[int, list[int]]] = []
        while not self.bus.index.done:
            if self.bus.index.version == at:
                self.resume()
                at = None
            self.step(self.bus.index.step)

    def step(self, step: int) -> None:
        index = self.bus.index
        for ahead in index.open_steps(step):
            self.bus.admit(ahead)
        for group in index.waiting(step):
            self.bus.fill(group.id)
        self.bus.score()
        while self.bus.train_rounds(step):
            pass
        positions = [index.groups[group].position for group in index.membership(step)]
        self.consumed.append((step, positions))
        self.bus.commit(step + 1)

    def resume(self) -> None:
        """One group ready, one with half of its samples, one leased, the rest waiting: then only the checkpoint is left."""
        bus, index = self.bus, self.bus.index
        for ahead in index.open_steps(index.step):
            bus.admit(ahead)
        for act, group in zip(("fill", "put", "grant"), index.waiting(index.step), strict=False):
            if act == "fill":
                bus.fill(group.id)
            else:
                bus.grant(group.id)
            if act == "put":
                bus.put(group.id, [0])
        bus.emit(event="snapshot", state=orjson.loads(orjson.dumps(index.dump())))
        bus.emit(event="attempt", attempt=1)
        for member in ("rollout-0", "rollout-1", "actor_fwd-0", "advantages-0", "actor-0"):
            bus.start(member, 2)
        bus.pos.clear()
        bus.join()


@pytest.mark.parametrize("num_positions", [8, 9, 10, 18, 40])
def test_a_resumed_run_consumes_the_same_prompts_in_the_same_steps_to_the_end_of_the_data(num_positions: int) -> None:
    whole = Stopped(num_positions, None)
    num_steps = min(6, num_positions // 3)
    assert whole.consumed == [(step, list(range(3 * step, 3 * step + 3))) for step in range(num_steps)]
    for at in range(num_steps):
        stopped = Stopped(num_positions, at)
        assert stopped.bus.index.attempt == 1 and stopped.consumed == whole.consumed
        assert stopped.bus.index.imbalance() == "" and stopped.bus.index.counts["trained"] == 3 * num_steps


def put_rows(bus: Driver, group: int, rows: list[list[int]], oldest: list[int] | None = None, **more: int) -> None:
    """Rows [sample, part] of a leased group."""
    found = bus.index.groups[group]
    versions = oldest or [0] * len(rows)
    bus._put(
        "ring/rollout-0/0", [[group, *row] for row in rows], list(BASE), epoch=found.epoch, reservation=found.reservation(),
        info=by_field([[10, 4, 1.0, each, each, 0] for each in versions]), **more,
    )  # fmt: skip


def test_the_parts_of_a_sample_are_taken_together_or_not_at_all_and_the_first_put_of_it_counts() -> None:
    bus = Driver()
    group, *_ = bus.admit(0)
    found = bus.grant(group)
    put_rows(bus, group, [[0, 0], [0, 2], [1, 1], [9, 0], [0, -1], [0, 1 << 70]])  # a part is left out, none are there
    assert (found.numbers(), bus.index.refused_rows) == ([], 6)
    bus.grant(group)  # the room of two samples was used up
    put_rows(bus, group, [[0, 0], [0, 1], [0, 2]])
    assert (found.parts(), found.state, bus.index.entries(found)) == ([3, 0], "running", [256])
    put_rows(bus, group, [[0, 0], [1, 0], [0, 1]])  # sample 0 again, with fewer parts
    assert (found.parts(), found.state) == ([3, 1], "ready") and bus.index.refused_rows == 8
    assert [extent[1:4] for extent in found.extents if "tokens" in extent[0]] == [
        [0, 0, 1],
        [1, 0, 1],
        [2, 0, 1],
        [0, 1, 1],
    ]


def test_a_group_is_complete_with_the_columns_of_all_rows_and_committed_with_all_of_them() -> None:
    bus = Driver(groups_per_step=1)
    (group,) = bus.admit(0)
    found = bus.grant(group)
    put_rows(bus, group, [[0, 0], [1, 0], [1, 1]], [-1, 0, -1])
    assert found.oldest() == [-1, 0] and list(found.costs()) == [10, 10, 10]
    bus.join(tokens=20)
    (first, second) = bus.index.plan_rounds("actor_fwd", "actor_fwd-0", 1, None)
    bus.emit(event="rounds", rounds=[first, second])
    assert [rows_of(made["spans"][0]) for made in (first, second)] == [[[0, 0, 0], [0, 1, 0]], [[0, 1, 1]]]
    bus.put_columns(first["key"], rows_of(first["spans"][0]), ["log_probs"], "actor_fwd-0")
    assert not found.complete(("tokens", "log_probs"))
    bus.put_columns(second["key"], rows_of(second["spans"][0]), ["log_probs"], "actor_fwd-0")
    assert found.complete(("tokens", "log_probs"))
    for key in (first["key"], second["key"]):
        bus.emit(event="ack", key=key, rank=0)
    bus.forward("advantages", "advantages")
    again = Index.load(bus.index.rules, orjson.loads(orjson.dumps(bus.index.dump())))
    assert again.dump() == bus.index.dump()
    made = bus.train_rounds(0)
    spans = [span for event in made for span in event["spans"][0]]
    assert sorted(rows_of(spans)) == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]
    bus.emit(event="commit", role="actor", version=1, checksum=7, attempt=0, spans=spans)
    assert bus.index.staleness == {0: 1} and bus.index.groups == {}  # the sample of an environment alone has no age
    for cut, lost, twice in ((spans, 0, 0), (spans[:-1], 1, 0), (spans + spans[-1:], 0, 1)):
        bus.events[-1]["spans"] = cut
        found_ = count(bus.events, Ledger(2, 1, 2, 5))
        assert (found_.num_put, found_.num_trained, found_.num_lost, found_.num_trained_twice) == (2, 2, lost, twice)
        assert found_.staleness == {0: 1} and found_.num_unexpected == 0


def test_a_version_exists_once_every_trainable_role_is_prepared_and_a_death_withdraws_what_one_prepared_alone() -> None:
    streams = (*STREAMS, replace(STREAMS[2], name="critic"))
    bus = Driver(groups_per_step=1, streams=streams)
    bus.start("critic-0", 1)
    bus.emit(event="join", stream="critic", member="critic-0", ranks=1, tokens=1 << 20)
    (group,) = bus.admit(0)
    bus.fill(group)
    bus.score()
    spans = [[group, 0, 0, 2]]

    def report(kind: str, role: str, trained: list[list[int]], checksum: int = 7) -> None:
        bus.emit(
            event=kind, role=role, member=f"{role}-0", version=1, checksum=checksum, attempt=0, spans=trained
        )  # fmt: skip

    for role in ("actor", "critic"):
        planned = bus.index.plan_rounds(role, f"{role}-0", 1, 0)
        bus.emit(event="rounds", rounds=planned)
        assert [(event["spans"], event["turn"]) for event in planned] == [([spans], role == "critic")]
    report("prepared", "actor", spans)
    again = Index.load(bus.index.rules, orjson.loads(orjson.dumps(bus.index.dump())))
    assert again.dump() == bus.index.dump() and again.prepared["actor"]["version"] == 1
    assert bus.index.version == 0 and bus.index.groups[group].state == "ready"  # its rows stay
    bus.die("actor-0", 1)
    assert bus.index.prepared == {}
    bus.start("actor-0", 2)
    assert bus.index.rounds.find("actor", "step0", 0)[0]["spans"] == [spans]  # the step's rounds again
    report("prepared", "critic", spans, 8)
    report("commit", "actor", spans, 9)
    assert bus.index.version == 1 and bus.index.checksums == {"actor": 9, "critic": 8} and bus.index.prepared == {}
    assert bus.index.counts["trained"] == 1 and bus.index.groups == {}
    found = count(bus.events, Ledger(2, 1, 2, 5))
    assert (found.num_trained, found.num_lost, found.num_trained_twice) == (
        2,
        0,
        0,
    )  # what was withdrawn trained nothing
    bus.events[-2]["spans"] = [[group, 0, 0, 1]]
    assert count(bus.events, Ledger(2, 1, 2, 5)).num_lost == 1  # of the critic alone
    bus.events[-2]["spans"] = [*spans, [group, 0, 1, 1]]
    assert count(bus.events, Ledger(2, 1, 2, 5)).num_trained_twice == 1
