"""Episodes: one sample in the making, in turns of the policy and of whoever it talks to.

Owns which tokens a sample consists of: those that the policy sampled, as they were sampled, and between them those of what was
said to it; its budgets of turns, tokens and rows; and what each turn is worth where the workflow says so. Does not own what is
said (the workflow), the template's words between two turns (`roles/data/chat.py`), or the engine.

    turn = await episode.generate()                                        # turn.text, turn.tokens
    await episode.say([{"role": "tool", "content": "42"}])                 # messages, by the chat template
    await episode.say("42;")                                               # or text, as it is
    await episode.say([{"role": "tool", "content": [{"type": "image", "image": png}]}])     # media in messages
    turn = await episode.generate()
    episode.reward(1.0)                                                    # of this turn; or reward.function says

    row 0   prompt  [turn]{said}[turn]                   [ ] sampled, with log-probs and versions: trained
    row 1   another prompt  [turn]                       { } said: read, never trained, NO_VERSION

A sample has one *row*, which is computed at once, as long as every turn goes on behind the last one. It gets another where its
context is replaced (`new_context`), where somebody else talks beside it (`branch`), and where the chat template rewrites earlier
turns, so that the next one cannot go on behind them.

Invariant: tokens are never made again from text. What the policy is asked behind, and what is trained, are the same tokens; each
sampled token is in the response of exactly one row. What was said and not answered is in none.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rondo.comm.bus.group import NO_VERSION
from rondo.models.control_tokens import decoded, encoded
from rondo.models.media.errors import MediaError
from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.models.media.refs import MediaRef
from rondo.roles.data.chat import Chat, Message, check_text
from rondo.roles.data.datasets import RowError
from rondo.roles.data.media_rows import with_parts
from rondo.roles.engines.engine import Completion, FinishReason, Prefix, Request, ended_with, sample_seed
from rondo.roles.rewards.hub.named import is_thought_mark
from rondo.roles.sampling.kept_turns import place_of
from rondo.runtime.errors import ConfigError

T = TypeVar("T")
Ask = Callable[[Request], Awaitable[Completion]]
Look = Callable[[str, Sequence[MediaRef], int], Awaitable[tuple[np.ndarray, MediaInputs | None]]]
"""Text with places of media, these, and what bytes they may take: tokens int32 [T], and what became of them."""
_BESIDE_BYTES = 1 << 10
"""Of what is told of the media of one turn, beside their arrays."""
_SHORT = 2048
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a sample: tokens behind the prompt of each row, and with it; turns and rows in all; seconds; bytes of media that are
    said behind the prompt."""

    max_new_tokens: int
    max_tokens: int
    max_turns: int | None = None
    max_rows: int = 1
    max_s: float | None = None
    max_turn_bytes: int = 0


