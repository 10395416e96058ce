"""Status and stop, against a run that lives in another process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rondo.launch.report import status
from rondo.launch.report.status import ask, ask_to_stop, room_waited_for, show_status
from rondo.launch.report.summary import Summary, write
from rondo.launch.rundir import RunDir, owner, supervisor_record
from rondo.runtime.errors import ConfigError, PeerGone, Refused
from tests.runtime.admin.certificates import CERT, OTHER_CERT

LIVE_RUN = """
import asyncio, sys
from pathlib import Path
from rondo.launch.rundir import RunDir
from rondo.runtime.admin.endpoint import AdminServer, json_answer
from rondo.runtime.admin.openapi import Operation
from rondo.runtime.actors.broadcast import Broadcast
from rondo.runtime.config import AdminConfig
from tests.runtime.admin.certificates import CERT, KEY

class Provider:
    def __init__(self): self.stopped, self.reason = asyncio.Event(), None
    def health(self): return {"ready": True, "healthy": False, "step": 3, "reward_mean": 0.25}
    def roles(self): return [{"name": "actor-0", "state": "running", "pids": [1, 2], "rss_bytes": 318091264}]
    def waits(self): return [{"waiter": "actor-0", "name": "round", "seconds": 1.25},
        {"waiter": "coordinator", "name": "room for the journal", "seconds": 9.4, "peer": "/runs/demo/journal"}]
    bus = weights = samples = metrics = dict
    def subscribe(self): return Broadcast().subscribe()
    def stop(self, reason, *, quick): self.reason = (reason, quick); self.stopped.set()

async def scaling(request):
    return json_answer({"active": {"request_id": "7", "action": "scale_out", "role": "rollout", "num_replicas": 2,
        "status": "CREATING", "selected_engines": ["rollout-1"], "reason": "load"}})

