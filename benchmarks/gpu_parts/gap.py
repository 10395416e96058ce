"""The gap between log-probs of the trainer and those that an engine tells, both in bfloat16 under the same weights.

Some layers of a Qwen3-4B, whose random logits are sharpened to a few likely tokens, answer random prompts in the embedded
engine and in SGLang; the trainer scores their tokens as it does in a step. In a run this gap is `log_prob_gap`; a wrong mask,
position or scale shows here as nats, rounding as hundredths.
"""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import sglang_weights
from benchmarks.gpu import Options
from benchmarks.gpu_parts import ranks
from benchmarks.gpu_parts.sglang import launch
from benchmarks.gpu_parts.shapes import QWEN3_4B, TINY, write_model
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.mesh import Mesh
from rondo.models.packing import Sequence as Packable
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.engines.sglang.open import connect_engine
from rondo.roles.training.backend import make_ready, open_model
from rondo.roles.training.mismatch import Gap

LAYERS, SHARPNESS = 8, 4.0


def measure(options: Options, tell: Callable[[dict[str, Any]], None]) -> None:
    shape = TINY if options.tiny else QWEN3_4B.of(LAYERS)
    sizes = (4, 8, 16) if options.tiny else (64, 256, 512)
    asked = requests(shape.vocab, *sizes)
    found: dict[str, Any] = {"parameters": shape.parameters}
    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        folder = write_model(Path(aside) / "model", shape, sharpness=SHARPNESS)
        for name, generate in (("embedded", with_embedded), ("sglang", with_sglang)):
            try:
                done = generate(options, folder, asked)
                found[name] = gap = gap_of(options, folder, asked, done)
            except Exception as error:  # noqa: BLE001  # this engine's outcome; the other one goes on
                traceback.print_exc()
                found[name] = {"error": f"{type(error).__name__}: {error}"}
            else:
                print(f"{name:9} mean {gap['log_prob_gap']:.4f}, greatest {gap['log_prob_gap_max']:.3f} nats")
            tell(found)
            if options.num_devices:
                torch.cuda.empty_cache()  # the next one is another process


def requests(vocab: int, number: int, prompt: int, answer: int) -> list[Request]:
    draw = np.random.default_rng(0)
    return [
        Request(str(index), draw.integers(2, vocab, prompt).astype(np.int32), SamplingParams(answer), seed=index)
        for index in range(number)
    ]


def with_embedded(options: Options, folder: Path, asked: Sequence[Request]) -> list[Completion]:
    device = "cuda:0" if options.num_devices else "cpu"
    model = load_model(str(folder), dtype="bfloat16", device=device)
    length = max(len(each.prompt) + each.params.max_new_tokens for each in asked)
    engine = slot_engine(model, num_slots=len(asked), max_length=length)
    for each in asked:
        engine.add(each)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {each.request_id: each for each in engine.step()}
    return [done[each.id] for each in asked]


def with_sglang(options: Options, folder: Path, asked: Sequence[Request]) -> list[Completion]:
    async def ask(aside: Path) -> list[Completion]:
        async with sglang_weights.running(launch(options, folder), aside) as client:
            settings = SGLangConfig(urls=(client.url,), checksums=False)
            engine = await connect_engine(
                client, settings=settings, folder=aside / "weights", model_path=str(folder), processed_media=False
            )
            return list(await asyncio.gather(*(engine.generate(each) for each in asked)))

    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        return asyncio.run(ask(Path(aside)))


def gap_of(options: Options, folder: Path, asked: Sequence[Request], done: Sequence[Completion]) -> dict[str, float]:
    """`log_prob_gap`, `..._max`, `..._k3` and `..._tokens`, as a step tells them."""
    device = "cuda:0" if options.num_devices else "cpu"
    config = ranks.job(folder, micro_batch_tokens=8192)
    model, packing = open_model(config, str(folder), Mesh(), device=device)
    make_ready(model, config.train)
    gap = Gap()
    for request, each in zip(asked, done, strict=True):
        sequence = Packable(np.concatenate([request.prompt, each.tokens]), len(each.tokens))
        with torch.no_grad():
            mine, _ = response_log_probs(model, packing.pack([sequence]).to(device), chunk_tokens=2048)
        gap.add(mine.float().cpu().numpy(), each.log_probs, np.ones(len(each.tokens), bool), ())
    return gap.metrics()
