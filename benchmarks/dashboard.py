"""What the dashboard takes: time to a first view and its bytes, by length of the run, and its processor time beside a live one.

Run directories are made as long runs leave them: `steps` records of 60 numbers, and ten samples a step, each step's in a file of
its own. Of each, a `rondo view` is started twice, without an index and with the one that the first left:

    first_s     from the command until the page, its files, the overview and twelve curves of 600 points are there (an answer may
                come before all is read: `all_s` is when it is), `first_bytes` as they go over the wire, compressed
    again_s     the same with the index that is there by then
    samples_s   until the newest samples are there, `samples_all_s` until all are indexed, `samples_again_s` with the index
    search_s    a word that one sample in a thousand has, twenty of them

Beside a live run: steps come every `--period` seconds for `--seconds`, and a page asks as it does every two: `cpu_share` is the
dashboard's processor time over that time, of one core. `rss_bytes`: its memory then.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

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
    return json.dumps(told | {f"metric_{each}": random_.gauss(0, 1) for each in range(NUM_NUMBERS)}).encode() + b"\n"


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
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "samples" / f"step_{number:06d}.jsonl").write_text(text)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[150, 10_000, 100_000], help="lengths of runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="beside a live run")
    parser.add_argument("--period", type=float, default=0.5, help="seconds between its steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lengths = [length(Path(folder), each) for each in options.steps]
        for each in lengths:
            print(" ".join(f"{name}={value:.3g}" for name, value in each.items()))
        live = [beside(Path(folder), each, options.seconds, options.period) for each in options.steps]
        for each in live:
            print(" ".join(f"{name}={value:.3g}" for name, value in each.items()))
    print(json.dumps({"lengths": lengths, "beside": live}))


if __name__ == "__main__":
    main()
