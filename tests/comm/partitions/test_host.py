"""A bus without a run: its host, and programs of somebody's own that join it, leave it and are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.comm.partitions.host import Host
from rondo.comm.partitions.joining import SyncBus, join
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, PeerGone, Refused, WorkerDied
from tests.comm.memory import ROOT

PATIENCE_S = 120.0


class Program:
    """One process that joined; its words."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def word(self) -> Any:
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)  # type: ignore[union-attr]
        assert line, "the program ended"
        return json.loads(line)

    async def values(self) -> list[int]:
        """The rows of every batch up to its "end"."""
        found: list[int] = []
        while (word := await self.word()) != "end":
            found += word if word != "joined" else []
        return found

    async def leave(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        assert await asyncio.wait_for(self.process.wait(), PATIENCE_S) == 0

    async def kill(self) -> list[int]:
        """SIGKILL; the rows that it said and nobody had heard."""
        self.process.kill()
        await self.process.wait()
        whole = (await self.process.stdout.read()).rpartition(b"\n")[0]  # type: ignore[union-attr]
        return [value for line in whole.splitlines() if (word := json.loads(line)) != "end" for value in word]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rondo-") as name:
        yield Path(name) / "bus"


@asynccontextmanager
async def hosted(folder: Path) -> AsyncIterator[tuple[Host, Any]]:
    """A host in this process, and a way to start programs beside it."""
    programs: list[Program] = []

    async def start(name: str, act: str, *arguments: Any, rank: int = 0, ranks: int = 1) -> Program:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.comm.joined_worker", str(folder), name, str(rank), str(ranks), act,
            *map(json.dumps, arguments), cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        programs.append(Program(process))
        return programs[-1]

    async with Host(folder) as host:
        try:
            yield host, start
        finally:
            for program in programs:
                if program.process.returncode is None:
                    program.process.kill()
                await program.process.communicate()


async def test_programs_join_by_the_folder_and_every_row_is_read_once(folder: Path) -> None:
    async with hosted(folder) as (_, start), join(folder, "main") as bus:
        part = bus.partition("p", num_producers=1)
        producers = [await start(f"writer-{i}", "produce", 200 * i, 200) for i in range(2)]
        consumers = [await start(f"reader-{i}", "consume", "t", 16, 1) for i in range(2)]
        for producer in producers:
            assert await producer.word() == "put"
        await part.end()
        values = [value for consumer in consumers for value in await consumer.values()]
        assert sorted(values) == list(range(400))
        for program in (*producers, *consumers):
            await program.leave()
        assert part.stats().tasks["t"].num_acked == 400
        assert part.stats().num_rows == 400  # of producers that have left


async def test_rows_of_a_program_that_is_killed_come_to_the_next_one_of_its_name(folder: Path) -> None:
    async with hosted(folder) as (_, start), join(folder, "main") as bus:
        part = bus.partition("p")
        await part.put({"x": np.arange(60)})
        await part.end()
        victim = await start("reader", "consume", "t", 10, 1)
        assert await victim.word() == "joined"
        seen = await victim.word()
        victim.process.send_signal(signal.SIGSTOP)
        seen += await victim.kill()
        again = await start("reader", "consume", "t", 10, 1)
        rest = await again.values()
        assert sorted({*seen, *rest}) == list(range(60))
        assert len(seen) + len(rest) - 60 <= part.stats().tasks["t"].num_returned <= 10


async def test_ranks_of_one_name_share_rows_as_they_say_and_the_next_life_waits_for_all_of_them(folder: Path) -> None:
    async with hosted(folder) as (host, start), join(folder, "main") as bus:
        part = bus.partition("p")
        await part.put({"x": np.arange(16)})
        await part.end()
        # Four processes, two data-parallel ranks: the peers of a rank get the same rows.
        ranks = [await start("trainer", "consume", "t", 4, 2, rank=rank, ranks=4) for rank in range(4)]
        found = [await program.values() for program in ranks]
        assert found[0] == found[2] and found[1] == found[3] and sorted(found[0] + found[1]) == list(range(16))
        assert part.stats().tasks["t"].num_done == 16
        await ranks[0].kill()
        late = await start("trainer", "consume", "t", 4, 1)
        for program in ranks[1:]:
            assert host._lives["trainer"].incarnation == 1
            await program.leave()
        assert await late.word() == "joined"
        assert host._lives["trainer"].incarnation == 2


async def test_a_member_that_leaves_gives_back_what_it_has_not_acknowledged(folder: Path) -> None:
    async with hosted(folder), join(folder, "main") as bus:
        part = bus.partition("p")
        await part.put({"x": np.arange(4)})
        async with join(folder, "reader") as other:
            stream = other.partition("p").stream("t", columns=["x"], batch=2)
            first, _ = await stream.next(), await stream.next()
            first.ack()  # sent when it leaves
        async with join(folder, "else") as other:
            batch = await other.partition("p").stream("t", columns=["x"], batch=2).next()
            assert [int(x) for x in batch["x"]] == [2, 3]
        assert part.stats().tasks["t"].num_acked == 2


async def test_the_bus_goes_on_when_its_coordinator_is_killed(folder: Path) -> None:
    async with hosted(folder) as (host, start), join(folder, "main") as bus:
        part = bus.partition("p")
        await part.put({"x": np.arange(30)}, keys=[str(i) for i in range(30)])
        reader = await start("reader", "consume", "t", 10, 1)
        assert await reader.word() == "joined"
        seen = await reader.word()
        assert host._process is not None
        host._process.kill()
        await part.put({"x": np.arange(30, 60)})
        await part.end()
        assert sorted(seen + await reader.values()) == list(range(60))
        assert not host.failed.done()


async def test_a_coordinator_that_ends_again_and_again_ends_the_bus_with_its_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo.comm.partitions.host._RESTARTS", 1)
    async with hosted(folder) as (host, _):
        for _ in range(2):
            await asyncio.wait_for(host._ready.wait(), PATIENCE_S)
            process = host._process
            assert process is not None
            process.kill()
            async with asyncio.timeout(PATIENCE_S):
                while host._process is process and not host.failed.done():  # noqa: ASYNC110  # the kernel tells the loop
                    await asyncio.sleep(0)
        with pytest.raises(WorkerDied, match=r"the coordinator of the bus must stay up, got killed by SIGKILL"):
            host.failed.result()


async def test_a_host_whose_coordinator_cannot_be_started_says_why_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("rondo.comm.partitions.host.start_process", no_memory)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        async with Host(folder):
            pass


async def test_a_folder_has_one_host_and_what_a_killed_one_left_is_no_obstacle(folder: Path) -> None:
    command = [sys.executable, "-m", "rondo.launch.cli", "bus", str(folder)]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)  # noqa: ASYNC220  # before anything runs
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == f"bus ready folder={folder}\n".encode()
        assert [stat.S_IMODE((folder / name).stat().st_mode) for name in (".", "token")] == [0o700, 0o600]
        with pytest.raises(Refused, match="must have one host, got a second one"):
            async with Host(folder):
                pass
        async with join(folder, "main") as bus:
            await bus.partition("p").put({"x": np.arange(3)})
            first.kill()
            first.wait()
            batch = bus.partition("p")  # its memory is mapped still, and nobody answers
            with pytest.raises((PeerGone, DeadlineExceeded)):
                await batch.ask("part_list", {}, 0, 1, deadline_s=0.2)
    finally:
        first.kill()
        first.communicate()
    async with hosted(folder), join(folder, "main") as bus:
        part = bus.partition("p")
        await part.opened()
        assert part.stats().num_rows == 0


