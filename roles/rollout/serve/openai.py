"""OpenAI's /v1/chat/completions and /v1/completions.

Owns their fields, how a conversation becomes a prompt, and the record of a session's calls. Does not own sampling (`desk.py`) or
the form of answers (`answers.py`). A field that would change the answer and is not supported is refused; those that would not,
such as `user` or `store`, may be sent.

    POST /v1/chat/completions   X-Rondo-Session: task-7     {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

Invariant: the prompt of a call is what the chat template makes of its messages; in a session its tokens begin with recorded ones
wherever the text does (`trajectory.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson
from aiohttp import web

from rondo.roles.rollout.serve.answers import ChunkWriter, Form, message_of, usage_of, whole_choice
from rondo.roles.rollout.serve.calls import call_reader
from rondo.roles.rollout.serve.desk import Answer, Ask
from rondo.roles.rollout.serve.fields import Fields, read_body
from rondo.roles.rollout.serve.sampling import asks_of, encode, read_openai, token_ids
from rondo.roles.rollout.serve.service import SESSION, Service, json_answer, session_of, stream_events
from rondo.roles.rollout.serve.text import text_of
from rondo.roles.rollout.serve.trajectory import Call, Prompt
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
    fields = Fields(await read_body(request), "the body")
    service.require_model(fields.text("model"))
    messages = _messages(fields.take("messages"))
    tools = _tools(fields)
    most = fields.integer("max_completion_tokens", least=1)
    sampling, priority = read_openai(fields), fields.integer("priority", 0)
    log_probs, num_top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, least=0)
    if num_top and (not log_probs or num_top > _MAX_TOP):
        raise ConfigError(f"top_logprobs must be 0 to {_MAX_TOP}, and come with logprobs, got {num_top}. Correct it")
    arguments = fields.take("chat_template_kwargs", {})
    if not isinstance(arguments, dict):
        raise ConfigError(f"chat_template_kwargs must be an object, got {type(arguments).__name__}. Correct it")
    with_ids = fields.flag("return_token_ids")
    stream, usage = _stream(fields)
    fields.off("response_format", {"type": "text"})
    fields.off("modalities", ["text"])
    fields.off("reasoning_effort", why="templates differ in what they know; set it in chat_template_kwargs")
    fields.off("verbosity", "medium")
    fields.refuse_rest(_IGNORED)
    sampling = replace(sampling, max_new_tokens=most if most is not None else sampling.max_new_tokens)
    session = session_of(request)
    messages = _with_reasoning(service, session, messages)
    text = _render(service.tokenizer, messages, tools, arguments)
    prompt = _prompt(service, session, text, special=False)
    rid = f"chatcmpl-{uuid.uuid4().hex}"
    asks = _asks(service, sampling, prompt, rid, session, num_top, priority)
    calls = None if tools is None else call_reader(service.tokenizer.chat_template, tools)
    form = Form(
        rid, service.model_name, service.engine.version, True, log_probs, num_top, with_ids, calls=calls,
        reasoning=text.rstrip().endswith("<think>"),
    )  # fmt: skip
    return await _answer(service, request, _Asked(form, asks, {rid: prompt}, session, messages, stream, usage))


async def completions(service: Service, request: web.Request) -> web.StreamResponse:
    fields = Fields(await read_body(request), "the body")
    service.require_model(fields.text("model"))
    given = fields.take("prompt")
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
    session = session_of(request)
    rid = f"cmpl-{uuid.uuid4().hex}"
    asks: list[Ask] = []
    prompts: dict[str, Prompt] = {}
    for number, each in enumerate(_prompts(given)):
        if isinstance(each, str):
            prompt = _prompt(service, session, each, special=True)
        else:
            tokens = token_ids(each, "prompt")
            prompt = Prompt(tokens, text_of(service.tokenizer, tokens))
        name = f"{rid}-{number}"
        prompts[name] = prompt
        asks += _asks(service, sampling, prompt, name, session, num_top or 0, priority)
    form = Form(rid, service.model_name, service.engine.version, False, num_top is not None, num_top or 0, with_ids)
    return await _answer(service, request, _Asked(form, asks, prompts, session, None, stream, usage))


async def _answer(service: Service, request: web.Request, asked: _Asked) -> web.StreamResponse:
    headers = _headers(asked)
    if asked.stream:
        return await stream_events(request, _events(service, asked), headers)
    form = asked.form
    answers = await service.desk.answers(asked.asks)
    choices = []
    for index, (ask, answer) in enumerate(zip(asked.asks, answers, strict=True)):
        message = message_of(form, answer) if form.chat else None
        _record(service, asked, ask, answer, message)
        choices.append(whole_choice(form, service.tokenizer, index, answer, message))
    found = form.head(chunk=False) | {"choices": choices, "usage": usage_of(asked.asks, answers)}
    if form.token_ids:
        found["prompt_token_ids"] = asked.asks[0].prompt.tolist()
    return json_answer(found, headers)


async def _events(service: Service, asked: _Asked) -> AsyncGenerator[dict[str, Any], None]:
    form = asked.form
    writers = [ChunkWriter(form, service.tokenizer, index) for index in range(len(asked.asks))]
    answers: list[Answer] = []
    async with aclosing(service.desk.parts(asked.asks)) as parts:
        async for index, answer in parts:
            if answer.finish is not None:
                answers.append(answer)
                message = message_of(form, answer) if form.chat else None
                _record(service, asked, asked.asks[index], answer, message)
            for chunk in writers[index].chunks(answer):
                yield chunk
    if asked.usage:
        yield form.head(chunk=True) | {"choices": [], "usage": usage_of(asked.asks, answers)}


def _record(service: Service, asked: _Asked, ask: Ask, answer: Answer, message: dict[str, Any] | None) -> None:
    if asked.session is not None:
        text = text_of(service.tokenizer, answer.tokens, after=int(ask.prompt[-1]))
        call = Call.of(ask, answer, asked.prompts[ask.rid], text, messages=asked.messages, reply=message)
        service.trajectories.record(asked.session, call)


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
    asks = asks_of(
        sampling, prompt.tokens, rid, tokenizer=service.tokenizer, stop_token_ids=service.stop_token_ids,
        max_length=service.max_length, session=session, priority=priority,
    )  # fmt: skip
    return [replace(ask, params=replace(ask.params, num_top=num_top)) for ask in asks] if num_top else asks


def _prompt(service: Service, session: str | None, text: str, *, special: bool) -> Prompt:
    if session is None or not service.trajectories.known(session):
        return Prompt(encode(service.tokenizer, text, special=special), text)
    return service.trajectories.prompt(
        session,
        text,
        lambda rest: encode(service.tokenizer, rest, special=special and rest == text),
    )


def _prompts(given: Any) -> list[Any]:
    """Texts, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return [given]
    if isinstance(given, list) and given and all(isinstance(each, str | list) for each in given):
        return given
    raise ConfigError(f"prompt must be text, token ids, or a list of either, got {given!r:.80}. Correct it")


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


