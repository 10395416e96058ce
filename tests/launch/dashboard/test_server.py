"""The page's server, in this process, on run directories made by hand: what it tells, of files as they grow and tear, and to
whom."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image
from yarl import URL

from rondo.launch.cli import main
from rondo.launch.dashboard import behind, memory
from rondo.launch.dashboard import media as media_module
from rondo.launch.dashboard.server import ASSETS, NICE, Dashboard
from rondo.launch.rundir import RunDir
from rondo.roles.data.originals import FOLDER, Originals
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.admin.server import bind
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError
from tests.launch.dashboard.runs import HOSTILE, a_run, lines, of_step, sample
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers

TOKEN = "d" * 64


class Page:
    """Asks as the page does."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def ask(self, path: str, token: str | None = TOKEN, **query: Any) -> tuple[int, Any]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.session.get(self.url + path, params=query, headers=headers) as answer:
            return (
                answer.status,
                await answer.json() if answer.content_type == "application/json" else await answer.text(),
            )

    async def of(self, path: str, **query: Any) -> Any:
        status, told = await self.ask(f"/api/runs/demo{path}", **query)
        assert status == 200, told
        return told

    async def headers(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            return answer.headers


@contextlib.asynccontextmanager
async def page(*runs: Path, host: str = "127.0.0.1", given: tuple[str, ...] = ()) -> AsyncIterator[Page]:
    dashboard = Dashboard(runs, host=host, token=TOKEN, given=given)
    await dashboard.http.start(bind("127.0.0.1", 0, "--port"))
    try:
        async with aiohttp.ClientSession() as session:
            yield Page(f"http://127.0.0.1:{dashboard.http.port}", session)
    finally:
        await dashboard.close()


async def test_a_finished_run_is_told_in_words_and_figures(tmp_path: Path) -> None:
    async with page(a_run(tmp_path)) as demo:
        (told,) = (await demo.ask("/api/runs"))[1]
        assert (told["id"], told["state"], told["num_done"], told["num_steps"]) == ("demo", "done", 10, 10)
        assert told["figures"]["reward_mean"] == 0.9 and told["figures"]["s_a_step"] == 2.0
        assert told["figures"]["tokens_a_s"] == 50.0
        assert told["explanation"]["findings"][0]["text"] == "actor and rollout take turns: each waits for the other."
        health = await demo.of("/health")
        (actor,) = health["groups"]
        assert (actor["state"], actor["incarnation"], actor["deaths"], actor["rss_bytes"]) == ("ended", 2, 1, 1 << 20)
        assert [event["kind"] for event in health["events"]] == ["ready", "starting", "died", "ready", "starting"]
        flow = await demo.of("/flow")
        assert flow["ledger"]["trained"] == 80 and len(flow["commits"]) == 10
        assert [(version, round(seconds, 3)) for version, seconds in flow["delays"]["actor-0.0"]][-1] == (9, 0.2)
        assert [each["reward"] for each in await demo.of("/evaluations")] == [0.25, 0.75]
        assert (await demo.of("/log", file="attempt_0/actor-0.1.log"))["lines"] == ['"a line of a log"']


async def test_a_step_is_told_with_its_spans_and_its_parts(tmp_path: Path) -> None:
    async with page(a_run(tmp_path)) as demo:
        told = await demo.of("/timeline", step=3)
        lane = next(each for each in told["lanes"] if each["lane"] == "actor")
        assert (lane["process"], lane["lane"], len(lane["spans"])) == ("actor-0.0", "actor", 4)
        assert ["train", 0.0, 0.5, 3] in lane["spans"]
        pieces = [(name, round(at, 3), round(length, 3)) for name, at, length in told["path"]]
        assert pieces == [("train", 0.0, 0.5), ("wait for coordinator", 0.5, 0.9), ("commit", 1.4, 0.1)]
        assert (told["steps"][0]["trainer"]["wait for rollout"], told["seconds"], told["known"]) == (1.0, 1.5, [0, 9])
        newest = await demo.of("/timeline", num=2)
        assert {span[3] for span in newest["lanes"][0]["spans"]} == {8, 9} and len(newest["path"]) == 6
        status, failed = await demo.ask("/api/runs/demo/timeline", step=10)
        assert (status, failed["error"]["message"].partition(",")[0]) == (400, "step must be one of 0 to 9")


async def test_several_runs_of_one_name_stand_side_by_side(tmp_path: Path) -> None:
    async with page(a_run(tmp_path / "a"), a_run(tmp_path / "b"), tmp_path / "a" / "demo") as demo:
        assert [run["id"] for run in (await demo.ask("/api/runs"))[1]] == ["demo", "demo~2"]


async def test_all_runs_below_a_folder_are_shown_and_links_to_them_once(tmp_path: Path) -> None:
    a_run(tmp_path / "runs", "a"), a_run(tmp_path / "runs", "b"), a_run(tmp_path / "runs" / "sweep", "c")
    (tmp_path / "runs" / "latest").symlink_to("b")
    (tmp_path / "runs" / "notes.txt").write_text("no run")
    async with page(tmp_path / "runs") as demo:
        assert [run["id"] for run in (await demo.ask("/api/runs"))[1]] == ["a", "b", "c"]


async def test_a_run_without_metrics_yet_is_shown_and_what_comes_follows(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "demo", {"num_steps": 5}) as run:
        async with page(run.path) as demo:
            told = await demo.of("")
            assert (told["state"], told["num_done"], told["explanation"]) == ("starting", 0, None)
            assert (await demo.of("/names"))["names"] == []
            assert (await demo.of("/timeline"))["steps"] == []
            assert (await demo.of("/samples"))["rows"] == []
            assert (await demo.of("/health"))["groups"] == []
            lines(run.path / "metrics.jsonl", [of_step(0)])
            lines(run.path / "samples" / "step_000000.jsonl", [sample(7)])
            assert (await demo.of(""))["num_done"] == 1
            assert [row["line"]["group"] for row in (await demo.of("/samples"))["rows"]] == [7]


async def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=2)
    whole = json.dumps(of_step(2)) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(whole[:40])
        file.flush()
        async with page(run) as demo:
            assert (await demo.of("/series", names="loss"))["series"]["loss"]["x"] == [0, 1]
            file.write(whole[40:])
            file.flush()
            assert (await demo.of("/series", names="loss"))["series"]["loss"]["x"] == [0, 1, 2]


