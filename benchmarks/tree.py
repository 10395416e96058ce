"""What it saves to compute a tree of rows once: forward and backward, together and row by row, and how equal they are.

    rondo bench tree [--repetitions 5] [--dtype bfloat16]

A Qwen3 of 9.2 million parameters, in float32 unless told otherwise. Each turn of the policy is a row, behind all that came before
it, as an agent's sessions are exported:

    turns      8 samples of a prompt of 64 tokens, 6 turns of 64 tokens each
    session    a session of 256 tokens with 4 turns of 64, that 4 branches of 2 turns leave, one behind each turn
    tau2       as AReaL's examples/tau2 (n_samples 8, a row for each turn): 8 samples, 8 turns in which the policy says 32 tokens
               and is told 40, behind a prompt of 512; all lengths a sixteenth of its 16,384. Its reference/tree_training.md says
               "up to" 10x fewer operations and 7x faster, of lengths that it does not tell: these are chosen to have 10.6x fewer
               tokens, and rows count their padding, so that the ratio says nothing of its 7x

"rows" are what models get that cannot share: first fit, longest first, in micro-batches of up to 4,096 tokens. Both sides take
turns; a ratio is the median over repetitions of rows' processor seconds over ours. `log_probs` is the largest difference in nats,
and `gradients` that of any parameter, as a part of its norm. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence as Ordered
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


def turns(rng: np.random.Generator, begins: np.ndarray, num: int, says: int, told: int = 0) -> list[Sequence]:
    """A row for each of `num` turns that go on behind `begins`."""
    found, tokens = list[Sequence](), begins
    for _ in range(num):
        tokens = np.concatenate([tokens, drawn(rng, told if found else 0), drawn(rng, says)])
        found.append(Sequence(tokens, says))
    return found


def drawn(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, task.VOCAB - 2, length).astype(np.int32)


def cases(seed: int) -> dict[str, list[Sequence]]:
    rng = np.random.default_rng(seed)
    short, long = drawn(rng, 64), drawn(rng, 512)
    session = turns(rng, drawn(rng, 256), 4, 64)
    return {
        "turns": [row for _ in range(8) for row in turns(rng, short, 6, 64)],
        "session": [*session, *(row for turn in session for row in turns(rng, turn.tokens, 2, 64))],
        "tau2": [row for _ in range(8) for row in turns(rng, long, 8, 32, 40)],
    }


def computed(
    model: Any, packing: Packing, rows: Ordered[Sequence], budget: int
) -> tuple[float, int, torch.Tensor, dict[str, torch.Tensor]]:
    """(processor seconds of forward and backward, tokens that went through the layers, log-probs, gradients by name)"""
    parallel.discard_gradients(model)
    batches: list[list[Sequence]] = [[]]
    for row in rows:
        if sum(len(one.tokens) for one in batches[-1]) + len(row.tokens) > budget:
            batches.append([])
        batches[-1].append(row)
    weights = torch.linspace(-1, 1, sum(row.response for row in rows))
    num_tokens, found, began = 0, list[torch.Tensor](), time.process_time()
    for batch, weight in zip(batches, weights.split([sum(row.response for row in b) for b in batches]), strict=True):
        packed = packing.pack(batch, train=True)
        num_tokens += packed.input_ids.numel()
        log_probs, _ = response_log_probs(model, packed)
        (log_probs * weight).sum().backward()
        found.append(log_probs.detach())
    seconds = time.process_time() - began
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return seconds, num_tokens, torch.cat(found), gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="rondo-tree-") as folder:
        build_model(Path(folder) / "model")
        model = load_model(str(Path(folder) / "model"))
    shares = Packing.of(model)
    assert shares.share_prefixes
    parallel.compute_in(model, options.dtype)
    rows_alone = replace(shares, share_prefixes=False)
    computed(model, shares, cases(0)["session"], 1 << 30)  # it warms up
    results: dict[str, Any] = {}
    for name in cases(0):
        ratios, gaps, seconds, tokens = list[float](), list[tuple[float, float]](), list[tuple[float, float]](), (0, 0)
        for repetition in range(options.repetitions):
            rows = cases(repetition + 1)[name]
            ours_s, num_ours, found, gradients = computed(model, shares, rows, 1 << 30)
            rows_s, num_rows, expected, by_rows = computed(model, rows_alone, rows, 4096)
            far = [float((gradients[key] - by_rows[key]).norm() / by_rows[key].norm()) for key in by_rows]
            gaps.append((float((found - expected).abs().max()), max(far)))
            ratios.append(rows_s / ours_s)
            seconds.append((ours_s, rows_s))
            tokens = num_ours, num_rows
        ours_s, rows_s = map(statistics.median, zip(*seconds, strict=True))
        results[name] = {
            "ratio": round(statistics.median(ratios), 3),
            "tokens": {"ours": tokens[0], "rows": tokens[1]},
            "cpu_s": {"ours": round(ours_s, 3), "rows": round(rows_s, 3)},
            "log_probs": max(gap for gap, _ in gaps),
            "gradients": max(gap for _, gap in gaps),
        }
        print(f"{name:8} {results[name]}", flush=True)
    print(json.dumps({"benchmark": "tree", "cpus": os.cpu_count(), **vars(options), "results": results}))


if __name__ == "__main__":
    main()
