"""Dumps and journals of older releases. `version_3` was written by commit 923bec2, whose journal told puts field by field: three
groups of which one lacks a sample, and a round of the others that was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.comm.bus.audit import audit
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Journal, encode, files, read
from rondo.runtime import formats
from rondo.runtime.errors import ConfigError
from tests.comm.driver import rules
from tests.comm.inprocess import InProcess, Store, put

VERSION_3 = Path(__file__).parent / "version_3"
RULES = rules(media_bytes=256, max_data_failures=0)


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
    assert [list(field) for field in event["info"]] == [[6, 6], [4, 4], [1.0, 1.0], [0, 0], [0, 0], [0, 0], [1.0, 1.0]]
    lying = store.segment("ring/rollout-0/0", 0)
    start = 4096 + event["pos"]
    assert bytes(lying.view(readonly=True)[start : start + len(event["record"])]) == event["record"]
    await run.stop()
    for each in (rollout, actor, store, lying):
        each.close()


@pytest.mark.parametrize("number", [None, formats.OLDEST_JOURNAL - 1, formats.JOURNAL + 1])
def test_what_a_release_wrote_that_is_too_new_or_too_old_is_refused_in_one_line_that_names_it(
    tmp_path: Path, number: int | None
) -> None:
    state = {**Index(RULES).dump(), "format": number, "release": "9.9.9"}
    if number is None:
        del state["format"]
    line = (
        f"must be of format {formats.OLDEST_JOURNAL} to {formats.JOURNAL}, got {number or 0}, which rondo 9.9.9 wrote"
    )
    with pytest.raises(ConfigError, match=line) as refused:
        Index.load(RULES, state, "checkpoint step_000007")
    assert "\n" not in str(refused.value) and str(refused.value).startswith("checkpoint step_000007 ")
    assert ("or a newer one" in str(refused.value)) == (number == formats.JOURNAL + 1)  # else this may be that one
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
