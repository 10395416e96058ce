"""A server on a real socket over the embedded engine, whose model says what a test wants; and clients for it.

The model is a `Forward` that writes a given answer token by token, so that everything around it is real: slots, turns, cancels.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import torch

from rondo.models.tiny.tokenizer import END_OF_TURN, build_tokenizer
from rondo.roles.engines.embedded.embedded import EmbeddedEngine
from rondo.roles.engines.embedded.slots import Batch, SlotEngine
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.serve.app import listening
from rondo.roles.serve.prompt_work import Lane, PromptWork
from rondo.roles.serve.prompt_worker import do
from rondo.roles.serve.requests import Requests
from rondo.roles.serve.service import Service
from rondo.roles.serve.trajectory import Trajectories
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.pool import Outcome
from rondo.runtime.values import read_json

TOKEN = "a-token-of-a-test"
MODEL = "speaker"
BEGIN = "<|im_start|>assistant\n"
LIMIT_S = 60.0

TOOLS = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that shows tools, calls and reasoning as those of Qwen3 do."""


@functools.cache
def tokenizer() -> Any:
    made = build_tokenizer()
    made.chat_template = TOOLS
    return made


def ids(text: str, of: Any = None) -> list[int]:
    """A text's tokens."""
    found: list[int] = (of or tokenizer())(text, add_special_tokens=False)["input_ids"]
    return found


class Speaker:
    """Answers what `says` makes of the prompt: text, or tokens. Every other token has some probability, too."""

    modalities: tuple[str, ...] = ()
    keeps_prefixes = True
    held = False

    def __init__(self, says: Callable[[str], str | list[int]], own: Any) -> None:
        self._says = says
        self._tokenizer = own
        self._rows: dict[int, tuple[int, list[int]]] = {}  # slot -> where its answer begins, tokens
        self._begin = ids(BEGIN, own)
        self.num_calls = 0
        self.fails_at = 0
        self.holds: dict[int, tuple[threading.Event, threading.Event]] = {}
        self.vocab_size = len(own)

    def hold(self, call: int) -> tuple[threading.Event, threading.Event]:
        """Stops before this forward, counted from 1: (set when it is reached, to be set for it to go on)."""
        self.holds[call] = (threading.Event(), threading.Event())
        return self.holds[call]

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls in self.holds:
            reached, go_on = self.holds[self.num_calls]
            reached.set()
            assert go_on.wait(LIMIT_S)
        rows = []
        for slot, (token, position) in enumerate(zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)):
            begin, row = self._rows[slot]
            self._rows[slot] = begin, [*row[:position], token]
            rows.append(self._next(*self._rows[slot]))
        for prompt in batch.prompts:
            row = prompt.tokens.tolist()
            self._rows[prompt.slot] = self._answer_of(row), row
            rows.append(self._next(*self._rows[prompt.slot]))
        logits = torch.zeros(len(rows), self.vocab_size)
        logits[torch.arange(len(rows)), torch.tensor(rows)] = 30.0
        return logits

    def _answer_of(self, prompt: list[int]) -> int:
        """Where the answer begins: at the prompt's end, or before a part of it that was said in an earlier life."""
        size = len(self._begin)
        for end in range(len(prompt) - 1, size - 1, -1):
            if (
                prompt[end - size : end] == self._begin
                and self._said(prompt[:end])[: len(prompt) - end] == prompt[end:]
            ):
                return end
        return len(prompt)

    def _said(self, prompt: list[int]) -> list[int]:
        said = self._says(self._tokenizer.decode(prompt))
        return ids(said, self._tokenizer) if isinstance(said, str) else said

    def _next(self, begin: int, row: list[int]) -> int:
        if self.num_calls == self.fails_at:
            raise RuntimeError("the device is gone")
        tokens, done = self._said(row[:begin]), len(row) - begin
        end: int = self._tokenizer.convert_tokens_to_ids(END_OF_TURN)
        return tokens[done] if done < len(tokens) else end

    def copy(self, source: int, target: int, length: int) -> None:
        begin, row = self._rows[source]
        self._rows[target] = begin, row[:length]

    def clear(self, slot: int | None = None) -> None:
        self._rows.clear()

    def load(self, tensors: Any) -> None:
        pass

    def refresh(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Served:
    """A server, and what a test looks at behind it."""

    url: str
    client: SGLangClient
    openai: openai.AsyncOpenAI
    engine: EmbeddedEngine
    speaker: Any
    requests: Requests
    trajectories: Trajectories

    async def post(self, path: str, body: object = None) -> Any:
        return await self.client.post(path, body, deadline_s=LIMIT_S)

    async def get(self, path: str) -> Any:
        return await self.client.get(path, deadline_s=LIMIT_S)


@asynccontextmanager
async def computing() -> AsyncIterator[Callable[..., Any]]:
    """A compute thread."""
    with ThreadPoolExecutor(max_workers=1) as thread:

        async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)

        yield compute


def in_thread(own: Any) -> PromptWork:
    """What the processes do, by the same functions, without the time to start them."""

    async def run(lane: Lane, asked: bytes) -> Outcome:
        try:
            return Outcome(await asyncio.to_thread(do, own, read_json(asked)))
        except ConfigError as error:
            return Outcome(error=str(error), kind="ConfigError")

    return PromptWork(run)


@asynccontextmanager
async def serving(
    says: Callable[[str], str | list[int]] = lambda prompt: "hello",
    *,
    forward: Any = None,
    num_slots: int = 4,
    max_length: int = 1024,
    turn_s: float = 0.0,
    own: Any = None,
    experts: Callable[[int, int], np.ndarray] | None = None,
    work: PromptWork | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A server whose model answers what `says` makes of its prompt, or computes with `forward`; `experts` as SlotEngine's.
    Prompts are made in a thread unless there are processes for them."""
    own = own or tokenizer()
    speaker = forward or Speaker(says, own)
    async with computing() as compute:
        slots = SlotEngine(speaker, num_slots=num_slots, max_length=max_length, experts=experts)
        engine = EmbeddedEngine(slots, compute, turn_s=turn_s)
        settings |= {"tells_experts": experts is not None}
        service = Service(engine, own, work or in_thread(own), MODEL, max_length=max_length, **settings)
        try:
            async with listening(service, [TOKEN], "127.0.0.1", 0) as url, SGLangClient(url, api_key=TOKEN) as client:
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as agent:
                    yield Served(url, client, agent, engine, speaker, service.requests, service.trajectories)
        finally:
            await engine.close()


def prompt_ids(length: int = 5) -> list[int]:
    return np.arange(10, 10 + length).tolist()


async def reached(event: threading.Event) -> None:
    """Awaits a thread's event."""
    assert await asyncio.to_thread(event.wait, LIMIT_S)


async def until(holds: Callable[[], bool]) -> None:
    """Lets everything else go on until it holds."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
