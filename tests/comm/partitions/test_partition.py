from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from rondo.comm.partitions.spec import Sequential, TokenBudget
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, Refused
from tests.comm.partitions.world import served


def rows(n: int, start: int = 0, length: int = 5) -> dict:
    return {"tokens": [np.arange(length, dtype=np.int32) + start + i for i in range(n)]}


def firsts(batch, column: str = "tokens") -> list[int]:
    return [int(array[0]) for array in batch[column]]


async def read(part, task: str = "t", columns=("tokens",), **how) -> list[int]:
    found = []
    async for batch in part.stream(task, columns=columns, **how):
        found += firsts(batch)
        batch.ack()
    return found


async def test_a_row_comes_back_as_it_was_put_whatever_its_kind():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("eval")
        bf16 = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16)
        jagged = torch.nested.nested_tensor([torch.arange(3), torch.arange(0)], layout=torch.jagged)
        values = {
            "bf16": bf16,
            "jagged": jagged,
            "list": [torch.ones(2, 3), torch.zeros(0, 3)],
            "array": np.arange(6, dtype=np.uint8).reshape(2, 3),
            "scalar": torch.tensor([1.5, 2.5]),
            "text": ["a", "b"],
            "anything": [{"x": [1, None]}, 7],
            "deep": {"er": {"flag": np.array([True, False])}, "id": np.array([3, 4])},
        }
        await part.put(values, keys=["r0", "r1"])
        batch = await part.get(["r1", "r0"])
        assert set(batch.columns) == {*values, "deep.er.flag", "deep.id"} - {"deep"}
        assert [t.tolist() for t in batch.tensors("bf16")] == [[0.25, 3.0], [1.5, -2.0]]
        assert batch.tensors("bf16")[0].dtype == torch.bfloat16
        assert [t.tolist() for t in batch.tensors("jagged")] == [[], [0, 1, 2]]
        assert [t.shape for t in batch.tensors("list")] == [(0, 3), (2, 3)]
        assert [a.tolist() for a in batch["array"]] == [[3, 4, 5], [0, 1, 2]]
        assert [(a.shape, float(a)) for a in batch["scalar"]] == [((), 2.5), ((), 1.5)]
        assert batch["text"] == ["b", "a"] and batch["anything"] == [7, {"x": [1, None]}]
        assert [bool(a) for a in batch.nested()["deep"]["er"]["flag"]] == [False, True]


async def test_two_tasks_read_every_row_without_knowing_of_each_other():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("eval")
        for start in range(0, 100, 10):
            await part.put(rows(10, start))
        await part.end()
        assert await read(part, "a", batch=7) == list(range(100))
        assert await read(part, "b", batch=64) == list(range(100))
        stats = part.stats()
        assert stats.num_rows == 100 and stats.tasks["a"].num_acked == stats.tasks["b"].num_done == 100


async def test_a_row_is_ready_for_a_task_when_other_roles_have_added_its_columns():
    async with served() as run:
        writer = (await run.bus("rollout-0")).partition("eval")
        scorer = (await run.bus("actor_fwd-0")).partition("eval")
        trainer = (await run.bus("actor-0")).partition("eval")
        await writer.put(rows(8))
        await writer.end()
        training = asyncio.create_task(read(trainer, "train", ("tokens", "score"), batch=4))
        async for batch in scorer.stream("score", columns=["tokens"], batch=8):
            ids = batch.ids
            await scorer.add(ids[4:6], {"score": np.array([4.0, 5.0], np.float32)})
            await scorer.add(ids[:4], {"score": np.arange(4, dtype=np.float32)})
            await scorer.add(ids[6:], {"score": np.array([6.0, 7.0], np.float32)})
            batch.ack()
        assert sorted(await training) == list(range(8))
        found = await trainer.get(list(ids), ["score", "tokens"])
        assert [float(a) for a in found["score"]] == firsts(found) == list(range(8))


