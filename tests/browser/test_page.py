"""The page in a real browser: every view of a live run beside a finished one. Needs BROWSER_PYTHON, a Python that has playwright,
which `make test-browser` brings, and a Chromium."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import sys
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rondo.launch import init
from rondo.launch.dashboard.server import Dashboard
from rondo.launch.rundir import RunDir
from rondo.roles.data.originals import Originals
from rondo.runtime.actors.broadcast import Broadcast
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.admin.server import bind
from rondo.runtime.config import AdminConfig
from tests.launch.dashboard.runs import (
    HOSTILE,
    SETTINGS,
    a_run,
    bytes_for_tokens,
    evaluated,
    lines,
    of_step,
    sample,
    trained,
)

PYTHON = os.environ.get("BROWSER_PYTHON", "")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or ""
LOOK = Path(__file__).with_name("look.py")
pytestmark = pytest.mark.skipif(
    not (PYTHON and BROWSER), reason="BROWSER_PYTHON names no Python, or there is no chromium"
)


class Live:
    """What a run's endpoint says while it goes on."""

    def health(self) -> dict[str, Any]:
        return {"ready": True, "healthy": True, "step": 30, "version": 31}

    def roles(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "actor-0",
                "role": "actor",
                "state": "ready",
                "rss_bytes": 1 << 28,
                "restarts": 1,
                "section": "train",
                "pids": [os.getpid()],
            }
        ]

    def waits(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "call next_rounds",
                "waiter": "actor-0.0",
                "peer": "coordinator",
                "deadline_s": 600.0,
                "seconds": 1.5,
            }
        ]

    def bus(self) -> dict[str, Any]:
        rings = {"rollout-0": {"used": 1 << 20, "size": 64 << 20}}
        return {"groups": {"leased": 4, "ready": 2}, "rings": rings, "version": 31, "refused_rows": 0}

    def weights(self) -> dict[str, Any]:
        return {"committed": 31, "proved": {"rollout-0/rollout.0": 30}}

    def samples(self) -> list[Any]:
        return []

    metrics = dict

    def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        return Broadcast().subscribe()

    def stop(self, reason: str, *, quick: bool) -> None: ...


