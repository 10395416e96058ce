"""Dumps and journals of older releases. `version_0` was written by commit cc35ba8, which knew no formats: a coordinator in one
process, with groups in every state, a round that is read, and a partition. `version_3` by 923bec2, whose journal told puts field
by field: three groups of which one lacks a sample, and a round of the others that was read."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from rondo.comm.bus import formats
from rondo.comm.bus.audit import audit
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Journal, encode, files, read
from rondo.runtime.errors import ConfigError
from tests.comm.driver import rules
from tests.comm.inprocess import InProcess, Store, ask, put

VERSION_0 = Path(__file__).parent / "version_0"
VERSION_3 = Path(__file__).parent / "version_3"
RULES = rules(media_bytes=256, max_data_failures=0)


def of(number: int, state: dict) -> dict:
    return {**state, "format": number, "release": "9.9.9"}


def test_a_checkpoint_of_format_0_is_read() -> None:
    state = orjson.loads((VERSION_0 / "index.json").read_bytes())["index"]
    index = Index.load(RULES, state)
    found = {group.id: (group.step, group.state, group.numbers()) for group in index.groups.values()}
    assert found == {
        4: (1, "running", [1]), 5: (1, "ready", [0, 1]), 7: (1, "running", []),
        8: (2, "waiting", []), 9: (2, "waiting", []), 10: (2, "waiting", []),
    }  # fmt: skip
    assert (index.version, index.next_group, index.counts["trained"], index.counts["quarantined"]) == (1, 11, 3, 1)
    assert index.imbalance() == "" and index.survivors(1) == [4, 5, 7]
    assert index.groups[5].complete(("tokens", "loss_mask")) and index.rounds.pinned(5)
    assert index.rounds.lanes["advantages"].ready == {1: [5]}
    assert "partitions" in state and "partitions" not in index.dump()
    again = Index.load(RULES, orjson.loads(orjson.dumps(index.dump())))
    assert again.dump() == index.dump() and again.dump()["format"] == formats.FORMAT


def test_a_journal_of_format_0_is_replayed() -> None:
    for path, live in ((files(VERSION_0 / "journal")[0], [4, 5, 7, 8, 9, 10]), (files(VERSION_0 / "journal")[1], [8])):
        index = Index(RULES)
        for event in read(path):
            index.apply(event)
        assert set(live) <= index.groups.keys() and index.imbalance() == "" and index.version == 1
    assert (index.groups[8].state, index.groups[8].numbers()) == ("running", [0])


def test_a_journal_of_format_3_is_replayed() -> None:
    index = Index(rules())
    for event in read(files(VERSION_3 / "journal")[0]):
        index.apply(event)
    found = {group.id: (group.state, group.numbers(), sorted(group.have)) for group in index.groups.values()}
    assert [found[0], found[1]] == [("ready", [0, 1], ["log_probs", "loss_mask", "tokens"])] * 2
    assert found[2] == ("running", [1], ["loss_mask", "tokens"]) and index.imbalance() == ""
    assert [index.space.rings[f"ring/{name}/0"].head for name in ("rollout-0", "actor_fwd-0")] == [1472, 320]
    assert audit(VERSION_3 / "journal", 2, 3).num_put == 5


async def test_a_put_is_journalled_as_the_bytes_of_its_record(tmp_path: Path) -> None:
    store = Store()
    run = InProcess(tmp_path, store)
    await run.start()
    rollout, actor = await run.bus("rollout-0"), await run.bus("actor-0")
    await actor.call("commit", 0, 0, 7, [])
    await rollout.call("proved", "rollout.0", 0)
    (grant,) = (await rollout.call("lease", 1, []))["grants"]
    put(rollout, grant, [0, 1])
    await rollout.call("renew", [])
    (event,) = (event for event in read(files(tmp_path / "journal")[0]) if event["event"] == "put")
    assert (event["spans"], event["columns"], event["entries"]) == ([[0, 0, 0, 2]], ["tokens", "loss_mask"], 2)
    assert [list(field) for field in event["info"]] == [[6, 6], [4, 4], [1.0, 1.0], [0, 0], [0, 0], [0, 0]]
    lying = store.segment("ring/rollout-0/0", 0)
    start = 4096 + event["pos"]
    assert bytes(lying.view(readonly=True)[start : start + len(event["record"])]) == event["record"]
    await run.stop()
    for each in (rollout, actor, store, lying):
        each.close()


def test_an_audit_of_format_0_reads_all_files() -> None:
    found = audit(VERSION_0 / "journal", 2, 3, max_data_failures=0)
    assert (found.num_admitted, found.num_put, found.num_trained, found.num_lost, found.num_leases_lost) == (
        22,
        10,
        6,
        0,
        1,
    )
    assert found.outcomes == {"trained": 6, "filtered": 2, "surplus": 0, "failed": 0, "quarantined": 2}


async def test_a_run_goes_on_from_a_checkpoint_of_format_0(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    shutil.copytree(VERSION_0, checkpoint)
    (checkpoint / "COMPLETE").touch()
    store = Store()
    run = InProcess(tmp_path, store, media_bytes=256, max_data_failures=0)
    run.attempt = 1
    await run.start()
    rollout = await run.bus("rollout-0")
    await rollout.call("proved", "rollout.0", 1)
    leased = await ask(rollout.call("lease", 3, []))
    assert [(grant["group"], grant["step"]) for grant in leased["grants"]] == [(4, 1), (5, 1), (7, 1)]
    await run.stop()
    rollout.close()
    store.close()
    assert formats.format_of(next(iter(read(files(tmp_path / "journal")[-1])))["state"], "it") == formats.FORMAT


def test_what_a_newer_release_wrote_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    state = of(formats.FORMAT + 1, Index(RULES).dump())
    line = f"must be of format {formats.FORMAT} or older, got {formats.FORMAT + 1}, which rondo 9.9.9 wrote"
    with pytest.raises(ConfigError, match=line) as refused:
        Index.load(RULES, state, "checkpoint step_000007")
    assert "\n" not in str(refused.value) and str(refused.value).startswith("checkpoint step_000007 ")
    (tmp_path / "00000001.journal").write_bytes(encode({"event": "snapshot", "state": state}))
    with pytest.raises(ConfigError, match=line), Journal(tmp_path) as journal:
        list(journal.replay())


def test_a_field_that_an_older_dump_of_the_index_does_not_have_begins_as_in_a_new_one() -> None:
    whole = Index(RULES).dump()
    for name in Index._PLAIN:
        state = {key: value for key, value in whole.items() if key != name}
        assert Index.load(RULES, state).dump() == whole
    state = {**whole, "counts": {"admitted": 3}}
    assert Index.load(RULES, state).counts == {**Index(RULES).counts, "admitted": 3}