async def test_a_folder_that_is_no_bus_is_refused_and_left_as_it_was(folder: Path) -> None:
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "results.txt").write_text("a year of work")
    (folder / "token").write_text("of something else")
    with pytest.raises(ConfigError, match=f"must be new, empty or that of an earlier bus, got run, token in {folder}"):
        async with Host(folder):
            pass
    assert (folder / "run" / "results.txt").read_text() == "a year of work"
    assert (folder / "token").read_text() == "of something else" and not (folder / "lock").exists()
    with pytest.raises(ConfigError, match=r"got a file in .*token\. Choose another one"):
        async with Host(folder / "token"):
            pass


def test_a_signal_ends_the_command_and_leaves_no_process(folder: Path) -> None:
    command = [sys.executable, "-m", "rondo.launch.cli", "bus", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"bus ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not (folder / "supervisor.sock").exists()


async def test_a_blocking_call_is_cancelled_from_another_thread_and_the_stream_goes_on(folder: Path) -> None:
    async with hosted(folder), join(folder, "main") as bus:
        part = bus.partition("p")
        await part.opened()

        def work() -> list[int]:
            with SyncBus(folder, "reader") as own:
                mine = own.partition("p")
                stream = mine.stream("t", columns=["x"], batch=2)
                waiting = asyncio.run_coroutine_threadsafe(asyncio.to_thread(stream.next), loop)
                while not mine._calls:
                    os.sched_yield()
                mine.cancel()
                with pytest.raises(Closed, match="got cancelled"):
                    waiting.result(PATIENCE_S)
                mine.put({"x": np.arange(2)})
                batch = stream.next()
                assert batch is not None
                batch.ack()
                return [int(x) for x in batch["x"]]

        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(work) == [0, 1]
        assert part.stats().tasks["t"].num_acked == 2  # leaving has sent it


async def test_what_is_no_bus_or_no_member_is_told_so(folder: Path) -> None:
    with pytest.raises(PeerGone, match=f"a bus must be in {folder}"):
        async with join(folder, "main"):
            pass
    with pytest.raises(PeerGone, match="a bus must be in"):
        SyncBus(folder, "main")
    with pytest.raises(ConfigError, match="must have at most 107 bytes"):
        Host(folder / ("x" * 100))
    async with hosted(folder):
        for name, rank, ranks in (("a/b", 0, 1), ("a", 2, 2)):
            with pytest.raises(ConfigError, match="a member must have a name"):
                async with join(folder, name, rank=rank, ranks=ranks):
                    pass
        async with join(folder, "two", rank=0, ranks=2):
            with pytest.raises(Refused, match="must have 2 ranks as its other processes say, got 3"):
                async with join(folder, "two", rank=1, ranks=3):
                    pass
            with pytest.raises(DeadlineExceeded):  # the seat is taken, by somebody who lives
                async with join(folder, "two", rank=0, ranks=2, deadline_s=0.1):
                    pass
        (folder / "token").write_text("another")
        with pytest.raises(Refused, match="token"):
            async with join(folder, "main"):
                pass
