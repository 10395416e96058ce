"""One process a GPU, which train together; or, without a GPU, this process alone.

Owns their processes and the job that they train. Does not own what is measured: `work` of the part, a function of a module.

    figures = run(training.work, options, folder, {"attn": "sdpa"})
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu import Options
from rondo.models.config import ModelConfig
from rondo.roles.config import DataConfig, JobConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.training.objective import TrainRow
from rondo.runtime.processes.guard import die_with_parent

Figures = dict[str, Any]
Work = Callable[[Options, str, Path, dict[str, Any]], Figures]
"""Of a rank: (options, its device, the model's folder, settings) -> what the first one has measured."""
_LOOK_S = 0.2


def run(
    work: Work, options: Options, folder: Path, settings: dict[str, Any], *, num_ranks: int | None = None
) -> Figures:
    """What the first of `num_ranks` (all GPUs) measures. RuntimeError where one of them fails, which ends the others."""
    num_ranks = options.num_devices if num_ranks is None else num_ranks
    if not num_ranks:
        return work(options, "cpu", folder, settings)
    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        task = Path(aside) / "task.json"
        task.write_text(json.dumps([asdict(options), str(folder), settings]))
        command = [sys.executable, "-m", "benchmarks.gpu_parts.ranks", f"{work.__module__}:{work.__name__}", aside]
        ranks = [subprocess.Popen([*command, str(rank), str(num_ranks)]) for rank in range(num_ranks)]
        try:
            while None in (codes := [rank.poll() for rank in ranks]):
                if any(codes):
                    break
                time.sleep(_LOOK_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            raise RuntimeError(f"every rank must end with 0, got {codes}. What they said stands above")
        found: Figures = json.loads((Path(aside) / "figures.json").read_text())
        return found


def main() -> None:
    """A rank."""
    parser = argparse.ArgumentParser()
    for name, kind in (("work", str), ("aside", Path), ("rank", int), ("size", int)):
        parser.add_argument(name, type=kind)
    given = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    options, folder, settings = json.loads((given.aside / "task.json").read_text())
    module, _, name = given.work.partition(":")
    cuda = options["device"] == "cuda"
    device = f"cuda:{given.rank}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(given.rank)
    if given.size > 1:
        store = dist.FileStore(str(given.aside / "store"), given.size)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=given.rank, world_size=given.size)
    found = getattr(importlib.import_module(module), name)(Options(**options), device, Path(folder), settings)
    if given.rank == 0:
        (given.aside / "figures.json").write_text(json.dumps(found))
    if given.size > 1:
        dist.barrier()
        dist.destroy_process_group()


# ---- what they train ----------------------------------------------------------------------------------------------------


def no_rows() -> list[dict[str, str]]:
    return [{"prompt": "1+1=", "answer": "2"}]


def no_reward(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return 0.0


def job(folder: Path, *, micro_batch_tokens: int, attn: str = "sdpa", checkpointing: bool = True) -> JobConfig:
    """A job in bfloat16 over the model in `folder`."""
    return JobConfig(
        name="gpu", num_steps=100, model=ModelConfig(path=str(folder), dtype="bfloat16", attn=attn),
        data=DataConfig(rows=no_rows, label="answer"), reward=RewardConfig(function=no_reward),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=8),
        train=TrainConfig(
            dtype="bfloat16", micro_batch_tokens=micro_batch_tokens, activation_checkpointing=checkpointing
        ),
    )  # fmt: skip


def group(vocab: int, prompt: int, answers: list[int], draw: np.random.Generator) -> list[TrainRow]:
    """Random samples of one random prompt."""
    shared = draw.integers(2, vocab, prompt)
    made = []
    for answer in answers:
        tokens = np.concatenate([shared, draw.integers(2, vocab, answer)]).astype(np.int32)
        advantages, sampled = (draw.normal(mean, 1, answer).astype(np.float32) for mean in (0, -10))
        made.append(
            TrainRow(tokens, np.ones(answer, np.uint8), advantages, sampled, None, None, np.zeros(answer, np.int32))
        )
    return made


def spans(number: int, rows: int) -> list[list[int]]:
    """Names of the rows of micro-batch `number`."""
    return [[number * 1000 + row, 0, 0, 1] for row in range(rows)]


if __name__ == "__main__":
    main()
