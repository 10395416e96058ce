"""The fold takes any event of a known kind, in any order and however late: what means nothing any more changes nothing."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rondo.comm.bus.audit import Ledger, count
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event
from tests.comm.driver import Driver, rules
from tests.strength import strength

RULES = rules(media_bytes=64, max_data_failures=0, max_infra_failures=1, spare_groups=1)

groups, samples, epochs, small = st.integers(0, 7), st.integers(-2, 3), st.integers(0, 2), st.integers(0, 3)
parts = st.sampled_from([0, 0, 0, 1, 1, 2, -1, 1 << 62])
members = st.sampled_from(["rollout-0", "rollout-1", "actor_fwd-0", "advantages-0", "actor-0", "stranger-0"])
rings = members.map(lambda member: f"ring/{member}/0") | st.just("overflow/rollout-0/0.0")
streams = st.sampled_from(["actor_fwd", "advantages", "actor"])
columns = st.lists(st.sampled_from(["tokens", "loss_mask", "log_probs", "advantages", "pixel_values"]), max_size=3)
keys = st.tuples(streams, members, small).map(lambda key: f"{key[0]}/{key[1]}.1/{key[2]}")
reservations = st.tuples(groups, epochs).map(lambda at: f"group.{at[0]}.{at[1]}") | keys.map(lambda key: f"{key}.0")
why = st.just("it failed")


def event(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Event]:
    return st.fixed_dictionaries({"event": st.just(kind), **fields})


@st.composite
def puts(draw: st.DrawFn) -> Event:
    spans = draw(st.lists(st.tuples(groups, parts, samples, st.integers(1, 2)).map(list), min_size=1, max_size=2))
    num = sum(count for *_, count in spans)
    made = {
        "event": "put", "ring": draw(rings), "pos": draw(small) * 128, "seq": 1, "bytes": 128, "spans": spans,
        "columns": draw(columns), "epoch": draw(epochs), "attempt": draw(st.integers(0, 1)),
        "reservation": draw(reservations), "entries": num,
    }  # fmt: skip
    if draw(st.booleans()):
        made["info"] = [[draw(small) for _ in range(num)] for _ in range(6)]
    return made


@st.composite
def rounds(draw: st.DrawFn) -> Event:
    """What some index would plan now, be it another one."""
    made = draw(keys)
    stream, scope, index = made.split("/")
    spans = [draw(st.lists(st.tuples(groups, st.integers(0, 2), small, st.integers(1, 2)).map(list), max_size=2))]
    reserve = draw(st.sampled_from([[None], [["ring/actor_fwd-0/0", [64]]]]))
    return {
        "event": "rounds", "rounds": [{
            "key": made, "stream": stream, "scope": scope, "index": int(index), "step": draw(small),
            "member": "actor-0", "spans": spans, "turn": 0, "update": 0, "closes": False, "last": False, "reserve": reserve,
        }],
    }  # fmt: skip


EVENTS = st.one_of(
    event("admit", group=groups, step=small, position=groups),
    event("grant", group=groups, epoch=epochs, member=members, rank=st.just(0), incarnation=epochs, version=small,
          ring=rings, entries=st.just([64, 256, 256])),
    event("lose", group=groups, epoch=epochs, why=why),
    event("error", group=groups, epoch=epochs, why=why),
    event("abandon", group=groups, epoch=epochs),
    event("settle", group=groups, epoch=epochs, outcome=st.sampled_from(["filtered", "failed"]), why=why),
    puts(), puts(), rounds(),
    event("ack", key=keys, rank=small),
    *(event(kind, role=st.sampled_from(["actor", "critic"]), member=members, version=small, checksum=small, attempt=small,
            spans=st.lists(st.tuples(groups, st.integers(0, 1), small, st.just(2)).map(list), max_size=4))
      for kind in ("prepared", "commit")),
    event("left", step=small),
    event("started", member=members, incarnation=epochs, ranks=st.just(1)),
    event("dead", member=members, incarnation=epochs, publisher=st.booleans()),
    event("ring", ring=rings, bytes=st.just(1 << 12), member=members, overflow=st.booleans()),
    event("ring_dropped", ring=rings),
    event("join", stream=streams, member=members, ranks=st.integers(1, 2), tokens=st.just(32)),
    event("publishing", slot=st.integers(0, 2), version=small),
    event("published", slot=st.integers(0, 2), version=small, checksum=small),
    event("hold", slot=st.integers(0, 2), reader=members.map(lambda member: f"{member}/rollout.0")),
    event("proved", reader=members.map(lambda member: f"{member}/rollout.0"), version=small),
    event("pin", label=st.just("version_1"), slot=st.integers(0, 2)),
    event("evaluated", label=st.just("version_1"), result=st.just({"reward": 0.5})),
    event("evaluated_part", label=st.just("version_1"), part=st.integers(0, 1), found=st.just({"rewards": []})),
    event("attempt", attempt=st.integers(0, 1)),
)  # fmt: skip


def apply_plans(bus: Driver, step: int) -> None:
    """What a coordinator does of its own between two calls."""
    for planned in bus.index.plan_admissions(step):
        bus.emit(**planned)
    for group in list(bus.index.waiting(step)):
        if "ring/rollout-0/0" in bus.index.space.rings:
            bus.grant(group.id)


@settings(max_examples=strength(quick=60, full=3000), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(EVENTS, st.integers(0, 2)), max_size=60))
def test_any_events_in_any_order_leave_an_index_that_balances_and_is_the_same_from_its_dump(
    acts: list[Event | int],
) -> None:
    bus = Driver(media_bytes=64, max_data_failures=0, max_infra_failures=1, spare_groups=1)
    for act in acts:
        if isinstance(act, int):
            apply_plans(bus, act)
        else:
            bus.emit(**act)
        assert bus.index.imbalance() == ""
    assert count(bus.events, Ledger(2, 3)).num_admitted >= 2 * bus.index.counts["admitted"]  # it takes any event too
    dump = orjson.loads(orjson.dumps(bus.index.dump()))
    assert orjson.loads(orjson.dumps(Index.load(RULES, dump).dump())) == dump
