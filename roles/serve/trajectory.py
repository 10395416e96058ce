"""Trajectories: what each call of an agent's session was asked and sampled, to the token.

Owns the sessions, their calls, and what they may take: every call that is let in is recorded whole, and who finds no room is
told so before any work begins. Does not own the tree that a session's tokens lie in (`spans.py`) or how a conversation is
rendered (`openai.py`).

    with kept.calling("task-7"):                    # TurnedDown: 410 dropped, 413 the session is full, 429 all of them are
        prompt = kept.prompt("task-7", text, encode)
        kept.record("task-7", Call(...), ...)

Invariant: tokens that were sampled are never made from text again: a next prompt whose text begins with that of a recorded call
begins with that call's tokens. What a session takes grows with its new tokens. A session goes when it was not used for
`max_age_s`, or, where others need its room, for `idle_s`; whoever comes back to it is told.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rondo.models.control_tokens import without_marks
from rondo.roles.serve.requests import Answer, Ask
from rondo.roles.serve.spans import Chains, Row, Span, in_text, in_tokens
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.values import write_json

_SHOWN = 24
_CALL_BYTES = 1024
"""What a call takes beside its tokens and texts."""
_MAX_DROPPED = 4096
"""Names of sessions that were dropped, of which callers are told."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a call's prompt, int32 [T], with their text; they begin with recorded ones, the path to `known`. `parted`
    says why these are not all that the newest call of the session left, None where they are."""

    tokens: np.ndarray
    text: str
    known: Span
    parted: str | None = None

    @property
    def reused_tokens(self) -> int:
        return self.known.num_tokens


@dataclass(slots=True, eq=False)
class _Said:
    """A message of a conversation, as JSON, behind others; calls of one session share what they have in common. `sampled`: what
    the policy wrote, where the message is a reply of it."""

    before: _Said | None
    message: bytes
    sampled: Span | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One sample of one call: `sampled` behind the path of its prompt. `conversation` and `reply` are those of a chat."""

    id: str
    index: int
    sampled: Span
    reused_tokens: int
    parted: str | None
    finish_reason: str
    at: float
    conversation: _Said | None
    reply: bytes | None

    @property
    def name(self) -> str:
        return f"{self.id}/{self.index}"

    @property
    def prompt(self) -> Span:
        assert self.sampled.before is not None
        return self.sampled.before

    def messages(self) -> list[orjson.Fragment] | None:
        """The conversation, oldest first."""
        found, at = [], self.conversation
        while at is not None:
            found.append(orjson.Fragment(at.message))
            at = at.before
        return found[::-1] if found else None

    def shown(self) -> dict[str, Any]:
        """As JSON values."""
        sampled = self.sampled
        assert sampled.log_probs is not None and sampled.policy_versions is not None
        return {
            "id": self.id, "index": self.index, "at": self.at, "finish_reason": self.finish_reason,
            "prompt_token_ids": self.prompt.tokens_to_here(), "reused_tokens": self.reused_tokens,
            "parted": self.parted, "token_ids": sampled.tokens, "log_probs": sampled.log_probs,
            "policy_versions": sampled.policy_versions, "text": sampled.text,
            "prompt_text": without_marks(self.prompt.text_to_here()),
            "messages": self.messages(), "reply": None if self.reply is None else orjson.Fragment(self.reply),
        }  # fmt: skip


@dataclass(slots=True, eq=False)
class _Session:
    used_at: float
    root: Span = field(default_factory=Span.root)
    calls: list[Call] = field(default_factory=list)
    chains: Chains = field(default_factory=Chains)
    said: dict[tuple[_Said | bytes, bytes], _Said] = field(default_factory=dict)
    """(what a message follows, its meaning) -> the message. The first one follows what the template is given beside messages."""
    answers: dict[bytes, Sequence[Answer]] = field(default_factory=dict)
    """Digest of a request -> what it was answered."""
    num_bytes: int = 0
    num_calling: int = 0


@dataclass(frozen=True, slots=True)
class TrajectoryStats:
    """A snapshot."""

    num_sessions: int
    num_calls: int
    num_bytes: int
    num_dropped: int


