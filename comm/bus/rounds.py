"""Work for consumers, planned once for all ranks of a role group.

Owns which rows are ready for which stream, the rounds made of them, and who still reads them (pins). A part of the index's
fold: pure, and the same for whoever asks again. Does not own rows, room in rings, or sockets.

A *stream* is one kind of work on rows: `forward` streams add columns (actor_fwd, reference, advantages) and can have replicas
that share the groups between them; a `train` stream (actor) reads every group of a step. A *round* is one micro-batch for every
data-parallel rank; a rank without rows runs a dummy, so that all ranks run the same collectives in the same order.

    offer(group) -> ready -> plan(...) -> round r of a scope -> acknowledge(key, rank) by every rank -> unpinned

A round is balanced by what rows cost (`balance.py`); a micro-batch holds at most the tokens of its member's layout.

The rounds of a step make `mini_batches` x `passes` *updates*, one optimizer step each, behind each other in one scope: the groups
of a step are divided over its mini-batches in admission order, and every pass goes through all of them.

    step 7, 4 groups, 2 mini-batches, 2 passes      update 0: groups a b    1: c d    2: a b    3: c d

Several roles may be trained on a step, each with a stream of its own: a group is in the same update of each, and the rounds of
all share one order (`turn`), so that ranks that train both run the same collectives.

Invariants: every rank of a scope sees the same rounds in the same order; a group is in at most one live round of a stream;
a train round names only groups whose membership in the step, and in the mini-batch, is certain; a group is in exactly one
update of a pass, and with the same rank in every pass; readiness is a list, never a scan.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

from rondo.comm.bus.balance import Bound, fill, micro_batches, recut
from rondo.comm.bus.group import Group
from rondo.comm.ring.spans import Span

MOST_ROUNDS = 8
"""How many rounds are planned at once, where so many are full, and handed out with one answer."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What a role reads and writes, by column name."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    kind: str = "forward"  # forward | train
    whole_groups: bool = False  # keep the samples of a prompt group in one micro-batch (group statistics)
    whole_samples: bool = False  # keep the parts of a sample in one micro-batch (losses over a tree, or a whole sample)
    # train only when every group of the step is ready (needs_full_step algorithms); a forward stream: all of them in one round
    whole_step: bool = False
    media: bool = False  # reads the media of prompt groups too
    fixed: bool = False  # rounds follow from admission order and lengths alone, never from what is ready when
    output_bytes_per_token: int = 4
    # outputs with something for every token of a sample, not of its response alone -> bytes of each token
    sample_bytes: Mapping[str, int] = field(default_factory=dict)
    mini_batches: int = 1  # a train stream's optimizer steps in one pass over a step's groups
    passes: int = 1  # how often a train stream goes through a step's groups
    first_step: int = 0  # the first step that a train stream trains; before it, its role commits unchanged weights


class Round(TypedDict):
    """Micro-batch `index` of a scope, as it is planned, journalled and kept."""

    key: str
    stream: str
    scope: str
    index: int
    step: int
    spans: list[list[Span]]  # [rank]: its rows
    reserve: list[list[Any] | None]  # [rank]: ring, and bytes of each record of columns that is to come
    turn: int  # its place among the rounds of all train streams of the step: who trains several runs them in this order
    update: int  # which optimizer step of a train step it belongs to
    closes: bool  # whether that optimizer step has all its rows with this round
    last: bool  # whether the step has


def groups_of(made: Round) -> set[int]:
    return {group for rank in made["spans"] for group, *_ in rank}