async def test_the_first_value_of_a_column_stays_and_later_ones_are_counted():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("eval")
        await part.put(rows(2), keys=["a", "b"])
        await part.put(rows(2, 50) | {"x": np.array([1, 2])}, keys=["b", "c"])
        await part.add(["a", "b"], {"x": np.array([7, 8])})
        assert firsts(await part.get(["a", "b", "c"], ["tokens"])) == [0, 1, 51]
        assert [int(a) for a in (await part.get(["a", "b", "c"], ["x"]))["x"]] == [7, 1, 2]
        await part.add(["a", "nobody"], {"x": np.array([7, 8])})
        with pytest.raises(KeyError, match="nobody"):
            await part.get(["nobody"])
        assert part.stats().num_refused == 3


async def test_a_get_that_waits_ends_when_the_column_comes_or_with_its_deadline():
    async with served() as run:
        writer = (await run.bus("rollout-0")).partition("eval")
        reader = (await run.bus("actor-0")).partition("eval")
        await reader.opened()
        asking = asyncio.create_task(reader.get(["k"], ["x"], wait=True))
        await writer.put(rows(1), keys=["k"])
        await writer.add(["k"], {"x": np.array([9])})
        assert int((await asking)["x"][0]) == 9
        with pytest.raises(DeadlineExceeded):
            await reader.get(["other"], wait=True, deadline_s=0.01)


async def test_rows_are_found_by_tags_and_by_what_changed_since_a_cursor():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("replay")
        await part.put(rows(3), keys=["a", "b", "c"], tags=[{"s": 1}, {"s": 1, "t": "x"}, {"s": 2}])
        found, cursor = await part.list(tags={"s": 1})
        assert [row["key"] for row in found] == ["a", "b"]
        assert [row["key"] for row in (await part.list(tags={"s": 1, "t": "x"}))[0]] == ["b"]
        await part.tag(["c"], {"s": 1})
        await part.tag(["a"], {"s": None, "new": True})
        changed, cursor = await part.list(since=cursor)
        assert [(row["key"], row["tags"]) for row in changed] == [("c", {"s": 1}), ("a", {"new": True})]
        assert await part.list(since=cursor) == ([], cursor)
        await part.clear(["b"])
        assert [row["key"] for row in (await part.list(tags={"s": 1}))[0]] == ["c"]


async def test_neighbours_with_different_columns_are_listed_each_with_its_own():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("replay")
        await part.put(rows(4), keys=list("abcd"), tags={"s": 1})
        await part.add(["b", "c"], {"y": np.array([1, 2])})
        found, _ = await part.list(tags={"s": 1})
        assert [row["columns"] for row in found] == [["tokens"], ["tokens", "y"], ["tokens", "y"], ["tokens"]]
        await part.add(["a", "b", "c", "d"], {"z": np.arange(4)})
        assert [int(z) for z in (await part.get(list("abcd"), ["z"]))["z"]] == list(range(4))
        assert {"z"} <= set((await part.get(["a"])).columns)


async def test_a_call_sees_every_put_that_returned_before_it_also_a_second_one_of_its_key():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("replay")
        for _ in range(2):
            await part.put(rows(2), keys=["a", "b"])
        assert await part.clear(["a", "a"]) == 1
        assert [row["key"] for row in (await part.list())[0]] == ["b"]
        await part.add(["b"], {"y": np.array([1])})
        assert set((await part.get(["b"])).columns) == {"tokens", "y"}


async def test_clearing_gives_memory_back_but_not_under_a_reader():
    async with served() as run:
        writer = (await run.bus("rollout-0")).partition("eval", capacity_bytes=1 << 20, chunk_bytes=1 << 17)
        reader = (await run.bus("actor-0")).partition("eval")
        await writer.put(rows(4))
        stream = reader.stream("t", columns=["tokens"], batch=2)
        batch = await stream.next()
        assert await writer.clear() == 4
        assert batch.valid() and firsts(batch) == [0, 1]
        assert writer.stats().live_bytes > 0 and writer.stats().num_rows == 0
        batch.ack()
        await reader.flush()
        assert reader.stats().live_bytes == 0 and not batch.valid()
        with pytest.raises(KeyError):
            await reader.get(batch.ids)


