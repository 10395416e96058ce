"""Data sets on disk: what ten million rows cost to open and to read, and whether a killed reader goes on exactly.

    rondo bench data [--rows 10000000] [--folder FOLDER] [--quick]

Files are made once in `--folder`: JSONL and parquet, in shards and in one file (`one`). Each figure is of a process of its own:
the first start, which makes the indexes of JSONL and the Arrow files of parquet, and a later one, from opening to the first row,
with its processor time and the load before it; processor time of a row, read in the shuffled order; memory that is the process's
own (RssAnon), before opening, after, and after all reads. For `resume` a process prints each row that it takes, is killed by
SIGKILL in the middle, and another goes on from its position: rows must be those of one that was left alone; and so for a whole
`run`, all of whose processes are killed. Files lie in the page cache as they do. What was found lies in the folder too: what was
stopped goes on. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos_run import QUICKSTART, ChaosRun
from benchmarks.runs import Cells, rondo, settings
from rondo.roles.config import DataConfig
from rondo.roles.data.cursor import Order
from rondo.roles.data.datasets import open_dataset
from rondo.roles.training.trained_samples import steps_of

SEED = 7
_SHARDS = 8
_BLOCK, _GROUP = 100_000, 10_000
_READ_S = 10.0
_WORDS = 40
_KILLED_BEHIND = 6


def rows(first: int, count: int) -> tuple[list[str], list[str]]:
    """(questions, answers): texts of forty words that differ from row to row, as long as the questions of GSM8K."""
    pool = [f"word{number}" for number in range(997)]
    sentence = " ".join(pool[(31 * at) % 997] for at in range(997)) + " "
    numbers = range(first, first + count)
    begins = (number * 7919 % 4000 for number in numbers)
    questions = [f"{number}: {sentence[at : at + 6 * _WORDS]}" for number, at in zip(numbers, begins, strict=True)]
    return questions, [str(number % 1000) for number in numbers]


def make(folder: Path, num_rows: int, group: int | None, shards: int = _SHARDS) -> None:
    """The shards of one form, those that are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-num_rows // shards)
    for number in range(shards):
        first, end = number * size, min((number + 1) * size, num_rows)
        path = folder / f"{number}.{'jsonl' if group is None else 'parquet'}"
        if path.exists():
            continue
        whole = path.with_suffix(".part")
        if group is None:
            with whole.open("w") as file:
                for at in range(first, end, _BLOCK):
                    both = zip(*rows(at, min(_BLOCK, end - at)), strict=True)
                    file.writelines(f'{{"question": "{asked}", "answer": "{answer}"}}\n' for asked, answer in both)
        else:
            import pyarrow
            import pyarrow.parquet

            schema = pyarrow.schema({"question": "string", "answer": "string"})
            with pyarrow.parquet.ParquetWriter(whole, schema) as writer:
                for at in range(first, end, max(group, _BLOCK)):
                    columns = rows(at, min(max(group, _BLOCK), end - at))
                    writer.write_table(pyarrow.Table.from_arrays(list(columns), schema=schema), row_group_size=group)
        whole.replace(path)


def joined(shards: Path, folder: Path) -> None:
    """All JSONL of a folder in one file."""
    whole = folder / "0.jsonl"
    if not whole.exists():
        folder.mkdir(exist_ok=True)
        with whole.with_suffix(".part").open("wb") as file:
            for path in sorted(shards.iterdir()):
                with path.open("rb") as shard:
                    shutil.copyfileobj(shard, file, 1 << 20)
        whole.with_suffix(".part").replace(whole)


def own_bytes() -> int:
    found = Path("/proc/self/status").read_text(encoding="utf-8").partition("RssAnon:")[2].split()[0]
    return int(found) * 1024


def look(folder: Path, seconds: float) -> dict[str, float]:
    """Opens a data set in this process and reads rows for so long."""
    with contextlib.suppress(ImportError):  # what any reader of parquet loads is no part of the data
        import pyarrow.parquet  # noqa: F401
    before, begun, used = own_bytes(), time.perf_counter(), time.process_time()
    data = open_dataset(DataConfig(path=str(folder), prompt="question", label="answer"))
    order = Order(len(data), SEED)
    data.row(order.locate(0).row)
    start_s, start_cpu_s, opened = time.perf_counter() - begun, time.process_time() - used, own_bytes()
    begun, used, read = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begun < seconds:
        data.row(order.locate(read).row)
        read += 1
    ms = (time.process_time() - used) * 1e3 / read
    memory = {"before_mb": before / 1e6, "opened_mb": opened / 1e6, "read_mb": own_bytes() / 1e6}
    told = {"rows": len(data), "start_s": start_s, "start_cpu_s": start_cpu_s, "ms_a_row": ms, "rows_read": read}
    return told | memory


def take(folder: Path, first: int, count: int) -> None:
    """A line a row: position and a digest of what it says."""
    data = open_dataset(DataConfig(path=str(folder), prompt="question", label="answer"))
    order = Order(len(data), SEED)
    for position in range(first, first + count):
        row = data.row(order.locate(position).row)
        told = hashlib.blake2b(f"{row.prompt}/{row.label}".encode(), digest_size=8).hexdigest()
        print(position, told, flush=True)


