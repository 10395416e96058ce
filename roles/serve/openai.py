"""OpenAI's /v1/chat/completions and /v1/completions.

Owns their fields, how a conversation becomes a prompt, and the record of a session's calls. Does not own sampling
(`requests.py`) or the form of answers (`answers.py`). A field that would change the answer and is not supported is refused; those
that would not, such as `user` or `store`, may be sent.

    POST /v1/chat/completions   X-Rondo-Session: task-7     {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

Invariant: the prompt of a call is what the chat template makes of its messages; in a session its tokens begin with recorded ones
wherever the text does (`trajectory.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from rondo.roles.serve.answers import ChunkWriter, Form, message_of, usage_of, whole_choice
from rondo.roles.serve.calls import call_reader
from rondo.roles.serve.conversation import arguments_of, messages_of, said_in, tools_of, with_reasoning
from rondo.roles.serve.fields import Fields, shown
from rondo.roles.serve.requests import Answer, Ask
from rondo.roles.serve.sampling import asks_of, read_openai, require_samples, require_tops, token_ids
from rondo.roles.serve.service import SESSION, Service, json_answer, session_of, stream_events
from rondo.roles.serve.text import text_of
from rondo.roles.serve.trajectory import Prompt
from rondo.runtime.errors import ConfigError

REUSED = "X-Rondo-Reused-Tokens"
PARTED = "X-Rondo-Parted"
_MAX_TOP = 20
_IGNORED = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    )
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request as it was read: its samples, how they are answered, and what is recorded of them."""

    form: Form
    asks: Sequence[Ask]
    prompts: Mapping[str, Prompt]
    session: str | None
    messages: Sequence[Any] | None
    stream: bool
    usage: bool


async def chat(service: Service, request: web.Request) -> web.StreamResponse:
    session = session_of(request)
    with service.trajectories.calling(session):
        async with service.body(request) as body:
            asked = await _chat(service, session, Fields(body, "the body"))
            del body
        return await _answer(service, request, asked)


async def _chat(service: Service, session: str | None, fields: Fields) -> _Asked:
    service.require_model(fields.text("model"))
    tokenizer = service.tokenizer
    messages = messages_of(fields.take("messages"), tokenizer.chat_template)
    tools, arguments = tools_of(fields), arguments_of(fields, tokenizer)
    most = fields.integer("max_completion_tokens", least=1)
    sampling, priority = read_openai(fields), fields.integer("priority", 0)
    log_probs, num_top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, least=0)
    if num_top and (not log_probs or num_top > _MAX_TOP):
        raise ConfigError(f"top_logprobs must be 0 to {_MAX_TOP}, and come with logprobs, got {num_top}. Correct it")
    with_ids = fields.flag("return_token_ids")
    stream, usage = _stream(fields)
    fields.off("response_format", {"type": "text"})
    fields.off("modalities", ["text"])
    fields.off("reasoning_effort", why="templates differ in what they know; set it in chat_template_kwargs")
    fields.off("verbosity", "medium")
    fields.refuse_rest(_IGNORED)
    sampling = replace(sampling, max_new_tokens=most if most is not None else sampling.max_new_tokens)
    messages = with_reasoning(service.trajectories, session, messages)
    text = await service.work.render(arguments | {"messages": messages, "tools": tools}, most=service.max_chars)
    prompt = await service.prompt(session, text, special=False)
    rid = f"chatcmpl-{uuid.uuid4().hex}"
    asks = _asks(service, sampling, prompt, rid, session, num_top, priority)
    calls = None if tools is None else call_reader(tokenizer.chat_template, tools)
    form = Form(
        rid, service.model_name, service.engine.version, True, log_probs, num_top, with_ids, calls=calls,
        reasoning=text.rstrip().endswith("<think>"),
    )  # fmt: skip
    return _Asked(form, asks, {rid: prompt}, session, messages, stream, usage)


async def completions(service: Service, request: web.Request) -> web.StreamResponse:
    session = session_of(request)
    with service.trajectories.calling(session):
        async with service.body(request) as body:
            asked = await _completions(service, session, Fields(body, "the body"))
            del body
        return await _answer(service, request, asked)


