"""Steps per second of GRPO on a CPU: rondo's whole run beside TRL's GRPOTrainer, the same model, prompts and answer lengths.

    rondo bench trl --peers-python PEERS_VENV/bin/python [--repetitions 3] [--cases equal ragged_bf16 ...]

A Qwen3 of 9.2 million parameters with random weights; a step is 8 prompts of 16 tokens with 8 answers each, and one optimizer
step. "equal": every answer has 64 tokens. "ragged": log-normal with the same mean, none beyond 256 (`trl_task.py`). Both sides
get both cores. Blocks of steps of the two sides take turns; a block is a fresh process tree, of which the first steps, and
ours that nobody generates beside any more at the end, do not count. Wall seconds are from the end of one step to the end of
another; CPU seconds are those of all processes of a side in that time. A ratio is the median over repetitions of theirs over
ours.

TRL generates with transformers' `generate`, its default, and as a row of its own with transformers' continuous batching.
bfloat16: TRL as `bf16=True` makes it (autocast over float32 weights), and as its own row with bfloat16 weights; ours trains with
`train.dtype`, float32 weights in the optimizer, and generates in bfloat16. The ratio is against the quicker of theirs.

"pretrained": a real model given as a folder, sums through its chat template, sampled freely by both sides; `--lr 2e-5` is of
its size.

The peer needs an environment of its own:

    pip install torch==2.13.0 trl==1.16.0

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import trl_task as task
from rondo.launch.report.records import step_records

ROOT = Path(__file__).resolve().parent.parent
PEER = Path(__file__).parent / "peers" / "trl_grpo.py"
CASES = ("equal", "ragged", "equal_bf16", "ragged_bf16")
PRETRAINED = (task.PRETRAINED, f"{task.PRETRAINED}_bf16")
NUM_LEAD, NUM_TAIL, NUM_PEER_LEAD = 3, 3, 1
"""Steps of a block that do not count: ours before the pipeline is full and after generation has ended; theirs to warm up."""
SAMPLE_S, BLOCK_LIMIT_S = 0.1, 900.0
BARS = {"ratio_equal": 1.5, "ratio_ragged": 2.5}


@dataclass(frozen=True, slots=True)
class Block:
    """Steady steps of one side. `records` are all of its steps, `roles` the CPU seconds of a step by kind of process."""

    step_s: float
    step_cpu_s: float
    roles: dict[str, float]
    records: list[dict[str, Any]]
    began: float
    """Of the first step, in seconds since the epoch."""


@dataclass(slots=True)
class Watch:
    """CPU seconds of a process tree over time, by kind of process. The ones that have ended keep what they had used."""

    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _used: dict[tuple[int, float], tuple[str, float]] = field(default_factory=dict)

    def look(self, root: int) -> None:
        try:
            processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                key = process.pid, process.create_time()
                times = process.cpu_times()
                kind = self._used[key][0] if key in self._used else "other"
                if kind in ("other", "torchrun"):  # also what has not become itself yet
                    kind = kind_of(process.cmdline(), process.name())
            except psutil.Error:
                continue
            self._used[key] = (kind, times.user + times.system)
        sums: dict[str, float] = {}
        for kind, seconds in self._used.values():
            sums[kind] = sums.get(kind, 0.0) + seconds
        self.samples.append((time.time(), sums))

    def between(self, begin: float, end: float) -> dict[str, float]:
        """CPU seconds by kind from one moment to another, straight lines between samples."""
        kinds = self.samples[-1][1]
        return {kind: self._at(kind, end) - self._at(kind, begin) for kind in kinds}

    def _at(self, kind: str, moment: float) -> float:
        before = max((s for s in self.samples if s[0] <= moment), default=self.samples[0], key=lambda s: s[0])
        after = min((s for s in self.samples if s[0] > moment), default=before, key=lambda s: s[0])
        low, high = before[1].get(kind, 0.0), after[1].get(kind, 0.0)
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return low + share * (high - low)


def kind_of(command: Sequence[str], name: str) -> str:
    """Of a process of ours: the role group that a worker, by its name, belongs to; or what else it is, by its command line."""
    text = " ".join(command)
    worker = re.fullmatch(r"([a-z][a-z0-9_]*)-\d+\.\d*", name)
    if worker is not None:
        return worker[1]
    for part, kind in (
        ("runtime/supervision/", "torchrun"), ("rondo.comm.bus.serve", "coordinator"),
        ("pool_worker", "reward"), ("trl_run", "supervisor"), ("trl_grpo", "trainer"),
    ):  # fmt: skip
        if part in text:
            return kind
    return "other"


@contextmanager
def watched(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[Watch]:
    """Runs a command to its end, and looks at its process tree meanwhile."""
    watch, ended = Watch(), threading.Event()
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=ROOT)

        def look() -> None:
            while not ended.wait(SAMPLE_S):
                watch.look(process.pid)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            code = process.wait(timeout=BLOCK_LIMIT_S)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            ended.set()
            looking.join()
    if code:
        raise RuntimeError(f"a block must end with code 0, got {code}. Its output ends:\n{log.read_text()[-2000:]}")
    yield watch


def block_of(watch: Watch, records: list[dict[str, Any]], lead: int, tail: int) -> Block:
    counted = records[lead - 1 : len(records) - tail]
    num, begin, end = len(counted) - 1, counted[0]["time"], counted[-1]["time"]
    roles = {kind: seconds / num for kind, seconds in watch.between(begin, end).items() if seconds / num > 0.0005}
    first = records[0]["time"] - records[0].get("step_s", 0.0)
    if "step_s" not in records[0]:  # the peer tells what a step took by its parts
        first = records[0]["time"] - records[0]["generate_s"] - records[0]["train_s"]
    return Block((end - begin) / num, sum(roles.values()), roles, records, first)


def ours(options: argparse.Namespace, scratch: Path, case: str, num_steps: int) -> Block:
    load, _, kind = case.partition("_")
    run_dir = Path(tempfile.mkdtemp(dir=scratch))
    spec = {
        "model": model_of(options, scratch, load), "run_dir": str(run_dir), "load": load, "mode": options.mode,
        "staleness": options.staleness, "threads": options.threads, "steps": num_steps + NUM_LEAD + NUM_TAIL,
        "dtype": "bfloat16" if kind else "float32", "lr": options.lr, "num_slots": options.num_slots,
        "micro_batch_tokens": options.micro_batch_tokens,
    }  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": options.wait_policy}
    command = [sys.executable, "-m", "benchmarks.trl_run", json.dumps(spec)]
    with watched(command, environment, scratch / "ours.log") as watch:
        (run,) = (path for path in run_dir.iterdir() if not path.is_symlink() and (path / "metrics.jsonl").exists())
        return block_of(watch, step_records(run / "metrics.jsonl"), NUM_LEAD, NUM_TAIL)


def theirs(options: argparse.Namespace, scratch: Path, case: str, dtype: str, threads: int, continuous: bool) -> Block:
    out, load = Path(tempfile.mkdtemp(dir=scratch)) / "steps.jsonl", case.partition("_")[0]
    spec = {
        "model": model_of(options, scratch, load), "out": str(out), "scratch": str(scratch), "load": load,
        "threads": threads, "steps": options.peer_steps + NUM_PEER_LEAD, "dtype": dtype, "lr": options.lr,
        "micro_batch": options.peer_micro_batch, "continuous": continuous,
    }  # fmt: skip
    command = [options.peers_python, str(PEER), json.dumps(spec)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_WAIT_POLICY"] = options.wait_policy
    with watched(command, environment, scratch / "theirs.log") as watch:
        return block_of(watch, [json.loads(line) for line in out.open()], NUM_PEER_LEAD, 0)


def model_of(options: argparse.Namespace, scratch: Path, load: str) -> str:
    return str(Path(options.pretrained).resolve()) if load == task.PRETRAINED else str(scratch / "model")


def build_model(folder: Path) -> None:
    """The model and its tokenizer, one name for each id, as a Hugging Face folder; equal for equal versions of torch."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

    names = [*sorted(ByteLevel.alphabet()), *task.token_names()]
    tokenizer = Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate(names)}, merges=[], eos_token="<|im_end|>",
        pad_token="<|endoftext|>", unk_token=None,
    )  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=task.VOCAB, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def to_reward(block: Block, target: float) -> float | None:
    """Seconds from the first step's begin until a step's mean reward reached the target; None where it did not."""
    return next((r["time"] - block.began for r in block.records if r["reward_mean"] >= target), None)


