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

from typing import Any

from aiohttp import web
from pydantic import Field, create_model

from rondo.launch.elastic.request import Action, Policy, Request, Status, Wish
from rondo.launch.elastic.scaler import EngineView, Scaler, ScalingView
from rondo.runtime.admin.endpoint import AdminServer, Handler, json_answer
from rondo.runtime.admin.openapi import BODY, QUERY, Operation
from rondo.runtime.section import Section

_ACTIONS: tuple[Action, ...] = ("scale_out", "scale_in")
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

    def scaling(role: str, action: Action) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            asked: Scale = request[BODY]
            wish = Wish(
                role, action, asked.num_replicas, asked.reason, asked.timeout_secs, asked.force, asked.dry_run, asked.policy,
                tuple(asked.engine_urls), asked.idempotency_key, asked.model_name,
            )  # fmt: skip
            return _answer(scaler.ask(wish))

        return handler

    def restarting(role: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            asked: Restart = request[BODY]
            limits = asked.timeout_secs, asked.force, asked.dry_run
            wish = Wish(role, "restart", 0, asked.reason, *limits, idempotency_key=asked.idempotency_key)
            return _answer(scaler.ask(wish))

        return handler

    def listing(role: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            chosen: Chosen = request[QUERY]
            wanted = {"role": role, **chosen.model_dump(exclude_none=True)}
            found = [r for r in scaler.view().requests if all(getattr(r, name) == v for name, v in wanted.items())]
            return json_answer(found)

        return handler

    def one(role: str, *, cancels: bool = False) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            found = scaler.get(request.match_info["id"])
            if found is None or found.role != role:
                raise web.HTTPNotFound(reason="no such request")
            return json_answer(scaler.cancel(found.request_id) if cancels else found)

        return handler

    def engines(role: str) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return json_answer(scaler.engines(role))

        return handler

    async def whole(request: web.Request) -> web.StreamResponse:
        return json_answer(scaler.view())

    admin.route("GET", "/scaling", whole, scope="read", operation=Operation("Replicas, and requests.", ScalingView))
    for role in roles:
        begins = Operation("Have so many replicas.", Request, takes=_scale(role, scaler.most(role)), also=_ALSO)
        for action in _ACTIONS:
            admin.route("POST", f"/{role}/{action}", scaling(role, action), scope="control", operation=begins)
        again = Operation("New replicas, one after another.", Request, takes=Restart, also=_ALSO)
        admin.route("POST", f"/{role}/restart", restarting(role), scope="control", operation=again)
        every = Operation("Requests, the newest first.", list[Request], query=Chosen)
        admin.route("GET", f"/{role}/scale", listing(role), scope="read", operation=every)
        admin.route("GET", f"/{role}/scale/{{id}}", one(role), scope="read", operation=Operation("A request.", Request))
        undo = Operation("Undo it.", Request)
        cancel = one(role, cancels=True)
        admin.route("POST", f"/{role}/scale/{{id}}/cancel", cancel, scope="control", operation=undo)
        shown = Operation("Replicas.", list[EngineView])
        admin.route("GET", f"/{role}/engines", engines(role), scope="read", operation=shown)


def _scale(role: str, most: int | None) -> type[Scale]:
    """What a role is asked with: `most` replicas, more of which are REJECTED."""
    if most is None:
        return Scale
    field: Any = (int, Field(0, ge=0, lt=2**63, json_schema_extra={"maximum": most}))
    return create_model(f"Scale_{role}", __base__=Scale, __doc__=Scale.__doc__, num_replicas=field)


def _answer(found: Request) -> web.Response:
    return json_answer(found, status=_HTTP.get(found.status, 200))
