"""What a run is asked while it goes on: an evaluation now, and what it makes of one row.

    POST /evaluate {"set": "math", "version": 40, "idempotency_key": "nightly-7"}    202: {"id", "status", ...}
    GET  /evaluate/{id}                                                              the same, with its result at the end
    POST /predict  {"row": {...}} or {"prompt": "2 + 2 = ?", "label": "4"}           samples, scores, versions

Owns these routes, and which evaluations were asked for. Does not own evaluating, nor the way of a row: rollout processes do that
beside their leases (`roles/rollout.py`), the coordinator says which weights (`evaluations.py`).

Invariant: one evaluation is asked for at a time; the same key is the same one. What is asked again of a coordinator that has not
heard of it, since it was started anew, is asked for anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from aiohttp import web
from pydantic import AfterValidator, BaseModel, Field

from rondo.comm.bus.evaluations import ASKED
from rondo.launch.config import RunConfig
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.admin.openapi import BODY, Operation
from rondo.runtime.errors import ConfigError, PeerGone, Refused
from rondo.runtime.section import Section, nearest
from rondo.runtime.supervision.orders import State
from rondo.runtime.supervision.spec import COORDINATOR_NAME, GroupView

_ASK_S = 30.0
_KEPT = 1000
_MOST_SAMPLES = 64
_LEAST_S, _MOST_S = 0.1, 3600.0
Status = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED"]


def _goes_on(value: Any) -> Any:
    """To another process, as it is. JSON from outside has integers of any size, and numbers that are none."""
    try:
        arrives = orjson.loads(orjson.dumps(value))
    except TypeError as error:
        raise ValueError("must hold integers of 64 bits at most, got a larger one. Send it as text") from error
    if arrives != value:
        raise ValueError("must hold finite numbers alone, got NaN or an infinite one. Send null, or text")
    return value


GoesOn = AfterValidator(_goes_on)


class Evaluate(Section):
    """`set`: one of the run's evaluation sets, all without. `version`: one whose weights are held now; the newest without."""

    set: str | None = None
    version: int | None = Field(None, ge=0, lt=2**63)
    idempotency_key: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class Evaluation(BaseModel):
    """`result`: as a record of metrics.jsonl has it, or {"skipped": why} of one that failed."""

    id: str
    status: Status
    sets: list[str]
    version: int | None
    result: dict[str, Any] | None = None


class Predict(Section):
    """`row` as those of the run's data, or `prompt` (text, or chat messages) with `label` and `metadata` where the reward wants
    them. Samples of one `seed` are the same under the same weights, where the engine can."""

    row: Annotated[dict[str, Any] | None, GoesOn] = None
    prompt: Annotated[str | list[dict[str, Any]] | None, GoesOn] = None
    label: Annotated[Any, GoesOn] = None
    metadata: Annotated[dict[str, Any] | None, GoesOn] = None
    num_samples: int = Field(1, ge=1, le=_MOST_SAMPLES)
    seed: int = Field(0, ge=0, lt=2**63)
    timeout_secs: float = Field(300.0, ge=_LEAST_S, le=_MOST_S)


class Sample(BaseModel):
    """`versions`: the policy versions that its tokens were sampled under; `reward` None: it failed, with an `error`."""

    response: str
    reward: float | None
    finish_reason: str
    num_tokens: int
    versions: list[int]
    tokens: list[int]
    log_probs: list[float]
    details: Any = None
    error: str | None = None


class Predicted(BaseModel):
    replica: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class _Asked:
    id: str
    sets: tuple[str, ...]
    version: int | None


