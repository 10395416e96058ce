"""Training: tokens a second and the share of the chip's peak, packed against padded, for every attention.

A Qwen3-4B with random weights, or as many of its layers as fit beside 16 bytes a parameter, cut over all GPUs, trains in
bfloat16 with activation checkpointing: steps of several prompt groups, 8 answers each whose lengths are uniform in [n/8, n].
"packed" is what a run does; "padded" has one sample a row and as many rows as fit into the micro-batch at the longest of
them, with "sdpa", as what cannot be packed has. A token is a sample's, its prompt's counted for each. The share of the peak
counts what must be computed (`Shape.step_flops`), nothing that packing, padding or checkpointing computes beside it.
"product" is what one large bfloat16 product reaches on this chip.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu import Options
from benchmarks.gpu_parts import ranks
from benchmarks.gpu_parts.shapes import QWEN3_4B, TINY, Shape, peak_of, write_model
from rondo.models.config import ModelConfig
from rondo.roles.training.objective import TrainRow, open_policy

_BYTES_A_PARAMETER = 16.5
_ROOM = 0.85
"""Of a device's memory: what allocators and kernels leave over."""
_BYTES_A_TOKEN = 400_000
"""Kept and recomputed activations of a token, at most, and with the logits of a chunk:"""
_CHUNK_BYTES = 5_000_000_000
_GROUPS, _SAMPLES = 4, 8
_PEAK_SIDE = 8192


def measure(options: Options, tell: Callable[[dict[str, Any]], None]) -> None:
    found: dict[str, Any] = {"product_tflop_s": product_rate(options) / 1e12}
    if options.num_devices:
        torch.cuda.empty_cache()  # ranks are other processes
    peak = peak_of(torch.cuda.get_device_name(0)) if options.num_devices else None
    found["peak_tflop_s"] = None if peak is None else peak / 1e12
    shape, tokens = sizes(options)
    found |= {"shape": asdict(shape), "parameters": shape.parameters, "ranks": max(1, options.num_devices), "attn": {}}
    print(f"{shape.layers} layers, {shape.parameters / 1e9:.2f} billion parameters; peak of this device: {peak}")
    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        folder = write_model(Path(aside) / "model", shape)
        for attn in get_args(ModelConfig.model_fields["attn"].annotation):
            if attn in ("auto", "eager"):
                continue
            found["attn"][attn] = row = of_attention(options, folder, attn, shape, tokens)
            for way, each in row.items() if "error" not in row else ():
                each["of_peak"] = None if peak is None else each["flop_s_a_rank"] / peak
                each["of_product"] = each["flop_s_a_rank"] / (found["product_tflop_s"] * 1e12)
                print(f"{attn:18} {way:7} {each['tokens_s']:12,.0f} tokens/s  {each['of_product']:.1%} of a product")
            tell(found)


def of_attention(options: Options, folder: Path, attn: str, shape: Shape, tokens: int) -> dict[str, Any]:
    if attn.startswith("flash_attention") and importlib.util.find_spec("flash_attn") is None:
        return {"error": "flash-attn is not installed"}
    settings = {"attn": attn, "shape": asdict(shape), "micro_batch_tokens": tokens}
    try:
        return ranks.run(work, options, folder, settings)
    except Exception as error:  # noqa: BLE001  # this attention's outcome; the others go on
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def sizes(options: Options) -> tuple[Shape, int]:
    """The shape that fits, and the tokens of a micro-batch."""
    if options.tiny:
        return TINY, 256
    memory = torch.cuda.get_device_properties(0).total_memory if options.num_devices else 32 << 30
    tokens = 16_384 if memory > 36 << 30 else 4_096
    for_weights = max(1, options.num_devices) * (_ROOM * memory - tokens * _BYTES_A_TOKEN - _CHUNK_BYTES)
    layers = (for_weights / _BYTES_A_PARAMETER - QWEN3_4B.of(0).parameters) // QWEN3_4B.layer_parameters
    if layers < 1:
        raise MemoryError(f"a device must hold a layer of Qwen3-4B and its optimizer, got {memory / 2**30:.0f} GiB")
    return QWEN3_4B.of(min(QWEN3_4B.layers, int(layers))), tokens


def product_rate(options: Options) -> float:
    """Operations a second of one large product of random numbers."""
    device, side = "cuda" if options.num_devices else "cpu", 256 if options.tiny else _PEAK_SIDE
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = [timed(lambda: left @ right, device) for _ in range(13)][3:]
    return 2 * side**3 / statistics.median(seconds)


def timed(function: Callable[[], Any], device: str) -> float:
    """Seconds until all that it has started on the device is done."""
    finish = torch.cuda.synchronize if device.startswith("cuda") else int
    finish()
    began = time.perf_counter()
    function()
    finish()
    return time.perf_counter() - began


def work(options: Options, device: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Steps of one attention, packed and padded, on this rank."""
    shape, tokens = Shape(**settings["shape"]), settings["micro_batch_tokens"]
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    config = ranks.job(folder, micro_batch_tokens=tokens, attn=settings["attn"])
    trainer = open_policy(config, str(folder), world_size=size, device=device)
    prompt = tokens // 32
    longest = (tokens - _SAMPLES * prompt) // _SAMPLES * 3 // 2
    draw = np.random.default_rng(0)
    lengths = [
        draw.integers(longest // 8, longest + 1, _SAMPLES).tolist() for _ in range(_GROUPS)
    ]  # alike on all ranks
    groups = [ranks.group(shape.vocab, prompt, answers, np.random.default_rng(rank)) for answers in lengths]
    every = [row for group in groups for row in group]
    packing = trainer.objective._packing
    apart = replace(packing, share_prefixes=False, share_rows=False)
    ways = {"packed": (packing, list(in_order(every, tokens)))}
    if settings["attn"] == "sdpa":
        ways["padded"] = (apart, list(side_by_side(every, tokens)))
    flops = sum(shape.step_flops(prompt, answers) for answers in lengths)
    num_tokens = sum(len(row.tokens) for row in every)
    found = {}
    for way, (how, batches) in ways.items():
        trainer.objective._packing = how

        def step(batches: list[list[TrainRow]] = batches) -> None:
            for number, rows in enumerate(batches):
                trainer.accumulate(0, rows, ranks.spans(number, len(rows)), last=number == len(batches) - 1)
            trainer.finish(0)

        seconds = [timed(step, device) for _ in range(2 if options.tiny else 4)][1:]  # kernels are made in the first
        step_s = statistics.median(seconds)
        found[way] = {
            "step_s": step_s, "tokens_s": size * num_tokens / step_s, "flop_s_a_rank": flops / step_s,
            "micro_batches": len(batches), "peak_gib": peak_gib(device),
        }  # fmt: skip
    return found


def peak_gib(device: str) -> float | None:
    """The most that tensors took on the device since this was asked last."""
    if not device.startswith("cuda"):
        return None
    found = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return round(found, 1)


def in_order(rows: list[TrainRow], most: int) -> Iterator[list[TrainRow]]:
    """Micro-batches of so many tokens at most, of samples as they come."""
    batch: list[TrainRow] = []
    for row in rows:
        if batch and sum(len(each.tokens) for each in (*batch, row)) > most:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def side_by_side(rows: list[TrainRow], most: int) -> Iterator[list[TrainRow]]:
    """The same, where every sample takes as much as the longest of its micro-batch."""
    batch: list[TrainRow] = []
    for row in rows:
        if batch and (len(batch) + 1) * max(len(each.tokens) for each in (*batch, row)) > most:
            yield batch
            batch = []
        batch.append(row)
    yield batch
