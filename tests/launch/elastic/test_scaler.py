"""The number of replicas, asked for as an autoscaler does and over HTTP, of a supervisor that does what it is told at once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rondo.launch.config import RunConfig, load, override
from rondo.launch.elastic.request import Action, Request, Status, Wish
from rondo.launch.elastic.room import PREPARED
from rondo.launch.elastic.routes import mount
from rondo.launch.elastic.scaler import Scaler
from rondo.launch.machine import num_cores
from rondo.launch.modes import fully_async
from rondo.launch.rundir import read_json, write_json
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError, Refused
from rondo.runtime.supervision.orders import State
from rondo.runtime.supervision.spec import GroupSpec, GroupView
from rondo.runtime.supervision.supervisor import Supervisor
from tests.launch.configs import write
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers, ask

GIB = 1 << 30


class Told:
    """A supervisor whose replicas are up with the next look, and gone."""

    def __init__(self, config: RunConfig) -> None:
        names = [(name, group.name) for group in config.role_groups for name in group.replica_names()]
        self.phase, self.refuses = "running", False
        self.groups = {name: (group, State.READY) for name, group in names}
        self.incarnations = Counter(self.groups.keys())

    def snapshot(self) -> Any:
        views = tuple(
            GroupView(
                name,
                state,
                self.incarnations[name],
                1,
                1,
                1,
                0,
                service=False,
                role=group,
                pids=(),
                rss_bytes=0,
                progress=0,
                section="",
            )
            for name, (group, state) in self.groups.items()
        )
        for name, (group, state) in list(self.groups.items()):
            if state is State.DRAINING:
                del self.groups[name]
            elif state is State.STARTING:
                self.groups[name] = group, State.READY
        return SimpleNamespace(groups=views, phase=self.phase)

    def add_group(self, spec: GroupSpec) -> None:
        if self.refuses:
            raise Refused("no")
        self.groups[spec.name] = spec.role, State.STARTING

    def drain_group(self, name: str, *, deadline_s: float, again: bool = False) -> None:
        self.incarnations[name] += again
        self.groups[name] = self.groups[name][0], State.READY if again else State.DRAINING

    def last_failure(self, name: str) -> str:
        return f"{name} has no memory"

    def keep_group(self, name: str) -> None:
        self.groups[name] = self.groups[name][0], State.READY


class Rig:
    def __init__(self, folder: Path, *sets: str, free: int = GIB, fixed: bool = False) -> None:
        config = load(write(folder))
        self.config = override(config, sets) if sets else config
        self.supervisor, self.events, self.proved = Told(self.config), list[Mapping[str, Any]](), dict[str, int]()
        self.folder = folder
        write_json(folder / PREPARED, {"first_devices": {}, "num_devices": 4})
        self.scaler = Scaler(
            cast(Supervisor, self.supervisor), self.config, folder, self.tell, lambda: self.proved, fixed=fixed
        )
        self.scaler._room._free = lambda: (free, "the machine")

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        assert kind == "scaling"
        self.events.append(data)

    def ask(self, target: int, action: Action | None = None, **fields: Any) -> Request:
        """Of rollout; without an action whichever leads there."""
        there = len(self.scaler.view().replicas.get("rollout", ()))
        return self.scaler.ask(
            Wish("rollout", action or ("scale_in" if target < there else "scale_out"), target, **fields)
        )

    def settle(self) -> None:
        while self.scaler.view().active is not None:
            self.scaler.advance()


def test_an_autoscaler_asks_for_a_total_and_reads_how_it_goes(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asked = rig.ask(3, reason="queue above 10")
    assert asked.status is Status.PENDING and rig.scaler.view().active == asked
    rig.proved = {"rollout-1/rollout.0": 4, "rollout-2/rollout.0": 5, "rollout-0/rollout.0": 2}
    rig.settle()
    done = rig.scaler.get(asked.request_id)
    assert done is not None and (done.status, done.weight_version) == (Status.ACTIVE, 4)
    assert rig.scaler.view().replicas["rollout"] == ("rollout-0", "rollout-1", "rollout-2")
    assert [event["status"] for event in rig.events] == ["PENDING", "CREATING", "ACTIVE"]
    assert rig.events[0]["reason"] == "queue above 10"
    endpoints = [tmp_path / "endpoints" / f"rollout-{number}.json" for number in (0, 2)]
    endpoints[0].parent.mkdir()
    for path in endpoints:
        path.touch()
    rig.ask(1, reason="idle")
    rig.settle()
    assert [path.exists() for path in endpoints] == [True, False]
    assert rig.scaler.view().requests[0].status is Status.COMPLETED
    engines = rig.scaler.engines("rollout")
    assert [(each.engine_id, each.origin, each.weight_version) for each in engines] == [("rollout-0", "initial", 2)]


def test_a_critic_of_a_group_of_its_own_can_start_again(tmp_path: Path) -> None:
    groups = [group.model_dump(mode="json") for group in fully_async(critic_processes=1)]
    rig = Rig(tmp_path, "algorithm.name=ppo", f"role_groups={json.dumps(groups)}")
    assert rig.scaler._requests._fixed == {"actor": "actor", "critic": "critic"}


def test_a_replica_that_is_given_up_is_told_with_what_it_failed_of(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    asked = rig.ask(3, reason="")
    rig.scaler.advance()
    del rig.supervisor.groups["rollout-2"]
    rig.settle()
    found = rig.scaler.get(asked.request_id)
    assert found is not None and found.status is Status.PARTIAL
    assert found.failed_engines == {"rollout-2": "rollout-2 has no memory"}


class Holds:
    """A rollout process that attaches what it is told to; `holds`: until it is asked, or cancelled."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        if method == "engines":
            return [{"name": url, "state": state, "healthy": True, "version": 3} for url, state in self.states.items()]
        url = arguments[0]
        if method == "detach_engine":
            del self.states[url]
            return True
        self.states[url] = "connecting"
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            del self.states[url]
            raise
        self.states[url] = "active"
        return True