class Unseen(Exception):
    """Media that the policy cannot be shown, or not any more. It ends its sample alone."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What is trained at once of a sample: a prompt, int32 [T], and all that follows it; tokens with NO_VERSION were said by
    others. `rewards`: (place of a turn's last token in the response, what the turn is worth). `shown`: (token of the row from
    which on they lie, media) of turns behind the prompt."""

    prompt: np.ndarray
    completion: Completion
    rewards: tuple[tuple[int, float], ...] = ()
    shown: tuple[tuple[int, MediaInputs], ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A sample that is whole, in one row or several. With an `error` it gets no reward; with a `reward`, of which `details` are
    told, no other. `turns`: its messages behind the prompt, where more than its tokens is known."""

    number: int
    rows: tuple[SampleRow, ...]
    reward: float | None = None
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    turns: Sequence[Message] = ()

    @property
    def last(self) -> Completion:
        """What it came to: the end of its last row, and most often all of it."""
        return self.rows[-1].completion

    @property
    def newest(self) -> int:
        """The newest weights that any token of it was sampled under; NO_VERSION without one."""
        return max(int(row.completion.policy_versions.max()) for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Behind the prompts of all rows."""
        return sum(len(row.completion.tokens) for row in self.rows)


@dataclass(frozen=True)
class Turn:
    """What the policy said at once: `tokens` int32 [R], and how it ended."""

    tokens: np.ndarray
    finish_reason: FinishReason
    written: Callable[..., str] = field(repr=False)

    @functools.cached_property
    def text(self) -> str:
        """Without the token that ended it, and without special tokens that are no marks of thoughts."""
        return self.written(skip_special_tokens=True)


@dataclass(slots=True)
class _Row:
    """One that grows. `messages` are those in front of the reply that is being made, `reply` what was written of it, `said` what
    follows it; `heard` and `between` are tokens that nobody has answered yet, int32. `refs` and `coming` are the media of `said`,
    whose tokens are `between`, and as many before as the policy has written of them; `shown` those of what was answered, as in
    `SampleRow`. `path`: among the rows of its sample."""

    path: tuple[int, ...]
    request: Request
    messages: list[Message]
    reply: list[Callable[[], str]] = field(default_factory=list)
    done: Completion | None = None
    said: list[Message] = field(default_factory=list)
    heard: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    between: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    refs: tuple[MediaRef, ...] = ()
    coming: tuple[int, MediaInputs] | None = None
    shown: list[tuple[int, MediaInputs]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    branches: Iterator[int] = field(default_factory=itertools.count)

    @property
    def pieces(self) -> tuple[np.ndarray, ...]:
        """All tokens behind the prompt, end to end."""
        return _NO_TOKENS if self.done is None else self.done.tokens, self.heard, self.between

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate(self.pieces)

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def conversation(self) -> list[Message]:
        """With the reply as it is so far."""
        reply = [{"role": "assistant", "content": "".join(each() for each in self.reply)}] if self.reply else []
        return [*self.messages, *reply]

    def answered(self) -> None:
        """What was said becomes part of the conversation, and another reply begins."""
        if self.said:
            self.messages = [*self.conversation, *self.said]
            if self.coming is not None:
                before, media = self.coming
                self.shown.append((len(self.request.prompt) + self.size - len(self.between) - before, media))
            self.heard = np.concatenate([self.heard, self.between])
            self.reply, self.said, self.between, self.refs, self.coming = [], [], _NO_TOKENS, (), None

    def next(self) -> Request:
        """The request that goes on from here, where everything was answered."""
        tokens, new = self.tokens, len(self.heard)
        if not len(tokens):
            return self.request
        done = self.done or ended_with(self.request, "stop", None)
        log_probs = np.concatenate([done.log_probs, np.zeros(new, np.float32)])
        versions = np.concatenate([done.policy_versions, np.full(new, NO_VERSION, np.int32)])
        prefix = Prefix(tokens, log_probs, versions, routed_experts=done.routed_experts)
        return replace(self.request, prefix=prefix, media=with_turns(self.request.media, self.shown))


@dataclass(slots=True)
class _Shared:
    """What the branches of one sample share. `root` is the request that it begins with."""

    number: int
    root: Request
    ask: Ask
    limits: Limits
    tokenizer: Any
    chat: Chat | None
    further: Callable[[], None]
    look: Look | None
    rows: list[_Row] = field(default_factory=list)
    turns: list[tuple[str, Callable[[], str]]] = field(default_factory=list)
    """(role, content) of what was said behind the prompt, over all rows, as it came."""
    num_turns: int = 0


class Episode:
    """One sample, or a branch of one. Opened by `Client.episode`."""

    def __init__(self, shared: _Shared, row: _Row, ended: FinishReason | None = None) -> None:
        self._shared, self._row, self._ended = shared, row, ended
        self._spoken: _Row | None = None  # where the last turn is

    @classmethod
    def opened(
        cls, number: int, request: Request, ask: Ask, limits: Limits, tokenizer: Any, chat: Chat | None,
        further: Callable[[], None], look: Look | None = None,
    ) -> Episode:  # fmt: skip
        """The sample with this number, which begins with `request`."""
        row = _Row((0,), request, [] if chat is None else list(chat.begin))
        if row.messages and row.messages[-1]["role"] == "assistant":  # it continues what the prompt ends with
            row.reply.append(functools.partial(str, row.messages.pop()["content"]))
        return cls(_Shared(number, request, ask, limits, tokenizer, chat, further, look, [row]), row)

    @property
    def number(self) -> int:
        return self._shared.number

    @property
    def over(self) -> bool:
        """Whether a budget has ended it: nothing is sampled any more."""
        return self._ended is not None

    @property
    def num_turns(self) -> int:
        """Of the policy, over all rows and branches."""
        return self._shared.num_turns

    @property
    def at(self) -> tuple[str, str]:
        """The request of this row, and the place where it stands (`kept_turns.py`)."""
        request = self._row.request
        return request.id, place_of(request.seed, request.prompt, *self._row.pieces)

    @property
    def messages(self) -> list[Message]:
        """The conversation of this row so far, as the chat template is given it."""
        return [*self._row.conversation, *self._row.said]

    async def generate(self) -> Turn:
        """What the policy says next, to its own end or that of a budget; of one that is over nothing.

        Raises RowError where the engine refuses this very request, and what an engine that ended raises.
        """
        row, shared = self._row, self._shared
        if not self._has_room():
            self._ended = self._ended or "length"
            return Turn(_NO_TOKENS, self._ended, lambda **_: "")
        row.answered()
        begin = row.size
        shared.num_turns += 1
        done = row.done = await shared.ask(row.next())
        row.heard, self._spoken = _NO_TOKENS, row
        shared.further()
        if done.finish_reason != "stop":
            self._ended = done.finish_reason
        tokens = done.tokens[begin:]
        closed = done.finish_reason == "stop" and len(tokens) and int(tokens[-1]) in row.request.params.stop_token_ids
        written = _Written(shared.tokenizer, tokens[:-1] if closed else tokens)
        row.reply.append(written)
        shared.turns.append(("assistant", functools.partial(written, skip_special_tokens=True)))
        return Turn(tokens, done.finish_reason, written)

    async def say(self, said: str | Sequence[Message]) -> None:
        """Something to the policy, which its next turn answers: messages behind its reply, as the chat template writes them, with
        media in their parts, or text as it is. Where there is no room for it, the episode ends.

        Raises RowError for messages that the template does not take, and where there is no reply that they follow; Unseen for
        media that cannot be shown, and where the template rewrites earlier turns in a run that shows media in turns;
        ConfigError where it does with `rollout.max_rows` 1.
        """
        row, shared = self._row, self._shared
        shared.further()
        if self.over:
            return
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        shared.turns += [(str(each["role"]), functools.partial(_text_of, each.get("content"))) for each in messages]
        if isinstance(said, str):
            row.answered()
            row.heard = np.concatenate([row.heard, await self._encoded(said)])
            row.reply.append(functools.partial(str, said))
        else:
            if not row.reply or not row.messages:
                raise RowError(
                    f"sample {self.number}: messages must be said behind a reply to messages, got "
                    f"{'a row that began with text. Say text' if row.reply else 'none. Put them into the prompt'}"
                )
            chat = self._chat()
            said, refs = with_parts(chat.name, said)
            whole, refs = [*row.said, *said], (*row.refs, *refs)
            text, written = await _beside(
                self._following, chat, row.conversation, whole, read=not refs, size=_size(whole)
            )
            if text is None:
                why = "a chat template that rewrites earlier turns"
                if self._sees() or shared.limits.max_turn_bytes:  # it depends on what was said, such as a thought
                    raise Unseen(f"sample {self.number}: one with media must have one row, got another by {why}")
                await self._anew([*row.conversation, *whole], why)
                return
            between, media = await self._looked(text, refs) if refs else (written, None)
            ended = row.done is not None and not len(row.heard) and row.done.tokens[-1:].tolist()
            closed = bool(ended) and ended == between[:1].tolist()  # the policy has closed its turn itself
            row.said, row.refs, row.between = whole, refs, between[closed:]
            row.coming = None if media is None else (int(closed), media)
        if not self._has_room():
            self._ended = "length"

    async def new_context(self, begins: str | Sequence[Message]) -> None:
        """Goes on from another prompt, in another row of the same sample: with a summary in the place of what was said, say.
        Where there is no room for it, the episode ends; ConfigError where `rollout.max_rows` is 1."""
        await self._anew(begins, "Episode.new_context")

    async def branch(self, begins: str | Sequence[Message] | None = None) -> Episode:
        """Another line of the same sample, with rows of its own out of the same budgets: a sub-agent, which begins with this
        prompt; or without one another way to go on from here, which reads what was sampled so far and does not train it again."""
        row, why = self._row, "Episode.branch"
        if begins is None:
            row.answered()
            begun = np.concatenate([row.request.prompt, row.tokens]), list(row.messages), list(row.reply)
        else:
            begun = await self._prompt(begins)
        other = self._open((*row.path, next(row.branches), 0), *begun, why)
        return Episode(self._shared, other or row, None if other else "length")

    def reward(self, value: float) -> None:
        """What the last turn is worth. A sample is worth the sum of its turns, and `reward.function` is not asked then."""
        row = self._spoken
        if row is None or row.done is None or not math.isfinite(value):
            raise RowError(
                f"sample {self.number}: reward must be a finite number behind a turn, got {value}. Correct it"
            )
        row.rewards.append((len(row.done.tokens) - 1, float(value)))

    def abort(self) -> None:
        """Ends it from outside: nothing is sampled any more, and what there is stands."""
        self._ended = "cancelled"

    def made(self, error: str | None = None) -> Made:
        """The sample as it is, the rows of a branch in front of the one that it left, so that what the sample came to is the
        last. One without a token gets one that nobody sampled, since a row has a response."""
        rows = [row for row in self._shared.rows if row.done is not None]
        rows.sort(key=lambda row: (*row.path, math.inf))
        found = [SampleRow(row.request.prompt, self._whole(row), tuple(row.rewards), _answered(row)) for row in rows]
        worth = [value for row in rows for _, value in row.rewards]
        found = found or [unsaid(self._shared.root.prompt)]
        said = self._shared.turns
        while said and said[-1][0] != "assistant":  # nobody has answered it
            said.pop()
        turns = [{"role": role, "content": content()} for role, content in said] if len(said) > 1 else ()
        return Made(self.number, tuple(found), sum(worth) if worth and error is None else None, error, turns=turns)

    def _whole(self, row: _Row) -> Completion:
        assert row.done is not None
        experts = row.done.routed_experts
        if experts is not None and len(experts) != len(row.request.prompt) + len(row.done.tokens) - 1:
            experts = None  # no engine has told of all of them
        return replace(row.done, finish_reason=self._ended or row.done.finish_reason, routed_experts=experts)

    def _has_room(self) -> bool:
        """For a turn."""
        limits, row = self._shared.limits, self._row
        more = limits.max_turns is None or self._shared.num_turns < limits.max_turns
        return not self.over and more and row.size < row.request.params.max_new_tokens

    # ---- rows -------------------------------------------------------------------------------------------------------

    async def _anew(self, begins: str | Sequence[Message], why: str) -> None:
        """Goes on in a row that begins so."""
        row, shared = self._row, self._shared
        begun = await self._prompt(begins)
        if row.done is None:  # it has nothing to train
            shared.rows.remove(row)
        other = self._open((*row.path[:-1], row.path[-1] + 1), *begun, why)
        if other is None:
            self._ended = "length"
        else:
            self._row = other

    async def _prompt(
        self, begins: str | Sequence[Message]
    ) -> tuple[np.ndarray, list[Message], list[Callable[[], str]]]:
        if isinstance(begins, str):
            return await self._encoded(begins), [], []
        chat = self._chat()
        check_text(chat.name, begins)
        return await self._encoded(await asyncio.to_thread(chat.prompt, begins)), list(begins), []

    def _following(
        self, chat: Chat, before: Sequence[Message], said: Sequence[Message], read: bool
    ) -> tuple[str | None, np.ndarray]:
        """What the template writes of what is said behind a reply, as `Chat.behind`, and where it is read as text its tokens."""
        text = chat.behind(before, said)
        return text, _NO_TOKENS if text is None or not read else encoded(self._shared.tokenizer, text)

    def _open(
        self,
        path: tuple[int, ...],
        prompt: np.ndarray,
        messages: list[Message],
        reply: list[Callable[[], str]],
        why: str,
    ) -> _Row | None:
        """A row that begins with `prompt`; None where a budget has no room for it."""
        shared = self._shared
        root, limits = shared.root, shared.limits
        if self._sees():
            raise RowError(f"sample {self.number}: one with media must have one row, got another by {why}")
        if not len(prompt):
            raise RowError(f"sample {self.number}: a row must begin with a token, got none by {why}. Give it a text")
        if limits.max_rows == 1 and shared.rows:
            raise ConfigError(
                f"rollout.max_rows must be 2 or more with {why}, got 1. Raise it to the rows that a sample may have"
            )
        room = min(limits.max_new_tokens, limits.max_tokens - len(prompt))
        if len(shared.rows) >= limits.max_rows or room < 1:
            return None
        name = ".".join(map(str, path))
        request = replace(
            root, id=f"{root.id}.{name}", prompt=prompt.astype(np.int32), seed=sample_seed(root.seed, name),
            params=replace(root.params, max_new_tokens=room),
        )  # fmt: skip
        row = _Row(path, request, messages, reply)
        shared.rows.append(row)
        return row

    def _sees(self) -> bool:
        return self._shared.root.media is not None or any(row.shown or row.coming for row in self._shared.rows)

    def _chat(self) -> Chat:
        if self._shared.chat is None:
            raise RowError(
                f"sample {self.number}: messages must be written by a chat template, got a prompt of plain text. Say text, or "
                "set data.apply_chat_template to True"
            )
        return self._shared.chat

    async def _looked(self, text: str, refs: Sequence[MediaRef]) -> tuple[np.ndarray, MediaInputs | None]:
        """What a template has written of the messages that are said, with their media."""
        row, shared = self._row, self._shared
        look, most = shared.look, shared.limits.max_turn_bytes
        if look is None or not most:
            raise Unseen(
                f"media must be shown behind a prompt with a `media` section and media.max_turn_bytes above 0, got "
                f"{refs[0]}{'' if look is None else ' and media.max_turn_bytes 0'}. Set it to what those of a sample take"
            )
        taken = sum(media.num_bytes + _BESIDE_BYTES for _, media in row.shown) + _BESIDE_BYTES
        try:
            return await look(text, refs, most - taken)
        except MediaError as error:
            raise Unseen(str(error)) from error
        finally:
            shared.further()

    async def _encoded(self, text: str) -> np.ndarray:
        return await _beside(encoded, self._shared.tokenizer, text, size=len(text))


async def _beside(function: Callable[..., T], *args: Any, size: int, **keywords: Any) -> T:
    """Beside the loop, since what tools say may be long; in it what has so few characters that a thread would take longer."""
    call = functools.partial(function, *args, **keywords)
    return call() if size <= _SHORT else await asyncio.to_thread(call)


def _size(messages: Sequence[Message]) -> int:
    """Of what is said, in characters: media are as long as can be."""
    return sum(len(text) if isinstance(text := each.get("content"), str) else _SHORT + 1 for each in messages)


def _text_of(content: Any) -> str:
    """The text of a message, media left out."""
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return "".join(str(part.get("text", "")) for part in parts)


def unsaid(prompt: np.ndarray) -> SampleRow:
    """The row of a sample in which nobody said anything."""
    nothing = np.zeros(1, np.float32), np.full(1, NO_VERSION, np.int32)
    return SampleRow(prompt, Completion("", prompt[-1:].astype(np.int32), *nothing, "cancelled"))


def _answered(row: _Row) -> tuple[tuple[int, MediaInputs], ...]:
    """Of what was shown in a row that has a turn, what one of its turns is behind."""
    assert row.done is not None
    end = len(row.request.prompt) + len(row.done.tokens)
    return tuple((at, media) for at, media in row.shown if at + media.positions.shape[1] <= end)


class _Written:
    """What says these tokens as text, or with `skip_special_tokens` as `text_of`; decoded once, when it is asked."""

    __slots__ = ("_texts", "_tokenizer", "_tokens")

    def __init__(self, tokenizer: Any, tokens: np.ndarray) -> None:
        self._tokenizer, self._tokens = tokenizer, tokens.copy()  # not the row's, which would stay for each turn
        self._texts = dict[bool, str]()

    def __call__(self, skip_special_tokens: bool = False) -> str:
        if (found := self._texts.get(skip_special_tokens)) is None:
            said = self._tokens.tolist()
            skips = skip_special_tokens and not _hidden(self._tokenizer).isdisjoint(said)
            found = text_of(self._tokenizer, said) if skips else decoded(self._tokenizer, said)
            self._texts |= {skips: found, skip_special_tokens: found}
        return found


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of sampled tokens without special ones, except marks of thoughts, by which rewards find the answer."""
    hidden = _hidden(tokenizer)
    return decoded(tokenizer, [token for token in tokens if token not in hidden])


@functools.lru_cache(16)
def _hidden(tokenizer: Any) -> frozenset[int]:
    added = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    special = added | {*tokenizer.all_special_ids}
    return frozenset(token for token in special if not is_thought_mark(tokenizer.decode([token])))
