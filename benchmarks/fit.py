"""What a rank holds at its peak, over what it must: while a model loads, in a step, and while a version is published.

    rondo bench fit                                     all cases of the table
    rondo bench fit --layers 36 --ranks 4 [--copies 2] [--experts 8] [--checkpointing] [--rows 1] [--tokens 64]

A Qwen3-shaped random model of 0.6 billion float32 parameters (vocabulary 32,768) trains on four gloo ranks with the product's own
backend: loaded from a folder, one step of 8 micro-batches a rank, one version copied into a slab as the actor does without a hot
snapshot. Fewer layers of it train on two ranks, as a mixture of experts, and with layers computed again in the backward, with two
micro-batches. A rank's memory is its RssAnon + RssShmem above what it had before it loaded; each rank is sampled every few
milliseconds, and the greatest counts, of each part of a step too. What it must hold: 16 bytes a parameter over the ranks of a
copy (weights, gradients, two moments), twice the largest unit (gathered, and its gradient), and the activations of a micro-batch
as `rondo check` traces them. The slab is another process's memory, as in a run; its pages count for the ranks that touch them.

The whole model takes minutes and 16 GB on two cores; `--layers 10`, of 0.19 billion parameters, a third.

The last line is JSON, of every case: `load_ratio`, `step_ratio`, `publish_ratio`, and in `trace_error` how far what was traced
before is from a step's peak, as a part of it. Beside the cases the worst of each.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from rondo.comm.weights.publication import publish as publish_version
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.together import other_part
from rondo.launch.check.trace import Tracer
from rondo.models.config import MeshConfig, ModelConfig
from rondo.models.hf_folder import write_folder
from rondo.models.load import empty_model
from rondo.models.names import disk_groups
from rondo.models.parallel.experts import experts_of
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.models.units import decoder_layers
from rondo.roles.config import DataConfig, JobConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective, TrainRow, open_policy
from rondo.runtime.memory.segments import Segment

WORST = ("load_ratio", "step_ratio", "publish_ratio", "trace_error")
_EVERY_S = 0.004
_CHILD = (
    "import sys; from benchmarks import fit; fit.{}(fit.Path(sys.argv[1]), fit.Case(**fit.json.loads(sys.argv[2])))"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and how it is trained. copies: of the model, over which the ranks are divided. experts: of every layer, two of
    which a token goes to; 0 for none. ep: ranks that share them out. rows, tokens: of a micro-batch, of a row."""

    layers: int = 36
    ranks: int = 4
    copies: int = 1
    experts: int = 0
    ep: int = 1
    checkpointing: bool = False
    rows: int = 1
    tokens: int = 64
    micro_batches: int = 8


CASES = {
    "0.6 B": Case(),
    "on 2 ranks": Case(layers=8, ranks=2, micro_batches=2),
    "8 experts a layer": Case(layers=8, experts=8, micro_batches=2),
    "layers computed again": Case(layers=8, tokens=512, checkpointing=True, micro_batches=2),
}


def rows() -> list[dict[str, str]]:
    return [{"prompt": "1+1=", "answer": "2"}]


def reward(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return 0.0


def job(folder: Path, case: Case) -> JobConfig:
    size, half = case.rows * case.tokens, case.tokens // 2
    return JobConfig(
        name="fit", num_steps=1, model=ModelConfig(path=str(folder / "model")), data=DataConfig(rows=rows, label="answer"),
        reward=RewardConfig(function=reward),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=half, max_new_tokens=half),
        train=TrainConfig(
            mesh=MeshConfig(dp_replicate=case.copies, ep=case.ep), micro_batch_tokens=size, log_prob_chunk_tokens=size,
            hot_snapshot=False, activation_checkpointing=case.checkpointing,
        ),
    )  # fmt: skip


def trace(folder: Path, case: Case) -> None:
    """What a rank would hold in a step, and of it what a forward keeps, as JSON."""
    config = job(folder, case)
    found = Tracer(config, str(config.model.path)).of("actor", case.ranks)
    print(json.dumps([found.parts, found.ended["activations"] + found.ended["logits"]]))


