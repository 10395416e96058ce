"""Tokens per CPU second: the embedded engine (fused forward, Hugging Face forward) beside transformers' `generate`.

    rondo bench generation [--repetitions 5] [--sizes tiny small] [--dtype float32]

Both sides sample at temperature 1 from the same random Qwen3. "equal": as many requests as slots, all of one length.
"ragged": three requests a slot, lengths uniform in [n/8, n]; `generate` runs static batches, each to its longest, and only
the requested tokens count. `generate` returns tokens alone; the engine returns log-probs and policy versions as well. The
repetitions of all are interleaved; a ratio is the median over repetitions. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from rondo.roles.engines.embedded.embedded import ForwardPath, slot_engine
from rondo.roles.engines.engine import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the load that is generated with it."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    num_slots: int
    num_prompt: tuple[int, int]
    num_new: int


SIZES = {
    "tiny": Size(128, 256, 2, 4, 2, 32, 270, 64, (8, 32), 96),
    "small": Size(256, 1024, 6, 8, 4, 64, 4096, 32, (8, 32), 128),
}


def build(size: Size, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.Qwen3ForCausalLM(config).to(dtype).eval()


def workload(size: Size, *, ragged: bool) -> list[Request]:
    rng = np.random.default_rng(0)
    count = size.num_slots * (3 if ragged else 1)
    low, high = size.num_prompt
    prompts = [rng.integers(1, size.vocab, rng.integers(low, high + 1)).astype(np.int32) for _ in range(count)]
    lengths = rng.integers(size.num_new // 8, size.num_new + 1, count) if ragged else np.full(count, size.num_new)
    return [
        Request(str(index), prompt, SamplingParams(max_new_tokens=int(length)), seed=index)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def with_engine(model: Any, size: Size, path: ForwardPath) -> Callable[[list[Request]], int]:
    engine = slot_engine(model, num_slots=size.num_slots, max_length=size.num_prompt[1] + size.num_new, forward=path)

    def run(requests: list[Request]) -> int:
        for request in requests:
            engine.add(request)
        num_tokens = 0
        while engine.has_work:
            num_tokens += sum(completion.tokens.size for completion in engine.step())
        return num_tokens

    return run


def with_generate(model: Any, size: Size) -> Callable[[list[Request]], int]:
    def run(requests: list[Request]) -> int:
        for start in range(0, len(requests), size.num_slots):
            batch = requests[start : start + size.num_slots]
            width = max(request.prompt.size for request in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, width - request.prompt.size :] = torch.from_numpy(request.prompt)
                mask[row, width - request.prompt.size :] = 1
            num_new = max(request.params.max_new_tokens for request in batch)
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
        return sum(request.params.max_new_tokens for request in requests)

    return run


def measure(name: str, size: Size, dtype: torch.dtype, repetitions: int) -> dict[str, dict[str, Any]]:
    """Per load and engine: tokens per CPU second (median, least, most) and the ratio to `generate`."""
    model = build(size, dtype)
    engines = {
        "fused": with_engine(model, size, "fused"),
        "hf": with_engine(model, size, "hf"),
        "generate": with_generate(model, size),
    }
    loads = {"equal": workload(size, ragged=False), "ragged": workload(size, ragged=True)}
    speeds: dict[tuple[str, str], list[float]] = {}
    for repetition in range(repetitions + 1):
        for load, requests in loads.items():
            for engine, run in engines.items():
                start = time.process_time()
                num_tokens = run(requests)
                if repetition:  # the first round warms up
                    speeds.setdefault((load, engine), []).append(num_tokens / (time.process_time() - start))
    report: dict[str, dict[str, Any]] = {}
    for (load, engine), values in speeds.items():
        against = [ours / theirs for ours, theirs in zip(values, speeds[load, "generate"], strict=True)]
        row = {
            "tokens_per_cpu_s": round(statistics.median(values)),
            "least": round(min(values)),
            "most": round(max(values)),
            "ratio_to_generate": round(statistics.median(against), 2),
        }
        report.setdefault(load, {})[engine] = row
        print(
            f"{name:6s} {load:7s} {engine:9s} {row['tokens_per_cpu_s']:7d} tokens/CPU-s "
            f"[{row['least']} - {row['most']}]  x{row['ratio_to_generate']:.2f}",
            flush=True,
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype)
    result: dict[str, Any] = {
        "benchmark": "generation",
        "dtype": options.dtype,
        "threads": 1,
        "repetitions": options.repetitions,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sizes": {name: measure(name, SIZES[name], dtype, options.repetitions) for name in options.sizes},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