@dataclass(slots=True)
class _Lane:
    """The state of one stream."""

    spec: Stream
    layouts: dict[str, list[int]] = field(default_factory=dict)  # member -> [ranks, tokens a micro-batch]
    ready: dict[int, list[int]] = field(default_factory=dict)  # step -> groups, sorted; a step without any is not in it
    taken: set[int] = field(default_factory=set)  # groups that are ready, in a round, or finished here
    rounds: dict[str, dict[int, Round]] = field(default_factory=dict)  # scope -> index -> round
    planned: dict[str, int] = field(default_factory=dict)  # scope -> rounds planned so far
    covered: dict[str, dict[int, set[int]]] = field(
        default_factory=dict
    )  # train scope -> update -> groups in its rounds
    news: set[int] = field(default_factory=set)  # steps of which more can be planned than before

    def list_ready(self, step: int, group: int) -> None:
        listed = self.ready.setdefault(step, [])
        at = bisect.bisect_left(listed, group)
        if at == len(listed) or listed[at] != group:
            listed.insert(at, group)
            self.news.add(step)

    def unlist(self, step: int, group: int) -> None:
        listed = self.ready.get(step, [])
        at = bisect.bisect_left(listed, group)
        if at < len(listed) and listed[at] == group:
            del listed[at]
            if not listed:
                del self.ready[step]

    def in_order(self) -> Iterator[int]:
        """Ready groups, oldest step first."""
        return (group for step in sorted(self.ready) for group in self.ready[step])


