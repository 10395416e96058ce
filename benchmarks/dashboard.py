"""What the dashboard takes: time to a first view and its bytes, by length of the run, and its processor time beside a live one.

Run directories are made as long runs leave them: `steps` records of 60 numbers, and ten samples a step, each step's in a file of
its own. Of each, a `rondo view` is started twice, without an index and with the one that the first left:

    first_s     from the command until the page, its files, the overview and twelve curves of 600 points are there (an answer may
                come before all is read: `all_s` is when it is), `first_bytes` as they go over the wire, compressed
    again_s     the same with the index that is there by then
    samples_s   until the newest samples are there, `samples_all_s` until all are indexed, `samples_again_s` with the index
    search_s    a word that one sample in a thousand has, twenty of them

Beside a file that grows by a step every `--period` seconds for `--seconds`, a page asks as it does every two: `cpu_share` is the
dashboard's processor time over that time, of one core. `rss_bytes`: its memory then.

Beside a run at the paper's stage times (`paper.py`, over `--time-scale`): three trackers that it starts
itself, and the dashboard with a page that asks. They are stopped and go on (SIGSTOP, SIGCONT) every `--turn` steps, so that a
machine's other work falls on both alike; what came meanwhile they read when they go on. The first step of a turn is left out.

    steps_per_s     of the run, with and without readers; `share` with over without, `pairs` of each two turns that follow
    cpu_s           of each reader since the first turn; `of_core` of all of them, of a core, while they were not stopped
    begin_cpu_s     before the first turn, imports and all

    rondo bench dashboard --turns 0                          lengths alone
    rondo bench dashboard --as dashboard_beside --steps      beside the run alone
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil

from rondo.launch.report.records import read_records, step_records

TRACKERS = ("tensorboard", "mlflow", "trackio")
ROOT = Path(__file__).resolve().parent.parent
NUM_NUMBERS, NUM_SAMPLES, NUM_CURVES = 60, 10, 12
FILES = ("", "assets/app.js", "assets/uPlot.iife.min.js", "assets/uPlot.min.css", "assets/style.css", "assets/dom.js")
SETTINGS = {"num_steps": 0, "job": "rl"}
CURVES = ["reward_mean", *(f"metric_{number}" for number in range(NUM_CURVES - 1))]


def step(number: int, random_: random.Random) -> bytes:
    told = {
        "time": 1.7e9 + number,
        "kind": "metrics",
        "source": "actor-0",
        "step": number,
        "reward_mean": random_.random(),
    }
    return orjson.dumps(told | {f"metric_{each}": random_.random() for each in range(NUM_NUMBERS)}) + b"\n"


def make(run: Path, num_steps: int) -> None:
    random_ = random.Random(num_steps)
    (run / "samples").mkdir(parents=True)
    (run / "config.resolved.json").write_text(json.dumps(SETTINGS | {"num_steps": num_steps}))
    with (run / "metrics.jsonl").open("wb") as file:
        file.writelines(step(number, random_) for number in range(num_steps))
    for number in range(num_steps):
        lines = [
            {
                "time": 1.7e9 + number, "group": NUM_SAMPLES * number + each, "sample": 0, "reward": random_.random(),
                "prompt": f"what is {number} + {each}?",
                "response": "a rare word" if (number + each) % 1000 == 0 else "a common one",
                "finish_reason": "stop", "num_tokens": 12, "versions": [number],
            }
            for each in range(NUM_SAMPLES)
        ]  # fmt: skip
        text = b"".join(orjson.dumps(line) + b"\n" for line in lines)
        (run / "samples" / f"step_{number:06d}.jsonl").write_bytes(text)


class Page:
    """Asks as a browser does, and counts what comes."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self.num_bytes = 0

    def get(self, path: str, **query: Any) -> bytes:
        search = f"?{urllib.parse.urlencode(query)}" if query else ""
        headers = {"Authorization": f"Bearer {self._token}", "Accept-Encoding": "deflate"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path + search, headers=headers)) as answer:
            body: bytes = answer.read()
            self.num_bytes += len(body)
            if answer.headers.get("Content-Encoding") == "deflate":
                body = zlib.decompress(body)
        return body

    def ask(self, path: str, **query: Any) -> Any:
        return json.loads(self.get(f"api/runs/run{path}", **query))

    def first_view(self) -> Any:
        for path in FILES:
            self.get(path)
        self.ask("")
        return self.ask("/series", names=",".join(CURVES), points=600)


@contextmanager
def viewed(run: Path) -> Iterator[tuple[Page, float, psutil.Process]]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "rondo.launch.cli", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            told = re.search(r"(http\S+/)#token=(\w+)", process.stdout.readline())
            assert told is not None
            yield Page(told[1], told[2]), began, psutil.Process(process.pid)
        finally:
            process.terminate()