async def test_a_put_waits_for_room_under_its_name_and_goes_on_when_rows_are_cleared():
    async with served() as run:
        writer = (await run.bus("rollout-0")).partition("p", capacity_bytes=1 << 17, chunk_bytes=1 << 16)
        reader = (await run.bus("actor-0")).partition("p")
        big = {"x": np.zeros((4, 10_000), np.uint8)}
        await writer.put(big)
        await writer.put(big)
        with pytest.raises(DeadlineExceeded, match="partition room"):
            await writer.put(big, deadline_s=0.01)
        with pytest.raises(ConfigError, match="capacity"):
            await writer.put({"x": np.zeros((1, 1 << 18), np.uint8)})
        putting = asyncio.create_task(writer.put(big))
        await reader.opened()
        ids = [row["id"] for row in (await reader.list())[0]]
        await reader.clear(ids[:4])
        await putting
        await reader.list()
        assert reader.stats().num_put == 12 and reader.stats().num_rows == 8


async def test_every_producer_has_room_for_certain_even_where_one_took_it_all():
    async with served() as run:
        greedy = (await run.bus("rollout-0")).partition("p", capacity_bytes=1 << 17, chunk_bytes=1 << 16)
        late = (await run.bus("rollout-1")).partition("p")
        await greedy.put({"x": np.zeros((1, 50_000), np.uint8)})
        await greedy.put({"x": np.zeros((1, 50_000), np.uint8)})
        await late.put({"x": np.zeros((1, 50_000), np.uint8)})
        await late.list()
        assert late.stats().num_rows == 3


async def test_a_dropped_partition_is_gone_for_everyone_and_its_name_is_free():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("eval")
        other = (await run.bus("actor-0")).partition("eval")
        await part.put(rows(4))
        waiting = asyncio.create_task(other.get(["nobody"], wait=True))
        kept = await part.get([row["id"] for row in (await part.list())[0]], copy=False)
        stream = other.stream("t", columns=["absent"])
        await stream.open()
        await part.drop()
        with pytest.raises(Closed):
            await waiting
        with pytest.raises(Closed, match="dropped"):
            await stream.next()
        assert firsts(kept) == [0, 1, 2, 3]
        await part.put(rows(1, 9))
        await other.put(rows(1, 10))
        assert len((await part.list())[0]) == part.stats().num_rows == 2
        assert all("part/0" not in name for name, _ in run.segments.stats().segments)


async def test_rows_are_read_again_after_a_reset_and_the_reset_of_a_pass_counts_once():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("eval")
        await part.put(rows(6))
        await part.end()
        assert await read(part, batch=4) == list(range(6))
        assert await part.reset("t", 1) == await part.reset("t", 1) == 1
        assert await read(part, batch=4) == list(range(6))
        assert await read(part, batch=4) == []


async def test_a_row_that_every_named_task_has_read_is_cleared_by_itself():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("p", clear_after=("a", "b"))
        await part.put(rows(6))
        await part.end()
        assert await read(part, "a") == list(range(6)) and part.stats().num_rows == 6
        assert await read(part, "b") == list(range(6)) and part.stats().num_rows == 0
        assert part.stats().live_bytes == 0


async def test_settings_that_contradict_are_refused_with_both_named():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("p", capacity_bytes=1 << 20)
        await part.put(rows(1))
        with pytest.raises(Refused, match="capacity_bytes 1048576"):
            await (await run.bus("actor-0")).partition("p", capacity_bytes=1 << 21).opened()
        await part.stream("t", columns=["tokens"], until="now").next()
        with pytest.raises(Refused, match="'tokens'"):
            await part.stream("t", columns=["x"], sampler=Sequential()).next()
        with pytest.raises(ValueError, match="equally many rows"):
            await part.put({"a": np.zeros(2), "b": np.zeros(3)})
        with pytest.raises(ValueError, match="one text a row"):
            await part.put(rows(2), keys=[1, 2])
        with pytest.raises(ValueError, match="each of 2 rows, got 3"):
            await part.put(rows(2), groups=[1, 2, 3])
        with pytest.raises(ValueError, match=r"without '\.'"):
            await part.put({"a.b": {"c": np.zeros(1)}})
        with pytest.raises(ValueError, match="must be a tensor, an array or JSON"):
            await part.put({"a": [object()]})


