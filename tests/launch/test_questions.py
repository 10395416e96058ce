"""What a run is asked while it goes on, over HTTP: evaluations by id and key, and one row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp

from rondo.launch.questions import Questions
from rondo.roles.config import EvalConfig, EvalSet
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError, Refused
from rondo.runtime.supervision.orders import State
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers

SETS = EvalConfig(sets={"easy": EvalSet(), "hard": EvalSet()})


class Run:
    """Its processes, as the leader asks them."""

    def __init__(self, **rollout: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.states: dict[str, dict[str, Any]] = {}
        self.refuses: Exception | None = None
        source = SimpleNamespace(name="rollout")
        self.config: Any = SimpleNamespace(
            evaluation=SETS, rollout=SimpleNamespace(**{"sglang": None, **rollout}), group_of=lambda _: source
        )
        self.groups: list[Any] = [
            SimpleNamespace(name=name, state=state, num_ranks=1)
            for name, state in (("rollout-0", State.STARTING), ("rollout-1", State.READY), ("actor-0", State.READY))
        ]

    def ref(self, name: str) -> Any:
        async def call(method: str, *arguments: Any, **settings: Any) -> Any:
            self.calls.append((name, method, *arguments))
            if self.refuses is not None:
                raise self.refuses
            if method == "predict":
                return [{"response": "4", "reward": 1.0, "versions": [3]}]
            return self.states.get(arguments[0], {"status": "PENDING"})

        return SimpleNamespace(call=call)


@contextlib.asynccontextmanager
async def asking(run: Run) -> AsyncIterator[Any]:
    admin = AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    Questions(run.config, run.ref, lambda: run.groups).mount(admin)
    await admin.start()
    try:
        async with aiohttp.ClientSession(admin.url, headers={"Authorization": f"Bearer {RUN_TOKEN}"}) as session:

            async def ask(path: str, body: dict[str, Any] | None = None, **settings: Any) -> tuple[int, Any]:
                method = "GET" if body is None else "POST"
                async with session.request(method, path, json=body, **settings) as response:
                    return response.status, await response.json()

            yield ask
    finally:
        await admin.close()


async def test_an_evaluation_is_asked_for_once_a_key_and_followed_by_its_id() -> None:
    run = Run()
    async with asking(run) as ask:
        status, told = await ask("/evaluate", {"set": "hard", "idempotency_key": "k"})
        assert (status, told["status"], told["sets"], told["version"]) == (202, "PENDING", ["hard"], None)
        name = told["id"]
        assert run.calls == [("coordinator", "ask_evaluation", f"asked-{name}", ["hard"], None)]
        result = {"version": 3, "reward": 0.5}
        run.states[f"asked-{name}"] = {"status": "COMPLETED", "result": result}
        assert (await ask(f"/evaluate/{name}"))[1]["result"] == result
        status, told = await ask("/evaluate", {"set": "hard", "idempotency_key": "k"})
        assert (status, told["id"], told["status"]) == (202, name, "COMPLETED")
        assert (await ask("/evaluate", {"idempotency_key": "k"}))[0] == 400  # another wish under that key
        assert (await ask("/evaluate", {"version": 2}))[1]["sets"] == ["easy", "hard"]
        assert (await ask("/evaluate", {"version": 2**63}))[0] == 400
        assert (await ask("/evaluate/none"))[0] == 404


async def test_what_cannot_be_evaluated_is_refused_with_words_and_leaves_no_trace() -> None:
    run = Run()
    async with asking(run) as ask:
        status, told = await ask("/evaluate", {"set": "hart"})
        assert status == 400 and "set must be one of easy, hard, got 'hart'" in told["error"]["message"]
        for refusal, expected in ((ConfigError("version must be held"), 400), (Refused("another one"), 409)):
            run.refuses = refusal
            assert (await ask("/evaluate", {"idempotency_key": "k"}))[0] == expected
        run.refuses = None
        assert (await ask("/evaluate", {"set": "easy", "idempotency_key": "k"}))[0] == 202
        assert (await ask("/evaluate", {}, headers={"Authorization": "Bearer other"}))[0] == 401
    async with asking(Run(sglang=object())) as ask:
        assert "evaluation.every must be set" in (await ask("/evaluate", {}))[1]["error"]["message"]


async def test_a_row_goes_to_a_replica_that_is_ready() -> None:
    run = Run()
    async with asking(run) as ask:
        status, told = await ask("/predict", {"prompt": "2 + 2", "label": "4", "num_samples": 2})
        assert (status, told["replica"], told["samples"][0]["reward"]) == (200, "rollout-1", 1.0)
        row = {"row": None, "prompt": "2 + 2", "label": "4", "metadata": None}
        assert run.calls == [("rollout-1.0", "predict", row, 2, 0)]
        for wrong in (
            {},
            {"prompt": "a", "row": {"b": 1}},
            {"prompt": "a", "num_samples": 65},
            {"prompt": "a", "timeout_secs": 5e-324},
            {"prompt": "a", "x": 1},
            {"prompt": "a", "label": 2**64},
            {"prompt": "a", "metadata": {"b": 2**64}},
            {"prompt": [{"b": 2**64}]},
            {"row": {"b": [2**64]}},
            {"row": {"b": [math.nan]}},
            {"prompt": "a", "label": math.inf},
        ):
            assert (await ask("/predict", wrong))[0] == 400
        run.groups.clear()
        assert (await ask("/predict", {"prompt": "2 + 2"}))[0] == 503
