"""Answers: samples in the form of OpenAI's endpoints, whole and as chunks of a stream.

Owns the objects of a chat and of a completion, and what of each part of a stream is new. Owns neither tokens nor text.

    chat   {"choices": [{"message": {"content", "reasoning_content", "tool_calls"}, "finish_reason", "logprobs"}], "usage"}
    chunk  {"choices": [{"delta": {...}, "finish_reason": null}]} .. , the last one with usage where it was asked for

Beside OpenAI's fields a choice has, with `return_token_ids`, `token_ids` and `policy_versions`, and an answer `prompt_token_ids`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rondo.roles.serve.calls import CallReader
from rondo.roles.serve.errors import TurnedDown
from rondo.roles.serve.output import OutputReader, Part
from rondo.roles.serve.pieces import REPLACEMENT, Pieces, pieces_of
from rondo.roles.serve.requests import Answer, Ask
from rondo.roles.serve.service import in_slices


@dataclass(frozen=True, slots=True)
class Told:
    """`Form` of one request. `chat`: with messages, not bare text; `calls` reads those of tools, where there are any;
    `reasoning`: the prompt ended inside of it; `usage`: a stream ends with it."""

    id: str
    model: str
    version: int
    tokenizer: Any
    asks: Sequence[Ask]
    chat: bool
    log_probs: bool
    num_top: int
    token_ids: bool
    usage: bool
    calls: CallReader | None = None
    reasoning: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _writers: dict[int, ChunkWriter] = field(default_factory=dict)

    async def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [await self._choice(index, answer) for index, answer in enumerate(answers)]
        found = self.head(chunk=False) | {"choices": choices, "usage": self._usage(answers)}
        return found | ({"prompt_token_ids": self.asks[0].prompt.tolist()} if self.token_ids else {})

    async def part(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        return await self._writers.setdefault(index, ChunkWriter(self, index)).chunks(answer)

    def end(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return [self.head(chunk=True) | {"choices": [], "usage": self._usage(answers)}] if self.usage else []

    def reply(self, answer: Answer) -> dict[str, Any] | None:
        """The assistant's message."""
        if not self.chat:
            return None
        reader = OutputReader(calls=self.calls, reasoning=self.reasoning)
        parts = reader.feed(answer.text) + reader.finish()
        content = "".join(part.text for part in parts if part.kind == "content")
        reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
        calls = [_call(part) for part in parts if part.kind == "call"]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": f"rondo-policy-{self.version}",
        }  # fmt: skip

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Tokens; a prompt with several samples counts once."""
        prompts = {ask.rid: int(ask.prompt.size) for ask in self.asks}
        num_prompt, num_new = sum(prompts.values()), sum(len(answer.tokens) for answer in answers)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    async def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """One sample."""
        message = self.reply(answer)
        reason = _reason(answer, bool(message and "tool_calls" in message))
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        choice |= {"text": answer.text} if message is None else {"message": message}
        choice["logprobs"] = await _log_probs(self, answer, 0)
        if self.token_ids:
            choice |= {"token_ids": answer.tokens.tolist(), "policy_versions": answer.policy_versions.tolist()}
        return choice


class ChunkWriter:
    """The chunks of one sample of a stream: each tells what is new since the one before."""

    def __init__(self, form: Told, index: int) -> None:
        self._form = form
        self._index = index
        self._reader = OutputReader(calls=form.calls, reasoning=form.reasoning)
        self._num_chars = self._num_tokens = self._num_calls = 0
        self._begun = False

    async def chunks(self, answer: Answer) -> list[dict[str, Any]]:
        """What the sample so far, or whole, brings: nothing where all that is new is kept back."""
        text = answer.text[self._num_chars :]
        self._num_chars += len(text)
        deltas = (
            self._deltas(text, answer.finish is not None) if self._form.chat else ([{"text": text}] if text else [])
        )
        extra = await self._extra(answer)
        if answer.finish is not None or (extra and not deltas):
            deltas.append({} if self._form.chat else {"text": ""})
        made = []
        for delta in deltas:
            choice: dict[str, Any] = {"index": self._index, "finish_reason": None, "logprobs": None}
            choice |= {"delta": delta} if self._form.chat else delta
            made.append(choice)
        if made:
            made[0] |= extra
            if self._form.chat and not self._begun:
                made[0]["delta"] = {"role": "assistant"} | made[0]["delta"]
            self._begun = True
        if answer.finish is not None:
            made[-1]["finish_reason"] = _reason(answer, self._num_calls > 0)
        return [self._form.head(chunk=True) | {"choices": [choice]} for choice in made]

    def _deltas(self, text: str, ended: bool) -> list[dict[str, Any]]:
        parts = self._reader.feed(text) + (self._reader.finish() if ended else [])
        found: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "call":
                found.append({"tool_calls": [{"index": self._num_calls} | _call(part)]})
                self._num_calls += 1
            else:
                found.append({"content" if part.kind == "content" else "reasoning_content": part.text})
        return found

    async def _extra(self, answer: Answer) -> dict[str, Any]:
        """Log-probs and ids of the tokens that are new."""
        start, self._num_tokens = self._num_tokens, len(answer.tokens)
        if start == self._num_tokens:
            return {}
        found: dict[str, Any] = {}
        if self._form.log_probs:
            found["logprobs"] = await _log_probs(self._form, answer, start)
        if self._form.token_ids:
            found["token_ids"] = answer.tokens[start:].tolist()
            found["policy_versions"] = answer.policy_versions[start:].tolist()
        return found


def _reason(answer: Answer, called: bool) -> str:
    assert answer.finish is not None
    return "tool_calls" if called and answer.finish.kind == "stop" else answer.finish.kind


def _call(part: Part) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.text}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


async def _log_probs(form: Told, answer: Answer, start: int) -> dict[str, Any] | None:
    """Of the tokens from `start` on, in the endpoint's form."""
    if not form.log_probs:
        return None
    if form.num_top and answer.top is None and len(answer.tokens):
        raise TurnedDown(501, "top_logprobs must be 0 with this engine, which does not tell them. Remove it")
    tokens, values = answer.tokens[start:].tolist(), answer.log_probs[start:].tolist()
    pieces = pieces_of(form.tokenizer)

    def others(place: int) -> list[tuple[int, float]]:
        return likeliest(answer, start + place) if form.num_top else []

    def told(place: int) -> dict[str, Any]:
        top = [_token(pieces, *other) for other in others(place)]
        return _token(pieces, tokens[place], values[place]) | {"top_logprobs": top}

    places = range(len(tokens))
    if form.chat:
        return {"content": await in_slices(places, told), "refusal": None}
    texts = list(map(pieces.alone, tokens))
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": await in_slices(places, lambda place: {pieces.alone(token): p for token, p in others(place)})
        if form.num_top
        else None,
        "text_offset": offsets[:-1],
    }


def likeliest(answer: Answer, place: int) -> list[tuple[int, float]]:
    """The tokens that are known to be likeliest there, with their log-probs."""
    assert answer.top is not None
    ids, values = answer.top.tokens[place].tolist(), answer.top.log_probs[place].tolist()
    return [(token, value) for token, value in zip(ids, values, strict=True) if not math.isnan(value)]


def _token(pieces: Pieces, token: int, value: float) -> dict[str, Any]:
    text, raw = pieces.alone(token), pieces.raw(token)
    # A part of a character has no text of its own, but its bytes, where they are known.
    known = raw if raw is not None else None if REPLACEMENT in text else text.encode()
    return {"token": text, "logprob": value, "bytes": None if known is None else list(known)}
