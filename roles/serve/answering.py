"""Answering: one request of either dialect, from its body to what is told and recorded.

Owns the way that all requests go, and what is recorded of a session's calls. Does not own the fields of a dialect and the form
of its answers (`openai.py`, `generate.py`), or sampling (`requests.py`).

    body -> the dialect reads it -> Asked: samples, their prompts, a Form -> sampled -> recorded -> the Form writes it

Invariant: a sample that ended in a session is recorded before it is told, whole or as a stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from rondo.roles.engines.engine import SamplingParams
from rondo.roles.engines.stops import token_stops
from rondo.roles.serve.conversation import said_in
from rondo.roles.serve.fields import Fields
from rondo.roles.serve.requests import Answer, Ask, one_seed
from rondo.roles.serve.sampling import Sampling, require_tops, token_ids
from rondo.roles.serve.service import SESSION, Service, json_answer, session_of, stream_events
from rondo.roles.serve.text import text_of
from rondo.roles.serve.trajectory import Prompt
from rondo.runtime.errors import ConfigError

REUSED = "X-Rondo-Reused-Tokens"
PARTED = "X-Rondo-Parted"


class Form(Protocol):
    """How a dialect writes the samples of one request; `index` is a sample's place."""

    async def whole(self, answers: Sequence[Answer]) -> Any:
        """All of them, in order, as one answer."""

    async def part(self, index: int, answer: Answer) -> list[Any]:
        """What a stream tells of a sample so far, or at its end."""

    def end(self, answers: Sequence[Answer]) -> list[Any]:
        """What a stream ends with."""

    def reply(self, answer: Answer) -> dict[str, Any] | None:
        """The message that a sample is, in a chat."""


@dataclass(slots=True)
class Asked:
    """One request as it was read: its samples, and the prompt behind each `rid`. `messages` are those of a chat."""

    session: str | None
    stream: bool
    messages: Sequence[Mapping[str, Any]] | None = None
    asks: list[Ask] = field(default_factory=list)
    prompts: dict[str, Prompt] = field(default_factory=dict)

    def ask(
        self,
        service: Service,
        sampling: Sampling,
        prompt: Prompt,
        rid: str,
        *,
        num_top: int = 0,
        priority: int = 0,
        affinity: str | None = None,
    ) -> None:
        """Samples of one more prompt. ConfigError for one that leaves no room in the server's sequences."""
        tokens, most = prompt.tokens, service.max_length
        room = most - tokens.size
        if tokens.size < 1 or room < 1:
            raise ConfigError(f"the prompt must have 1 to {most - 1} tokens, got {tokens.size}. Shorten it")
        if sampling.max_new_tokens is not None and sampling.max_new_tokens > room:
            raise ConfigError(
                f"prompt and new tokens must fit into {most} tokens, got {tokens.size} + {sampling.max_new_tokens}. "
                "Shorten the prompt, or ask for fewer tokens"
            )
        ends = set(sampling.stop_token_ids) | set(() if sampling.ignore_eos else service.stop_token_ids or ())
        if sampling.stops:
            ends |= set(token_stops(service.tokenizer, sampling.stops).values())
        params = SamplingParams(
            max_new_tokens=sampling.max_new_tokens or room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sorted(ends)),
            num_top=num_top,
        )
        self.prompts[rid] = prompt
        self.asks += [
            Ask(
                rid, tokens, params, one_seed(sampling.seed, index), index, sampling.stops, sampling.keep_stop,
                sampling.skip_special_tokens, priority, self.session or affinity,
            )
            for index in range(sampling.num_samples)
        ]  # fmt: skip


Read = Callable[[Service, str | None, Fields], Awaitable[tuple[Asked, Form]]]
"""Of a dialect: what the fields of a body ask for, in a session or none."""


async def answered(service: Service, request: web.Request, read: Read) -> web.StreamResponse:
    session = session_of(request)
    with service.trajectories.calling(session):
        async with service.body(request) as body:
            asked, form = await read(service, session, Fields(body, "the body"))
            del body
        require_tops(asked.asks)
        headers = _headers(asked)
        if asked.stream:
            return await stream_events(request, _events(service, asked, form), headers)
        answers = await service.requests.answers(asked.asks)
        for ask, answer in zip(asked.asks, answers, strict=True):
            _record(service, asked, form, ask, answer)
        return json_answer(await form.whole(answers), headers)


async def prompt_of(service: Service, session: str | None, given: object, name: str) -> Prompt:
    """Of bare text, or of token ids in the field `name`."""
    if isinstance(given, str):
        return await service.prompt(session, given, special=True)
    return service.prompt_of_tokens(session, token_ids(given, name, service.max_length))


async def _events(service: Service, asked: Asked, form: Form) -> AsyncGenerator[Any, None]:
    answers: list[Answer] = []
    async with aclosing(service.requests.parts(asked.asks)) as parts:
        async for index, answer in parts:
            if answer.finish is not None:
                answers.append(answer)
                _record(service, asked, form, asked.asks[index], answer)
            for event in await form.part(index, answer):
                yield event
    for event in form.end(answers):
        yield event


def _record(service: Service, asked: Asked, form: Form, ask: Ask, answer: Answer) -> None:
    if asked.session is None:
        return
    text = text_of(service.tokenizer, answer.tokens, after=int(ask.prompt[-1]))
    message = form.reply(answer)
    said = b"" if message is None else said_in(message)
    service.trajectories.record(
        asked.session, asked.prompts[ask.rid], ask, answer, text, messages=asked.messages, reply=message, said=said
    )


def _headers(asked: Asked) -> dict[str, str]:
    if asked.session is None:
        return {}
    prompts = list(asked.prompts.values())
    found = {SESSION: asked.session, REUSED: str(sum(prompt.reused_tokens for prompt in prompts))}
    parted = next((prompt.parted for prompt in prompts if prompt.parted is not None), None)
    if parted is not None:
        found[PARTED] = parted.encode("ascii", "backslashreplace").decode()
    return found
