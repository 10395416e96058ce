"""The autoscaler over HTTP: what it says of itself, and what somebody with the run's token may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rondo.launch.autoscale.decide import AutoscaleConfig
from rondo.launch.autoscale.routes import mount
from rondo.launch.autoscale.watch import Autoscaler
from rondo.launch.machine import num_cores
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.config import AdminConfig
from tests.launch.elastic.test_scaler import Rig
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers, ask


async def test_an_autoscaler_tells_of_itself_and_is_changed_with_the_runs_token_under_relax_s_names(
    tmp_path: Path,
) -> None:
    rig, told = Rig(tmp_path), list[str]()
    scales = Autoscaler(AutoscaleConfig(max_replicas=4), rig.scaler, lambda kind, data: told.append(kind))
    admin = AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    mount(admin, rig.scaler, scales)
    await admin.start()

    async def get(name: str) -> Any:
        status, found = await ask(admin, "GET", f"/autoscaler/{name}")
        assert status == 200, found
        return found

    async def does(method: str, name: str, token: str | None = RUN_TOKEN, **body: Any) -> tuple[int, Any]:
        return await ask(admin, method, f"/autoscaler/{name}", token, json=body)

    try:
        scales.look()
        rig.ask(2, reason="by hand")
        rig.settle()
        rig.ask(3, reason="autoscale: the trainer waits")
        found = await get("status")
        assert (found["enabled"], found["current_engines"], found["max_engines"]) == (True, 2, 4)
        assert found["last_decision"]["reason"] == "too little was seen of this number of replicas"
        assert (found["last_scale_action"], len(found["pending_requests"])) == ("scale_out", 1)
        rig.settle()
        assert (await get("scale_history"))["total_count"] == 1 and await get("conditions") == {
            "conditions": {}, "metrics": {}, "observations": {}
        }  # fmt: skip
        assert (await get("scale_history?action=scale_in&limit=5"))["history"] == []
        assert (await does("POST", "enable", None, enabled=False))[0] == 401
        assert (await does("POST", "enable", enabled=False))[1]["enabled"] is False and scales.look() is None
        status, rules = await does("PATCH", "config", max_replicas=2, wait_out=0.5)
        assert status == 200 and (rules["max_replicas"], rules["wait_out"]) == (2, 0.5) and rules == await get("config")
        for wrong in (
            {"max_replicas": 0}, {"min_replicas": 3}, {"period_s": 1.0}, {"max_engines": 3}, {"max_replicas": 2**64},
            {"max_step": 2**64}, {"max_replicas": 8 * num_cores() + 1},
        ):  # fmt: skip
            status, failed = await does("PATCH", "config", **wrong)
            assert status == 400 and next(iter(wrong)) in failed["error"]["message"], failed
        assert told == ["autoscale_holds", "autoscale_rules", "autoscale_rules"]
    finally:
        await admin.close()


async def test_a_run_without_one_says_so(tmp_path: Path) -> None:
    rig, admin = Rig(tmp_path), AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    mount(admin, rig.scaler, None)
    await admin.start()
    try:
        assert (await ask(admin, "GET", "/autoscaler/status"))[1]["enabled"] is False
        for method, name, body in (("POST", "enable", {"enabled": True}), ("PATCH", "config", {"max_replicas": 2})):
            status, failed = await ask(admin, method, f"/autoscaler/{name}", RUN_TOKEN, json=body)
            assert status == 400 and "autoscale must be set" in failed["error"]["message"]
    finally:
        await admin.close()