async def test_a_stream_of_what_is_ready_now_ends_without_waiting_and_goes_on_later():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("p")
        await part.put(rows(3))
        assert await read(part, until="now", batch=2) == [0, 1, 2]
        assert await read(part, until="now", batch=2) == []
        await part.put(rows(2, 3))
        assert await read(part, until="now", batch=2) == [3, 4]


async def test_a_reader_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("p")
        stream = part.stream("t", columns=["tokens"], batch=2)
        await part.put(rows(1))
        waiting = asyncio.create_task(stream.next())
        await part.get([row["id"] for row in (await part.list())[0]])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await part.put(rows(1, 1))
        assert await read(part, batch=2, until="now") == [0, 1]
        assert not len(run.coordinator.wakes)


async def test_a_partition_ends_with_its_last_producer_and_takes_no_rows_then():
    async with served() as run:
        one = (await run.bus("rollout-0")).partition("p", num_producers=2)
        two = (await run.bus("rollout-1")).partition("p")
        await one.put(rows(1), keys=["k"])
        await one.end()
        await two.put(rows(1, 1))
        assert two.stats().state == "open"
        await two.end()
        assert two.stats().state == "ended"
        for part in (one, two):
            with pytest.raises(Closed, match="ended"):
                await part.put(rows(1))
        await one.add(["k"], {"y": np.array([1])})
        assert await read(one) == [0, 1]


async def until(run, condition) -> None:
    """Let the loop run until the coordinator is as wanted."""
    async with asyncio.timeout(30):
        while not condition(run.coordinator):  # noqa: ASYNC110  # counters in memory ring no bell
            await asyncio.sleep(0)


def waiters(num: int):
    return lambda service: len(service.wakes) == num


async def test_a_waiting_reader_gets_its_batch_with_the_put_that_fills_it_and_with_no_other():
    async with served() as run:
        writer = (await run.bus("rollout-0")).partition("p")
        reader = (await run.bus("actor-0")).partition("p")
        await writer.put(rows(1))
        waiting = asyncio.create_task(reader.stream("t", columns=["tokens"], batch=3).next())
        await until(run, waiters(1))
        await writer.put(rows(1, 1))
        await until(run, lambda service: reader.stats().num_rows == 2)
        assert not waiting.done()
        await writer.put(rows(1, 2))
        assert firsts(await waiting) == [0, 1, 2]


async def test_two_role_groups_that_wait_for_budgets_are_both_woken_by_what_comes():
    async with served() as run:
        parts = [(await run.bus(group)).partition("p") for group in ("rollout-0", "actor-0", "actor_fwd-0")]
        await parts[0].put(rows(3, 0, length=5))
        waiting = [
            asyncio.create_task(part.stream("t", columns=["tokens"], sampler=TokenBudget(20), batch=8).next())
            for part in parts[1:]
        ]
        await until(run, waiters(2))
        for start in range(3, 8):
            await parts[0].put(rows(1, start, length=5))
        found = await asyncio.gather(*waiting)
        assert sorted(value for batch in found for value in firsts(batch)) == list(range(8))


async def test_an_acknowledgement_is_sent_at_once_where_the_next_claim_waits_already():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("p", clear_after=("t",))
        await part.put(rows(2))
        stream = part.stream("t", columns=["tokens"], batch=2)
        batch = await stream.next()
        ahead = asyncio.create_task(stream.next())
        await until(run, waiters(1))
        batch.ack()
        await until(run, lambda service: part.stats().num_rows == 0)
        await part.end()
        assert await ahead is None


async def test_a_pass_ends_for_no_rank_while_rows_of_the_pass_before_are_still_read():
    async with served() as run:
        part = (await run.bus("rollout-0")).partition("p")
        await part.put(rows(2))
        await part.end()
        quick, slow = (part.stream("t", columns=["tokens"], batch=1, rank=rank, ranks=2) for rank in range(2))
        (await quick.next()).ack()
        late = await slow.next()
        assert await quick.next() is None
        await part.reset("t", 1)
        quick.go_on()
        batch = await quick.next()
        assert firsts(batch) == [0]
        batch.ack()
        ahead = asyncio.create_task(quick.next())
        await until(run, waiters(1))
        late.ack()
        await slow.flush()
        assert firsts(await ahead) == firsts(late) == [1]