async def _completions(service: Service, session: str | None, fields: Fields) -> _Asked:
    service.require_model(fields.text("model"))
    given = _prompts(fields.take("prompt"))
    sampling, priority = read_openai(fields), fields.integer("priority", 0)
    num_top = fields.integer("logprobs", None, least=0)
    if num_top is not None and num_top > _MAX_TOP:
        raise ConfigError(f"logprobs must be 0 to {_MAX_TOP}, got {num_top}. Ask for fewer")
    with_ids = fields.flag("return_token_ids")
    stream, usage = _stream(fields)
    fields.off("echo", False)
    fields.off("suffix", "")
    fields.off("best_of", 1, sampling.num_samples)
    fields.refuse_rest(_IGNORED)
    if sampling.max_new_tokens is None:
        sampling = replace(sampling, max_new_tokens=16)  # OpenAI's default here
    require_samples(len(given) * sampling.num_samples)
    rid = f"cmpl-{uuid.uuid4().hex}"
    asks: list[Ask] = []
    prompts: dict[str, Prompt] = {}
    for number, each in enumerate(given):
        if isinstance(each, str):
            prompt = await service.prompt(session, each, special=True)
        else:
            prompt = service.prompt_of_tokens(session, token_ids(each, "prompt", service.max_length))
        name = f"{rid}-{number}"
        prompts[name] = prompt
        asks += _asks(service, sampling, prompt, name, session, num_top or 0, priority)
    form = Form(rid, service.model_name, service.engine.version, False, num_top is not None, num_top or 0, with_ids)
    return _Asked(form, asks, prompts, session, None, stream, usage)


async def _answer(service: Service, request: web.Request, asked: _Asked) -> web.StreamResponse:
    require_tops(asked.asks)
    headers = _headers(asked)
    if asked.stream:
        return await stream_events(request, _events(service, asked), headers)
    form = asked.form
    answers = await service.requests.answers(asked.asks)
    choices = []
    for index, (ask, answer) in enumerate(zip(asked.asks, answers, strict=True)):
        message = message_of(form, answer) if form.chat else None
        _record(service, asked, ask, answer, message)
        choices.append(await whole_choice(form, service.tokenizer, index, answer, message))
    found = form.head(chunk=False) | {"choices": choices, "usage": usage_of(asked.asks, answers)}
    if form.token_ids:
        found["prompt_token_ids"] = asked.asks[0].prompt.tolist()
    return json_answer(found, headers)


async def _events(service: Service, asked: _Asked) -> AsyncGenerator[dict[str, Any], None]:
    form = asked.form
    writers = [ChunkWriter(form, service.tokenizer, index) for index in range(len(asked.asks))]
    answers: list[Answer] = []
    async with aclosing(service.requests.parts(asked.asks)) as parts:
        async for index, answer in parts:
            if answer.finish is not None:
                answers.append(answer)
                message = message_of(form, answer) if form.chat else None
                _record(service, asked, asked.asks[index], answer, message)
            for chunk in await writers[index].chunks(answer):
                yield chunk
    if asked.usage:
        yield form.head(chunk=True) | {"choices": [], "usage": usage_of(asked.asks, answers)}


def _record(service: Service, asked: _Asked, ask: Ask, answer: Answer, message: dict[str, Any] | None) -> None:
    if asked.session is not None:
        text = text_of(service.tokenizer, answer.tokens, after=int(ask.prompt[-1]))
        said = b"" if message is None else said_in(message)
        service.trajectories.record(
            asked.session, asked.prompts[ask.rid], ask, answer, text, messages=asked.messages, reply=message, said=said
        )


def _headers(asked: _Asked) -> dict[str, str]:
    if asked.session is None:
        return {}
    prompts = list(asked.prompts.values())
    found = {SESSION: asked.session, REUSED: str(sum(prompt.reused_tokens for prompt in prompts))}
    parted = next((prompt.parted for prompt in prompts if prompt.parted is not None), None)
    if parted is not None:
        found[PARTED] = parted.encode("ascii", "backslashreplace").decode()
    return found


def _asks(
    service: Service, sampling: Any, prompt: Prompt, rid: str, session: str | None, num_top: int, priority: int
) -> list[Ask]:
    return asks_of(
        sampling, prompt.tokens, rid, tokenizer=service.tokenizer, stop_token_ids=service.stop_token_ids,
        max_length=service.max_length, num_top=num_top, session=session, priority=priority,
    )  # fmt: skip


def _prompts(given: Any) -> list[Any]:
    """Texts, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return [given]
    if isinstance(given, list) and given and all(isinstance(each, str | list) for each in given):
        return given
    raise ConfigError(f"prompt must be text, token ids, or a list of either, got {shown(given)}. Correct it")


def _stream(fields: Fields) -> tuple[bool, bool]:
    """(whether to stream, whether the stream ends with the usage)."""
    stream, options = fields.flag("stream"), fields.take("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise ConfigError("stream_options must come with stream, got no stream. Remove them")
    inner = Fields(options, "stream_options")
    usage = inner.flag("include_usage")
    inner.refuse_rest({"include_obfuscation", "continuous_usage_stats"})
    return stream, usage