async def test_engines_that_run_already_are_attached_shown_and_let_go_and_a_call_that_is_given_up_is_undone(
    tmp_path: Path,
) -> None:
    asked, replica = list[str](), Holds()
    rig = Rig(tmp_path, "rollout.sglang.urls=('http://own:1',)", "rollout.sglang.weights='disk'")

    def ref(name: str) -> Any:
        asked.append(name)
        return replica

    rig.scaler._ref = ref

    async def settled() -> Status:
        async with asyncio.timeout(60):
            while rig.scaler.view().active is not None:
                await asyncio.sleep(0.005)
                rig.scaler.advance()
        return rig.scaler.view().requests[0].status

    urls = ("HTTP://A:1/", "http://a:1")
    request = rig.ask(0, action="scale_out", reason="", engine_urls=urls)
    assert request.selected_engines == ("http://a:1",)
    rig.scaler.advance()
    await replica.begun.wait()
    rig.scaler.cancel(request.request_id)
    assert await settled() is Status.CANCELLED and replica.states == {}
    replica.go_on.set()
    rig.ask(0, action="scale_out", reason="", engine_urls=urls)
    assert await settled() is Status.ACTIVE and set(asked) == {"rollout-0.0"}
    await rig.scaler._look_at_engines()
    told = rig.scaler.engines("rollout")[-1]
    assert (told.url, told.origin, told.group, told.state, told.weight_version) == (
        "http://a:1", "attached", "rollout-0", "active", 3,
    )  # fmt: skip
    rig.ask(0, action="scale_in", reason="", engine_urls=urls)
    assert await settled() is Status.COMPLETED and rig.scaler.engines("rollout")[-1].engine_id == "rollout-0"
    embedded = Rig(tmp_path).ask(0, action="scale_out", reason="", engine_urls=urls)
    assert embedded.status is Status.REJECTED and "generates with servers" in embedded.message


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "bus.ring_bytes=67108864", free=100 << 20)
    assert rig.ask(2, reason="", dry_run=True).status is Status.PENDING
    refused = rig.ask(3, reason="")
    assert (refused.status, refused.message) == (
        Status.REJECTED,
        "2 more of rollout must fit into the 100 MiB of memory that are free in the machine, got 128 MiB: for each 64 MiB of "
        "rings, and 0 bytes as one has now. Ask for fewer, or make room",
    )
    assert rig.events[-1]["status"] == "REJECTED"