def measure(options: argparse.Namespace, scratch: Path, case: str) -> dict[str, list[Block]]:
    """The blocks of every side for one case, in turns."""
    dtypes = {"theirs": "bfloat16", "theirs_weights": "bfloat16_weights"} if "bf16" in case else {"theirs": "float32"}
    kinds = {
        name + "_continuous" * continuous: (dtype, continuous)
        for name, dtype in dtypes.items()
        for continuous in (False, True)
    }
    sides: dict[str, list[Block]] = {}
    for _ in range(options.repetitions):
        for name, (dtype, continuous) in kinds.items() if options.peers_python else ():
            for threads in options.peer_threads:
                label = name if threads == max(options.peer_threads) else f"{name}_{threads}_thread"
                block = theirs(options, scratch, case, dtype, threads, continuous)
                told(case, label, block)
                sides.setdefault(label, []).append(block)
        block = ours(options, scratch, case, options.steps)
        told(case, "ours", block)
        sides.setdefault("ours", []).append(block)
    return sides


def told(case: str, side: str, block: Block) -> None:
    parts = "  ".join(f"{kind} {seconds:.2f}" for kind, seconds in sorted(block.roles.items(), key=lambda i: -i[1]))
    print(f"{case:12} {side:24} {block.step_s:6.2f} s/step  {block.step_cpu_s:6.2f} CPU-s/step  [{parts}]", flush=True)