def write(folder: Path, case: Case) -> None:
    """Random weights, a tensor at a time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    routed = {
        "num_experts": case.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    config = (Qwen3MoeConfig if case.experts else Qwen3Config)(
        vocab_size=32_768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=case.layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, **(routed if case.experts else {}),
    )  # fmt: skip
    for written in (build_tokenizer(), config):
        written.save_pretrained(folder / "empty")
    with torch.device("meta"):
        model = (Qwen3MoeForCausalLM if case.experts else Qwen3ForCausalLM)(config)
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


def micro_batch(number: int, case: Case) -> list[TrainRow]:
    draw = np.random.default_rng(case.ranks * number + dist.get_rank())
    half = case.tokens // 2
    made = []
    for _ in range(case.rows):
        tokens = draw.integers(0, 32_768, case.tokens).astype(np.int32)
        sampled, worth = (draw.normal(-1, 0.1, half).astype(np.float32) for _ in range(2))
        made.append(TrainRow(tokens, np.ones(half, np.uint8), sampled, worth, None, None, np.zeros(half, np.int32)))
    return made


def train(config: JobConfig, case: Case, slab: Segment, out: Path) -> None:
    peaks = Peaks()
    trainer = open_policy(config, str(config.model.path), world_size=case.ranks, device="cpu")
    trainer.objective = cast(PolicyObjective, Told(trainer.objective, peaks))
    for number in range(case.micro_batches):
        spans = [[number * 1000 + at, 0, 0, 1] for at in range(case.rows)]
        trainer.accumulate(0, micro_batch(number, case), spans, last=number == case.micro_batches - 1)
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
        publish_version(slab, 0, attempt=0, version=1, tensors=trainer.weights(), beside=trainer.publishing)
    elif trainer.mesh.replica == 0:
        other_part(slab, trainer.weights(), trainer.publishing, attempt=0, version=1)


def fork(out: Path, ranks: int, work: Callable[[], None]) -> None:
    """`work` on every rank; what they load before is shared."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            torch.set_num_threads(1)
            store = dist.FileStore(str(out / "store"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            work()
        except BaseException:  # noqa: BLE001  # told, and this rank is over
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if codes := [code for child in children if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]:
        sys.exit(f"every rank must end with 0, got {codes}")


def measure(case: Case) -> dict[str, Any]:
    """Prints all, and returns what is kept."""
    shards = case.ranks // case.copies
    with tempfile.TemporaryDirectory(prefix="rondo-fit-") as temporary:
        out, arguments = Path(temporary), (temporary, json.dumps(asdict(case)))
        subprocess.run([sys.executable, "-c", _CHILD.format("write"), *arguments], check=True)
        told = subprocess.check_output([sys.executable, "-c", _CHILD.format("trace"), *arguments])
        traced, activations = json.loads(told)
        config = job(out, case)
        model = empty_model(str(config.model.path))
        layers, parameters = decoder_layers(model), sum(p.numel() for p in model.parameters())
        apart = {id(p) for module in experts_of(model).values() for p in module.parameters()}
        units = [sum(p.numel() // (case.ep if id(p) in apart else 1) for p in layer.parameters()) for layer in layers]
        outside = parameters - sum(p.numel() for layer in layers for p in layer.parameters())
        num_bytes = slab_bytes(4 * parameters, 1000, 1)
        descriptor = os.memfd_create("weights")
        os.posix_fallocate(descriptor, 0, num_bytes)
        with Segment("weights", num_bytes, descriptor) as slab:
            fork(out, case.ranks, lambda: train(config, case, slab, out))
        found = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(case.ranks)]
    largest = 4 * max(*units, outside)
    must = 16 * parameters // shards + 2 * largest + activations
    mib = 1 << 20
    print(f"{parameters:,} parameters on {case.ranks} ranks; a rank must hold {must // mib:,} MiB, of which:")
    of = {"shards": 16 * parameters // shards, "twice a unit": 2 * largest, "activations": activations}
    print("  " + ", ".join(f"{name} {size // mib:,}" for name, size in of.items()))
    peaks = dict[str, int]()
    for name in found[0]:
        peak, seconds = (max(each[name][at] for each in found) for at in range(2))
        print(f"{name:15} {peak // mib:6,} MiB at most on a rank, {peak / must:.2f} of it, in {seconds:.0f} s")
        whole = name.partition(":")[0]
        peaks[whole] = max(peaks.get(whole, 0), peak)
    print("traced before: " + ", ".join(f"{name} {size // mib:,}" for name, size in traced.items()), flush=True)
    ratios = {f"{name}_ratio": round(peak / must, 3) for name, peak in peaks.items()}
    error = round(sum(traced.values()) / peaks["step"] - 1, 3)
    return (
        ratios
        | {"trace_error": error, "must_bytes": must, "peak_bytes": peaks, "parameters": parameters}
        | asdict(case)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Case()).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(option, type=int, default=argparse.SUPPRESS, help=f"default {value}")
    options = vars(parser.parse_args())
    figures = dict[str, Any]()
    for name, case in ({"one": Case(**options)} if options else CASES).items():
        print(f"\n{name}: {case}", flush=True)
        figures[name] = measure(case)
    worst = {name: max((of[name] for of in figures.values()), key=abs) for name in WORST}
    print(json.dumps(worst | {"cases": figures}))


if __name__ == "__main__":
    main()