def length(folder: Path, num_steps: int) -> dict[str, Any]:
    run = folder / str(num_steps) / "run"
    make(run, num_steps)
    found: dict[str, Any] = {"steps": num_steps, "samples": NUM_SAMPLES * num_steps}
    for which in ("first", "again"):
        with viewed(run) as (page, began, process):
            told = page.first_view()
            found |= {f"{which}_s": time.perf_counter() - began, f"{which}_bytes": page.num_bytes}
            while told["share"] < 1:
                told = page.ask("/series", names=",".join(CURVES), points=600)
            found["all_s" if which == "first" else "all_again_s"] = time.perf_counter() - began
            assert told["series"]["reward_mean"]["num"] == num_steps
            began = time.perf_counter()
            told = page.ask("/samples")
            found["samples_s" if which == "first" else "samples_again_s"] = time.perf_counter() - began
            while told["share"] < 1:
                told = page.ask("/samples")
            assert told["total"] == NUM_SAMPLES * num_steps
            found["samples_all_s" if which == "first" else "samples_all_again_s"] = time.perf_counter() - began
            if which == "again":
                began = time.perf_counter()
                told, rows = {"next": None}, 0
                while rows < 20 and (told["next"] is not None or not rows):
                    more = {} if told["next"] is None else {"before": told["next"]}
                    told = page.ask("/samples", search="rare word", limit=20 - rows, **more)
                    rows += len(told["rows"])
                    if told["next"] is None:
                        break
                found |= {"search_s": time.perf_counter() - began, "rss_bytes": process.memory_info().rss}
    return found


def beside(folder: Path, num_steps: int, seconds: float, period_s: float) -> dict[str, Any]:
    """The dashboard's processor time while a run of that length goes on."""
    run = folder / str(num_steps) / "run"
    random_ = random.Random(0)
    with viewed(run) as (page, _, process), (run / "metrics.jsonl").open("ab", buffering=0) as file:
        while page.first_view()["share"] < 1:
            pass
        before, began, asked, number = sum(process.cpu_times()[:2]), time.monotonic(), 0, num_steps
        while (now := time.monotonic()) < began + seconds:
            file.write(step(number, random_))
            number += 1
            if now >= began + 2 * asked:
                asked += 1
                page.ask("")
                told = page.ask("/series", names=",".join(CURVES), points=600)
            time.sleep(period_s)
        assert told["series"]["reward_mean"]["num"] > num_steps
        cpu_s, elapsed = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
    return {"steps": num_steps, "seconds": elapsed, "cpu_s": cpu_s, "cpu_share": cpu_s / elapsed}


# ---- beside a run -------------------------------------------------------------------------------------------------------

_FILL = 3
"""Steps until every role works on another one."""


def replayed(folder: Path, time_scale: float, num_steps: int) -> int:
    """The run, in this process."""
    from benchmarks.paper import config_of, prepare, specs_of
    from benchmarks.replay_stages import Replay
    from rondo.launch import train
    from rondo.launch.track.settings import TrackerConfig

    places: dict[str, dict[str, Any]] = {
        "mlflow": {"url": f"sqlite:///{folder}/mlflow.db"},
        "trackio": {"folder": folder / "trackio"},
    }
    replay = Replay.of("qwen3_4b", "fully_async", time_scale=time_scale, num_steps=num_steps)
    config = config_of(replay, folder, hot_snapshot=True)
    trackers = tuple(TrackerConfig.model_validate({"name": name} | places.get(name, {})) for name in TRACKERS)
    config = config.model_copy(update={"name": "run", "trackers": trackers})
    options = train.TrainOptions(Path(__file__), plain=True)
    return train.main(config, options, groups=specs_of(config), before=lambda run: prepare(replay, run))


class Readers:
    """Processes that read a run, and what these start; made while they go on."""

    def __init__(self, processes: dict[str, psutil.Process], page: Page) -> None:
        self._processes, self._page = processes, page
        self._going, self._closed = threading.Event(), threading.Event()
        self._asking = threading.Thread(target=self._ask)
        self.num_asked = 0

    def _all(self) -> list[tuple[str, psutil.Process]]:
        return [(name, each) for name, of in self._processes.items() for each in (of, *of.children(recursive=True))]

    def cpu_s(self) -> dict[str, float]:
        found = dict.fromkeys(self._processes, 0.0)
        for name, each in self._all():
            found[name] += sum(each.cpu_times()[:2])
        return found

    def stop(self) -> None:
        self._going.clear()
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)
        self._going.set()

    def _send(self, number: int) -> None:
        for _, each in self._all():
            each.send_signal(number)

    def _ask(self) -> None:
        while not self._closed.is_set():
            if self._going.wait(0.2):
                self._page.ask("")
                self._page.ask("/series", names=",".join(CURVES[:1]), points=600)
                self.num_asked += 1
                self._closed.wait(2)

    def __enter__(self) -> Readers:
        self._asking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.go_on()
        self._asking.join()