def test_servers_that_are_named_in_the_settings_have_one_replica(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "rollout.sglang={'urls': ['http://h:1']}")
    refused = rig.ask(2, reason="")
    assert refused.status is Status.REJECTED and "must be 1 with rollout.sglang.urls" in refused.message


def test_no_fewer_stay_than_the_settings_ask_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "role_groups.0.replicas=3", "rollout.min_engines=2")
    refused = rig.ask(1, reason="")
    assert (refused.status, refused.message) == (
        Status.REJECTED, "num_replicas must be at least 2, got 1. Lower rollout.min_engines, or stop the run to end all",
    )  # fmt: skip
    assert rig.ask(2, reason="", dry_run=True).status is Status.PENDING


def test_new_replicas_get_devices_that_nobody_has_and_give_them_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "role_groups.0.devices=1", "role_groups.1.devices=1", free=64 * GIB)
    write_json(tmp_path / PREPARED, {"first_devices": {"rollout-0": 0, "actor-0": 1}, "num_devices": 4})
    rig.ask(3, reason="")
    rig.settle()
    assert read_json(tmp_path / PREPARED)["first_devices"] == {
        "rollout-0": 0, "actor-0": 1, "rollout-1": 2, "rollout-2": 3,
    }  # fmt: skip
    refused = rig.ask(4, reason="")
    assert refused.message == (
        "1 more of rollout must find 1 free devices, 1 beside each other for each, got room for 0 of them. Ask for fewer, or "
        "scale another role in"
    )
    rig.ask(2, reason="")
    rig.settle()
    rig.ask(3, reason="")
    rig.settle()
    assert read_json(tmp_path / PREPARED)["first_devices"]["rollout-3"] == 3


