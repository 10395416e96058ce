from __future__ import annotations

from collections.abc import Callable

import orjson
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.runs import compress, count, cut, even, expand
from tests.comm.cost import lines
from tests.comm.partitions.hand import Hand
from tests.strength import strength

KEYS = [f"k{i}" for i in range(6)]


class Folding(RuleBasedStateMachine):
    """Any order of events keeps the counters equal to the states, and replay and load equal to the live fold."""

    def __init__(self) -> None:
        super().__init__()
        self.hand = Hand(clear_after=("a",))
        self.hand.task("a")
        self.step = 0

    @property
    def ids(self) -> list[int]:
        return [entry.num << 20 | i for entry in self.hand.table.entries.values() for i in range(entry.n)]

    @rule(n=st.integers(1, 5), columns=st.sampled_from([("x",), ("y",), ("x", "y")]))
    def put(self, n: int, columns: tuple[str, ...]) -> None:
        self.hand.put(n, columns)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), columns=st.sampled_from([("x",), ("y",)]))
    def put_keys(self, keys: list[str], columns: tuple[str, ...]) -> None:
        self.hand.put(len(keys), columns, keys=keys, tags=[{"t": key} for key in keys])

    @rule(data=st.data(), column=st.sampled_from(["x", "y"]))
    def add(self, data: st.DataObject, column: str) -> None:
        if self.ids:
            self.hand.add(data.draw(st.lists(st.sampled_from(self.ids), min_size=1, max_size=6, unique=True)), column)

    @rule(scope=st.sampled_from(["m.1", "n.1", "n.1/two"]), ranks=st.integers(1, 3), name=st.sampled_from(["a", "b"]))
    def claim(self, scope: str, ranks: int, name: str) -> None:
        if name not in self.hand.table.tasks:
            self.hand.task(name, columns=("x", "y"))
        self.hand.claim(name, scope, ranks, batch=2, partial=True)

    @rule(data=st.data(), name=st.sampled_from(["a", "b"]))
    def ack(self, data: st.DataObject, name: str) -> None:
        task = self.hand.table.tasks.get(name)
        if task is not None and task.claims:
            scope, k = data.draw(st.sampled_from(sorted(task.claims)))
            for rank in range(len(task.claims[scope, k].rows)):
                self.hand.ack(k, name, scope, rank)

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        if self.ids:
            ids = data.draw(st.lists(st.sampled_from(self.ids), min_size=1, max_size=4, unique=True))
            self.hand.emit("clear", rows=compress(sorted(ids)))

    @rule(data=st.data())
    def tag(self, data: st.DataObject) -> None:
        if self.ids:
            self.hand.emit("tag", rows=[[data.draw(st.sampled_from(self.ids)), 1]], tags={"t": "other", "u": 1})

    @rule(name=st.sampled_from(["a", "b"]))
    def reset(self, name: str) -> None:
        task = self.hand.table.tasks.get(name)
        if task is not None:
            self.hand.emit("reset", task=name, to=task.num_passes + 1)

    @rule(member=st.sampled_from(["m", "n"]))
    def die(self, member: str) -> None:
        self.hand.die(member)

    @invariant()
    def counters_equal_the_states(self) -> None:
        self.hand.check()

    def teardown(self) -> None:
        again = self.hand.replayed()
        state = orjson.loads(orjson.dumps(self.hand.partitions.dump()))
        assert again.dump() == self.hand.partitions.dump()
        loaded = Fold.load(orjson.loads(orjson.dumps(state)))
        assert loaded.dump() == state
        mine, theirs = self.hand.table, loaded.tables[0]
        assert (theirs.keys, theirs.num_rows) == (mine.keys, mine.num_rows)
        assert {tag: set(ids) for tag, ids in theirs.tagged.items()} == {
            tag: set(ids) for tag, ids in mine.tagged.items()
        }
        assert theirs.changes(0, 1000) == mine.changes(0, 1000)


Folding.TestCase.settings = settings(
    max_examples=strength(quick=25, full=60),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestFolding = Folding.TestCase


def steps(act: Callable[[], object]) -> int:
    return lines(act, "/partitions/")


def held(num_rows: int) -> Hand:
    hand = Hand()
    hand.task("t")
    hand.task("u", columns=("x", "y"))
    for _ in range(0, num_rows, 8):
        hand.put(8)
    hand.claim(batch=8)
    return hand


def test_put_add_claim_ack_and_clear_take_as_many_steps_however_many_rows_are_held():
    costs = []
    for num_rows in (400, 8000):
        hand = held(num_rows)
        last = hand.table.next_record - 1 << 20
        acts = (
            lambda hand=hand: hand.put(8),
            lambda hand=hand, last=last: hand.add([last + i for i in range(8)], "y"),
            lambda hand=hand: hand.claim(batch=8),
            lambda hand=hand: hand.ack(1),
            lambda hand=hand, last=last: hand.emit("clear", rows=[[last, 8]]),
            lambda hand=hand: hand.table.changes(hand.table._change - 1, 10),
        )
        costs.append([steps(act) for act in acts])
    assert costs[0] == costs[1]


def test_dropping_takes_as_many_steps_however_many_rows_are_held():
    one, many = held(400), held(8000)
    assert steps(lambda: one.emit("drop")) == steps(lambda: many.emit("drop"))


def test_memory_moves_on_when_the_last_user_of_the_oldest_record_is_gone():
    hand = Hand()
    first, second = hand.put(2), hand.put(2)
    hand.add(first, "y")
    hand.emit("clear", rows=compress(second))
    assert hand.table.shelf.rings["r"].tail == 0
    hand.emit("clear", rows=compress(first))
    assert hand.table.shelf.rings["r"].tail == hand.pos and not hand.table.shelf.sources


def test_changes_come_page_by_page_each_row_once():
    hand = Hand()
    ids = hand.put(3) + hand.put(3)
    hand.emit("tag", rows=[[ids[1], 1]], tags={"a": 1})
    found, cursor = [], 0
    while page := hand.table.changes(cursor, 1)[0]:
        cursor = hand.table.changes(cursor, 1)[1]
        found += page
    assert found == [ids[0], ids[2], *ids[3:], ids[1]]


def test_runs_say_the_same_as_the_ids():
    ids = [5, 6, 7, 9, 3, (1 << 20) - 1, 1 << 20]
    assert list(expand(compress(ids))) == ids
    assert compress([(1 << 20) - 1, 1 << 20]) == [[(1 << 20) - 1, 1], [1 << 20, 1]]
    parts = cut([[0, 5], [9, 2]], [3, 3, 3])
    assert [list(expand(part)) for part in parts] == [[0, 1, 2], [3, 4, 9], [10]]
    assert even(7, 3) == [3, 2, 2] and count(parts[0]) == 3
