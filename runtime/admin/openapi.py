"""OpenAPI: what a route says of itself when it is mounted, and the document of all routes (`GET /openapi.json`).

Owns `Operation`, how a request is held to it, and OpenAPI 3.1. Does not own any route, nor who may ask. Invariant: what the
document says of a request decides: the models that it shows are those that read queries and bodies.

    class Count(Section):
        num_replicas: int = Field(ge=1)

    Operation("Have so many replicas.", Scaling, takes=Count, status=202)        # the handler reads request[BODY]: a Count

A field that no model has is refused, and so are numbers in quotes and a second value of a name: nothing that was sent is left out
in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from rondo.runtime.admin.guard import Scope, TurnedDown
from rondo.runtime.errors import ConfigError, DeadlineExceeded
from rondo.runtime.section import Section, explain, show_value
from rondo.runtime.waits import wait_for

BODY_S = 20.0
"""A body that has not come whole by then is not waited for."""
_REFERENCES = "#/components/schemas/{model}"
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"

QUERY: web.RequestKey[Any] = web.RequestKey("query", Section)
BODY: web.RequestKey[Any] = web.RequestKey("body", Section)
"""Of a request: what stands behind its `?`, and its body, as the models of its operation."""


class Nothing(Section):
    """Of what has no fields."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route does, in a sentence. `gives`: the type of its answer, which pydantic knows (a model, a dataclass,
    `list[Model]`, `dict[str, Any]`), None for an empty one. `takes`: of its body, None for a route without one. `query`: of what
    stands behind the `?`, None for a route that looks at it itself, and at its body. `also`: other answers of the same form, by
    their status, with words."""

    summary: str
    gives: Any
    takes: type[BaseModel] | None = None
    query: type[Section] | None = Nothing
    status: int = 200
    media_types: tuple[str, ...] = (JSON,)
    also: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mounted:
    """A route with what it says of itself, None where that is nobody's business. `guarded`: it needs a token."""

    method: str
    route: AbstractRoute
    scope: Scope
    operation: Operation | None
    guarded: bool


async def read(request: web.Request, operation: Operation) -> None:
    """Puts request[QUERY] and, where there is to be one, request[BODY] in place. ConfigError for what they must not be,
    TurnedDown (408) for a body that does not come."""
    if operation.query is None:
        return
    where = f"{request.method} {request.path}"
    names = list(request.query.keys())
    known = operation.query.model_fields
    if len(names) > len(known) or len(names) > len(set(names)):
        told = f"at most {', '.join(known)}, each once" if known else "empty"
        raise ConfigError(
            f"the query of {where} must be {told}, got {show_value(request.query_string)}. Remove the rest"
        )
    try:
        request[QUERY] = operation.query.model_validate_strings(dict(request.query), strict=True)
    except ValidationError as error:
        raise explain(error, f"the query of {where}") from None
    if operation.takes is None:
        return
    try:
        content = await wait_for(request.read(), name="a body", peer="its caller", deadline_s=BODY_S)
    except DeadlineExceeded as late:
        raise TurnedDown(408, f"a body must come within {BODY_S:g} s, got part of it. Ask again") from late
    refuse_repeated_names(content, where)
    try:
        request[BODY] = operation.takes.model_validate_json(content or b"{}", strict=True)
    except ValidationError as error:
        raise explain(error, f"the body of {where}") from None


def refuse_repeated_names(content: bytes, where: str) -> None:
    """Raise ConfigError where an object in this JSON has two values of one name, of which a parser would take the last."""

    def check(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(names) > len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"the body of {where} must have each name once, got {show_value(twice)} twice. Remove one"
            )

    try:
        json.loads(content, object_pairs_hook=check, parse_int=len, parse_float=len)
    except RecursionError:
        raise ConfigError(f"the body of {where} must be JSON of some depth, got too many levels. Flatten it") from None
    except ConfigError:
        raise
    except ValueError:
        return  # whoever reads it says what is wrong


def document(title: str, version: str, mounted: Iterable[Mounted], failed: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes, as JSON values. `failed`: what every answer is that is no success."""
    told = [(each, each.operation) for each in mounted if each.operation is not None]
    read = {model for _, operation in told for model in (operation.takes, operation.query) if model is not None}
    inputs: list[Any] = [(model, "validation", TypeAdapter(model)) for model in read]
    inputs += [(n, "serialization", TypeAdapter(operation.gives)) for n, (_, operation) in enumerate(told)]
    inputs.append(("failed", "serialization", TypeAdapter(failed)))
    found, defined = TypeAdapter.json_schemas(inputs, ref_template=_REFERENCES)
    otherwise = {"description": "Refused or failed.", "content": {JSON: {"schema": found["failed", "serialization"]}}}
    paths: dict[str, dict[str, Any]] = {}
    for number, (each, operation) in enumerate(told):
        query = {} if operation.query is None else found[operation.query, "validation"]
        name = query.get("$ref", "").rpartition("/")[2]
        path, parameters = _place(each, defined["$defs"][name] if name else query)
        schema = {"schema": found[number, "serialization"]}
        content = {} if operation.gives is None else dict.fromkeys(operation.media_types, schema)
        either = {"anyOf": [schema["schema"], found["failed", "serialization"]]} if JSON in content else None
        # Of one status there may be answers of the route's form, and failures of every route's.
        also = content | {JSON: {"schema": either or found["failed", "serialization"]}}
        answers = {operation.status: ("Done.", content)}
        answers |= {status: (words, also) for status, words in operation.also.items()}
        entry = {
            "summary": operation.summary, "parameters": parameters, "x-scope": each.scope,
            "security": [{"token": []}] if each.guarded else [],
            "responses": {
                str(status): {"description": words, **({"content": told} if told else {})}
                for status, (words, told) in answers.items()
            }
            | {"default": otherwise},
        }  # fmt: skip
        if operation.takes is not None:
            content = {JSON: {"schema": found[operation.takes, "validation"]}}
            needed = any(field.is_required() for field in operation.takes.model_fields.values())
            entry["requestBody"] = {"required": needed, "content": content}
        paths.setdefault(path, {})[each.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": defined.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _place(mounted: Mounted, query: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """A route's path as OpenAPI writes it, and the parameters in it and behind it, whose schema is `query`."""
    assert mounted.route.resource is not None
    info = mounted.route.resource.get_info()
    names = info["pattern"].groupindex if "pattern" in info else ()
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    for name, schema in query.get("properties", {}).items():
        parameters.append(
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
        )
    return info.get("formatter") or info["path"], parameters