def test_what_the_supervisor_refuses_and_a_run_that_ends_fail_a_request(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    for change, why in ({"refuses": True}, "no"), ({"phase": "stopping"}, "the run is stopping"):
        rig.ask(2, reason="")
        vars(rig.supervisor).update(change)
        rig.scaler.advance()
        assert (rig.scaler.view().requests[0].status, rig.scaler.view().requests[0].error_message) == (
            Status.FAILED,
            why,
        )
    vars(rig.supervisor).update(refuses=False, phase="restarting")
    rig.ask(2, reason="")
    rig.scaler.advance()
    assert rig.scaler.view().active is not None  # it goes on with the next attempt


def test_a_run_of_other_role_groups_than_its_settings_scales_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of this run"):
        Rig(tmp_path, fixed=True).ask(2, reason="")


@asynccontextmanager
async def over_http(folder: Path) -> AsyncIterator[tuple[Rig, AdminServer]]:
    rig = Rig(folder)
    admin = AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    mount(admin, rig.scaler, tuple(role for group in rig.config.role_groups for role in group.roles))
    await admin.start()
    try:
        yield rig, admin
    finally:
        await admin.close()


async def test_requests_over_http_have_relax_s_fields_and_http_s_statuses(tmp_path: Path) -> None:
    async with over_http(tmp_path) as (rig, admin):

        async def post(path: str, **body: Any) -> tuple[int, Any]:
            return await ask(admin, "POST", path, RUN_TOKEN, json=body)

        status, begun = await post("/rollout/scale_out", num_replicas=3, timeout_secs=60, idempotency_key="k")
        assert (status, begun["status"], begun["timeout_s"]) == (200, "PENDING", 60.0)
        assert begun.keys() >= {
            "request_id", "status", "model_name", "num_replicas", "engine_urls", "engine_ids", "failed_engines",
            "created_at", "updated_at", "error_message", "weight_version", "message", "selected_engines", "removed_engines",
        }  # fmt: skip
        assert (await post("/rollout/scale_out", num_replicas=3, timeout_secs=60, idempotency_key="k"))[1] == begun
        status, other = await post("/rollout/scale_in", num_replicas=1)
        assert (status, other["status"]) == (409, "CONFLICT")
        path = f"/rollout/scale/{begun['request_id']}"
        assert (await ask(admin, "GET", path))[1]["status"] == "PENDING"
        assert (await post(f"{path}/cancel"))[1]["status"] == "CANCELLED"
        assert (await post(f"{path}/cancel"))[0] == 400
        for wrong in (0, -(2**64), 2**64):
            assert (await post("/rollout/scale_in", num_replicas=wrong))[0] == 400
        assert (await post("/rollout/scale_out", num_replicas=1))[1]["status"] == "NOOP"
        status, refused = await post("/rollout/scale_out", engine_urls=["http://a:1"])
        assert (status, refused["status"], refused["engine_urls"]) == (400, "REJECTED", ["http://a:1"])
        status, failed = await post("/actor/scale_out", num_replicas=2)
        assert status == 400 and "got 'actor'" in failed["error"]["message"]
        status, failed = await post("/rollout/scale_out", num_replica=2)
        assert status == 400 and "num_replica" in failed["error"]["message"]
        assert (await post("/rollout/restart"))[1]["action"] == "restart"
        rig.settle()
        assert [each["action"] for each in (await ask(admin, "GET", "/rollout/scale"))[1]] == ["restart", "scale_out"]
        assert len((await ask(admin, "GET", "/rollout/scale?status=CANCELLED"))[1]) == 1
        assert (await ask(admin, "GET", "/advantages/scale"))[1] == []
        for path in ("/rollout/scale/none", "/nobody/engines", f"/advantages/scale/{begun['request_id']}"):
            assert (await ask(admin, "GET", path))[0] == 404
        assert [each["engine_id"] for each in (await ask(admin, "GET", "/actor/engines"))[1]] == ["actor-0"]
        assert (await ask(admin, "GET", "/scaling"))[1]["replicas"] == {
            "rollout": ["rollout-0"], "advantages": ["advantages-0"],
        }  # fmt: skip
        assert (await ask(admin, "POST", "/rollout/scale_out", json={"num_replicas": 2}))[0] == 401
        assert "/rollout/scale/{id}/cancel" in (await ask(admin, "GET", "/openapi.json"))[1]["paths"]


async def test_a_role_on_the_cores_has_at_most_eight_times_as_many_replicas_as_they_are_or_the_settings_name(
    tmp_path: Path,
) -> None:
    async with over_http(tmp_path) as (rig, admin):
        most = 8 * num_cores()
        paths = (await ask(admin, "GET", "/openapi.json"))[1]
        named = paths["paths"]["/rollout/scale_out"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        told = paths["components"]["schemas"][named["$ref"].rpartition("/")[2]]["properties"]["num_replicas"]
        assert told["maximum"] == most
        body = {"num_replicas": most + 1}
        status, refused = await ask(admin, "POST", "/rollout/scale_out", RUN_TOKEN, json=body)
        assert (status, refused["status"], refused["message"]) == (
            400, "REJECTED", f"num_replicas of rollout must be at most {most} on this machine, got {most + 1}. Ask for fewer, or "
            "start the run with more role_groups[rollout].replicas",
        )  # fmt: skip
        assert rig.ask(most, reason="").status is Status.PENDING
    more = Rig(tmp_path, f"role_groups.0.replicas={most}").scaler
    assert (more.most("rollout"), more.most("actor")) == (8 * most, None)