async def main(parent):
    provider, token = Provider(), "t" * 32
    with RunDir.create(parent, "demo", {"num_steps": 10}) as run:
        (parent / "token").write_text(token)
        cert, key = parent / "cert.pem", parent / "key.pem"
        cert.write_text(CERT); key.write_text(KEY); key.chmod(0o600)
        server = AdminServer(AdminConfig(tls_cert=cert, tls_key=key), provider, token=token)
        server.route("GET", "/scaling", scaling, scope="read", operation=Operation("Replicas.", dict))
        await server.start()
        port = server.port
        run.write_supervisor(rt_dir=parent, admin_host="127.0.0.1", admin_port=port, token_path=parent / "token", admin_cert=cert)
        print("ready", flush=True)
        await provider.stopped.wait()
        await server.close()
    print(provider.reason, flush=True)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setattr(status, "_ANSWER_S", 120.0)
    with subprocess.Popen(
        [sys.executable, "-c", LIVE_RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_live_run_is_shown_and_stops_when_it_is_asked_to(
    tmp_path: Path, live: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"time": 20 * at, "kind": "metrics", "step": at, "reward_mean": at / 4, "loss": 0.25} for at in range(3)]
    told = {"kind": "metrics", "evaluation": {"version": 2, "reward": 0.5, "figures": {"pass@1": 0.75}}}
    records = "".join(json.dumps(record) + "\n" for record in [*steps, told])
    (tmp_path / "demo" / "metrics.jsonl").write_text(records)
    assert show_status(tmp_path / "latest") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run demo  pid {live.pid}  https://127.0.0.1:")
    assert lines[1:] == [
        "step 3/10  reward 0.500  loss 0.25  evaluation pass@1=0.75  2 min 20 s left",
        "ready=True  healthy=False  step=3  reward_mean=0.25",
        "  name=actor-0  state=running  pids=1,2  memory=303 MiB",
        "  scaling: request_id=7  action=scale_out  role=rollout  num_replicas=2  status=CREATING  selected_engines=rollout-1  "
        "reason=load",
        "  waits: waiter=actor-0  name=round  seconds=1.25",
        "  waits: waiter=coordinator  name=room for the journal  seconds=9.4  peer=/runs/demo/journal",
    ]
    assert room_waited_for(tmp_path / "demo") == [
        "coordinator waits for room for the journal (/runs/demo/journal): free some, and the run goes on"
    ]
    assert show_status(tmp_path / "latest", as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["alive"], shown["health"]["step"]) == (True, 3)
    record = supervisor_record(tmp_path / "demo")
    assert record is not None
    with pytest.raises(
        ConfigError, match=r"why must be a field of Stop, got an unknown name.* \(https://127.*/stop, status 400\)"
    ):
        ask(record, "/stop", {"why": "?"})
    with pytest.raises(Refused, match=r"POST /roles: Method Not Allowed"):
        ask(record, "/roles", {})
    (tmp_path / "cert.pem").write_text(OTHER_CERT)  # somebody else answers there
    with pytest.raises(PeerGone, match="certificate verify failed"):
        ask(record, "/healthz")
    (tmp_path / "cert.pem").write_text(CERT)

    assert ask_to_stop(tmp_path / "demo", reason="enough for today", now=True) == 0
    assert owner(tmp_path / "demo") is None
    assert live.communicate()[0] == "('enough for today', True)\n"
    assert live.returncode == 0


def test_a_finished_run_is_shown_by_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        write(run.path, Summary(name="demo", exit_code=0, attempt=0, steps=4, wall_s=2.0, reward_after=0.5))
    assert show_status(tmp_path / "demo") == 0
    assert "reward_after            0.500\n" in capsys.readouterr().out
    assert show_status(tmp_path / "demo", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["steps"] == 4


def test_a_run_that_was_killed_is_shown_with_what_it_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        line = '{"time": 1, "source": "actor-0", "kind": "metrics", "step": 2, "reward_mean": 0.5}\n'
        (run.path / "metrics.jsonl").write_text(line)
    assert show_status(tmp_path / "demo") == 1
    assert capsys.readouterr().out == (
        "run demo ended without a summary after step 3, reward 0.500. It has no checkpoint: start it again with `rondo train`\n"
    )


def test_a_torn_summary_counts_as_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        (run.path / "summary.json").write_text('{"name": "de')
    assert show_status(tmp_path / "demo") == 1
    assert capsys.readouterr().out.startswith("run demo ended without a summary after no step.")


def test_a_run_that_starts_is_shown_and_cannot_be_stopped_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        assert show_status(run.path) == 0
        assert capsys.readouterr().out.startswith("run demo is starting, or ends, pid ")
        with pytest.raises(PeerGone, match="run demo must have started, and not be ending, to be stopped"):
            ask_to_stop(run.path, reason="x")
        run.write_supervisor(rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=9, token_path=tmp_path / "gone")
        assert show_status(run.path) == 0


def test_a_run_that_has_ended_cannot_be_stopped(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", {}).close()
    with pytest.raises(ConfigError, match=r"RUN must be alive to be stopped, got .*/demo which has ended"):
        ask_to_stop(tmp_path / "demo", reason="x")


def test_whoever_waits_for_a_stop_is_told_what_for_and_until_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that leaves after three looks: it saves, then waits for room, and then is gone."""
    room = {"waiter": "actor-0.0", "name": "room on the disk", "peer": "/runs: 9 bytes needed, 0 free", "seconds": 5.0}
    waits: list[list[dict[str, Any]]] = [[], [room | {"deadline_s": 25.0}], [room | {"deadline_s": None}], []]
    groups = [
        {"name": "actor-0", "state": "leaving", "section": "save"},
        {"name": "store", "state": "ready", "section": ""},
    ]
    record, asked = SimpleNamespace(pid=7), iter(waits)

    def ask(_: object, path: str, body: object = None) -> Any:
        return {"/stop": {}, "/roles": groups}.get(path) if path != "/waits" else next(asked)

    owners = iter([7, 7, 7, None])
    monkeypatch.setattr(status, "existing_run", lambda path: path)
    monkeypatch.setattr(status, "live_record", lambda *_: record)
    monkeypatch.setattr(status, "supervisor_record", lambda _: record)
    monkeypatch.setattr(status, "read_json", lambda _: {"supervision": {"grace_s": 20.0, "save_s": 1800.0}})
    monkeypatch.setattr(status, "owner", lambda _: next(owners))
    monkeypatch.setattr(status, "ask", ask)
    monkeypatch.setattr(status, "_LOOK_S", 0.0)
    monkeypatch.setattr(status, "_TELL_S", -1.0)
    assert ask_to_stop(tmp_path / "demo", reason="enough") == 0
    first, saves, until, whenever = capsys.readouterr().out.splitlines()
    assert first == "run demo saves and ends, within 20 s, or 1800 s where a save takes so long, pid 7"
    assert saves == "waits for actor-0: save"
    told = r"actor-0.0 waits for room on the disk \(/runs: 9 bytes needed, 0 free\)"
    assert re.fullmatch(told + r", until \d\d:\d\d:\d\d: free some, and the run goes on", until)
    assert re.fullmatch(told + ": free some, and the run goes on", whenever)
