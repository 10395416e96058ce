"""`rondo agents`: makes the samples of a run with programs of yours, on any machine that reaches it.

Owns whose samples are taken, how many programs run at once, and what the run is told at the end of each. Does not own a program's
process (`roles/sampling/agent_programs.py`): that is what `rollout.agent.command` gets from the run itself.

    rondo agents --run runs/latest -- python agent.py                           # on the run's machine
    rondo agents --url http://10.0.0.7:8300 --token-file token -- python agent.py

    POST /episodes -> session, key, row -> python agent.py -> its end: exit 0 and its output, or what went wrong

Invariant: a sample that was taken is ended: by its program, or by what is told of it here, at a stop too. Replicas that come and
go are found again; with --run it ends with the run, with --url when nobody has answered for a minute, and before the run's first
answer, which a warm-up may put off, for as long as it is told to wait.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rondo.launch.rundir import existing_run, owner, read_json
from rondo.roles.sampling.agent_programs import OVER, Played, Told, play, reward_url
from rondo.runtime.admin.tls import client_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.errors import ConfigError, RondoError

_WAIT_S = 5.0
"""One replica is asked for so long, then the next one."""
_ANSWER_S = 30.0
"""A replica that is busy answers so late, beside that."""
_AGAIN_S = 1.0
_GONE_S = 60.0
_SILENT_S = 2.0
"""From when on it says that nobody answers, and how long it waits."""
_PROGRESS_S = 30.0
_TELL_S = 5.0
"""What is told at a stop may take so long."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A replica that gives out samples."""

    url: str
    token: str
    cert: str | None = None

    @property
    def tls(self) -> ssl.SSLContext | bool:
        return True if self.cert is None else client_context(Path(self.cert))


def main(
    command: Sequence[str], run: Path, urls: Sequence[str], token_file: Path | None, processes: int, timeout: float
) -> int:
    """0 at the end of the run, 1 where nobody has answered in `timeout` seconds."""
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise ConfigError("COMMAND must be the program that makes a sample, got nothing. Add: -- python agent.py")
    if processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {processes}. Change it")
    if not 0 < timeout < float("inf"):
        raise ConfigError(f"--timeout must be a number of seconds above 0, got {timeout}. Change it")
    if urls and token_file is None:
        raise ConfigError("--token-file must come with --url: the token of rollout.agent.elsewhere, got none. Name it")
    taking = _Taking(tuple(command), existing_run(run) if not urls else None, urls, token_file, processes, timeout)
    return asyncio.run(taking.until_over())


