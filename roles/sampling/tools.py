"""Tools: plain Python functions that the policy may call in what it says, as the chat template shows them.

Owns their JSON schemas, made of type hints and docstrings; which of them a turn calls; and what a call is answered. Does not own
the ways in which models write calls (`roles/serve/calls.py`), or who waits for a tool, and how long (`environments.py`).

    schemas_of([add])                      # [{"type": "function", "function": {"name": "add", "parameters": ...}}]
    calls_of(turn.text, template, schemas) # [Call("add", '{"a":1,"b":2}')]

Invariant: whatever a tool does, its answer is something for the policy: a text, or parts of a message with media among them.
"""

from __future__ import annotations

import functools
import inspect
import io
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import orjson

from rondo.roles.data.media_rows import PARTS
from rondo.roles.rewards.worker import Opened
from rondo.roles.sampling import mcp_servers, media_tools
from rondo.roles.serve.calls import Call, call_reader
from rondo.roles.serve.output import OutputReader
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import in_one_line, load_reference
from rondo.runtime.values import encode, read_json, write_json

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig, JobConfig

Settings = TypeVar("Settings", bound="JobConfig")
SETTING = "rollout.environment"
NO_TOOLS = ("reset", "get_reward", "close", "snapshot", "restore")
"""Methods of an environment that are the run's to call."""
_MARK = "<tool_call>"
_AS_FILE = {**dict.fromkeys(("CMYK", "HSV", "LAB", "RGBX", "YCbCr"), "RGB"), "La": "LA", "PA": "RGBA", "RGBa": "RGBA"}
"""Modes of pictures that no PNG has, and in which they are written."""


class Answer(NamedTuple):
    """What the policy is told of a call: a text, or parts with media."""

    content: str | list[dict[str, Any]]
    failed: bool = False