def resumes(folder: Path, count: int = 2000) -> bool:
    """Whether a reader that was killed, and one that went on, took the rows of one that nobody touched."""
    alone = taken(folder, 0, count, None)
    killed = taken(folder, 0, count, count // 3)
    return len(alone) == count and killed + taken(folder, len(killed), count - len(killed), None) == alone


def taken(folder: Path, first: int, count: int, kill_at: int | None) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.data", "--take", str(folder), str(first), str(count)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # cut off by the kill
            lines.append(line)
            if len(lines) == kill_at:
                process.send_signal(signal.SIGKILL)
    return lines


def whole_run(data: Path, folder: Path) -> dict[str, Any]:
    """A run that reads this data set, killed with all of its processes and resumed from its checkpoint: whether each of its steps
    trained the rows that it trains where nobody touches it."""
    shutil.rmtree(folder, ignore_errors=True)
    values = {
        "num_steps": 12, "data.rows": "null", "data.path": data.resolve(), "data.prompt": "question", "data.label": "answer",
        "data.held_out": 0, "evaluation": "null", "sft": "null",
        "rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 2, "rollout.max_prompt_tokens": 320,
        "rollout.max_new_tokens": 4, "rollout.num_slots": 16, "train.save_every": 4, "samples.keep": 1,
    }  # fmt: skip
    alone = folder / "alone"
    rondo("train", str(QUICKSTART), *settings({**values, "run_dir": alone.resolve()}))
    with ChaosRun(folder.resolve() / "killed", [f"{name}={value}" for name, value in values.items()]) as run:
        killed_at = run.until(lambda line: line.kind == "step" and line.step >= _KILLED_BEHIND).step
    rondo("resume", str(run.run_dir))
    untouched, resumed = trained(alone / "quickstart"), trained(run.run_dir)
    return {"steps": len(untouched), "killed_behind_step": killed_at, "saved_every": values["train.save_every"],
            "rows": sum(map(len, untouched.values())), "equal": untouched == resumed}  # fmt: skip


def trained(run_dir: Path) -> dict[int, list[str]]:
    """Step -> the prompts of its samples."""
    import pyarrow.parquet

    tables = {step: pyarrow.parquet.read_table(paths, columns=["prompt"]) for step, paths in steps_of(run_dir).items()}
    return {step: sorted(table.column("prompt").to_pylist()) for step, table in tables.items()}


def elsewhere(folder: Path, seconds: float) -> dict[str, Any]:
    load = os.getloadavg()[0]
    command = [sys.executable, "-m", "benchmarks.data", "--look", str(folder), str(seconds)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {name: round(value, 4) for name, value in (found | {"load": load}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_data"))
    parser.add_argument("--seconds", type=float, default=_READ_S, help="of reading, each")
    parser.add_argument("--quick", action="store_true", help="100,000 rows and a second of reading")
    parser.add_argument("--look", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--take", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        folder, seconds = options.look
        print(json.dumps(look(Path(folder), float(seconds))))
        return
    if options.take:
        folder, first, count = options.take
        take(Path(folder), int(first), int(count))
        return
    num_rows, seconds = (100_000, 1.0) if options.quick else (options.rows, options.seconds)
    top = options.folder / str(num_rows)
    cache, jsonl, cells = top / "cache", top / "jsonl", Cells(top / "cells.jsonl")
    os.environ["XDG_CACHE_HOME"] = str(cache.resolve())

    def found(name: str, measure: Callable[..., Any], *args: Any) -> Any:
        return cells.made({"name": name}, lambda: {"it": measure(*args)})["it"]

    def first_start(folder: Path) -> dict[str, Any]:
        shutil.rmtree(cache, ignore_errors=True)
        return elsewhere(folder, seconds)

    figures: dict[str, Any] = {"rows": num_rows}
    make(jsonl, num_rows, None)
    figures["jsonl_first"] = found("jsonl_first", first_start, jsonl)
    figures["jsonl"] = found("jsonl", elsewhere, jsonl, seconds)
    figures["index_bytes"] = sum(path.stat().st_size for path in cache.rglob("*.index"))
    figures["jsonl_bytes"] = sum(path.stat().st_size for path in jsonl.iterdir())
    joined(jsonl, top / "jsonl_one")
    figures["jsonl_one_first"] = found("jsonl_one_first", first_start, top / "jsonl_one")
    figures["jsonl_one"] = found("jsonl_one", elsewhere, top / "jsonl_one", seconds)
    for name, shards in (("parquet", _SHARDS), ("parquet_one", 1)):
        make(top / name, num_rows, _GROUP, shards)
        figures[f"{name}_first"] = found(f"{name}_first", first_start, top / name)
        figures[name] = found(name, elsewhere, top / name, seconds)
    figures["arrow_bytes"] = sum(path.stat().st_size for path in cache.rglob("*.arrow"))
    figures["resume_exact"] = {
        "jsonl": found("jsonl resumes", resumes, jsonl),
        "parquet": found("parquet resumes", resumes, top / "parquet"),
    }
    figures["run"] = found("run", whole_run, top / "parquet", top / "runs")
    for name, each in figures.items():
        print(f"{name:22} {each}", flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