class _Taking:
    def __init__(
        self, command: tuple[str, ...], run: Path | None, urls: Sequence[str], token_file: Path | None, processes: int,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self._command, self._run, self._processes, self._timeout_s = command, run, processes, timeout_s
        token = "" if token_file is None else read_token_file(token_file, "--token-file")
        self._places = [_Place(url.rstrip("/"), token) for url in urls]
        self._stopped = asyncio.Event()
        self._heard_at, self._has_heard, self._next_s = time.monotonic(), False, _PROGRESS_S
        self._num_taken = self._num_failed = 0

    async def until_over(self) -> int:
        loop, ours = asyncio.get_running_loop(), asyncio.current_task()
        assert ours is not None

        def stop() -> None:
            if self._stopped.is_set():
                ours.cancel()
            elif self._num_taken:
                print("stopping: samples in hand are finished first; once more ends them", file=sys.stderr)
            self._stopped.set()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop)
        with suppress(asyncio.CancelledError):
            async with aiohttp.ClientSession() as link:
                working = [asyncio.create_task(self._work(link, number)) for number in range(self._processes)]
                try:
                    await asyncio.gather(*working)
                finally:
                    for one in working:
                        one.cancel()
                    await asyncio.wait(working)
        print(f"took {self._num_taken} samples, of which {self._num_failed} failed")
        return 0

    async def _work(self, link: aiohttp.ClientSession, number: int) -> None:
        """One program after the other."""
        turn = number
        while not self._stopped.is_set():
            places = await asyncio.to_thread(lambda: list(self._found()))
            if not places and self._run is not None and owner(self._run) is None:
                return
            told, turn = None, turn + 1
            if places:
                place = places[turn % len(places)]
                asking = asyncio.ensure_future(self._ask(link, place))
                told = await self._unless_stopped(asking)
            if told is not None:
                self._num_taken += 1
                await self._make(link, place, told)
            elif self._is_gone():
                return
            elif not places:
                await asyncio.sleep(_AGAIN_S)

    def _is_gone(self) -> bool:
        """Whether nobody will answer any more; tells how long nobody has. RondoError where nobody ever did."""
        silent_s = time.monotonic() - self._heard_at
        if self._has_heard and (self._run is not None or silent_s > _GONE_S):
            return self._run is None
        if self._run is None and not self._has_heard and silent_s > self._timeout_s:
            raise RondoError(
                f"--url must be of a run that gives out samples, got no answer for {self._timeout_s:g} s. Correct it, or raise "
                "--timeout for a run that takes longer to begin"
            )
        if silent_s > self._next_s:
            self._next_s += _PROGRESS_S
            again = f"the run, which has ended or starts its replicas again, up to {_GONE_S:g} s"
            what = again if self._has_heard else "the run to begin"
            print(f"waiting for {what}: no answer for {silent_s:.0f} s", file=sys.stderr, flush=True)
        return False

    def _found(self) -> Iterator[_Place]:
        """Who gives out samples now."""
        if self._run is None:
            yield from self._places
            return
        for path in sorted((self._run / "agents").glob("*.json")):
            with suppress(FileNotFoundError):  # it has just ended
                found = read_json(path)
                yield _Place(found["url"], Path(found["token_path"]).read_text().strip(), found.get("tls_cert"))

    async def _unless_stopped(self, asking: asyncio.Future[Told | None]) -> Told | None:
        """The answer; a stop gives up waiting for one."""
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait((asking, stopped), return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            stopped.cancel()

    async def _ask(self, link: aiohttp.ClientSession, place: _Place) -> Told | None:
        """A sample to make, None where there is none. RondoError where none will ever be given."""
        try:
            status, told = await self._post(link, place, f"{place.url}/episodes", place.token, {"wait_s": _WAIT_S})
        except (aiohttp.ClientConnectionError, TimeoutError):
            await asyncio.sleep(_AGAIN_S)
            return None
        self._heard_at, self._has_heard, self._next_s = time.monotonic(), True, _SILENT_S
        if status in (401, 403, 404):
            raise RondoError(f"{place.url} must be where rollout.agent.elsewhere listens, got: {told}")
        if status != 200:
            if status != 204:
                await asyncio.sleep(_AGAIN_S)
            return None
        return Told(**told)

    async def _make(self, link: aiohttp.ClientSession, place: _Place, told: Told) -> None:
        """A sample by its program, and what there is to tell at its end."""
        played = Played("the agent must make its sample, got a stop. Start `rondo agents` again")
        try:
            limit_s = told.limits["deadline_s"]
            played = await play(self._command, told, place.url, None, limit_s=limit_s, ends=asyncio.Event())
        finally:
            self._num_failed += played.error is not None
            if played.error is not None:
                print(f"{told.session}: {played.error}", file=sys.stderr)
            body = OVER if played.output is None else played.output
            if played.error is not None:
                body = {"error": played.error}
            telling = self._post(link, place, reward_url(place.url, told.session), told.key, body)
            # Whoever has told its worth himself is over, and so is one whose run did not wait.
            with suppress(aiohttp.ClientConnectionError, TimeoutError):
                await asyncio.shield(asyncio.wait_for(telling, _TELL_S))

    async def _post(self, link: aiohttp.ClientSession, place: _Place, url: str, key: str, body: Any) -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(_WAIT_S + _ANSWER_S)
        async with link.post(url, data=orjson.dumps(body), headers=sent, timeout=limit, ssl=place.tls) as answer:
            content = await answer.read()
            told = orjson.loads(content) if content and answer.content_type == "application/json" else None
            return answer.status, told
