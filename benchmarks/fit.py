"""What a rank holds at its peak, over what it must: while a model loads, in a step, and while a version is published.

    rondo bench fit [--layers 36] [--mesh 1x4] [--rows 1] [--tokens 64]

A Qwen3-shaped random model of 0.6 billion float32 parameters (vocabulary 32,768) trains on four gloo ranks with the product's own
backend: loaded from a folder, one step of 8 micro-batches a rank, one version copied into a slab as the actor does without a hot
snapshot. A rank's memory is its RssAnon + RssShmem above what it had before it loaded; each rank is sampled every few
milliseconds, and the greatest counts, of each part of a step too. What it must hold: 16 bytes a parameter over the ranks of a
copy (weights, gradients, two moments), twice the largest unit (gathered, and its gradient), and the activations of a micro-batch
as `rondo check` traces them. The slab is another process's memory, as in a run; its pages count for the ranks that touch them.

The whole model takes minutes and 16 GB on two cores; `--layers 10`, of 0.19 billion parameters, a third.

The last line is JSON: `load_ratio`, `step_ratio`, `publish_ratio`, and in `trace_error` how far what was traced before is from a
step's peak, as a part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.comm.weights.publisher import Publisher
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.together import other_part
from rondo.launch.check.trace import Tracer
from rondo.models.config import MeshConfig, ModelConfig
from rondo.models.hf_folder import write_folder
from rondo.models.load import empty_model
from rondo.models.names import disk_groups
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.models.units import decoder_layers
from rondo.roles.config import DataConfig, JobConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import TrainRow, open_policy
from rondo.runtime.memory.segments import Segment

NUM_RANKS, NUM_MICRO_BATCHES = 4, 8
_EVERY_S = 0.004
_TRACE = "import sys; from benchmarks.fit import Path, trace; trace(Path(sys.argv[1]), *map(int, sys.argv[2:]))"
_WRITE = "import sys; from benchmarks.fit import Path, write_model; write_model(Path(sys.argv[1]), int(sys.argv[2]))"


def rows() -> list[dict[str, str]]:
    return [{"prompt": "1+1=", "answer": "2"}]


def reward(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return 0.0


def job(folder: Path, replicas: int, num_rows: int, num_tokens: int) -> JobConfig:
    size, half = num_rows * num_tokens, num_tokens // 2
    return JobConfig(
        name="fit", num_steps=1, model=ModelConfig(path=str(folder)), data=DataConfig(rows=rows, label="answer"),
        reward=RewardConfig(function=reward),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=half, max_new_tokens=half),
        train=TrainConfig(
            mesh=MeshConfig(dp_replicate=replicas), micro_batch_tokens=size, log_prob_chunk_tokens=size, hot_snapshot=False
        ),
    )  # fmt: skip


def trace(folder: Path, replicas: int, num_rows: int, num_tokens: int) -> None:
    """What a rank would hold in a step, and of it what a forward keeps, as JSON."""
    found = Tracer(job(folder, replicas, num_rows, num_tokens), str(folder)).of("actor", NUM_RANKS)
    print(json.dumps([found.parts, found.kept]))


def write_model(folder: Path, layers: int) -> None:
    """Random weights, a tensor at a time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32_768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    for written in (build_tokenizer(), config):
        written.save_pretrained(folder / "empty")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    draw = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for group in disk_groups(model):
            for name, shape in group.shapes.items():
                yield name, torch.randn(shape, generator=draw) * 0.02 if len(shape) > 1 else torch.ones(shape)

    write_folder(folder / "model", model, str(folder / "empty"), "float32", tensors())


# ---- one rank -----------------------------------------------------------------------------------------------------------


def held_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


class Peaks:
    """The most that this process held during each part, above the beginning, and how long the part took."""

    def __init__(self) -> None:
        self._before, self._part, self._since = held_bytes(), "", time.monotonic()
        self.of, self.took = dict[str, int](), dict[str, float]()
        self.begin("load")
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, part: str) -> None:
        """The part before is over."""
        now = time.monotonic()
        self._look()
        self.took[self._part] = self.took.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(_EVERY_S)

    def _look(self) -> None:
        part = self._part
        self.of[part] = max(self.of.get(part, 0), held_bytes() - self._before)


class Told:
    """An objective that tells when its forward begins and ends: behind it comes the backward."""

    def __init__(self, objective: Any, peaks: Peaks) -> None:
        self._objective, self._peaks = objective, peaks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def sums(self, *what: Any) -> Any:
        self._peaks.begin("step: forward")
        found = self._objective.sums(*what)
        self._peaks.begin("step: backward")
        return found


