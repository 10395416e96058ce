"""Trajectories: what each call of an agent's session was asked and sampled, to the token.

Owns the record, its limits, and which recorded tokens the prompt of a next call begins with. Does not own how a conversation is
rendered (`openai.py`).

    turn 1   prompt text "Q1 A:"             -> tokens p1;  sampled tokens r1, text "abc"
    turn 2   prompt text "Q1 A:abc Q2 A:"    -> begins with text(p1 + r1), so its tokens are p1, r1, encode(" Q2 A:")

Invariant: tokens that were sampled are never made from text again. A next prompt whose text begins with that of a recorded call
begins with that call's tokens; where the text differs, because a template rewrites or an agent drops what was said, it is
tokenised whole and the call says where they part. Bounded in sessions, tokens and age: the one not used for longest goes first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rondo.roles.rollout.serve.desk import Answer, Ask
from rondo.roles.rollout.serve.errors import TurnedDown

MAX_NAME = 256
_SHOWN = 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a call's prompt, int32 [T]; the first `reused_tokens` are recorded ones. `parted` says why they are not all
    that the newest call of the session left, None where they are."""

    tokens: np.ndarray
    text: str
    reused_tokens: int = 0
    parted: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One sample of one call. `tokens` int32 [R], `log_probs` float32 [R], `policy_versions` int32 [R] as the engine gave them;
    `text` is theirs with nothing left out. `messages` and `reply` are the conversation, of a chat."""

    id: str
    index: int
    prompt: Prompt
    tokens: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: str
    text: str
    at: float
    messages: Sequence[Any] | None = None
    reply: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        ask: Ask,
        answer: Answer,
        prompt: Prompt | str,
        text: str,
        *,
        messages: Sequence[Any] | None = None,
        reply: dict[str, Any] | None = None,
    ) -> Call:
        assert answer.finish is not None
        made = prompt if isinstance(prompt, Prompt) else Prompt(ask.prompt, prompt)
        return cls(
            ask.rid, ask.index, made, answer.tokens, answer.log_probs, answer.policy_versions, answer.finish.kind, text,
            time.time(), messages, reply,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.tokens) + len(self.tokens)

    def shown(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "id": self.id, "index": self.index, "at": self.at, "finish_reason": self.finish_reason,
            "prompt_token_ids": self.prompt.tokens.tolist(), "reused_tokens": self.prompt.reused_tokens,
            "parted": self.prompt.parted, "token_ids": self.tokens.tolist(), "log_probs": self.log_probs.tolist(),
            "policy_versions": self.policy_versions.tolist(), "prompt_text": self.prompt.text, "text": self.text,
            "messages": self.messages, "reply": self.reply,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """Calls that go on from each other, as one sequence to train on. All arrays [T]: `tokens` int32, `loss_mask` uint8 (1 =
    sampled by the policy), `log_probs` float32 (0 where the mask is) and `policy_versions` int32 (-1 where the mask is 0)."""

    calls: tuple[str, ...]
    tokens: np.ndarray
    loss_mask: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray

    def shown(self) -> dict[str, Any]:
        arrays = {
            name: getattr(self, name).tolist() for name in ("tokens", "loss_mask", "log_probs", "policy_versions")
        }
        return {"calls": list(self.calls)} | arrays


def rows_of(calls: Sequence[Call]) -> list[Row]:
    """Each sampled token in exactly one row. A call continues the row whose tokens its prompt begins with, else it begins one."""
    rows: list[Row] = []
    for call in calls:
        before = _before(rows, call.prompt.tokens)
        start = 0 if before is None else len(before.tokens)
        given, sampled = call.prompt.tokens[start:], call.tokens
        row = Row(
            (f"{call.id}/{call.index}",),
            np.concatenate([given, sampled]).astype(np.int32),
            np.concatenate([np.zeros(len(given), np.uint8), np.ones(len(sampled), np.uint8)]),
            np.concatenate([np.zeros(len(given), np.float32), call.log_probs]),
            np.concatenate([np.full(len(given), -1, np.int32), call.policy_versions]),
        )
        if before is None:
            rows.append(row)
        else:
            rows[rows.index(before)] = Row(
                before.calls + row.calls,
                *(
                    np.concatenate([getattr(before, name), getattr(row, name)])
                    for name in ("tokens", "loss_mask", "log_probs", "policy_versions")
                ),
            )
    return rows


def _before(rows: Sequence[Row], prompt: np.ndarray) -> Row | None:
    """The longest row that the prompt begins with."""
    fitting = [
        row for row in rows if len(row.tokens) <= len(prompt) and np.array_equal(prompt[: len(row.tokens)], row.tokens)
    ]
    return max(fitting, key=lambda row: len(row.tokens), default=None)


@dataclass(slots=True, eq=False)
class _Session:
    used_at: float
    calls: list[Call] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrajectoryStats:
    """A snapshot."""

    num_sessions: int
    num_calls: int
    num_tokens: int
    num_evicted: int


class Trajectories:
    """The sessions of one server. `max_age_s` counts from a session's last call; `clock` gives monotonic seconds."""

    def __init__(
        self,
        *,
        max_sessions: int = 1024,
        max_tokens: int = 1 << 24,
        max_age_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._max_age_s = max_age_s
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the one used last stands last
        self._num_tokens = self._num_evicted = 0

    def stats(self) -> TrajectoryStats:
        self._expire()
        sessions = self._sessions.values()
        num_calls = sum(len(session.calls) for session in sessions)
        return TrajectoryStats(len(sessions), num_calls, self._num_tokens, self._num_evicted)

    def names(self) -> list[str]:
        self._expire()
        return list(self._sessions)

    def known(self, name: str) -> bool:
        self._expire()
        return name in self._sessions

    def calls(self, name: str) -> list[Call]:
        """What was recorded, oldest first. TurnedDown (404) for a session without a call, or that is gone."""
        self._expire()
        if name not in self._sessions:
            raise TurnedDown(
                404, f"session must have a recorded call, got {name!r} without one. It may have been evicted"
            )
        return list(self._sessions[name].calls)

    def drop(self, name: str) -> bool:
        session = self._sessions.pop(name, None)
        self._num_tokens -= 0 if session is None else session.num_tokens
        return session is not None

    def record(self, name: str, call: Call) -> None:
        session = self._sessions.setdefault(name, _Session(0.0))
        session.calls.append(call)
        session.num_tokens += call.num_tokens
        self._num_tokens += call.num_tokens
        session.used_at = self._clock()
        self._sessions.move_to_end(name)
        self._expire()

    def prompt(self, name: str, text: str, encode: Callable[[str], np.ndarray]) -> Prompt:
        """The tokens of a prompt with this text, recorded ones first. `encode` makes tokens of what follows them."""
        self._expire()
        session = self._sessions.get(name)
        if session is None or not session.calls:
            return Prompt(encode(text), text)
        newest = session.calls[-1]
        best, found = "", None
        for call in session.calls:
            for begin in (call.prompt.text + call.text, call.prompt.text):
                if len(begin) > len(best) and text.startswith(begin):
                    best, found = begin, call
        whole = newest.prompt.text + newest.text
        parted = None if text.startswith(whole) else _parting(whole, text)
        if found is None:
            return Prompt(encode(text), text, 0, parted)
        known = found.prompt.tokens
        if len(best) > len(found.prompt.text):
            known = np.concatenate([known, found.tokens])
        rest = text[len(best) :]
        tokens = np.concatenate([known, encode(rest)]) if rest else known
        return Prompt(tokens.astype(np.int32), text, len(known), parted)

    def _expire(self) -> None:
        now = self._clock()
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            many = len(self._sessions) > self._max_sessions or self._num_tokens > self._max_tokens
            if not many and now - oldest.used_at <= self._max_age_s:
                return
            self._num_tokens -= oldest.num_tokens
            self._sessions.popitem(last=False)
            self._num_evicted += 1


def _parting(recorded: str, text: str) -> str:
    """Where the text of a next prompt leaves what was recorded."""
    pairs = enumerate(zip(recorded, text, strict=False))
    at = next((index for index, (old, new) in pairs if old != new), min(len(recorded), len(text)))
    return (
        f"the conversation's text differs from the newest call's at character {at}: "
        f"{recorded[at : at + _SHOWN]!r} was recorded, {text[at : at + _SHOWN]!r} was asked"
    )