def followers(run: psutil.Process) -> dict[str, psutil.Process]:
    """The trackers of a run by name, their guards with them."""
    found = {each.cmdline()[-1]: each for each in run.children() if "rondo.launch.track.follow" in each.cmdline()}
    return {name: each for name, each in found.items() if name in TRACKERS}


def wait_until(path: Path, num: int, run: subprocess.Popen[bytes]) -> list[float]:
    """When its steps ended, as soon as there are `num`."""
    while len(times := [each["time"] for each in step_records(path)]) < num:
        said = path.parents[1] / "run.log"
        assert run.poll() is None, f"{len(times)} steps, exit code {run.returncode}: {said.read_text()[-3000:]}"
        time.sleep(0.1)
    return times


def beside_run(folder: Path, time_scale: float, num_turns: int, turn: int, late: float) -> dict[str, Any]:
    num_steps = _FILL + num_turns * (turn + 1) + 2
    command = [sys.executable, "-m", "benchmarks.dashboard", "--replay", str(folder), str(time_scale), str(num_steps)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    metrics, events = (folder / "run" / name for name in ("metrics.jsonl", "events.jsonl"))
    with (
        (folder / "run.log").open("wb") as log,
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=log, stderr=log) as run,
    ):
        try:
            wait_until(metrics, 1, run)
            with viewed(folder / "run") as (page, _, dashboard):
                page.first_view()
                wait_until(metrics, _FILL, run)
                processes = followers(psutil.Process(run.pid)) | {"dashboard": dashboard}
                with Readers(processes, page) as readers:
                    found = in_turns(readers, lambda num: wait_until(metrics, num, run), num_turns, turn, late)
        finally:
            run.terminate()
            run.wait(120)
    ends = {event["tracker"]: event["why"] for event in read_records(events) if event.get("kind") == "tracker_died"}
    assert not ends, ends
    return {"time_scale": time_scale} | found


def in_turns(readers: Readers, until: Any, num_turns: int, turn: int, late: float) -> dict[str, Any]:
    """Without readers, with them, without, ...; no new pair when it is `late`."""
    begin = readers.cpu_s()
    step_s: list[float] = []
    while len(step_s) < num_turns and (len(step_s) % 2 or time.monotonic() < late):
        readers.go_on() if len(step_s) % 2 else readers.stop()
        first = _FILL + len(step_s) * (turn + 1) + 1
        times = until(first + turn)
        step_s.append((times[first + turn - 1] - times[first - 1]) / turn)
        print(f"{'with' if len(step_s) % 2 == 0 else 'without':8}{step_s[-1]:.4f} s a step", flush=True)
    cpu_s = {name: value - begin[name] for name, value in readers.cpu_s().items()}
    pairs = [without / beside for without, beside in zip(step_s[::2], step_s[1::2], strict=True)]
    with_s = sum(step_s[1::2]) * (turn + 1)
    return {
        "steps_per_s": {"without": 1 / statistics.fmean(step_s[::2]), "with": 1 / statistics.fmean(step_s[1::2])},
        "share": sum(step_s[::2]) / sum(step_s[1::2]), "pairs": pairs, "asked": readers.num_asked,
        "begin_cpu_s": begin, "cpu_s": cpu_s, "with_s": with_s, "of_core": sum(cpu_s.values()) / with_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[150, 10_000, 100_000], help="lengths of runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="beside a live run")
    parser.add_argument("--period", type=float, default=0.5, help="seconds between its steps")
    parser.add_argument("--turns", type=int, default=16, help="beside a run, with readers and without; an even number")
    parser.add_argument("--turn", type=int, default=5, help="steps that are measured of each")
    parser.add_argument("--within", type=float, default=300.0, help="seconds: no pair of turns begins after that")
    parser.add_argument("--time-scale", type=float, default=60.0, help="of the paper's stage times")
    parser.add_argument("--replay", nargs=3, metavar=("FOLDER", "SCALE", "STEPS"), help="be that run")
    options = parser.parse_args()
    late = time.monotonic() + options.within
    if options.replay:
        folder, scale, steps = options.replay
        sys.exit(replayed(Path(folder), float(scale), int(steps)))
    with tempfile.TemporaryDirectory() as folder:
        lengths = []
        for num_steps in options.steps:
            lengths.append(each := length(Path(folder), num_steps))
            print(" ".join(f"{name}={value:.3g}" for name, value in each.items()))
        live = [beside(Path(folder), each, options.seconds, options.period) for each in options.steps]
        for each in live:
            print(" ".join(f"{name}={value:.3g}" for name, value in each.items()))
        found: dict[str, Any] = {"lengths": lengths, "beside": live} if lengths else {}
        if options.turns:
            found["run"] = beside_run(Path(folder), options.time_scale, options.turns, options.turn, late)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