@dataclass(kw_only=True, slots=True)
class Trajectories:
    """The sessions of one server. `max_bytes` of all together, `max_session_bytes` of each; `max_age_s` and `idle_s` count from a
    session's last call. `clock` gives monotonic seconds."""

    max_sessions: int = 4096
    max_bytes: int = 1 << 30
    max_session_bytes: int = 1 << 26
    max_age_s: float = 3600.0
    idle_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    _sessions: OrderedDict[str, _Session] = field(default_factory=OrderedDict)
    """The one used last stands last."""
    _dropped: OrderedDict[str, str] = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _num_dropped: int = 0

    def stats(self) -> TrajectoryStats:
        self._expire()
        sessions = [session for session in self._sessions.values() if session.calls]
        num_calls = sum(len(session.calls) for session in sessions)
        return TrajectoryStats(len(sessions), num_calls, self._num_bytes, self._num_dropped)

    def names(self) -> list[str]:
        self._expire()
        return [name for name, session in self._sessions.items() if session.calls]

    @contextmanager
    def calling(self, name: str | None) -> Iterator[None]:
        """A call of the session, from before any work to its record. TurnedDown where it could not be recorded."""
        if name is None:
            yield
            return
        session = self._let_in(name)
        session.num_calling += 1
        try:
            yield
        finally:
            session.num_calling -= 1
            session.used_at = self.clock()
            if self._sessions.get(name) is session:
                self._sessions.move_to_end(name)
                if not session.calls and not session.num_calling:
                    del self._sessions[name]

    def calls(self, name: str) -> list[Call]:
        """What was recorded, oldest first. TurnedDown (404) for a session without a call, (410) for one that was dropped."""
        self._expire()
        self._check_dropped(name)
        session = self._sessions.get(name)
        if session is None or not session.calls:
            raise TurnedDown(404, f"session must have a recorded call, got {name!r} without one. Look at its name")
        return list(session.calls)

    def rows(self, name: str) -> Iterator[Row]:
        """The sequences to train on that its calls make."""
        self.calls(name)  # there are some
        return self._sessions[name].chains.sequences()

    def chains(self, name: str) -> Chains:
        """Of a session that has been let in. TurnedDown (410) where it was forgotten meanwhile."""
        return self._within(name).chains

    def forget(self, name: str, *, at_once: bool = False) -> bool:
        """Whether there was something to forget. TurnedDown (409) while a call of it is being answered, unless `at_once`: then
        that call fails."""
        session = self._sessions.get(name)
        if session is not None and session.num_calling and not at_once:
            raise TurnedDown(
                409, f"session must have no call in flight to be forgotten, got {session.num_calling}. Wait"
            )
        self._sessions.pop(name, None)
        self._num_bytes -= 0 if session is None else session.num_bytes
        return self._dropped.pop(name, None) is not None or (session is not None and bool(session.calls))

    # ---- what a call begins with --------------------------------------------------------------------------------------------

    async def prompt(
        self, name: str | None, text: str, encode: Callable[[str, int | None], Awaitable[np.ndarray | None]]
    ) -> Prompt:
        """The tokens of a prompt with this text, in a session recorded ones first. `encode` makes tokens of what follows them,
        behind the last of them; None where it cannot do so exactly."""
        session = _Session(0.0) if name is None else self._within(name)
        known = session.root.longest(in_text(text))
        parted = self._parting(session, text)
        rest = text[known.num_chars :]
        tokens = known.tokens_to_here()
        new = await encode(rest, int(tokens[-1]) if len(tokens) else None) if rest else np.zeros(0, np.int32)
        if new is None:
            parted = parted or f"the tokenizer cannot go on behind recorded tokens with {rest[:_SHOWN]!r}"
            known, tokens, new = session.root, tokens[:0], await encode(text, None)
        assert new is not None
        return Prompt(np.concatenate([tokens, new]), text, known, parted)

    def prompt_of_tokens(
        self, name: str, tokens: np.ndarray, text_of: Callable[[np.ndarray, int | None], str]
    ) -> Prompt:
        """A prompt that came as tokens, int32 [T]. `text_of` says what follows a token."""
        session = self._within(name)
        known = session.root.longest(in_tokens(tokens))
        size, parted = known.num_tokens, None
        text = known.text_to_here() + text_of(tokens[size:], int(tokens[size - 1]) if size else None)
        if session.calls and known is not session.calls[-1].sampled:
            parted = f"the prompt's tokens leave what was recorded behind {size} of them"
        return Prompt(tokens, text, known, parted)

    def replies(self, name: str, beside: bytes, meanings: Sequence[bytes]) -> dict[int, Span]:
        """Return which messages of a conversation are replies that this session recorded behind those before them, with what was
        sampled of each. `meanings` are the messages', `beside` is what the template is given beside them."""
        session, found = self._within(name), dict[int, Span]()
        at: _Said | bytes = beside
        for number, meaning in enumerate(meanings):
            if (said := session.said.get((at, meaning))) is None:
                break
            if said.sampled is not None:
                found[number] = said.sampled
            at = said
        return found

    def answers(self, name: str, request: bytes) -> Sequence[Answer] | None:
        """Return what the request with this digest was answered; None for a new one."""
        return self._within(name).answers.get(request)

    def answered(self, name: str, request: bytes, answers: Sequence[Answer]) -> None:
        """Keep what a request was answered, in case that does not arrive."""
        session = self._within(name)
        size = _CALL_BYTES + sum(sys.getsizeof(answer.text) for answer in answers)
        session.answers[request] = answers
        session.num_bytes += size
        self._num_bytes += size

    # ---- the record ---------------------------------------------------------------------------------------------------------

    def record(
        self,
        name: str,
        prompt: Prompt,
        ask: Ask,
        answer: Answer,
        text: str,
        *,
        beside: bytes = b"",
        messages: Sequence[tuple[Mapping[str, Any], bytes]] = (),
        reply: Mapping[str, Any] | None = None,
        meanings: Collection[bytes] = (),
    ) -> None:
        """One sample of a call that is let in. `text` is its tokens' behind the prompt, with nothing left out; `beside` is what
        the template is given beside the messages, which come with their meanings; `meanings` are those by which the reply is
        known when it comes back."""
        session = self._within(name)
        assert answer.finish is not None
        before = session.num_bytes
        leaf = prompt.known.add(prompt.tokens[prompt.reused_tokens :], prompt.text[prompt.known.num_chars :])
        if leaf is not prompt.known and len(leaf.following) == 0:
            session.num_bytes += leaf.num_bytes
        sampled = leaf.sample(answer.sampled, text)
        conversation = self._say(session, beside, messages)
        told = None if reply is None else write_json(reply)
        session.num_bytes += sampled.num_bytes + _CALL_BYTES + len(told or b"")
        if told is not None:
            after: _Said | bytes = beside if conversation is None else conversation
            own = _Said(conversation, told)
            for meaning in meanings:
                session.said.setdefault((after, meaning), own).sampled = sampled
                session.num_bytes += len(meaning) + _CALL_BYTES // 4
        call = Call(
            ask.rid, ask.index, sampled, prompt.reused_tokens, prompt.parted, answer.finish.kind, time.time(), conversation,
            told,
        )  # fmt: skip
        session.calls.append(call)
        session.chains.add(call.name, sampled)
        self._num_bytes += session.num_bytes - before

    def _say(
        self, session: _Session, beside: bytes, messages: Sequence[tuple[Mapping[str, Any], bytes]]
    ) -> _Said | None:
        at: _Said | None = None
        for message, meaning in messages:
            key = beside if at is None else at, meaning
            if key not in session.said:
                session.said[key] = _Said(at, write_json(message))
                session.num_bytes += len(meaning) + len(session.said[key].message) + _CALL_BYTES // 4
            at = session.said[key]
        return at

    # ---- room ---------------------------------------------------------------------------------------------------------------

    def _let_in(self, name: str) -> _Session:
        self._expire()
        self._check_dropped(name)
        session = self._sessions.get(name)
        if session is not None and session.num_bytes >= self.max_session_bytes:
            raise TurnedDown(
                413,
                f"a session must have at most {self.max_session_bytes} bytes, got {session.num_bytes} of {name!r}. All of "
                "its calls are recorded: read it, and go on in another one",
            )
        self._expire(room_for=int(session is None))
        if self._num_bytes >= self.max_bytes or len(self._sessions) + (session is None) > self.max_sessions:
            raise TurnedDown(
                429,
                f"recorded sessions must have at most {self.max_bytes} bytes in {self.max_sessions} sessions, got "
                f"{self._num_bytes} in {len(self._sessions)}. DELETE those that were read, or raise the limits",
            )
        if session is None:
            session = self._sessions[name] = _Session(self.clock())
        session.used_at = self.clock()
        self._sessions.move_to_end(name)
        return session

    def _within(self, name: str) -> _Session:
        """Of a call that was let in."""
        if name not in self._sessions:
            raise TurnedDown(410, f"session must go on to be recorded, got {name!r}, which was forgotten meanwhile")
        return self._sessions[name]

    def _check_dropped(self, name: str) -> None:
        if name in self._dropped:
            raise TurnedDown(
                410, f"session must be recorded still, got {name!r}, which {self._dropped[name]}. DELETE it"
            )

    def _expire(self, room_for: int | None = None) -> None:
        """Drops what is too old; with `room_for` more sessions to come what is idle too, while room is wanted."""
        now = self.clock()
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None or now - oldest.used_at <= min(self.idle_s, self.max_age_s):
            return
        for name, session in list(self._sessions.items()):
            idle_s = now - session.used_at
            wanted = room_for is not None and (
                self._num_bytes >= self.max_bytes or len(self._sessions) + room_for > self.max_sessions
            )
            if idle_s <= self.max_age_s and not (wanted and idle_s > self.idle_s):
                return  # those behind it were used later
            if session.num_calling:
                continue
            del self._sessions[name]
            self._num_bytes -= session.num_bytes
            self._num_dropped += 1
            self._dropped[name] = f"was not used for {idle_s:.0f} s and has given way"
            if len(self._dropped) > _MAX_DROPPED:
                self._dropped.popitem(last=False)

    @staticmethod
    def _parting(session: _Session, text: str) -> str | None:
        """Where the text of a next prompt leaves what the newest call recorded."""
        if not session.calls:
            return None
        for span in session.calls[-1].sampled.path():
            at = span.num_chars - len(span.text)
            if not text.startswith(span.text, at):
                cut = sum(itertools.takewhile(bool, map(operator.eq, span.text, text[at : span.num_chars])))
                old, new = span.text[cut : cut + _SHOWN], text[at + cut : at + cut + _SHOWN]
                return (
                    f"the conversation's text differs from the newest call's at character {at + cut}: "
                    f"{old!r} was recorded, {new!r} was asked"
                )
        return None
