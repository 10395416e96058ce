"""Answering: one request of either dialect, from its body to what is told and recorded.

Owns the way that all requests go, and what is recorded of a session's calls. Does not own the fields of a dialect and the form
of its answers (`openai.py`, `generate.py`), or sampling (`requests.py`).

    body -> the dialect reads it -> Asked: samples, their prompts -> sampled -> recorded -> the dialect's Asked writes it

Invariant: a sample that ended in a session is recorded before it is told, whole or as a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import numpy as np
from aiohttp import web

from rondo.roles.engines.engine import SamplingParams
from rondo.roles.engines.stops import token_stops
from rondo.roles.serve.conversation import meanings_of
from rondo.roles.serve.prompt_work import json_of
from rondo.roles.serve.requests import Answer, Ask, one_seed
from rondo.roles.serve.sampling import Sampling, require_tops, token_ids
from rondo.roles.serve.service import SESSION, Service, stream_events
from rondo.roles.serve.spans import Span
from rondo.roles.serve.text import text_of
from rondo.roles.serve.trajectory import Prompt
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.admin.server import json_answer
from rondo.runtime.errors import ConfigError

REUSED = "X-Rondo-Reused-Tokens"
PARTED = "X-Rondo-Parted"
_RETRIES = "X-Stainless-Retry-Count"
"""How often OpenAI's clients have sent a request before."""


class Asked(ABC):
    """One request as it was read: its samples, and the prompt behind each `rid`. A dialect's own writes them; `index` is a
    sample's place among `asks`."""

    messages: Sequence[tuple[Mapping[str, Any], bytes]] = ()
    """Of a chat, each with its meaning."""
    beside = b""
    """What its template is given beside them."""
    is_repeated = False
    """Whether its session was answered the same request before."""

    def __init__(self, service: Service, session: str | None, *, stream: bool) -> None:
        self.service = service
        self.session = session
        self.stream = stream
        self.asks: list[Ask] = []
        self.prompts: dict[str, Prompt] = {}
        self.sampling: Sampling | None = None

    @abstractmethod
    async def whole(self, answers: Sequence[Answer]) -> Any:
        """All of them, in order, as one answer."""

    @abstractmethod
    async def part(self, index: int, answer: Answer) -> list[Any]:
        """What a stream tells of a sample so far, or at its end."""

    def end(self, answers: Sequence[Answer]) -> list[Any]:
        """What a stream ends with."""
        return []

    def reply(self, answer: Answer) -> dict[str, Any] | None:
        """The message that a sample is, in a chat."""
        return None

    def ask(
        self,
        sampling: Sampling,
        prompt: Prompt,
        rid: str,
        *,
        most: int | None,
        num_top: int = 0,
        priority: int = 0,
        affinity: str | None = None,
    ) -> None:
        """Samples of one more prompt, of `most` tokens or as many as fit. ConfigError for one that leaves no room in the server's
        sequences."""
        tokens, service = prompt.tokens, self.service
        room = service.max_length - tokens.size
        if service.samples is not None and tokens.size:
            room = max(1, room)  # what there is room for, the sample's budgets say (`admitted`)
            most = min(most or room, room)
        if tokens.size < 1 or room < 1:
            raise ConfigError(
                f"the prompt must have 1 to {service.max_length - 1} tokens, got {tokens.size}. Shorten it"
            )
        if most is not None and most > room:
            raise ConfigError(
                f"prompt and new tokens must fit into {service.max_length} tokens, got {tokens.size} + {most}. "
                "Shorten the prompt, or ask for fewer tokens"
            )
        ends = set(sampling.stop_token_ids) | set(() if sampling.ignore_eos else service.stop_token_ids or ())
        if sampling.stop:
            ends |= set(token_stops(service.tokenizer, sampling.stop).values())
        params = SamplingParams(
            most or room, sampling.temperature, sampling.top_p, sampling.top_k, tuple(sorted(ends)), num_top
        )
        self.prompts[rid], self.sampling = prompt, sampling
        self.asks += [
            Ask(
                rid, tokens, params, one_seed(sampling.seed, index), index, sampling.stop, sampling.no_stop_trim,
                sampling.skip_special_tokens, priority, self.session or affinity,
            )
            for index in range(sampling.n)
        ]  # fmt: skip

    async def prompt(self, text: str, *, chat: bool) -> Prompt:
        """The prompt with this text, in a session with recorded tokens first: what `render` has made of a `chat`, or bare text,
        with the tokens that the tokenizer puts in front of one. ConfigError for one that cannot fit."""
        work, most = self.service.work, self.service.max_chars
        if len(text) > most:
            raise ConfigError(f"a prompt must have at most {most} characters, got {len(text)}. Shorten it")

        async def encode(rest: str, after: int | None) -> np.ndarray | None:
            return await work.encode(rest, special=not chat and after is None, after=after, marked=chat)

        return await self.service.trajectories.prompt(self.session, text, encode)

    async def prompt_of(self, given: object, name: str) -> Prompt:
        """Of bare text, or of token ids in the field `name`; in a session with their text."""
        if isinstance(given, str):
            return await self.prompt(given, chat=False)
        tokens, tokenizer = token_ids(given, name, self.service.max_length), self.service.tokenizer
        if self.session is None:
            return Prompt(tokens, "", Span.root())
        return self.service.trajectories.prompt_of_tokens(
            self.session, tokens, lambda rest, after: text_of(tokenizer, rest, after=after)
        )

    def record(self, ask: Ask, answer: Answer) -> None:
        """A sample that ended, where it is of a session."""
        if self.session is None:
            return
        text = text_of(self.service.tokenizer, answer.sampled.tokens, after=int(ask.prompt[-1]))
        message = self.reply(answer)
        self.service.trajectories.record(
            self.session, self.prompts[ask.rid], ask, answer, text, beside=self.beside, messages=self.messages, reply=message,
            meanings=() if message is None else meanings_of(message),
        )  # fmt: skip

    def keep(self, digest: bytes, answers: Sequence[Answer]) -> None:
        """All of them, by the digest of their request, where it is of a session and nobody ended it."""
        ends = [answer.finish.kind for answer in answers if answer.finish is not None]
        if self.session is not None and "abort" not in ends:
            self.service.trajectories.answered(self.session, digest, answers)

    def headers(self) -> dict[str, str]:
        """What of a session's prompts was recorded, and why not all."""
        if self.session is None:
            return {}
        prompts = list(self.prompts.values())
        found = {SESSION: self.session, REUSED: str(sum(prompt.reused_tokens for prompt in prompts))}
        parted = next((prompt.parted for prompt in prompts if prompt.parted is not None), None)
        if parted is not None:
            found[PARTED] = parted.encode("ascii", "backslashreplace").decode()
        return found