async def test_a_file_that_was_begun_anew_is_read_anew(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    async with page(run) as demo:
        await demo.of("/series", names="loss")
        assert (await demo.of("/samples"))["total"] == 58
        (run / "metrics.jsonl").write_text(json.dumps(of_step(0, loss=5.0)) + "\n")
        assert (await demo.of("/series", names="loss"))["series"]["loss"]["mean"] == [5.0]
        (run / "samples" / "end.0.jsonl").unlink()
        lines(run / "samples" / "end.0.jsonl", [sample(1)])
        assert (await demo.of("/samples"))["total"] == 55


async def test_samples_are_found_by_words_rewards_and_steps(tmp_path: Path) -> None:
    async with page(a_run(tmp_path)) as demo:
        found = await demo.of("/samples", first=3, last=3, limit=2)
        assert [(row["step"], row["line"]["group"]) for row in found["rows"]] == [(3, 15), (3, 15)]
        rest = await demo.of("/samples", first=3, last=3, before=found["next"])
        assert [row["line"]["group"] for row in rest["rows"]] == [14, 13, 12] and rest["next"] is None
        assert {row["line"]["reward"] for row in (await demo.of("/samples", least=0.6))["rows"]} == {1.0}
        assert len((await demo.of("/samples", failed="true", limit=200))["rows"]) == 10
        assert [row["line"]["group"] for row in (await demo.of("/samples", search="WHAT IS 21 +"))["rows"]] == [21]
        assert (await demo.of("/samples", kind="end"))["matching"] == 4
        assert found["kinds"] == ["end", "start", "trained"]


async def test_a_sample_comes_with_its_group_and_the_same_prompt_of_other_evaluations(tmp_path: Path) -> None:
    async with page(a_run(tmp_path)) as demo:
        row = (await demo.of("/samples", kind="end", limit=1))["rows"][0]["row"]
        told = await demo.of("/group", row=row)
        assert [each["line"]["sample"] for each in told["group"]] == [0, 1]
        assert [each["kind"] for each in told["elsewhere"]] == ["start", "start"]
        assert told["sample"]["row"] == row


async def test_a_hostile_sample_is_cut_in_the_list_and_whole_beside_it(tmp_path: Path) -> None:
    async with page(a_run(tmp_path, steps=1)) as demo:
        (row,) = (await demo.of("/samples", failed="true"))["rows"]
        assert row["line"]["response"].startswith(HOSTILE[:2000]) and len(row["line"]["response"]) < 2100
        assert (await demo.of("/group", row=row["row"]))["sample"]["line"]["response"] == HOSTILE


async def test_what_no_run_writes_is_left_out_and_a_directory_that_goes_leaves_the_others(tmp_path: Path) -> None:
    run, other = a_run(tmp_path, steps=2), a_run(tmp_path, "other", steps=2)
    (run / "samples" / "step_000009.jsonl").mkdir()
    with (run / "samples" / "step_000001.jsonl").open("ab") as file:
        file.write(
            b'{"group": 7, "sample": 1e12, "details": ' + b"[" * 900 + b"]" * 900 + b', "response": "in the deep"}\n'
        )
    lines(run / "samples" / "step_99999999999.jsonl", [sample(8)])
    lines(run / "metrics.jsonl", [of_step(2) | {"step": "x"}, {"evaluation": 3}, of_step(2)])
    lines(run / "events.jsonl", [{"kind": {}, "group": "a"}])
    async with page(run, other) as demo:
        (found,) = (await demo.of("/samples", search="in the deep"))["rows"]
        assert (
            str(found["line"]["details"]).strip("[]'") == "…" and (await demo.of("/group", row=found["row"]))["sample"]
        )
        assert (await demo.of("/samples", search="deep", least=100))["rows"] == []
        assert (await demo.of("/health"))["groups"][0]["name"] == "actor-0"
        shutil.rmtree(other)
        told, gone = (await demo.ask("/api/runs"))[1]
        assert (told["num_done"], told["state"], gone["id"], gone["state"]) == (3, "done", "other", "unreadable")
        assert "config.resolved.json must be whole JSON, got No such file" in gone["words"]


async def test_media_are_given_as_what_they_are_and_what_could_hurt_a_page_is_not(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    kept, picture, huge = Originals(run, 1 << 30), io.BytesIO(), io.BytesIO()
    Image.new("RGB", (3, 2)).save(picture, "PNG")
    Image.new("1", (8192, 8192)).save(huge, "PNG")
    script = b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>"
    media = [picture.getvalue(), script, huge.getvalue(), b"RIFF\0\0\0\0WAVEfmt ", picture.getvalue()[:20]]
    names = [kept.put(each)[0] for each in media]
    kept.keep(3, 7, [("image", [*names, "0" * 32])])
    os.truncate(run / FOLDER / kept.put(b"\x89PNG\r\n\x1a\n")[0], media_module.MOST_BYTES + 1)
    names += kept.put(b"\x89PNG\r\n\x1a\n")
    async with page(run) as demo:
        told = await demo.of("/tokens", step=3, group=7)
        assert [each["bytes"] for each in told["media"]] == [*map(len, media), None]
        assert [bool(each["why"]) for each in told["media"]] == [False, True, True, False, False, True]
        assert (await demo.ask("/api/runs/demo/media", name=names[0], token=None))[0] == 401
        headers = {"Authorization": f"Bearer {TOKEN}"}
        for name, form in ((names[0], "image/png"), (names[3], "audio/wav"), (names[4], "image/png")):
            async with demo.session.get(
                f"{demo.url}/api/runs/demo/media", params={"name": name}, headers=headers
            ) as answer:
                assert (answer.status, answer.content_type) == (200, form)
                assert await answer.read() == media[names.index(name)]
                assert answer.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for name, words in (
            (names[1], "must be of a form that browsers show, got b'<svg xml' and so on."),
            (names[2], "must have at most 33554432 pixels to be shown, got 67108864 or more."),
            (names[5], "must have at most 67108864 bytes to be shown, got 67108865."),
            ("0" * 32, "must be there to be shown, got No such file or directory."),
            ("../../config.resolved.json", "name"),
        ):
            status, told = await demo.ask("/api/runs/demo/media", name=name)
            assert status == 400 and words in told["error"]["message"], told


@pytest.mark.parametrize(
    ("path", "query", "words"),
    [
        ("/series", {"names": "loss", "points": "0"}, "points must be greater than or equal to 1, got 0"),
        ("/series", {"names": "loss", "points": "many"}, "points must be a valid integer, got 'many'"),
        ("/series", {}, "names must be set, got nothing"),
        ("/samples", {"least": "nan"}, "least must be a valid number, got 'nan'"),
        ("/samples", {"limit": "201"}, "limit must be less than or equal to 200, got 201"),
        ("/samples", {"size": "3"}, "size must be a field of Find, got an unknown name"),
        ("/group", {"row": "900"}, "a sample must be one of 0 to 12, got 900"),
        ("/log", {"file": "../metrics.jsonl"}, "file must be a log of this run, got '../metrics.jsonl'"),
        ("/log", {"file": "../../../../etc/passwd"}, "file must be a log of this run"),
        ("/log", {"file": "x" * 300 + ".log"}, "file must be a log of this run"),
        ("/log", {"file": "x\0.log"}, "the path and query of GET must have no NUL, got one"),
        ("/samples", {"search": "\0"}, "the path and query of GET must have no NUL, got one"),
    ],
)
async def test_a_bad_query_is_answered_with_400_and_words(tmp_path: Path, path: str, query: Any, words: str) -> None:
    async with page(a_run(tmp_path, steps=1)) as demo:
        await demo.of("/samples")
        status, told = await demo.ask(f"/api/runs/demo{path}", **query)
        assert (status, told["error"]["type"]) == (400, "ConfigError") and told["error"]["message"].startswith(words)


async def test_a_file_of_the_page_with_a_name_beyond_any_is_not_there(tmp_path: Path) -> None:
    async with page(a_run(tmp_path, steps=1)) as demo:
        assert (await demo.ask(f"/assets/{'x' * 300}.js"))[0] == 404


async def test_on_loopback_reading_is_open_and_what_was_said_needs_the_token(tmp_path: Path) -> None:
    async with page(a_run(tmp_path, steps=1)) as demo:
        for path in ("/api/runs", "/api/runs/demo/health", "/", "/assets/app.js"):
            assert (await demo.ask(path, token=None))[0] == 200
        for path in ("samples", "group?row=0", "log?file=x"):
            assert (await demo.ask(f"/api/runs/demo/{path}", token=None))[0] == 401


async def test_on_another_address_everything_but_the_page_needs_the_token_file(tmp_path: Path) -> None:
    async with page(a_run(tmp_path, steps=1), host="0.0.0.0", given=("f" * 32,)) as demo:
        assert (await demo.ask("/", token=None))[0] == 200
        assert (await demo.ask("/api/runs", token=None))[0] == 401
        assert (await demo.ask("/api/runs/demo/samples", token="f" * 32))[0] == 200


async def test_behind_the_admin_port_it_has_that_ports_tokens_and_its_death_is_a_503_there(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=1)
    admin = AdminServer(AdminConfig(), Numbers(), token=RUN_TOKEN)
    behind.mount(admin, run)
    await admin.start()
    try:
        async with aiohttp.ClientSession() as session:
            port = Page(admin.url, session)
            status, told = await port.ask("/ui/", token=None)
            assert status == 503 and told["error"]["message"].startswith(
                "a dashboard must show this run alone, got none"
            )
            async with page(run) as demo:
                with behind.noted(run, demo.url, TOKEN):
                    with behind.noted(run, "http://127.0.0.1:1", "another"):  # the first stays
                        assert (await port.ask("/ui", token=None))[1] == (await demo.ask("/"))[1]
                    assert "script-src 'self'" in (await port.headers("/ui/"))["Content-Security-Policy"]
                    assert (await port.ask("/ui/assets/app.js", token=None))[1] == (await demo.ask("/assets/app.js"))[1]
                    assert (await port.ask("/ui/api/runs", token=None))[1][0]["id"] == "demo"
                    status, told = await port.ask("/ui/api/runs/demo/series", token=None, names="loss", points=5)
                    assert (status, told["series"]["loss"]["x"]) == (200, [0])
                    for path in ("samples", "group?row=0", "log?file=attempt_0/actor-0.1.log"):
                        assert (await port.ask(f"/ui/api/runs/demo/{path}", token=None))[0] == 401
                        assert (await port.ask(f"/ui/api/runs/demo/{path}", token=TOKEN))[0] == 401
                        assert (await port.ask(f"/ui/api/runs/demo/{path}", token=RUN_TOKEN))[0] == 200
                    assert (await port.ask("/ui/api/runs/demo/group", token=RUN_TOKEN, row="x"))[0] == 400
                    other = (
                        "demo%2Fsamples",
                        "demo%2fsamples",
                        "x/%2e%2e/demo/samples",
                        "x/../demo/samples",
                        "%2e%2e/series",
                    )
                    for path in other:
                        place = URL(f"{admin.url}/ui/api/runs/{path}", encoded=True)
                        async with session.get(place) as answer:
                            assert answer.status in (400, 401, 404), path
                assert (await port.ask("/ui/", token=None))[0] == 503  # nobody holds the note
            with behind.noted(run, demo.url, TOKEN):  # somebody does, and does not answer
                assert (await port.ask("/ui/", token=None))[0] == 503
            assert (await port.ask("/livez"))[0] == 200
    finally:
        await admin.close()


async def test_the_page_is_whole_and_asks_nobody_else(tmp_path: Path) -> None:
    async with page(a_run(tmp_path, steps=1)) as demo:
        policy = (await demo.headers("/"))["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy and "unsafe" not in policy
        for path in sorted(ASSETS.iterdir()):
            status, _ = await demo.ask(f"/assets/{path.name}")
            assert status == (200 if path.suffix in (".js", ".css", ".html", ".svg") else 404), path
        for path in ("/assets/..%2Fserver.py", "/assets/nothing.js", "/api/runs/other"):
            assert (await demo.ask(path))[0] == 404
    ours = [path.read_text() for path in ASSETS.iterdir() if "uPlot" not in path.name]
    assert not any(word in text for text in ours for word in ("innerHTML", "https:", "eval(", "insertAdjacentHTML"))


def test_what_may_not_be_listened_at_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(a_run(tmp_path, steps=1)), "--host", "0.0.0.0"]) == 2
    assert "--token-file must be given when --host is not loopback, got '0.0.0.0'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="RUN must be a run directory"):
        Dashboard([tmp_path / "nothing"], host="127.0.0.1", token=TOKEN)


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rondo.launch.cli", "view", str(a_run(tmp_path, steps=1)), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = re.fullmatch(r"runs demo: (http://127.0.0.1:\d+/)#token=(\w{64})\n", process.stdout.readline())
        assert told is not None
        request = urllib.request.Request(
            told[1] + "api/runs/demo/samples", headers={"Authorization": f"Bearer {told[2]}"}
        )
        found = {"share": 0.0}
        while found["share"] < 1.0:  # it looks for half a second at a time
            with urllib.request.urlopen(request) as answer:
                found = json.load(answer)
        assert found["total"] == 13
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0


async def test_a_live_run_does_what_it_is_asked_with_its_own_token_and_with_no_other(tmp_path: Path) -> None:
    provider = Numbers()
    admin = AdminServer(AdminConfig(), provider, token=RUN_TOKEN)
    behind.mount(admin, (tmp_path / "demo").resolve())
    await admin.start()
    (tmp_path / "token").write_text(RUN_TOKEN)
    stop = {"what": "stop", "token": RUN_TOKEN}
    try:
        with RunDir.create(tmp_path, "demo", {"num_steps": 5}) as run:
            run.write_supervisor(
                rt_dir=tmp_path, admin_host="127.0.0.1", admin_port=admin.port, token_path=tmp_path / "token"
            )
            async with page(run.path) as demo, aiohttp.ClientSession() as session:

                async def act(body: dict[str, Any], token: str | None = TOKEN, url: str = demo.url) -> tuple[int, Any]:
                    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                    place = f"{url}/api/runs/demo/act"
                    async with session.post(place, json=body, headers=headers) as answer:
                        return answer.status, await answer.json()

                assert (await act(stop, token=None))[0] == 401  # as another page would send it
                for wrong in (TOKEN, "x" * 64):  # the page's own token is for looking
                    status, told = await act(stop | {"token": wrong})
                    assert (status, "/stop must be asked with a valid token" in told["error"]["message"]) == (403, True)
                assert (await act({"what": "stop"}))[0] == (await act(stop | {"what": "seize"}))[0] == 400
                assert (await act(stop | {"what": "restart"}))[1]["error"]["message"].startswith(
                    "role must be set to restart"
                )
                assert (await act(stop | {"what": "restart", "role": "../stop"}))[0] == 400
                assert (await act(stop | {"what": "restart", "role": "actor"}))[0] == 403  # this one has no such route
                assert (await demo.ask("/api/runs/demo/act"))[0] == 405  # no link does anything
                assert provider.stopped_for == []
                assert await act(stop) == (200, {"stopping": True, "reason": "asked in the dashboard"})
                with behind.noted(run.path, demo.url, TOKEN):
                    assert (await act(stop, token=None, url=f"{admin.url}/ui"))[0] == 401
                    assert (await act(stop, token=RUN_TOKEN, url=f"{admin.url}/ui"))[0] == 200
                assert provider.stopped_for == [("asked in the dashboard", False)] * 2
    finally:
        await admin.close()


async def test_a_run_that_is_over_cannot_be_asked(tmp_path: Path) -> None:
    async with page(a_run(tmp_path, steps=1)) as demo:
        status, told = await demo.ask("/api/runs/demo/stacks", process="actor-0.0")
        assert (status, told["error"]["message"].partition(",")[0]) == (400, "RUN must be alive to be asked")
        assert (await demo.ask("/api/runs/demo/stacks", token=None, process="actor-0.0"))[0] == 401


async def test_memory_is_that_of_each_process_and_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in --query-gpu*) echo 'GPU-1, 0, NVIDIA H100, 1024, 81559, 37'; "
        "echo 'GPU-2, 1, NVIDIA H100, 0, 81559, [N/A]';;"
        f" *) echo 'GPU-1, {os.getpid()}, 1000';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (own, gone) = memory.held([{"name": "actor-0", "pids": [os.getpid(), 2**22 + 1]}])
    assert own["name"] == "actor-0.0" and own["peak_bytes"] >= own["rss_bytes"] > 1 << 20
    assert own["own_bytes"] + own["shared_bytes"] <= own["rss_bytes"] and gone == {
        "name": "actor-0.1",
        "pid": 2**22 + 1,
    }
    first, second = memory.devices()
    assert (first["name"], first["used_bytes"], first["busy"]) == ("NVIDIA H100", 1 << 30, 37)
    assert first["by_pid"] == {str(os.getpid()): 1000 << 20} and (second["busy"], second["by_pid"]) == (None, {})
    program.write_text("#!/bin/sh\nexit 9\n")
    assert memory.devices() == []
    async with page(a_run(tmp_path, steps=1)) as demo:
        told = await demo.of("/memory")
        assert (told["peak_bytes"], told["processes"], told["devices"]) == ({"actor-0": 1 << 20}, [], [])