async def looked(address: str, pictures: Path, *what: str) -> dict[str, Any]:
    """What the browser saw, of which every view is whole."""
    arguments = (str(LOOK), BROWSER, address, str(pictures), *what)
    looking = await asyncio.create_subprocess_exec(PYTHON, *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await looking.communicate()
    assert looking.returncode == 0
    told: dict[str, Any] = json.loads(out)
    assert (told["console"], told["elsewhere"]) == ([], [])
    for view, seen in told["views"].items():
        found = seen["wide"], seen["overflow"] <= 0, seen["scripts"], seen["blank"], seen["trouble"]
        assert found == ([], True, 0, 0, ""), view
        assert len(seen["text"]) > 100 and "owned" not in seen["title"], view
    return told


async def test_every_view_of_a_live_and_a_finished_run_in_a_browser(tmp_path: Path) -> None:
    finished = a_run(tmp_path, "finished", steps=30)
    token, admin = "t" * 64, AdminServer(AdminConfig(), Live(), token="t" * 64)
    await admin.start()
    (tmp_path / "token").write_text(token)
    with RunDir.create(tmp_path, "live", SETTINGS | {"num_steps": 3000}) as run:
        run.write_supervisor(
            rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=admin.port, token_path=tmp_path / "token"
        )
        lines(run.path / "metrics.jsonl", [evaluated(0, 0.1), *map(of_step, range(2500))])
        lines(
            run.path / "samples" / "step_000000.jsonl",
            [sample(0), sample(1, None, HOSTILE, error=HOSTILE, prompt=HOSTILE)],
        )
        bytes_for_tokens(run.path)
        kept = {"It is \u00e9leven, I think.": 1.0, HOSTILE[:3000]: None, "Twelve.": 0.0}
        trained(run.path, 0, 1, kept, prompt=HOSTILE[:300])
        media, picture, sound = Originals(run.path, 1 << 20), io.BytesIO(), io.BytesIO()
        Image.new("RGB", (40, 30), "teal").save(picture, "PNG")
        with wave.open(sound, "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(8000))
        of_prompt = (
            ("image", picture.getvalue()),
            ("audio", sound.getvalue()),
            ("image", f"<svg>{HOSTILE}</svg>".encode()),
        )
        media.keep(0, 1, [(kind, media.put(data)) for kind, data in of_prompt])
        shutil.copy(finished / "events.jsonl", run.path)
        shutil.copytree(finished / "timeline", run.path / "timeline")
        shutil.copytree(finished / "logs", run.path / "logs", dirs_exist_ok=True)
        dashboard = Dashboard([run.path, finished], host="127.0.0.1", token=token)
        await dashboard.http.start(bind("127.0.0.1", 0, "--port"))
        pictures = Path(os.environ.get("BROWSER_PICTURES", str(tmp_path / "pictures")))
        try:
            told = await looked(f"{dashboard.http.url}/#token={token}", pictures)
        finally:
            await dashboard.close()
            await admin.close()
    assert told["keys"] == ["overview", "curves", "timeline", "samples", "evaluation", "health", "bus", "memory"]
    light = {view: told["views"][f"light {view}"]["text"] for view in ("overview", "health", "bus", "samples?failed=1")}
    assert "The run goes on." in light["overview"] and "The run is done" in light["overview"]
    assert "actor and rollout take turns: each waits for the other." in light["overview"]
    assert "critical path: train" in told["views"]["light timeline"]["text"]
    assert (
        "Processes now" in told["views"]["phone memory"]["text"] and "At most" in told["views"]["dark memory"]["text"]
    )
    assert "Its critical path" in told["views"]["phone timeline"]["text"] and "Stop: save and end" in light["health"]
    assert "call next_rounds" in light["health"] and "1 MiB" in light["bus"]
    tokens = told["tokens"]
    assert tokens["text"].endswith("It is \u00e9leven, I think.") and HOSTILE[:60] in tokens["text"]
    assert (tokens["media"]["wide"], tokens["media"]["long"]) == ([40], [0.5])
    (said,) = tokens["media"]["said"]
    assert said.startswith("image: a medium must be of a form that browsers show, got b'<svg>")
    assert (tokens["samples"], tokens["dim"], tokens["title"]) == (3, 300 + len("\u202e") * 2 + 1, "not owned")
    assert len(tokens["colours"]) == 4 and all(
        each >= least for each, least in zip(tokens["colours"], (5, 2, 2, 1), strict=True)
    )
    assert HOSTILE[:60] in light["samples?failed=1"] and "\\u202e" in light["samples?failed=1"]


async def test_every_view_of_a_run_that_trains_and_of_the_same_when_it_has_ended(tmp_path: Path) -> None:
    rondo, run, config = (sys.executable, "-m", "rondo.launch.cli"), tmp_path / "mine", tmp_path / "mine.py"
    answers = {
        "machine": "laptop",
        "modality": "text",
        "model": "tiny",
        "data": "made",
        "reward": "own",
        "algorithm": "grpo",
    }
    init.main(config, **dict.fromkeys(init.QUESTIONS) | answers)
    settings = (
        f"run_dir={tmp_path}",
        "num_steps=5000",
        "samples.keep=1.0",
        "evaluation.every=3",
        "evaluation.num_prompts=8",
    )
    sets = [word for each in settings for word in ("--set", each)]
    piped: dict[str, Any] = {"stdout": asyncio.subprocess.PIPE}
    training = await asyncio.create_subprocess_exec(*rondo, "train", str(config), "--plain", *sets, **piped)
    assert training.stdout is not None
    while b" step=7/" not in (line := await training.stdout.readline()):
        assert line, "the run has ended"
    rest = asyncio.create_task(training.stdout.read())
    viewing = await asyncio.create_subprocess_exec(*rondo, "view", str(run), "--port", "0", **piped)
    try:
        assert viewing.stdout is not None
        address = (await viewing.stdout.readline()).decode().split()[-1]
        pictures = Path(os.environ.get("BROWSER_PICTURES", str(tmp_path / "pictures")))
        live = await looked(address, pictures / "live", "views")
        assert training.returncode is None
        stopping = await asyncio.create_subprocess_exec(*rondo, "stop", str(run))
        assert (await stopping.wait(), await training.wait()) == (0, 75)
        over = await looked(address, pictures / "over", "views")
    finally:
        for each in (training, viewing):
            if each.returncode is None:
                each.terminate()
                await each.wait()
        await rest
    for told, words in ((live, "The run goes on."), (over, "The run was stopped, and can be resumed.")):
        seen = {view: each["text"] for view, each in told["views"].items()}
        assert words in seen["light overview"] and "Its critical path" in seen["dark timeline"]
        assert "kept samples, newest first" in seen["phone samples"] and "held_out mean@1" in seen["light evaluation"]
        assert "actor-0" in seen["light health"] and "Seconds between commits" in seen["phone bus"]
        assert "segments" in seen["dark memory"]
    assert "Versions proved" in live["views"]["light bus"]["text"] and "left" in live["views"]["phone overview"]["text"]
    assert "Balance of samples" in over["views"]["light bus"]["text"]
