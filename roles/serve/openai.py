"""OpenAI's /v1/chat/completions and /v1/completions.

Owns their fields, how a conversation becomes a prompt, and the objects of a chat and of a completion, whole and as chunks of a
stream. Does not own the way of a request (`answering.py`), what a message may be (`conversation.py`), or text and tokens. A field
that would change the answer and is not supported is refused; those that would not, such as `user` or `store`, may be sent.

    POST /v1/chat/completions   X-Rondo-Session: task-7     {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    chat   {"choices": [{"message": {"content", "reasoning_content", "tool_calls"}, "finish_reason", "logprobs"}], "usage"}
    chunk  {"choices": [{"delta": {...}, "finish_reason": null}]} .. , the last one with usage where it was asked for

Beside OpenAI's fields a choice has, with `return_token_ids`, `token_ids` and `policy_versions`, and an answer `prompt_token_ids`.

Invariant: the prompt of a call is what the chat template makes of its messages; in a session its tokens begin with recorded ones
wherever the text does (`trajectory.py`).
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from rondo.roles.serve.answering import Asked
from rondo.roles.serve.calls import CallReader, call_reader
from rondo.roles.serve.conversation import arguments_of, meaning_of, messages_of, tools_of
from rondo.roles.serve.fields import Count, Fields, Name, require_off, shown
from rondo.roles.serve.output import OutputReader, Part
from rondo.roles.serve.pieces import REPLACEMENT, Pieces, pieces_of
from rondo.roles.serve.prompt_work import json_of
from rondo.roles.serve.requests import Answer
from rondo.roles.serve.sampling import Sampling, require_samples
from rondo.roles.serve.service import Service, in_slices
from rondo.runtime.errors import ConfigError

_MAX_TOP = 20


class _StreamOptions(Fields):
    ignored: ClassVar = frozenset({"include_obfuscation", "continuous_usage_stats"})
    include_usage: bool = False


class _Body(Sampling):
    """What both endpoints have."""

    ignored: ClassVar = frozenset(
        {
            "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "prediction",
        }
    )  # fmt: skip
    model: Name | None = None
    max_new_tokens: Count | None = Field(None, alias="max_tokens")
    priority: int = 0
    return_token_ids: bool = False
    stream: bool = False
    stream_options: Annotated[Any, PlainValidator(lambda value: _StreamOptions.of(value, "stream_options"))] = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must come with stream, got no stream. Remove them")
        return self


class ChatBody(_Body):
    off: ClassVar = Sampling.off | {
        "parallel_tool_calls": (True,), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
        "response_format": ({"type": "text"},), "reasoning_effort": (), "verbosity": ("medium",),
    }  # fmt: skip
    why: ClassVar = {
        "functions": "tools have replaced it",
        "function_call": "tool_choice has replaced it",
        "reasoning_effort": "templates differ in what they know; set it in chat_template_kwargs",
    }
    messages: Any = None
    tools: Any = None
    tool_choice: Any = "auto"
    chat_template_kwargs: Any = Field({})
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)


class TextBody(_Body):
    off: ClassVar = Sampling.off | {"echo": (False,), "suffix": ("",)}
    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    best_of: Any = 1


async def chat(service: Service, session: str | None, given: Any) -> Asked:
    body, tokenizer = ChatBody.of(given), service.tokenizer
    service.require_model(body.model)
    messages = messages_of(body.messages, tokenizer.chat_template)
    tools = tools_of(body.tools, body.tool_choice)
    arguments = arguments_of(body.chat_template_kwargs, tokenizer)
    num_top = body.top_logprobs
    if num_top and (not body.logprobs or num_top > _MAX_TOP):
        raise ConfigError(f"top_logprobs must be 0 to {_MAX_TOP}, and come with logprobs, got {num_top}. Correct it")
    told = {"messages": messages, "tools": tools, "own": dict(service.template_args), "given": arguments}
    asked = _OpenAI(service, session, body, "chatcmpl", num_top if body.logprobs else None)
    if session is not None:
        asked.messages = [(message, meaning_of(message)) for message in messages]
        asked.beside = json_of([told["tools"], told["own"], told["given"]])
    text = await _as_sampled(asked, told) or await service.work.render(told, most=service.max_chars)
    asked.reasoning = text.rstrip().endswith("<think>")
    asked.calls = None if tools is None else call_reader(tokenizer.chat_template, tools)
    prompt, most = await asked.prompt(text, chat=True), body.max_completion_tokens or body.max_new_tokens
    asked.ask(body, prompt, asked.id, most=most, num_top=num_top, priority=body.priority)
    return asked


async def _as_sampled(asked: Asked, told: dict[str, Any]) -> str | None:
    """Return the text of a conversation that goes on from a recorded reply: the text that was recorded, and what the template
    writes behind it. None where no message is such a reply, and where the template rewrites what stands in front of it."""
    service, session = asked.service, asked.session
    if session is None:
        return None
    replies = service.trajectories.replies(session, asked.beside, [meaning for _, meaning in asked.messages])
    if not replies:
        return None
    last, said = max(replies), list(told["messages"])
    for at, span in replies.items():
        said[at] = {"role": "assistant", "content": span.text}
    behind = await service.work.behind(told | {"messages": said}, last + 1)
    if behind is None:
        return None
    known, pieces = replies[last], pieces_of(service.tokenizer)
    ended = int(known.tokens[-1]) in pieces.special  # the policy has ended its turn itself
    return known.text_to_here() + behind.removeprefix(pieces.alone(int(known.tokens[-1])) if ended else "")


async def completions(service: Service, session: str | None, given: Any) -> Asked:
    body = TextBody.of(given)
    service.require_model(body.model)
    require_off("best_of", body.best_of, (1, body.n))
    prompts, num_top = _prompts(body.prompt), body.logprobs
    require_samples(len(prompts) * body.n)
    asked = _OpenAI(service, session, body, "cmpl", num_top)
    for number, each in enumerate(prompts):
        asked.ask(
            body, await asked.prompt_of(each, "prompt"), f"{asked.id}-{number}", most=body.max_new_tokens or 16,
            num_top=num_top or 0, priority=body.priority,
        )  # fmt: skip
    return asked


def _prompts(given: Any) -> list[Any]:
    """Texts, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return [given]
    if isinstance(given, list) and given and all(isinstance(each, str | list) for each in given):
        return given
    raise ConfigError(f"prompt must be text, token ids, or a list of either, got {shown(given)}. Correct it")