def middle(blocks: Sequence[Block], name: str) -> float:
    return statistics.median(getattr(block, name) for block in blocks)


def report_of(options: argparse.Namespace, sides: dict[str, list[Block]]) -> dict[str, Any]:
    """Figures of a case: each side, and the ratio to the quickest of the peer's."""
    report: dict[str, Any] = {}
    for side, blocks in sides.items():
        step_s = middle(blocks, "step_s")
        reached = [to_reward(block, options.target) for block in blocks]
        parts = ("generate_s", "generate_cpu_s", "train_s", "train_cpu_s", "score_cpu_s", "wait_s")
        report[side] = {
            "step_s": round(step_s, 3),
            "step_cpu_s": round(middle(blocks, "step_cpu_s"), 3),
            "samples_per_s": round(task.NUM_PROMPTS * task.NUM_SAMPLES / step_s, 1),
            "s_to_reward": [None if value is None else round(value, 1) for value in reached],
            "tokens_per_step": round(statistics.mean(r["tokens"] for b in blocks for r in b.records)),
            "roles_cpu_s": {k: round(v, 3) for k, v in blocks[-1].roles.items()},
            "parts": {
                part: round(statistics.median(r[part] for b in blocks for r in b.records[1:]), 3)
                for part in parts
                if part in blocks[0].records[0]
            },
            "reward_by_step": [[round(r["reward_mean"], 3) for r in block.records] for block in blocks],
        }
    peers = [side for side in sides if side != "ours"]
    if peers:
        for key, name in (("ratio", "step_s"), ("ratio_cpu", "step_cpu_s")):
            against = {side: paired(sides[side], sides["ours"], name) for side in peers}
            best = min(against, key=against.__getitem__)
            report[key] = round(against[best], 3)
            report[f"{key}_to"] = best
    return report


def paired(peer: Sequence[Block], mine: Sequence[Block], name: str) -> float:
    return statistics.median(getattr(a, name) / getattr(b, name) for a, b in zip(peer, mine, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", help="an interpreter with torch and trl; without it, only ours")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES + PRETRAINED, default=list(CASES))
    parser.add_argument(
        "--pretrained", help="a Hugging Face folder for the cases that name it, SmolLM2-135M-Instruct for one"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of ours that count in a block")
    parser.add_argument("--peer-steps", type=int, default=6, help="steps of theirs that count in a block")
    parser.add_argument("--peer-threads", type=int, nargs="+", default=[2], help="the quickest of these counts")
    parser.add_argument("--peer-micro-batch", type=int, default=64, help="samples of a forward of theirs")
    parser.add_argument("--mode", choices=("colocate", "hybrid", "fully_async"), default="hybrid")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of the process of ours that trains")
    parser.add_argument("--num-slots", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=1280)
    parser.add_argument(
        "--wait-policy", default="PASSIVE", help="OMP_WAIT_POLICY of both sides; PASSIVE is rondo's own"
    )
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--target", type=float, default=0.9, help="the reward that the time to it is told of")
    options = parser.parse_args()
    if not options.pretrained and set(options.cases) & set(PRETRAINED):
        parser.error("--pretrained FOLDER is needed by these cases: a Hugging Face folder with a chat template")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception it ends the block's processes too
    with tempfile.TemporaryDirectory(prefix="rondo-trl-") as folder:
        scratch = Path(folder)
        build_model(scratch / "model")
        cases = {case: report_of(options, measure(options, scratch, case)) for case in options.cases}
    result: dict[str, Any] = {"benchmark": "trl", "cpus": os.cpu_count(), "machine": platform.machine()}
    result |= {name: value for name, value in vars(options).items() if name not in ("peers_python", "pretrained")}
    result |= {"results": cases}
    for case, report in cases.items():
        if "ratio" in report:
            result |= {f"ratio_{case}": report["ratio"], f"ratio_cpu_{case}": report["ratio_cpu"]}
    result["bars_met"] = {name: result[name] >= bar for name, bar in BARS.items() if name in result}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
