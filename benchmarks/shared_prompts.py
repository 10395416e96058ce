"""What it saves to compute a prompt once for all of its samples: forward and backward of a step, with and without.

    rondo bench shared_prompts [--repetitions 5] [--dtype bfloat16]

A Qwen3 of 9.2 million parameters; 8 prompts with 8 answers each, of 64 tokens, or ragged as in `trl_task.py`; micro-batches are
whole prompt groups, those of both sides the same. "rows" are what models get that cannot share: first fit, longest first. The two
sides take turns; a ratio is the median over repetitions of rows' processor seconds over ours. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import trl_task as task
from benchmarks.trl import build_model
from rondo.models import parallel
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing, Sequence

CASES = ((16, "equal"), (16, "ragged"), (64, "equal"), (256, "equal"), (256, "ragged"))
"""(tokens of a prompt, lengths of answers)"""
GROUPS_TOGETHER = 2


def groups(num_prompt: int, load: str, seed: int) -> list[list[Sequence]]:
    """A step's prompt groups."""
    rng = np.random.default_rng(seed)

    def sample(prompt: np.ndarray, length: int) -> Sequence:
        return Sequence(np.append(prompt, rng.integers(0, task.VOCAB - 2, length)).astype(np.int32), length)

    prompts = [rng.integers(0, task.VOCAB - 2, num_prompt) for _ in range(task.NUM_PROMPTS)]
    return [
        [sample(prompt, length) for length in task.answer_lengths(load, position)]
        for position, prompt in enumerate(prompts)
    ]


def step_cpu_s(model: Any, packing: Packing, step: list[list[Sequence]]) -> tuple[float, int]:
    """(processor seconds, tokens that went through the layers)"""
    began, num_tokens = time.process_time(), 0
    for first in range(0, len(step), GROUPS_TOGETHER):
        packed = packing.pack([one for group in step[first : first + GROUPS_TOGETHER] for one in group], train=True)
        num_tokens += packed.input_ids.numel()
        log_probs, _ = response_log_probs(model, packed, with_entropy=True)
        log_probs.mean().backward()
    seconds = time.process_time() - began
    parallel.discard_gradients(model)
    return seconds, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="rondo-shared-") as folder:
        build_model(Path(folder) / "model")
        model = load_model(str(Path(folder) / "model"))
    shares = Packing.of(model)
    assert shares.share_prefixes
    parallel.compute_in(model, options.dtype)
    sides = {"ours": shares, "rows": replace(shares, share_prefixes=False)}
    cases: dict[str, Any] = {}
    for num_prompt, load in CASES:
        seen: dict[str, list[float]] = {side: [] for side in sides}
        tokens: dict[str, int] = {}
        for repetition in range(-1, options.repetitions):  # the first one warms up
            step = groups(num_prompt, load, repetition + 1)
            for side, packing in sides.items():
                seconds, tokens[side] = step_cpu_s(model, packing, step)
                if repetition >= 0:
                    seen[side].append(seconds)
        ratio = statistics.median(rows / ours for rows, ours in zip(seen["rows"], seen["ours"], strict=True))
        name = f"{num_prompt}_{load}"
        cases[name] = {
            "ratio": round(ratio, 3),
            "tokens": tokens,
            "cpu_s": {side: round(statistics.median(values), 3) for side, values in seen.items()},
        }
        print(f"prompt {num_prompt:4}  answers {load:7} {ratio:5.2f}x  {cases[name]['cpu_s']}  {tokens}", flush=True)
    print(json.dumps({"benchmark": "shared_prompts", "cpus": os.cpu_count(), **vars(options), "results": cases}))


if __name__ == "__main__":
    main()