@dataclass(slots=True)
class _Told:
    """What a stream has told of one sample: `reader` has read so many of its characters."""

    reader: OutputReader | None
    num_chars: int = 0
    num_tokens: int = 0
    num_calls: int = 0
    begun: bool = False

    def parts(self, answer: Answer) -> list[Part]:
        """What the text says beyond; at its end all that is left."""
        text = answer.text[self.num_chars :]
        self.num_chars += len(text)
        if self.reader is None:
            return [Part("content", text)] if text else []
        return self.reader.feed(text) + (self.reader.finish() if answer.finish is not None else [])


class _OpenAI(Asked):
    """`num_top` None: no log-probs."""

    reasoning = False
    """The prompt of a chat ended inside of it."""
    calls: CallReader | None = None
    """Reads those of tools, where there are any."""

    def __init__(self, service: Service, session: str | None, body: _Body, kind: str, num_top: int | None) -> None:
        super().__init__(service, session, stream=body.stream)
        self._body, self._num_top, self._chat = body, num_top, isinstance(body, ChatBody)
        self._told = defaultdict[int, _Told](self._nothing_told)
        self.id = f"{kind}-{uuid.uuid4().hex}"
        name = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": self.id, "object": f"{name}.chunk" if self._chat and self.stream else name, "created": int(time.time()),
            "model": service.model_name, "system_fingerprint": f"rondo-policy-{service.engine.version}",
        }  # fmt: skip

    async def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [await self._choice(index, answer) for index, answer in enumerate(answers)]
        found = self._head | {"choices": choices, "usage": self._usage(answers)}
        return found | ({"prompt_token_ids": self.asks[0].prompt.tolist()} if self._body.return_token_ids else {})

    async def part(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """Nothing where all that is new is kept back."""
        told = self._told[index]
        deltas = [self._delta(told, part) for part in told.parts(answer)]
        start, told.num_tokens = told.num_tokens, len(answer.sampled.tokens)
        extra = await self._extra(answer, start) if told.num_tokens > start else {}
        if answer.finish is not None or (extra and not deltas):
            deltas.append({} if self._chat else {"text": ""})
        if not deltas:
            return []
        if self._chat and not told.begun:
            deltas[0] = {"role": "assistant"} | deltas[0]
        told.begun = True
        choices: list[dict[str, Any]] = [
            {"index": index, "finish_reason": None, "logprobs": None} | ({"delta": delta} if self._chat else delta)
            for delta in deltas
        ]
        choices[0] |= extra
        if answer.finish is not None:
            choices[-1]["finish_reason"] = _reason(answer, told.num_calls > 0)
        return [self._head | {"choices": [choice]} for choice in choices]

    def end(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        options = self._body.stream_options
        usage = options is not None and options.include_usage
        return [self._head | {"choices": [], "usage": self._usage(answers)}] if usage else []

    def reply(self, answer: Answer) -> dict[str, Any] | None:
        """The assistant's message."""
        if not self._chat:
            return None
        parts = self._nothing_told().parts(answer)
        content, reasoning = (
            "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")
        )
        calls = [self._call(number, part) for number, part in enumerate(part for part in parts if part.kind == "call")]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    async def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = self.reply(answer)
        reason = _reason(answer, bool(message and "tool_calls" in message))
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        choice |= {"text": answer.text} if message is None else {"message": message}
        return choice | await self._extra(answer, 0)

    def _nothing_told(self) -> _Told:
        return _Told(OutputReader(calls=self.calls, reasoning=self.reasoning) if self._chat else None)

    def _delta(self, told: _Told, part: Part) -> dict[str, Any]:
        if not self._chat:
            return {"text": part.text}
        if part.kind != "call":
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        told.num_calls += 1
        return {"tool_calls": [{"index": told.num_calls - 1} | self._call(told.num_calls - 1, part)]}

    def _call(self, number: int, part: Part) -> dict[str, Any]:
        """Return a call of a tool. In a session its id follows from the prompt and the call: the record and an answer that is
        sent again have the id that the client was sent."""
        digest = blake2b(self.asks[0].prompt.tobytes(), digest_size=12)
        digest.update(repr((self.session or self.id, number, part.name, part.text)).encode())
        function = {"name": part.name, "arguments": part.text}
        return {"id": f"call_{digest.hexdigest()}", "type": "function", "function": function}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Tokens; a prompt with several samples counts once."""
        num_prompt = sum(prompt.tokens.size for prompt in self.prompts.values())
        num_new = sum(len(answer.sampled.tokens) for answer in answers)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    async def _extra(self, answer: Answer, start: int) -> dict[str, Any]:
        """Log-probs and ids of the tokens from `start` on, where they were asked for."""
        sampled, found = answer.sampled, dict[str, Any]()
        if self._num_top is not None:
            found["logprobs"] = await self._log_probs(answer, start)
        if self._body.return_token_ids:
            found["token_ids"] = sampled.tokens[start:].tolist()
            found["policy_versions"] = sampled.policy_versions[start:].tolist()
        return found

    async def _log_probs(self, answer: Answer, start: int) -> dict[str, Any]:
        """In the endpoint's form."""
        tokens, values = answer.sampled.tokens[start:].tolist(), answer.sampled.log_probs[start:].tolist()
        places = range(len(tokens))
        pieces = pieces_of(self.service.tokenizer)

        def others(place: int) -> list[tuple[int, float]]:
            return answer.likeliest(start + place) if self._num_top else []

        def told(place: int) -> dict[str, Any]:
            top = [_token(pieces, *other) for other in others(place)]
            return _token(pieces, tokens[place], values[place]) | {"top_logprobs": top}

        if self._chat:
            return {"content": await in_slices(places, told), "refusal": None}
        texts = list(map(pieces.alone, tokens))
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": await in_slices(places, lambda place: {pieces.alone(each): p for each, p in others(place)})
            if self._num_top
            else None,
            "text_offset": list(itertools.accumulate(map(len, texts), initial=0))[:-1],
        }


def _reason(answer: Answer, called: bool) -> str:
    assert answer.finish is not None
    return "tool_calls" if called and answer.finish.kind == "stop" else answer.finish.kind


def _token(pieces: Pieces, token: int, value: float) -> dict[str, Any]:
    text, raw = pieces.alone(token), pieces.raw(token)
    # A part of a character has no text of its own, but its bytes, where they are known.
    known = raw if raw is not None else None if REPLACEMENT in text else text.encode()
    return {"token": text, "logprob": value, "bytes": None if known is None else list(known)}
