"""Sessions of agents: each is a sample of the run, which a program makes by calls of a model over HTTP.

Owns whose key opens which session, what is asked of the engine for it, its budgets, and the rows that its calls make. Does not
own HTTP and the record of the calls (`roles/serve/`), nor the program (`agents.py`).

    with sessions.opened(client, number, limits) as session:       # session.name, session.key
        await session.ends.wait()                                  # a reward was told, or the engine has failed
        rows = sessions.ended(session)

Invariant: a session is answered as the sample that it is: with the run's sampling, under the run's class, by the sample's seed. A
call is let in only if the rows of the sample have room for it, those in flight counted: every sampled token that was told is
trained in exactly one row. Once a session is over nothing more of it is answered or recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from rondo.comm.bus.group import NO_VERSION
from rondo.roles.data.datasets import RowError
from rondo.roles.engines.engine import Completion, Engine, EngineStats, FinishReason, Request, sample_seed
from rondo.roles.rewards.scores import RewardError, scored
from rondo.roles.sampling.agent_programs import OVER, Told
from rondo.roles.sampling.episode import Limits, SampleRow
from rondo.roles.sampling.workflow import Client
from rondo.roles.serve.service import Call
from rondo.roles.serve.spans import Span
from rondo.roles.serve.trajectory import Trajectories
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.values import decode, read_json

_NAMES = ("temperature", "top_p", "top_k")
_WORDS = 2048
"""Characters that are kept of what an agent says went wrong."""


Worth = tuple[float, Mapping[str, Any]]
"""What a sample is worth, and what of that is told."""


class _Claim(NamedTuple):
    """What a call in flight will take: rows that it begins, and what it goes on from."""

    num_rows: int
    tips: tuple[Span, ...]


@dataclass(slots=True, eq=False)
class Session:
    """One that is open. `ends` is set when it was `told` of its end, with its `worth` or its `error`, and by a `fault` of the
    engine."""

    name: str
    key: str
    request: Request
    client: Client
    limits: Limits
    num_turns: int = 0
    spent: bool = False
    """Whether a budget has refused its last call."""
    over: bool = False
    told: bool = False
    worth: Worth | None = None
    error: str | None = None
    fault: Exception | None = None
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    claims: dict[object, _Claim] = field(default_factory=dict)
    asking: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)

    def refuse(self, why: str, words: str) -> TurnedDown:
        self.spent = True
        return TurnedDown(400, words, why=why)

    def next_seed(self) -> int:
        self.num_turns += 1
        return sample_seed(self.request.seed, self.num_turns)


class Sessions:
    """Those of one replica, and the engine that their calls ask: each asks the one of its own sample. `engine`: the replica's.
    `stops`: texts that end what the run samples; `components`: what rewards consist of."""

    def __init__(
        self, engine: Engine, *, stops: tuple[str, ...] = (), components: Mapping[str, float] | None = None,
        other_sampling: bool = False,
    ) -> None:  # fmt: skip
        self._engine, self._stops, self._components = engine, stops, components or {}
        self._other_sampling = other_sampling
        self.trajectories = Trajectories(max_sessions=1 << 30, max_age_s=float("inf"), idle_s=float("inf"))
        self._by_key = dict[str, Session]()
        self._by_name = dict[str, Session]()
        self._numbers = itertools.count()
        self._offers = deque[tuple[Told, asyncio.Future[None]]]()
        self._offered = asyncio.Event()

    @contextmanager
    def opened(self, client: Client, number: int, limits: Limits) -> Iterator[Session]:
        """The session of this sample while the body lasts."""
        request = client.request(number)
        name = f"{request.id.replace('/', '.')}-{next(self._numbers)}"
        session = Session(name, f"rondo-{secrets.token_hex(32)}", request, client, limits)
        self._by_key[session.key] = self._by_name[name] = session
        try:
            yield session
        finally:
            self._end(session)
            self.trajectories.forget(name, at_once=True)
            del self._by_key[session.key], self._by_name[name]

    def ended(self, session: Session) -> tuple[SampleRow, ...]:
        """Ends it: its rows, the newest call's last; none where nothing was sampled."""
        self._end(session)
        try:
            newest = self.trajectories.calls(session.name)[-1]
        except TurnedDown:  # without any
            return ()
        finish: FinishReason = "length" if session.spent or newest.finish_reason == "length" else "stop"
        found = []
        for row in sorted(self.trajectories.rows(session.name), key=lambda row: newest.name in row.calls):
            if row.loss_mask.any():
                begin = int(row.loss_mask.argmax())
                done = row.tokens[begin:], row.log_probs[begin:], row.policy_versions[begin:]
                found.append(SampleRow(row.tokens[:begin], Completion(session.request.id, *done, finish)))
        if found and session.worth is not None:
            last = found[-1]
            place = int(np.flatnonzero(last.completion.policy_versions != NO_VERSION)[-1])
            found[-1] = replace(last, rewards=((place, session.worth[0]),))
        return tuple(found)

    def turns(self, session: Session) -> list[dict[str, Any]]:
        """Return the messages of its newest call from the policy's first reply on, for reward functions; none without a chat."""
        newest = self.trajectories.calls(session.name)[-1]
        written = [*(newest.messages() or ()), *([] if newest.reply is None else [orjson.Fragment(newest.reply)])]
        messages: list[dict[str, Any]] = read_json(orjson.dumps(written))
        first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        return [message | {"content": message.get("content") or ""} for message in messages[first:]]

    def _end(self, session: Session) -> None:
        session.over = True
        for asking in session.asking.values():
            asking.cancel()

    def worth_of(self, given: Any) -> Worth:
        """What a program says: a number, a dict of components, or either under "reward". ConfigError for anything else."""
        value = given["reward"] if isinstance(given, dict) and "reward" in given else given
        if isinstance(value, bool) or not isinstance(value, int | float | dict):
            raise ConfigError(f"reward must be a number or a dict of components, got {type(value).__name__}. Send one")
        try:
            told = scored(value, self._components)
        except RewardError as error:
            raise ConfigError(str(error)) from error
        reward, details = decode(orjson.loads(told.text))
        return reward, details

    def offer(self, told: Told) -> asyncio.Future[None]:
        """Has a sample made by whoever asks for one, who is given what is told: done when somebody has taken it."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offers.append((told, taken))
        self._offered.set()
        return taken

    # ---- what the server asks (`serve.service.Samples`) ------------------------------------------------------------------------

    def session_of(self, key: str, named: str | None) -> str:
        session = self._by_key.get(key)
        if session is None:
            words = "a call must show the key of an open session, got none, or one that is over. Send OPENAI_API_KEY"
            raise TurnedDown(401, words, {"WWW-Authenticate": "Bearer"})
        if named not in (None, session.name):
            raise TurnedDown(
                403, f"session must be {session.name!r}, that of the key, got another. Leave the header out"
            )
        return session.name

    async def taken(self) -> Told:
        while True:
            while self._offers:
                told, taken = self._offers.popleft()
                if not taken.done():  # as that of a lost lease is
                    taken.set_result(None)
                    return told
            self._offered.clear()
            await self._offered.wait()

    def rewarded(self, name: str, given: Any) -> None:
        if (had := self._by_name.get(name)) is not None and had.told:
            raise TurnedDown(409, "a session must be rewarded once, got another reward. The first one counts")
        session = self._opened(name)
        failed = given.get("error") if isinstance(given, dict) else None
        if isinstance(failed, str):
            session.error = f"the agent says: {failed[-_WORDS:] or 'nothing'}"
        elif given != OVER:
            session.worth = self.worth_of(given)
        session.told = True
        session.ends.set()
        self._end(session)

    @contextmanager
    def admitted(self, asked: Call) -> Iterator[None]:
        session, claim = self._opened(asked.session), object()
        spent = session.spent
        try:
            session.claims[claim] = self._claimed(session, asked)
        except TurnedDown:
            session.spent = spent or not asked.is_repeated  # which is answered as it was
            raise
        try:
            yield
        finally:
            del session.claims[claim]

    def _claimed(self, session: Session, asked: Call) -> _Claim:
        """What the call takes, which becomes what the run would ask."""
        limits, params = session.limits, session.request.params
        if (sampling := asked.sampling) is not None and not self._other_sampling:
            for name in sampling.model_fields_set.intersection(_NAMES):
                given, ours = getattr(sampling, name), getattr(params, name)
                if given != ours:
                    raise ConfigError(
                        f"{name} must be {ours}, as this run samples, got {given}. Leave it out, or set agent.other_sampling"
                    )
        if limits.max_turns is not None and session.num_turns + len(asked.asks) > limits.max_turns:
            words = (
                f"a session must have at most {limits.max_turns} answers (rollout.max_turns), got one more. It is over"
            )
            raise session.refuse("max_turns", words)
        chains = self.trajectories.chains(session.name)
        taken = {tip for each in session.claims.values() for tip in each.tips}
        num_rows, tips, rooms = 0, list[Span](), dict[str, int]()
        for rid, prompt in asked.prompts.items():
            size, tip = len(prompt.tokens), chains.tip(prompt.known)
            begin = size if tip is None else chains.begin(tip)
            rooms[rid] = min(limits.max_new_tokens - (size - begin), limits.max_tokens - size)
            if rooms[rid] < 1:
                words = (
                    f"a conversation must have at most {limits.max_new_tokens} tokens behind its first prompt "
                    f"(rollout.max_new_tokens) and {limits.max_tokens} with it, got {size - begin} and {size}. Shorten it, or end"
                )
                raise session.refuse("context_length_exceeded", words)
            num_rows += sum(ask.rid == rid for ask in asked.asks)
            if tip is not None and tip not in taken:
                num_rows -= 1
                taken.add(tip)
                tips.append(tip)
        if len(chains.rows) + sum(each.num_rows for each in session.claims.values()) + num_rows > limits.max_rows:
            words = (
                f"a session must have at most {limits.max_rows} conversations of which none goes on with another "
                "(rollout.max_rows), got one more. Go on with what there is, or end"
            )
            raise session.refuse("max_rows", words)
        session.spent = False
        asked.asks = [
            replace(
                ask,
                params=replace(
                    ask.params, max_new_tokens=min(ask.params.max_new_tokens, rooms[ask.rid]),
                    **{name: getattr(params, name) for name in _NAMES},
                ),
                seed=session.next_seed(), stops=(*ask.stops, *self._stops), keep_stop=ask.keep_stop or bool(self._stops),
            )
            for ask in asked.asks
        ]  # fmt: skip
        return _Claim(num_rows, tuple(tips))

    def _opened(self, name: str | None) -> Session:
        """TurnedDown (410) for one that is over."""
        session = self._by_name.get(name or "")
        if session is None or session.over:
            raise _over(name)
        return session

    # ---- the engine that calls ask ---------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request) -> Completion:
        """As the sample's own request, under its name: its failures are the session's, but for those that are the request's own.
        What is drawn depends on what is asked for: a program that asks the same again is answered the same (`kept_turns.py`)."""
        session = self._opened(request.session)
        own = session.request
        asked = replace(
            request,
            id=f"{own.id}.{request.id}",
            seed=sample_seed(request.seed, request.params),
            kind=own.kind,
            priority=own.priority,
            on_new_weights=own.on_new_weights,
            interruptions=own.interruptions,
        )
        asking = session.asking[request.id] = asyncio.ensure_future(session.client.ask(asked))
        try:
            return await asking
        except asyncio.CancelledError:
            if session.over and asking.cancelled():
                raise _over(session.name) from None
            raise
        except (RowError, ConfigError) as error:
            raise ConfigError(str(error)) from error
        except Exception as error:
            session.fault = session.fault or error
            session.ends.set()
            raise
        finally:
            del session.asking[request.id]

    def cancel(self, request_id: str) -> None:
        for session in self._by_name.values():
            if request_id in session.asking:
                session.client.cancel(f"{session.request.id}.{request_id}")

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        raise RondoError("weights must come to the replica's engine, got some for its sessions")

    def progress(self) -> Mapping[str, int]:
        return self._engine.progress()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def close(self) -> None:
        """The replica's is its own."""


def _over(name: str | None) -> TurnedDown:
    return TurnedDown(410, f"session must be open, got {name!r}, which is over. End", why="session_over")
