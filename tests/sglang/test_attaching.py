"""A real server that joins a run while it goes on, asked for over HTTP, and leaves it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from rondo.launch.report.status import ask, live_record
from tests.e2e.runs import left_behind, start
from tests.sglang.served_runs import events, finish, line, lines_of
from tests.sglang.servers import Served


def test_a_server_is_attached_to_a_run_by_its_address_generates_for_it_and_leaves_it_as_it_was(
    served: Served, tmp_path: Path
) -> None:
    key, run_dir = tmp_path / "key", tmp_path / "small"
    key.touch(mode=0o600)
    key.write_text(served.key)
    sets = (
        "num_steps=1000", "model.build=null", "model.build_args={}", f"model.path={served.model}", "max_staleness=1",
        f"rollout.sglang.api_key_file={key}", "admin.port=0",
    )  # fmt: skip
    running = start(line(tmp_path, *sets), tmp_path)

    def until(there: Any) -> Any:
        """At every step."""
        for text in lines_of(running, run_dir):
            if "step=" in text and (found := there()):
                return found
        raise AssertionError("the run ended before")

    def status(request: dict[str, Any]) -> Any:
        told = ask(live_record(run_dir, "to be asked"), f"/rollout/scale/{request['request_id']}")
        assert told["status"] not in ("FAILED", "PARTIAL", "REJECTED", "CANCELLED"), told
        return told["status"] in ("ACTIVE", "COMPLETED")

    def engine() -> dict[str, Any]:
        told = ask(live_record(run_dir, "to be asked"), "/rollout/engines")
        return next((each for each in told if each.get("origin") == "attached"), {})

    def scale(action: str) -> None:
        body = {"engine_urls": [served.url], "timeout_secs": 300}
        request = ask(live_record(run_dir, "to be asked"), f"/rollout/scale_{action}", body)
        until(lambda: status(request))

    until(lambda: True)
    scale("out")
    until(lambda: engine())
    [attached] = events(run_dir, "engine_attached")
    assert attached["engine"] == served.url and attached["version"] >= 0
    scale("in")
    assert until(lambda: not engine())
    ask(live_record(run_dir, "to be stopped"), "/stop", {"reason": "enough", "now": False})
    ended = finish(running, run_dir)
    assert ended.code == 75, ended.output
    journal = {each["engine"] for each in events(run_dir, "engine_detached")}
    assert journal == {served.url} and served.server.pid is not None
    gaps = [orjson.loads(each) for each in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert max(each.get("log_prob_gap", 0.0) for each in gaps) < 1e-4
    assert left_behind(tmp_path) == []
