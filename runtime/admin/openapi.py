"""OpenAPI: what a route says of itself when it is mounted, and the document of all routes (`GET /openapi.json`).

Owns `Operation`, how a request is held to it, and OpenAPI 3.1. Does not own any route, nor who may ask. Invariant: what the
document says of a request decides: the models that it shows are those that read queries and bodies.

    class Count(Section):
        num_replicas: int = Field(ge=1)

    Operation("Have so many replicas.", Scaling, takes=Count, status=202)        # the handler reads request[BODY]: a Count

A field that no model has is refused, and so are numbers in quotes: nothing that was sent is left out in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from rondo.runtime.errors import ConfigError
from rondo.runtime.section import Section, explain, show_value
from rondo.runtime.waits import wait_for

BODY_S = 20.0
"""A body that has not come whole by then is not waited for."""
_REFERENCES = "#/components/schemas/{model}"
_JSON = "application/json"

Scope = Literal["open", "read", "content", "control"]
QUERY: web.RequestKey[Any] = web.RequestKey("query", Section)
BODY: web.RequestKey[Any] = web.RequestKey("body", Section)
"""Of a request: what stands behind its `?`, and its body, as the models of its operation."""


class Nothing(Section):
    """Of what has no fields."""


class Failure(BaseModel):
    """What went wrong: HTTP's status, the error's type, and words."""

    status: int
    type: str
    message: str


class Failed(BaseModel):
    """Every answer that is no success."""

    error: Failure


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route does. `gives`: the type of its answer, which pydantic knows (a model, a dataclass, `list[Model]`,
    `dict[str, Any]`), in JSON unless `media_type` says otherwise. `takes`: of its body, None for a route without one. `query`: of
    what stands behind the `?`. `also`: other answers of the same form, by their status, with words."""

    summary: str
    gives: Any
    takes: type[Section] | None = None
    query: type[Section] = Nothing
    status: int = 200
    media_type: str = _JSON
    also: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mounted:
    """A route with what it says of itself. `guarded`: it needs a token."""

    method: str
    route: AbstractRoute
    scope: Scope
    operation: Operation
    guarded: bool


async def read(request: web.Request, operation: Operation) -> None:
    """Puts request[QUERY] and, where there is to be one, request[BODY] in place. ConfigError for what they must not be,
    DeadlineExceeded for a body that does not come."""
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
    content = await wait_for(request.read(), name="a body", peer="its caller", deadline_s=BODY_S)
    try:
        request[BODY] = operation.takes.model_validate_json(content or b"{}", strict=True)
    except ValidationError as error:
        raise explain(error, f"the body of {where}") from None


def document(title: str, version: str, mounted: Iterable[Mounted]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes, as JSON values."""
    told = list(mounted)
    asked = {model for each in told for model in (each.operation.takes, each.operation.query) if model is not None}
    schemas: dict[Any, Any] = {model: TypeAdapter(model) for model in asked}
    answers = [TypeAdapter(each.operation.gives) for each in told]
    inputs: list[Any] = [(model, "validation", adapter) for model, adapter in schemas.items()]
    inputs += [(number, "serialization", adapter) for number, adapter in enumerate(answers)]
    inputs.append(("failed", "serialization", TypeAdapter(Failed)))
    found, defined = TypeAdapter.json_schemas(inputs, ref_template=_REFERENCES)
    paths: dict[str, dict[str, Any]] = {}
    for number, each in enumerate(told):
        operation, resource = each.operation, each.route.resource
        assert resource is not None
        info = resource.get_info()
        names = info["pattern"].groupindex if "pattern" in info else ()
        query = operation.query.model_json_schema(ref_template=_REFERENCES)
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query.get("properties", {}).items()
        ]
        answer = {operation.media_type: {"schema": found[number, "serialization"]}}
        failed = {"description": "Refused or failed.", "content": {_JSON: {"schema": found["failed", "serialization"]}}}
        also = {str(status): {"description": words, "content": answer} for status, words in operation.also.items()}
        path = paths.setdefault(info.get("formatter") or info["path"], {})
        path[each.method.lower()] = {
            "summary": operation.summary,
            "parameters": parameters,
            "responses": {
                str(operation.status): {"description": "Done.", "content": answer},
                **also,
                "default": failed,
            },
            "security": [{"token": []}] if each.guarded else [],
            "x-scope": each.scope,
        }
        if operation.takes is not None:
            schema = found[operation.takes, "validation"]
            required = bool(operation.takes.model_json_schema().get("required"))
            path[each.method.lower()]["requestBody"] = {"required": required, "content": {_JSON: {"schema": schema}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": defined.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