class Questions:
    """`ref` gives the actor of a process by its name, `groups` the role groups that there are now."""

    def __init__(
        self, config: RunConfig, ref: Callable[[str], ActorRef], groups: Callable[[], Sequence[GroupView]]
    ) -> None:
        self._config, self._ref, self._groups = config, ref, groups
        self._asked: dict[str, _Asked] = {}
        self._by_key: dict[str, tuple[Evaluate, str]] = {}
        self._turn = 0

    def mount(self, admin: AdminServer) -> None:
        asking = Operation("Evaluate a set now, beside the training.", Evaluation, takes=Evaluate, status=202)
        admin.route("POST", "/evaluate", self._evaluate, scope="control", operation=asking)
        told = Operation("How an evaluation that was asked for is, and its result.", Evaluation)
        admin.route("GET", "/evaluate/{id}", self._evaluation, scope="read", operation=told)
        predicting = Operation("Send a row through the run's workflow and reward.", Predicted, takes=Predict)
        admin.route("POST", "/predict", self._predict, scope="control", operation=predicting)

    # ---- evaluations ------------------------------------------------------------------------------------------------

    async def _evaluate(self, request: web.Request) -> Mapping[str, Any]:
        given: Evaluate = request[BODY]
        key = given.idempotency_key
        if key is not None and key in self._by_key:
            before, name = self._by_key[key]
            if before != given:
                raise ConfigError(
                    f"idempotency_key must be new for another wish, got {key!r} of {before}. Take another key"
                )
            return await self._state(self._asked[name])
        asked = _Asked(secrets.token_hex(6), self._sets(given.set), given.version)
        state = await self._state(asked)
        self._asked[asked.id] = asked
        if key is not None:
            self._by_key[key] = given, asked.id
        if len(self._asked) > _KEPT:
            oldest = next(iter(self._asked))
            del self._asked[oldest]
            self._by_key = {key: kept for key, kept in self._by_key.items() if kept[1] != oldest}
        return state

    def _sets(self, name: str | None) -> tuple[str, ...]:
        """ConfigError where the run cannot evaluate beside its training, or has no such set."""
        evaluation, sglang = self._config.evaluation, self._config.rollout.sglang
        if evaluation is None:
            raise ConfigError(
                "the run must have evaluation sets to be asked for one, got none. Start it with evaluation"
            )
        if sglang is not None and evaluation.every is None:
            raise ConfigError(
                "evaluation.every must be set to evaluate beside a training that generates with servers, since that takes an "
                "engine with weights of its own, got None. Evaluate a checkpoint with `rondo eval`"
            )
        sets = evaluation.named_sets()
        if name is not None and name not in sets:
            raise ConfigError(f"set must be one of {', '.join(sets)}, got {name!r}. {nearest(name, sorted(sets))}")
        return tuple(sets) if name is None else (name,)

    async def _evaluation(self, request: web.Request) -> Mapping[str, Any]:
        asked = self._asked.get(name := request.match_info["id"])
        if asked is None:
            raise TurnedDown(
                404, f"an evaluation must have been asked for, got {name[:50]!r}. See /events for what there was"
            )
        return await self._state(asked)

    async def _state(self, asked: _Asked) -> Mapping[str, Any]:
        coordinator, sets = self._ref(COORDINATOR_NAME), list(asked.sets)
        label = f"{ASKED}{asked.id}"
        try:
            found = await coordinator.call("ask_evaluation", label, sets, asked.version, deadline_s=_ASK_S, retry=True)
        except Refused as error:  # by what the run does now
            raise TurnedDown(409, str(error)) from error
        return {"id": asked.id, "sets": sets, "version": asked.version, "result": None} | found

    # ---- one row ----------------------------------------------------------------------------------------------------

    async def _predict(self, request: web.Request) -> dict[str, Any]:
        given: Predict = request[BODY]
        if (given.row is None) == (given.prompt is None):
            raise ConfigError(
                "row and prompt must be sent one without the other, got both or neither. Send one of them"
            )
        row = {"row": given.row, "prompt": given.prompt, "label": given.label, "metadata": given.metadata}
        source = self._config.group_of("rollout")
        names = [
            f"{group.name}.{rank}"
            for group in self._groups()
            if source is not None and group.name.rpartition("-")[0] == source.name and group.state is State.READY
            for rank in range(group.num_ranks)
        ]
        if not names:
            raise PeerGone("a rollout replica must be ready to predict, got none. Ask again soon")
        self._turn += 1
        name = names[self._turn % len(names)]
        calling = self._ref(name).call("predict", row, given.num_samples, given.seed, deadline_s=given.timeout_secs)
        return {"replica": name.rpartition(".")[0], "samples": await calling}