def micro_batch(number: int, num_rows: int, num_tokens: int) -> list[TrainRow]:
    draw = np.random.default_rng(NUM_RANKS * number + dist.get_rank())
    half = num_tokens // 2
    made = []
    for _ in range(num_rows):
        tokens = draw.integers(0, 32_768, num_tokens).astype(np.int32)
        columns = [draw.normal(-1, 0.1, half).astype(np.float32) for _ in range(2)]
        made.append(TrainRow(tokens, np.ones(half, np.uint8), *columns, None, None, np.zeros(half, np.int32)))
    return made


def train(config: JobConfig, num_rows: int, num_tokens: int, slab: Segment, out: Path) -> None:
    assert config.model.path is not None
    peaks = Peaks()
    trainer = open_policy(config, config.model.path, world_size=NUM_RANKS, device="cpu")
    trainer.objective = Told(trainer.objective, peaks)
    for number in range(NUM_MICRO_BATCHES):
        spans = [[number * 1000 + at, 0, 0, 1] for at in range(num_rows)]
        batch = micro_batch(number, num_rows, num_tokens)
        trainer.accumulate(0, batch, spans, last=number == NUM_MICRO_BATCHES - 1)
    peaks.begin("step: optimizer")
    trainer.finish(0)
    peaks.begin("publish")
    publish(trainer, slab)
    peaks.begin("")
    told = {name: (peak, peaks.took[name]) for name, peak in peaks.of.items() if name}
    (out / f"rank-{dist.get_rank()}.json").write_text(json.dumps(told))


def publish(trainer: Backend[Any], segment: Segment) -> None:
    slab = WeightSlab(segment, 1)
    if dist.get_rank() == 0:
        publisher = Publisher(slab, beside=trainer.publishing)
        publisher.copy(0, attempt=0, version=1, tensors=trainer.weights())
        publisher.close()
    elif trainer.mesh.replica == 0:
        other_part(slab, trainer.weights(), trainer.publishing, attempt=0, version=1)


def fork(out: Path, work: Callable[[], None]) -> None:
    """`work` on every rank; what they load before is shared."""
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            torch.set_num_threads(1)
            store = dist.FileStore(str(out / "store"), NUM_RANKS)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
            work()
        except BaseException:  # noqa: BLE001  # told, and this rank is over
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if codes := [code for child in children if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]:
        sys.exit(f"every rank must end with 0, got {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--mesh", default="1x4", help="dp_replicate x dp_shard, of 4 ranks")
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    options = parser.parse_args()
    replicas, shards = map(int, options.mesh.split("x"))
    with tempfile.TemporaryDirectory(prefix="rondo-fit-") as temporary:
        out = Path(temporary)
        subprocess.run([sys.executable, "-c", _WRITE, temporary, str(options.layers)], check=True)
        config = job(out / "model", replicas, options.rows, options.tokens)
        arguments = [str(out / "model"), *map(str, (replicas, options.rows, options.tokens))]
        traced, activations = json.loads(subprocess.check_output([sys.executable, "-c", _TRACE, *arguments]))
        model = empty_model(str(out / "model"))
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
        parameters = sum(p.numel() for p in model.parameters())
        num_bytes = slab_bytes(4 * parameters, 1000, 1)
        descriptor = os.memfd_create("weights")
        os.posix_fallocate(descriptor, 0, num_bytes)
        with Segment("weights", num_bytes, descriptor) as slab:
            fork(out, lambda: train(config, options.rows, options.tokens, slab, out))
        told = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    largest = 4 * max(*layers, parameters - sum(layers))
    must = 16 * parameters // shards + 2 * largest + activations
    mib = 1 << 20
    print(f"{parameters:,} parameters on {options.mesh} ranks; a rank must hold {must // mib:,} MiB, of which:")
    of = {"shards": 16 * parameters // shards, "twice a unit": 2 * largest, "activations": activations}
    print("  " + ", ".join(f"{name} {size // mib:,}" for name, size in of.items()))
    peaks = dict[str, int]()
    for name in told[0]:
        peak, seconds = (max(each[name][at] for each in told) for at in range(2))
        print(f"{name:15} {peak // mib:6,} MiB at most on a rank, {peak / must:.2f} of it, in {seconds:.0f} s")
        whole = name.partition(":")[0]
        peaks[whole] = max(peaks.get(whole, 0), peak)
    ratios = {f"{name}_ratio": round(peak / must, 3) for name, peak in peaks.items()}
    print("traced before: " + ", ".join(f"{name} {size // mib:,}" for name, size in traced.items()))
    ratios["trace_error"] = round(sum(traced.values()) / peaks["step"] - 1, 3)
    print(json.dumps(ratios | {"must_bytes": must, "peak_bytes": peaks, "parameters": parameters}))


if __name__ == "__main__":
    main()
