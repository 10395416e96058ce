"""Routes: the autoscaler over HTTP, in the words that users of Relax know.

    GET   /autoscaler/status                         read: whether it decides, and what it decided last
    GET   /autoscaler/conditions                     read: what it looks at, and how far that is from a decision
    GET   /autoscaler/scale_history                  read: what it has asked for
    GET   /autoscaler/config                         read: its settings
    PATCH /autoscaler/config {"max_replicas": 8}     control: other ones, from now on
    POST  /autoscaler/enable {"enabled": false}      control: it decides nothing, or goes on

Owns the wire form. A run whose settings have no `autoscale` answers that it decides nothing, and 400 to what would change that.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, cast

from aiohttp import web
from pydantic import BaseModel, Field, ValidationError, create_model

from rondo.launch.autoscale.decide import Action, AutoscaleConfig
from rondo.launch.autoscale.watch import ASKED, ROLE, Autoscaler
from rondo.launch.elastic.request import Request
from rondo.launch.elastic.scaler import Scaler
from rondo.runtime.admin.endpoint import AdminServer, Handler
from rondo.runtime.admin.guard import Scope
from rondo.runtime.admin.openapi import BODY, QUERY, Operation
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import Section, explain


class Enable(Section):
    enabled: bool


class Chosen(Section):
    """So many, the newest first, of one kind alone."""

    action: Action | None = None
    limit: str = Field("100", pattern="^[1-9][0-9]{0,3}$")


_SETTINGS: Any = {
    name: (cast(Any, each.annotation) | None, None) for name, each in AutoscaleConfig.model_fields.items()
}
Changes: type[Section] = create_model("Changes", __base__=Section, **_SETTINGS)
"""Those settings that are to be others."""


class AutoscalerStatus(BaseModel):
    """`last_decision`: with what it was read from. Times in seconds since the epoch."""

    enabled: bool
    current_engines: int
    min_engines: int | None = None
    max_engines: int | None = None
    last_scale_action: str | None = None
    last_scale_time: float | None = None
    last_decision: dict[str, Any] | None = None
    pending_requests: list[Request] = []
    total_scale_operations: int = 0
    config: dict[str, Any] = {}


class Conditions(BaseModel):
    """By the name of the setting: `value`, `threshold`, and whether it is `met`. `observations`: since when, in seconds of the
    samples, more or fewer are wanted."""

    conditions: dict[str, dict[str, Any]] = {}
    metrics: dict[str, Any] = {}
    observations: dict[str, Any] = {}


class History(BaseModel):
    history: list[Request]
    total_count: int


def mount(admin: AdminServer, scaler: Scaler, scales: Autoscaler | None) -> None:
    """The routes of a run's autoscaler; None where it has none."""

    def there() -> Autoscaler:
        if scales is None:
            raise ConfigError(
                "autoscale must be set for a run to scale by itself, got none. Set it, and resume the run"
            )
        return scales

    def asked() -> list[Request]:
        return [each for each in scaler.view().requests if each.reason.startswith(ASKED)]

    def status(request: web.Request) -> dict[str, Any]:
        found = asked()
        told = AutoscalerStatus(enabled=False, current_engines=len(scaler.view().replicas.get(ROLE, ())))
        if scales is not None:
            rules, last = scales.rules, scales.last
            told = told.model_copy(update={
                "enabled": scales.enabled, "min_engines": rules.min_replicas, "max_engines": rules.max_replicas,
                "last_decision": None if last is None else asdict(last), "config": rules.model_dump(),
                "pending_requests": [each for each in found if not each.over], "total_scale_operations": len(found),
                **({"last_scale_action": found[0].action, "last_scale_time": found[0].created_at} if found else {}),
            })  # fmt: skip
        return told.model_dump()

    def conditions(request: web.Request) -> dict[str, Any]:
        return Conditions(**(scales.conditions() if scales is not None else {})).model_dump()

    def history(request: web.Request) -> dict[str, Any]:
        chosen: Chosen = request[QUERY]
        found = [each for each in asked() if chosen.action in (None, each.action)]
        return {"history": found[: int(chosen.limit)], "total_count": len(found)}

    def config(request: web.Request) -> dict[str, Any]:
        return scales.rules.model_dump() if scales is not None else {}

    def change(request: web.Request) -> dict[str, Any]:
        wanted = request[BODY].model_dump(exclude_unset=True)
        try:
            there().change(AutoscaleConfig(**there().rules.model_dump() | wanted))
        except ValidationError as error:
            raise explain(error, "the body", "autoscale") from None
        return config(request)

    def enable(request: web.Request) -> dict[str, Any]:
        there().enable(request[BODY].enabled)
        return status(request)

    told: tuple[tuple[str, str, Handler, Scope, Operation], ...] = (
        ("GET", "status", status, "read", Operation("Whether the run scales by itself.", AutoscalerStatus)),
        ("GET", "conditions", conditions, "read", Operation("What decides, and how far it is.", Conditions)),
        ("GET", "scale_history", history, "read", Operation("What it has asked for.", History, query=Chosen)),
        ("GET", "config", config, "read", Operation("Its settings.", dict[str, Any])),
        ("PATCH", "config", change, "control", Operation("Other settings.", dict[str, Any], takes=Changes)),
        ("POST", "enable", enable, "control", Operation("Decide nothing, or go on.", AutoscalerStatus, takes=Enable)),
    )
    for method, name, handler, scope, operation in told:
        admin.route(method, f"/autoscaler/{name}", handler, scope=scope, operation=operation)