def _tools(fields: Fields) -> list[Any] | None:
    """What the template is told of tools; None where the model is not to call any."""
    tools, choice = fields.take("tools"), fields.take("tool_choice", "auto")
    fields.off("parallel_tool_calls", True)
    fields.off("functions", [], why="tools have replaced it")
    fields.off("function_call", "none", "auto", why="tool_choice has replaced it")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"tools must be a list of objects, got {tools!r:.80}. Correct it")
    if choice not in ("auto", "none"):
        raise ConfigError(
            f"tool_choice must be 'auto' or 'none', since calls are not forced here, got {choice!r:.80}. Change it"
        )
    return tools if tools and choice == "auto" else None


def _messages(given: Any) -> list[dict[str, Any]]:
    """The conversation as templates want it: content as text, arguments of calls as objects."""
    if not isinstance(given, list) or not given:
        raise ConfigError(f"messages must be a list with a message or more, got {given!r:.80}. Send one")
    found = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ConfigError(
                f"{where} must be an object with a role of {', '.join(_ROLES)}, got {message!r:.80}. Correct it"
            )
        made = {name: value for name, value in message.items() if value is not None}
        made["role"] = "system" if made["role"] == "developer" else made["role"]
        made["content"] = _content(made.get("content", ""), where)
        if "tool_calls" in made:
            made["tool_calls"] = [_tool_call(call, where) for call in made["tool_calls"]]
        found.append(made)
    return found


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{where}.content must be text or a list of parts, got {content!r:.80}. Correct it")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ConfigError(
                f"{where}.content must hold parts of text, which is all that is taken here, got {part!r:.80}"
            )
    return "".join(part["text"] for part in content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{where}.tool_calls must hold functions with a name, got {call!r:.80}. Correct it")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        with suppress(orjson.JSONDecodeError):  # else it stays as the model wrote it, and the template shows that
            arguments = orjson.loads(arguments)
    return call | {"function": function | {"arguments": arguments}}


def _with_reasoning(service: Service, session: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation, with the reasoning that clients leave out of the replies that this session recorded."""
    if session is None or not service.trajectories.known(session):
        return messages
    calls = service.trajectories.calls(session)
    found = list(messages)
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or "reasoning_content" in message:
            continue
        for call in calls:
            reply = call.reply
            if (
                reply is None
                or call.messages is None
                or len(call.messages) != number
                or "reasoning_content" not in reply
            ):
                continue
            if _said(_messages([reply])[0]) == _said(message):
                found[number] = message | {"reasoning_content": reply["reasoning_content"]}
    return found


def _said(message: Mapping[str, Any]) -> tuple[str, list[Any]]:
    return message["content"], [call["function"] for call in message.get("tool_calls", ())]


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, arguments: dict[str, Any]) -> str:
    """The conversation as text, up to where the assistant begins."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise ConfigError("the model must have a chat template for a chat, got none. Use /v1/completions")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, **({"add_generation_prompt": True} | arguments | {"tokenize": False})
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"messages must suit the model's chat template, got {error}. Correct them") from error
    return text
