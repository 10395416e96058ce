"""Trackers that are killed at random moments: which points their services lack in the end, and which they have twice.

    make track                                      in an environment of its own, with every service's package
    rondo bench track --services tensorboard mlflow --kills 10 --spread 5

A file grows as a run's metrics.jsonl does (steps with 40 figures, evaluations, a stretch of steps that is trained again) while
the tracker's process, started and restarted as beside a run, is sent SIGKILL again and again, each time at a random moment of
`--spread` seconds. MLflow is a server of its own on a database, which is killed too, once; wandb, SwanLab and ClearML write their
offline files, which are read back as they lie there, all lives together. Prints for each service the points that it should have,
kills, points lost and repeated, by (step, name); the last line is JSON. What was found of a service is kept in
runs/bench_track/, so that services can be measured one at a time, or again after an end; `--fresh` forgets it.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.runs import Cells
from rondo.launch.track import beside as processes
from rondo.launch.track.beside import Beside
from rondo.launch.track.points import Points

SERVICES = ("tensorboard", "mlflow", "trackio", "wandb", "swanlab", "clearml")
OFFLINE = ("wandb", "swanlab", "clearml")
PERIOD_S, AGAIN = 0.05, 30
Counts = collections.Counter[tuple[int, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=SERVICES)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--spread", type=float, default=15.0, help="the longest that a life lasts, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    kept = Path("runs/bench_track/cells.jsonl")
    if options.fresh:
        kept.unlink(missing_ok=True)
    cells, figures = Cells(kept), {}

    def made(service: str) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="rondo-track-") as folder:
            return measured(service, Path(folder), options.kills, options.spread, random.Random(options.seed))

    for service in options.services:
        of = {"service": service, "kills": options.kills, "spread_s": options.spread, "seed": options.seed}
        found = figures[service] = cells.made(of, functools.partial(made, service))
        print(f"{service:12}", *(f"{name} {value:>6}" for name, value in found.items()), flush=True)
    print(json.dumps(figures))


def measured(service: str, folder: Path, kills: int, spread_s: float, draw: random.Random) -> dict[str, int]:
    run = folder / "demo"
    run.mkdir()
    os.environ |= {
        "HOME": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
    }
    with contextlib.ExitStack() as stack:
        tracker: dict[str, Any] = {"name": service, "offline": service in OFFLINE}
        server = None
        if service == "mlflow":
            server = stack.enter_context(Server(folder))
            tracker["url"] = server.url
        (run / "config.resolved.json").write_text(json.dumps({"train": {"lr": 1e-5}, "trackers": [tracker]}))
        writer = stack.enter_context(Writer(run / "metrics.jsonl"))
        num_kills = asyncio.run(killed(service, run, kills, spread_s, draw, writer, server))
        found = READ[service](run, folder, tracker)
    expected = Counts()
    points = Points(run / "metrics.jsonl")
    while batch := points.read():
        expected.update((each.step, name) for each in batch for name in each.values)
    return {
        "points": len(expected), "kills": num_kills, "lost": len(expected.keys() - found.keys()),
        "repeated": sum(found.values()) - len(found), "strange": len(found.keys() - expected.keys()),
    }  # fmt: skip


async def killed(
    service: str, run: Path, kills: int, spread_s: float, draw: random.Random, writer: Writer, server: Server | None
) -> int:
    """Kills the tracker, and in the middle its server, and lets it tell what is left; how often it was killed."""
    beside = Beside(run, {service: "rondo.launch.track.follow"}, lambda kind, data: None, first_pause_s=0.1)
    running, num = asyncio.create_task(beside.run()), 0
    while num < kills:
        await asyncio.sleep(draw.uniform(0, spread_s))
        if (pid := beside.pids().get(service)) is not None:
            os.kill(pid, signal.SIGKILL)
            num += 1
        if server is not None and num == kills // 2 and server.num_starts == 1:
            await asyncio.to_thread(server.again)
    writer.stop()
    size, until = (run / "metrics.jsonl").stat().st_size, time.monotonic() + 300
    while _offset(run, service) < size and service != "swanlab" and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    processes.FINISH_S = 300.0  # of SwanLab, which is told again all that it was told before the last kill
    await beside.finish(running, lambda: False)
    return num


def _offset(run: Path, service: str) -> int:
    file = run / "trackers" / f"{service}.json"
    return json.loads(file.read_bytes()).get("points", {}).get("offset", 0) if file.exists() else 0


class Writer(threading.Thread):
    """What a run writes, faster."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._stopped = path, threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        draw, step, again = random.Random(0), 0, AGAIN
        with self._path.open("ab", buffering=0) as file:
            while not self._stopped.wait(PERIOD_S):
                record = {
                    "time": time.time(),
                    "kind": "metrics",
                    "source": "actor-0",
                    "step": step,
                    "version": step + 1,
                }
                record |= {"reward_mean": draw.random()} | {f"figure_{number}": draw.random() for number in range(40)}
                lines = [record]
                if step % 10 == 9:
                    sets = {"held": {"mean@1": draw.random(), "pass@4": draw.random()}}
                    told = {
                        "label": "step",
                        "version": step + 1,
                        "reward": draw.random(),
                        "num_samples": 8,
                        "sets": sets,
                    }
                    lines.append({"time": time.time(), "kind": "metrics", "evaluation": told})
                file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
                step += 1
                if step == 2 * AGAIN and again:
                    step, again = step - again, 0

    def __enter__(self) -> Writer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Server:
    """MLflow's own, on a database in a file."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.num_starts = f"http://127.0.0.1:{port}", 0
        self._command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--port", str(port),
            "--workers", "1",
        ]  # fmt: skip
        self._log = (folder / "mlflow.log").open("ab")

    def start(self) -> None:
        self.num_starts += 1
        alone = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # without processes that no metric needs
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, start_new_session=True, env=alone
        )
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            assert time.monotonic() < until, "no MLflow server"
            time.sleep(0.5)

    def again(self) -> None:
        self.end()
        self.start()

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._log.close()


# ---- what the services have ---------------------------------------------------------------------------------------------


def of_tensorboard(run: Path, folder: Path, tracker: dict[str, Any]) -> Counts:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    seen.Reload()
    return Counts((each.step, tag) for tag in seen.Tags()["scalars"] for each in seen.Scalars(tag))


def of_mlflow(run: Path, folder: Path, tracker: dict[str, Any]) -> Counts:
    import mlflow

    client = mlflow.MlflowClient(tracker["url"])
    experiment = client.get_experiment_by_name("rondo")
    (found,) = client.search_runs([experiment.experiment_id])
    names = [name for name in found.data.metrics if name != "point"]
    return Counts(
        (each.step, name.replace("_at_", "@"))
        for name in names
        for each in client.get_metric_history(found.info.run_id, name)
    )


def of_trackio(run: Path, folder: Path, tracker: dict[str, Any]) -> Counts:
    import sqlite3

    (file,) = (folder / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("SELECT step, metrics FROM metrics").fetchall()
    return Counts((step, name) for step, values in rows for name in json.loads(values))


def of_wandb(run: Path, folder: Path, tracker: dict[str, Any]) -> Counts:
    from wandb.proto.wandb_internal_pb2 import Record

    found = Counts()
    for file in (run / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb"):
        for data in leveldb_log(file.read_bytes(), 7):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.update((items["step"], name) for name in items if "/" in name)
    return found


def of_swanlab(run: Path, folder: Path, tracker: dict[str, Any]) -> Counts:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = Counts()
    for file in (run / "trackers" / "swanlab").glob("run-*/*.swanlab"):
        for data in leveldb_log(file.read_bytes(), 7):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                found[record.scalar.step, record.scalar.key] += 1
    return found


def of_clearml(run: Path, folder: Path, tracker: dict[str, Any]) -> Counts:
    found = Counts()
    for file in folder.rglob("offline-*/metrics.jsonl"):
        for line in file.read_text().splitlines():
            events = json.loads(line)
            found.update(
                (each["iter"], f"{each['metric']}/{each['variant']}")
                for each in (events if isinstance(events, list) else [events])
                if "value" in each
            )
    return found


READ: dict[str, Callable[[Path, Path, dict[str, Any]], Counts]] = {
    "tensorboard": of_tensorboard, "mlflow": of_mlflow, "trackio": of_trackio, "wandb": of_wandb, "swanlab": of_swanlab,
    "clearml": of_clearml,
}  # fmt: skip


def leveldb_log(data: bytes, begin: int, block: int = 32768) -> Iterator[bytes]:
    """The records of a log in LevelDB's form: crc u32, length u16, kind u8 (1 whole, 2 first, 3 middle, 4 last), in blocks."""
    at, parts = begin, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        if at > len(data) or kind == 0:
            return
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4):
            yield parts


if __name__ == "__main__":
    main()