def schemas_of(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """What the chat template is told of them. ConfigError for one without type hints or without a docstring in Google's style,
    and for two of one name."""
    from transformers.utils import get_json_schema

    found = []
    for tool in tools:
        try:
            found.append(get_json_schema(tool))
        except Exception as error:
            raise ConfigError(
                f"{SETTING} must have tools with type hints, and a docstring with a line of each argument below `Args:`, got "
                f"{getattr(tool, '__qualname__', tool)} ({in_one_line(error)}). Write them"
            ) from error
    return _distinct(found)


def _distinct(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [each["function"]["name"] for each in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{SETTING} must have tools of different names, got two of {', '.join(twice)}. Rename one")
    return schemas


def methods_of(factory: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment by name: the public methods of its class, unless it has a `step`; of a function's, which
    is called once for that, those of what it returns. They are bound to nothing, for their signatures alone."""
    try:
        made = None if inspect.isclass(factory) or inspect.iscoroutinefunction(factory) else factory()
    except Exception as error:
        raise ConfigError(
            f"{SETTING}.factory must make an environment, got {in_one_line(error)}. See what it needs"
        ) from error
    kind = factory if made is None else type(made)
    if made is not None and hasattr(made, "close") and not inspect.iscoroutinefunction(made.close):
        made.close()
    if hasattr(kind, "step") or not inspect.isclass(kind):
        return {}
    members = {name: inspect.getattr_static(kind, name) for name in dir(kind)}
    return {
        name: getattr(kind, name) if isinstance(member, classmethod) else types.MethodType(member, object())
        for name, member in members.items()
        if not name.startswith("_") and name not in NO_TOOLS
        if isinstance(member, classmethod) or inspect.isfunction(member)
    }


def schemas(config: JobConfig) -> list[dict[str, Any]]:
    """Of all tools that the settings name. ConfigError for what cannot be loaded or told to a policy."""
    environment = config.rollout.environment
    if environment is None:
        return []
    tools = [load_reference(each, f"{SETTING}.tools") for each in environment.tools]
    if environment.factory is not None:
        factory = load_reference(environment.factory, f"{SETTING}.factory")
        try:
            inspect.signature(factory).bind()
        except TypeError as error:
            raise ConfigError(
                f"{SETTING}.factory must be called without arguments, got {environment.factory} ({error}). Give its parameters "
                "defaults"
            ) from error
        tools += methods_of(factory).values()
        if hasattr(factory, "snapshot") != hasattr(factory, "restore"):
            raise ConfigError(
                f"{SETTING}.factory must have both `snapshot` and `restore`, or neither, got one of them in "
                f"{environment.factory}. Add the other"
            )
        if inspect.ismethod(check := getattr(factory, "check_server", None)):  # of one that is elsewhere
            check()
        if inspect.isclass(factory) and not tools and not hasattr(factory, "step"):
            raise ConfigError(
                f"{SETTING}.factory must make what has a `step`, or public methods as tools, got {factory.__name__} with "
                "neither. Add one"
            )
    theirs = mcp_servers.schemas_of(environment.model_dump()["mcp"], environment.deadline_s)
    return _distinct([*schemas_of(tools), *theirs]) if tools or theirs else []


def with_tools(config: Settings) -> Settings:
    """The settings with the schemas among what the chat template is given, in every prompt that a policy answers or learns from.
    ConfigError for prompts that no template writes, and for tools of their own."""
    if not (found := schemas(config)):
        return config

    def told(data: DataConfig) -> DataConfig:
        if not data.apply_chat_template or data.tools is not None or "tools" in data.chat_template_args:
            raise ConfigError(
                f"data.apply_chat_template must be True, and data.tools and data.chat_template_args['tools'] not be set, with "
                f"tools of {SETTING}, which the chat template shows, got otherwise. Change one of them"
            )
        return data.model_copy(update={"chat_template_args": {**data.chat_template_args, "tools": found}})

    def within(section: Any, **update: Any) -> Any:
        return section and section.model_copy(update={"data": section.data and told(section.data), **update})

    sets = {} if config.evaluation is None else config.evaluation.sets
    evaluation = {} if not sets else {"sets": {name: within(each) for name, each in sets.items()}}
    update = {"evaluation": within(config.evaluation, **evaluation), "sft": within(config.sft)}
    return config.model_copy(update={"data": told(config.data), **update})


def check_template(chat_template: object) -> None:
    """ConfigError for one that does not show tools in a way that is known here."""
    if _MARK not in str(chat_template):
        raise ConfigError(
            f"{SETTING} must come without tools for a chat template that does not show how to call them ({_MARK}), got tools. "
            "Answer in `step`, or take another model"
        )


def calls_of(text: str, chat_template: object, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Return the calls that a turn makes, in their order. One that cannot be read has no name, and its text for arguments."""
    read = call_reader(chat_template, tools)
    reader = OutputReader(
        calls=lambda call: read(call) or Call("", call), reasoning="</think>" in text and "<think>" not in text
    )
    parts = [*reader.feed(text), *reader.finish()]
    calls = [Call(part.name, part.text) for part in parts if part.kind == "call"]
    content = "".join(part.text for part in parts if part.kind == "content")
    return [*calls, Call("", content.partition(_MARK)[2])] if _MARK in content else calls  # one without an end


def arguments_of(call: Call, tool: Callable[..., Any]) -> dict[str, Any] | Answer:
    """The keywords of a call; or why the tool cannot be called so."""
    try:
        arguments = read_json(call.arguments)
        if not isinstance(arguments, dict):
            raise TypeError("arguments must be an object of names and values")
        function = getattr(tool, "__func__", tool)
        signature_of(function).bind(*((None,) if function is not tool else ()), **arguments)
    except (TypeError, ValueError) as error:
        return failed(error)
    return arguments


@functools.lru_cache(256)
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Which takes as long as the rest of a call."""
    return inspect.signature(function)


def failed(error: BaseException) -> Answer:
    """What the policy is told of an error: no place, since that differs between machines."""
    return Answer(_encodable(f"Error: {type(error).__name__}: {error}"), True)


def answered(value: Any) -> Answer:
    """What the policy is told of a value: text as it is, media as they are, JSON where it can be, else Python's own words; an
    error where it has none."""
    if isinstance(value, str):
        return Answer(_encodable(value))
    try:
        if (parts := parts_of(value)) is not None:
            return Answer(parts)
        return Answer("" if value is None else write_json(value, orjson.OPT_SERIALIZE_NUMPY).decode())
    except (ValueError, OSError) as error:
        return failed(error)
    except TypeError:
        try:
            return Answer(_encodable(str(value)))
        except Exception as error:  # noqa: BLE001 - a number of 4300 digits, say
            return failed(error)


def parts_of(value: Any) -> list[dict[str, Any]] | None:
    """The parts of a message that a value is, Pillow's pictures in them as the bytes of files: such a picture, or a list of parts
    with media among them. None for anything else; ValueError or OSError for pictures that no file can be of. Large pictures take
    seconds: not in the loop."""
    if _is_picture(value):
        value = [{"type": "image", "image": value}]
    kinds = (
        [part.get("type") if isinstance(part, Mapping) else None for part in value] if isinstance(value, list) else []
    )
    if set(kinds) <= {"text"} or not all(isinstance(kind, str) and kind in PARTS for kind in kinds):
        return None
    return [{name: _as_file(each) for name, each in part.items()} for part in value]


def _as_file(value: Any) -> Any:
    """A picture, or each of a list of frames, as a file's bytes; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_as_file(each) for each in value]
    if not _is_picture(value):
        return _encodable(value) if isinstance(value, str) else value
    if not (value.width and value.height):
        raise ValueError(f"a picture must have a pixel or more, got {value.width} x {value.height}")
    if value.mode in _AS_FILE:
        value = value.convert(_AS_FILE[value.mode])
    value.save(file := io.BytesIO(), "PNG", compress_level=1)
    return file.getvalue()


def _is_picture(value: Any) -> bool:
    image = sys.modules.get("PIL.Image")  # who has not loaded it has none
    return image is not None and isinstance(value, image.Image)


def _encodable(text: str) -> str:
    """With what no tokenizer takes, such as half a character of a file's name, in escapes."""
    return text.encode(errors="backslashreplace").decode()


def open_tools(tools: Mapping[str, str], limits: dict[str, Any] | None = None) -> Opened:
    """Those with these names and references, as a process calls them: an item is [name, keywords, media of the question, within
    these `limits`, for a tool that takes them], what comes of it an `Answer`."""
    loaded = {name: load_reference(each, f"{SETTING}.tools") for name, each in tools.items()}

    def call(item: list[Any]) -> Answer:
        name, arguments, *media = item
        try:
            for refs in media:
                media_tools.give(refs, limits)
            return answered(loaded[name](**arguments))
        except Exception as error:  # noqa: BLE001 - the policy is told of it
            return failed(error)

    return Opened(call, lambda answer: encode(list(answer)), is_async=False)