Read = Callable[[Service, str | None, Any], Awaitable[Asked]]
"""Of a dialect: what a body asks for, in a session or none."""


async def answered(service: Service, request: web.Request, read: Read) -> web.StreamResponse:
    """Answer a request. One that its session was answered before is answered the same if its client says that it tries again, or
    if there is no room for another answer."""
    session, kept = service.session_of(request), service.trajectories
    with kept.calling(session), ExitStack() as admitted:
        async with service.body(request) as body:
            asked = await read(service, session, body)
            digest = b"" if session is None else blake2b(json_of([request.path, body])).digest()
            del body
        require_tops(asked.asks)
        past = None if session is None else kept.answers(session, digest)
        asked.is_repeated = past is not None
        if past is None or request.headers.get(_RETRIES, "0") == "0":
            try:
                if service.samples is not None:
                    admitted.enter_context(service.samples.admitted(asked))
                past = None
            except TurnedDown as refused:
                if past is None or refused.status != HTTPStatus.BAD_REQUEST:
                    raise
        if asked.stream:
            return await stream_events(request, _events(asked, digest, past), asked.headers())
        answers = past or await service.requests.answers(asked.asks)
        if past is None:
            for ask, answer in zip(asked.asks, answers, strict=True):
                asked.record(ask, answer)
            asked.keep(digest, answers)
        return json_answer(await asked.whole(answers), headers=asked.headers())


async def _events(asked: Asked, digest: bytes, past: Sequence[Answer] | None) -> AsyncGenerator[Any, None]:
    answers = dict[int, Answer]()
    async with aclosing(asked.service.requests.parts(asked.asks) if past is None else _again(past)) as parts:
        async for index, answer in parts:
            if answer.finish is not None:
                answers[index] = answer
                if past is None:
                    asked.record(asked.asks[index], answer)
            for event in await asked.part(index, answer):
                yield event
    if past is None:
        asked.keep(digest, [answers[index] for index in sorted(answers)])
    for event in asked.end([*answers.values()]):
        yield event


async def _again(past: Sequence[Answer]) -> AsyncGenerator[tuple[int, Answer], None]:
    for each in enumerate(past):
        yield each
