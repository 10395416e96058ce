"""Routes: the number of replicas over HTTP, in the words that users of Relax know.

    POST /{role}/scale_out /{role}/scale_in {"num_replicas": 3}     control: a request, or why there is none
    POST /{role}/restart                                            control: new replicas in place of the old
    GET  /{role}/scale /{role}/scale/{id}                           read: requests
    POST /{role}/scale/{id}/cancel                                  control: undo the one under way
    GET  /{role}/engines                                            read: replicas
    GET  /scaling                                                   read: all of it

Owns the wire form. A request that is not begun has a status of HTTP of its own: 409 where another one is under way, 400 where it
cannot be.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web
from pydantic import Field, create_model

from rondo.launch.elastic.request import Action, Policy, Request, Status, Wish
from rondo.launch.elastic.scaler import EngineView, Scaler, ScalingView
from rondo.runtime.admin.endpoint import AdminServer, Handler, json_answer
from rondo.runtime.admin.guard import Scope
from rondo.runtime.admin.openapi import BODY, QUERY, Operation
from rondo.runtime.section import Section

_HTTP = {Status.CONFLICT: 409, Status.REJECTED: 400}
_ALSO = {400: "It cannot be.", 409: "Another request is under way."}


class Restart(Section):
    """`timeout_secs`: for each replica, until it is back. `force`: what it has goes to others at once."""

    reason: str = "asked over HTTP"
    timeout_secs: float | None = Field(None, gt=0)
    force: bool = False
    dry_run: bool = False
    idempotency_key: str | None = Field(None, max_length=200)


class Scale(Restart):
    """`num_replicas`: how many there are to be; or `engine_urls`: engines that run already, to be attached or detached.
    `timeout_secs`: until new ones are up, or those that leave are ended.
    `policy`: what becomes of the new ones where some do not come up."""

    num_replicas: int = Field(0, ge=0, lt=2**63)
    model_name: str = "default"
    engine_urls: list[str] = Field([], max_length=256)
    policy: Policy = "keep_partial"


class Chosen(Section):
    """Those requests alone."""

    model_name: str | None = None
    status: Status | None = None


def mount(admin: AdminServer, scaler: Scaler, roles: tuple[str, ...]) -> None:
    """The routes of these roles. POST for one whose number is fixed is answered with the reason."""

    def asks(role: str, action: Action, request: web.Request) -> web.Response:
        fields = request[BODY].model_dump()
        timeout_s, urls = fields.pop("timeout_secs"), tuple(fields.pop("engine_urls", ()))
        found = scaler.ask(Wish(role, action, timeout_s=timeout_s, engine_urls=urls, **fields))
        return json_answer(found, status=_HTTP.get(found.status, 200))

    def every(role: str, request: web.Request) -> list[Request]:
        wanted = {"role": role, **request[QUERY].model_dump(exclude_none=True)}
        return [r for r in scaler.view().requests if all(getattr(r, name) == v for name, v in wanted.items())]

    def one(role: str, request: web.Request) -> Request:
        found = scaler.get(request.match_info["id"])
        if found is None or found.role != role:
            raise web.HTTPNotFound(reason="no such request")
        return found

    def cancel(role: str, request: web.Request) -> Request:
        return scaler.cancel(one(role, request).request_id)

    def engines(role: str, request: web.Request) -> list[EngineView]:
        return scaler.engines(role)

    whole = Operation("Replicas, and requests.", ScalingView)
    admin.route("GET", "/scaling", lambda request: scaler.view(), scope="read", operation=whole)
    for role in roles:
        begins = Operation("Have so many replicas.", Request, takes=_scale(role, scaler.most(role)), also=_ALSO)
        again = Operation("New replicas, one after another.", Request, takes=Restart, also=_ALSO)
        told: tuple[tuple[Scope, str, Handler, Operation], ...] = (
            ("control", "scale_out", partial(asks, role, "scale_out"), begins),
            ("control", "scale_in", partial(asks, role, "scale_in"), begins),
            ("control", "restart", partial(asks, role, "restart"), again),
            (
                "read",
                "scale",
                partial(every, role),
                Operation("Requests, the newest first.", list[Request], query=Chosen),
            ),
            ("read", "scale/{id}", partial(one, role), Operation("A request.", Request)),
            ("control", "scale/{id}/cancel", partial(cancel, role), Operation("Undo it.", Request)),
            ("read", "engines", partial(engines, role), Operation("Replicas.", list[EngineView])),
        )
        for scope, name, handler, operation in told:
            admin.route(
                "GET" if scope == "read" else "POST", f"/{role}/{name}", handler, scope=scope, operation=operation
            )


def _scale(role: str, most: int | None) -> type[Scale]:
    """What a role is asked with: `most` replicas, more of which are REJECTED."""
    if most is None:
        return Scale
    field: Any = (int, Field(0, ge=0, lt=2**63, json_schema_extra={"maximum": most}))
    return create_model(f"Scale_{role}", __base__=Scale, __doc__=Scale.__doc__, num_replicas=field)
