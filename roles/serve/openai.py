"""OpenAI's /v1/chat/completions and /v1/completions.

Owns their fields, and how a conversation becomes a prompt. Does not own the way of a request (`answering.py`) or the objects of
answers (`answers.py`). A field that would change the answer and is not supported is refused; those that would not, such as `user`
or `store`, may be sent.

    POST /v1/chat/completions   X-Rondo-Session: task-7     {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

Invariant: the prompt of a call is what the chat template makes of its messages; in a session its tokens begin with recorded ones
wherever the text does (`trajectory.py`).
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from rondo.roles.serve.answering import Asked, prompt_of
from rondo.roles.serve.answers import Told
from rondo.roles.serve.calls import call_reader
from rondo.roles.serve.conversation import arguments_of, messages_of, tools_of, with_reasoning
from rondo.roles.serve.fields import Fields, shown
from rondo.roles.serve.sampling import read_openai, require_samples
from rondo.roles.serve.service import Service
from rondo.runtime.errors import ConfigError

_MAX_TOP = 20
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
}  # fmt: skip


async def chat(service: Service, session: str | None, fields: Fields) -> tuple[Asked, Told]:
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
    asked = Asked(session, stream, messages)
    asked.ask(service, sampling, prompt, rid, num_top=num_top, priority=priority)
    calls = None if tools is None else call_reader(tokenizer.chat_template, tools)
    return asked, Told(
        rid, service.model_name, service.engine.version, tokenizer, asked.asks, True, log_probs, num_top, with_ids, usage,
        calls, reasoning=text.rstrip().endswith("<think>"),
    )  # fmt: skip


async def completions(service: Service, session: str | None, fields: Fields) -> tuple[Asked, Told]:
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
    rid, asked = f"cmpl-{uuid.uuid4().hex}", Asked(session, stream)
    for number, each in enumerate(given):
        prompt = await prompt_of(service, session, each, "prompt")
        asked.ask(service, sampling, prompt, f"{rid}-{number}", num_top=num_top or 0, priority=priority)
    return asked, Told(
        rid, service.model_name, service.engine.version, service.tokenizer, asked.asks, False, num_top is not None,
        num_top or 0, with_ids, usage,
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