class Rounds:
    def __init__(self, streams: Sequence[Stream]) -> None:
        self.lanes = {spec.name: _Lane(spec) for spec in streams}
        self._by_key: dict[str, tuple[Round, set[int]]] = {}  # and the ranks that have not acknowledged it
        self._pins: dict[int, set[str]] = {}
        self._turns: dict[int, int] = {}  # step -> rounds of its train streams that were ever planned

    def news(self) -> list[tuple[str, int | None]]:
        """(stream, step) of which more may be planned since the last call; step None of forward streams."""
        found: list[tuple[str, int | None]] = []
        for name, lane in self.lanes.items():
            if lane.news:
                found += [(name, step) for step in lane.news] if lane.spec.kind == "train" else [(name, None)]
                lane.news.clear()
        return found

    # ---- readiness --------------------------------------------------------------------------------------------------

    def offer(self, group: Group) -> None:
        """Tell every stream what is visible of a group; those whose inputs are complete list it as ready. Idempotent."""
        for lane in self.lanes.values():
            if lane.spec.mini_batches > 1 or lane.spec.fixed:
                lane.news.add(group.step)  # the place of those behind it may be certain now
            if group.id in lane.taken or not group.complete(lane.spec.inputs):
                continue
            lane.taken.add(group.id)
            if not lane.spec.outputs or not group.complete(lane.spec.outputs):
                lane.list_ready(group.step, group.id)

    def has_all(self, stream: str, groups: Collection[int]) -> bool:
        """Whether the inputs of some groups are complete for a stream."""
        return self.lanes[stream].taken.issuperset(groups)

    def withdraw(self, group: int, step: int) -> None:
        """A settled group is offered to nobody; rounds that hold it keep it until they are acknowledged."""
        for lane in self.lanes.values():
            lane.taken.discard(group)
            lane.unlist(step, group)

    # ---- planning (changes nothing) ---------------------------------------------------------------------------------

    def plan_forward(self, stream: str, member: str, incarnation: int, groups: Mapping[int, Group]) -> list[Round]:
        """The next rounds for one replica of a forward stream, or [] when nothing is ready. groups: all living ones."""
        lane = self.lanes[stream]
        if not lane.ready:
            return []
        # A group alone: who shares a micro-batch with whom depends on when they were ready.
        ready = itertools.islice(lane.in_order(), 1) if lane.spec.fixed else lane.in_order()
        batches, _ = self._batches(lane, ready, groups, member)
        step = min(lane.ready)  # the oldest ready group is always among the chosen
        scope, first = f"{member}.{incarnation}", lane.planned.get(f"{member}.{incarnation}", 0)
        return [_round(lane.spec, scope, first + i, step, spans) for i, spans in enumerate(batches)]

    def plan_whole(
        self,
        stream: str,
        member: str,
        incarnation: int,
        members: Callable[[int], Collection[int]],
        groups: Mapping[int, Group],
    ) -> list[Round]:
        """The next round of a forward stream that takes whole steps: all rows of one, on the first rank; [] where none is whole.
        members: of a step, all of its groups where these are certain, else none. One that lost the columns of a group has all
        made again, and what it has already stays."""
        lane = self.lanes[stream]
        for step, ready in sorted(lane.ready.items()):
            chosen = members(step)
            if not lane.taken.issuperset(chosen) or not set(chosen).intersection(ready):
                continue
            costs = {id: groups[id].costs() for id in sorted(chosen)}
            [[spans]] = micro_batches(costs, 1, sum(map(sum, costs.values())), self._bound(lane, costs, groups))
            scope, ranks = f"{member}.{incarnation}", lane.layouts[member][0]
            return [
                _round(lane.spec, scope, lane.planned.get(scope, 0), step, [spans, *([] for _ in range(ranks - 1))])
            ]
        return []

    def plan_train(
        self,
        stream: str,
        member: str,
        step: int,
        certain: Sequence[Sequence[int]],
        needed: int,
        groups: Mapping[int, Group],
        *,
        full: bool = False,
    ) -> list[Round]:
        """The next rounds of a step for the training group, all of one update, or [] when no further group is ready and certain:
        those to which nothing could be added, at most about `MOST_ROUNDS`; where there is none, the one that is begun.

        certain: for each mini-batch, the ready groups that certainly belong to it, in admission order, of a `fixed` stream only
        those that no other survivor stands before; needed: groups of a whole step; groups: all living ones.
        full: not one that is only begun, as always in a `fixed` stream.
        """
        lane = self.lanes[stream]
        scope = train_scope(step)
        sizes = mini_batch_sizes(needed, lane.spec.mini_batches)
        num_updates = lane.spec.passes * len(sizes)
        covered = lane.covered.get(scope, {})
        full = full or lane.spec.fixed
        for update in range(num_updates):
            if len(covered.get(update, ())) < sizes[update % len(sizes)]:
                break
        else:
            return []
        if update < len(sizes):
            ready = set(lane.ready.get(step, ()))
            fresh = [group for group in certain[update] if group in ready]
            if lane.spec.fixed:
                left = [group for group in certain[update] if group not in covered.get(update, ())]
                fresh = list(itertools.takewhile(ready.__contains__, left))
            if not fresh or (lane.spec.whole_step and not self._is_whole(ready, covered, certain, needed)):
                return []
            missing = sizes[update] - len(covered.get(update, ()))
            batches, missing = self._train_batches(lane, fresh, missing, groups, member, full=full)
        else:
            batches, missing = self._batches_again(lane, scope, update % len(sizes), groups, member), 0
        first, final, turn = lane.planned.get(scope, 0), update == num_updates - 1, self._turns.get(step, 0)
        ends = [not missing and i == len(batches) - 1 for i in range(len(batches))]
        return [
            _round(
                lane.spec, scope, first + i, step, spans,
                turn=turn + i, update=update, closes=end, last=end and final,
            )
            for i, (spans, end) in enumerate(zip(batches, ends, strict=True))
        ]  # fmt: skip

    def _train_batches(
        self, lane: _Lane, fresh: list[int], missing: int, groups: Mapping[int, Group], member: str, *, full: bool
    ) -> tuple[list[list[list[Span]]], int]:
        """Micro-batches of the `fresh` groups, of an update that `missing` groups are left of; and how many are left then."""
        batches: list[list[list[Span]]] = []
        while fresh and len(batches) < MOST_ROUNDS:
            made, num = self._batches(lane, fresh, groups, member)
            if num == len(fresh) < missing and (full or batches):
                break  # the next group may still fit
            batches += made
            fresh, missing = fresh[num:], missing - num
        return batches, missing

    def _is_whole(
        self, ready: set[int], covered: Mapping[int, set[int]], certain: Sequence[Sequence[int]], needed: int
    ) -> bool:
        there = ready.union(*covered.values())
        return sum(group in there for batch in certain for group in batch) == needed

    def _batches_again(
        self, lane: _Lane, scope: str, update: int, groups: Mapping[int, Group], member: str
    ) -> list[list[list[Span]]]:
        """The rows of an update once more, each with the rank that had it before."""
        ranks, tokens = lane.layouts[member]
        before = [made for _, made in sorted(lane.rounds[scope].items()) if made["update"] == update]
        shares = [[made["spans"][rank] for made in before] for rank in range(ranks)]
        chosen = {id: groups[id].costs() for made in before for id in groups_of(made)}
        return recut(shares, chosen, tokens, self._bound(lane, chosen, groups))

    def _batches(
        self, lane: _Lane, ready: Iterable[int], groups: Mapping[int, Group], member: str
    ) -> tuple[list[list[list[Span]]], int]:
        """Micro-batches of the first ready groups that fill one for every rank, and how many groups these are; samples that
        share media stay together in a stream that reads media."""
        ranks, tokens = lane.layouts[member]
        costs = fill(((id, groups[id].costs()) for id in ready), ranks * tokens)
        return micro_batches(costs, ranks, tokens, self._bound(lane, costs, groups)), len(costs)

    def _bound(self, lane: _Lane, chosen: Collection[int], groups: Mapping[int, Group]) -> Bound:
        """Which rows of some groups must not be taken apart."""
        spec = lane.spec
        media = {id for id in chosen if groups[id].media} if spec.media else ()
        parts = {id: groups[id].parts() for id in chosen if groups[id].branched}
        return Bound(spec.whole_groups, spec.whole_samples, media, parts)

    def may_train(self, stream: str, step: int, needed: int) -> bool:
        """False where `plan_train` would find nothing, told without a look at the groups. needed: groups of a whole step."""
        lane = self.lanes[stream]
        planned = lane.covered.get(train_scope(step), {})
        if lane.spec.passes > 1 and planned:
            return True
        ready = len(lane.ready.get(step, ()))
        return ready + sum(map(len, planned.values())) >= needed if lane.spec.whole_step else ready > 0

    def find(self, stream: str, scope: str, index: int) -> list[Round]:
        """Round `index` of a scope and those behind it, at most `MOST_ROUNDS`; none while it is not planned."""
        rounds = self.lanes[stream].rounds.get(scope, {})
        if index not in rounds:
            return []
        behind = itertools.takewhile(rounds.__contains__, range(index, index + MOST_ROUNDS))
        return [rounds[i] for i in behind]

    def knows(self, key: str) -> bool:
        """Whether there is such a round, and somebody may still read it."""
        return key in self._by_key

    def may_leave(self, member: str, step: int) -> bool:
        """Whether a trainer that is to leave needs no round of a step: none is planned for it, or others of its process that
        leave with it would have made what is missing."""
        lanes = [lane for lane in self.lanes.values() if member in lane.layouts]
        begun = any(train_scope(step) in lane.planned for lane in lanes)
        return not begun or any(lane.spec.kind == "forward" for lane in lanes)

    # ---- the fold ---------------------------------------------------------------------------------------------------

    def join(self, stream: str, member: str, ranks: int, tokens: int) -> None:
        """A role group registers its layout. Another layout than before has its uncommitted steps planned anew."""
        lane = self.lanes[stream]
        before, lane.layouts[member] = lane.layouts.get(member), [ranks, tokens]
        if lane.spec.kind == "train" and before not in (None, [ranks, tokens]):
            for rounds in lane.rounds.values():
                for made in rounds.values():
                    self._by_key.pop(made["key"])
                    for group in groups_of(made):
                        lane.list_ready(made["step"], group)
            lane.rounds.clear()
            lane.planned.clear()
            lane.covered.clear()

    def add(self, made: Round, groups: Mapping[int, Group]) -> None:
        lane, index, scope = self.lanes[made["stream"]], made["index"], made["scope"]
        lane.planned[scope] = max(lane.planned.get(scope, 0), index + 1)
        for id in self._enter(made, range(len(made["spans"]))):
            lane.unlist(groups[id].step, id)
            if lane.spec.kind == "forward":
                self._pins.setdefault(id, set()).add(made["key"])

    def _enter(self, made: Round, pending: Iterable[int]) -> set[int]:
        """Its groups."""
        lane, scope, groups = self.lanes[made["stream"]], made["scope"], groups_of(made)
        lane.rounds.setdefault(scope, {})[made["index"]] = made
        self._by_key[made["key"]] = made, set(pending)
        if lane.spec.kind == "train":
            lane.covered.setdefault(scope, {}).setdefault(made["update"], set()).update(groups)
            self._turns[made["step"]] = max(self._turns.get(made["step"], 0), made["turn"] + 1)
        return groups

    def acknowledge(self, key: str, rank: int) -> list[int]:
        """A rank has read its rows and put its columns. Groups that nobody pins any more."""
        made, pending = self._by_key.get(key, (None, set[int]()))
        pending.discard(rank)
        if made is None or pending or self.lanes[made["stream"]].spec.kind == "train":
            return []
        return self._drop(made)

    def forget(self, member: str) -> list[int]:
        """A member is proved dead: its unacknowledged forward rounds are undone. Groups that nobody pins any more."""
        unpinned: list[int] = []
        for lane in self.lanes.values():
            for scope in [scope for scope in lane.planned if scope.rpartition(".")[0] == member]:
                del lane.planned[scope]  # of the next life they are named otherwise
            if lane.spec.kind == "forward":
                for scope in [scope for scope in lane.rounds if scope.rsplit(".", 1)[0] == member]:
                    for made in lane.rounds.pop(scope).values():
                        lane.taken -= groups_of(made)
                        unpinned += self._drop(made)
        return unpinned

    def leave(self, member: str) -> None:
        """A member that was forgotten does not come again."""
        for lane in self.lanes.values():
            lane.layouts.pop(member, None)

    def close(self, step: int) -> None:
        """A step is committed: its training rounds are history."""
        self._turns.pop(step, None)
        for lane in self.lanes.values():
            if lane.spec.kind == "train":
                for made in lane.rounds.pop(train_scope(step), {}).values():
                    self._by_key.pop(made["key"])
                lane.planned.pop(train_scope(step), None)
                lane.covered.pop(train_scope(step), None)

    def pinned(self, group: int) -> bool:
        return bool(self._pins.get(group))

    def _drop(self, made: Round) -> list[int]:
        self._by_key.pop(made["key"], None)
        self.lanes[made["stream"]].rounds.get(made["scope"], {}).pop(made["index"], None)
        unpinned = []
        for group in groups_of(made):
            pins = self._pins.get(group, set())
            pins.discard(made["key"])
            if not pins:
                self._pins.pop(group, None)
                unpinned.append(group)
        return unpinned

    # ---- persistence ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        return {
            "lanes": {
                name: {
                    "layouts": lane.layouts,
                    "ready": [[step, list(groups)] for step, groups in sorted(lane.ready.items())],
                    "taken": sorted(lane.taken),
                    "planned": lane.planned,
                    "rounds": [
                        {**made, "pending": sorted(self._by_key[made["key"]][1])}
                        for rounds in lane.rounds.values()
                        for made in rounds.values()
                    ],
                }
                for name, lane in self.lanes.items()
            },
            "pins": [[group, sorted(keys)] for group, keys in self._pins.items() if keys],
        }

    @classmethod
    def load(cls, streams: Sequence[Stream], state: dict[str, Any]) -> Rounds:
        rounds = cls(streams)
        for name, fields in state["lanes"].items():
            lane = rounds.lanes[name]
            lane.layouts, lane.planned = dict(fields["layouts"]), dict(fields["planned"])
            lane.ready, lane.taken = {step: list(groups) for step, groups in fields["ready"]}, set(fields["taken"])
            for made in fields["rounds"]:
                entry = {"turn": 0, "update": 0, "closes": False, **made}
                rounds._enter(cast(Round, entry), entry.pop("pending"))
        rounds._pins = {group: set(keys) for group, keys in state["pins"]}
        return rounds


def train_scope(step: int) -> str:
    """The scope of the rounds of a step, in every train stream."""
    return f"step{step}"


def mini_batch_of(place: int, num_groups: int, num: int) -> int:
    """The mini-batch, of `num`, of the group at `place` in admission order: sizes differ by one group at most."""
    return place * num // num_groups


@functools.cache
def mini_batch_sizes(num_groups: int, num: int) -> list[int]:
    """Groups in each of `num` mini-batches of a step."""
    of = [mini_batch_of(place, num_groups, num) for place in range(num_groups)]
    return [of.count(batch) for batch in range(num)]


def _round(
    spec: Stream, scope: str, index: int, step: int, spans: list[list[Span]],
    *, turn: int = 0, update: int = 0, closes: bool = False, last: bool = False,
) -> Round:  # fmt: skip
    return Round(
        key=f"{spec.name}/{scope}/{index}", stream=spec.name, scope=scope, index=index, step=step, spans=spans,
        reserve=[None] * len(spans), turn=turn, update=update, closes=closes, last=last,
    )  # fmt: skip
