"""Experts over ranks against one process, and what router replay brings and costs.

    rondo bench experts [--pairs 40] [--only ranks gap cost memory]

ranks: a small mixture of experts makes one update in one process, and on four gloo ranks as `ep` 4, `ep` 2 over shards of 2, and
two copies of `ep` 2: the loss, the largest difference of a gradient (the bar is 1e-5), the norm before and after clipping; how
much of a step the all-to-alls take, as ranks of a busy processor wait in them; and whether state that goes through checkpoints
from `ep` 2 to 1 and back is the same to the bit.

gap: mixtures that have learnt to write the pages of `docs/`, byte by byte and with the load-balancing loss, one for each seed:
routers of random weights are nearly flat, and what they choose then says nothing of a model that was trained. The embedded engine
samples in bfloat16 (float16 where the processor has no products of it), the trainer scores in float32 from the same weights; mean
absolute difference of log-probs with and without replay (R3), in one process and on 2 x 2 ranks. The mean reduction is kept. What
a gap is made of is told by forwards over the same tokens in both precisions: how much less it is with the routes of the other,
its weights of experts too, and the very outputs of its layers of experts, beyond which no replay can go: what is left then is
made by everything else.

cost: a step samples and trains with the product's own trainer, with replay and without, in turns on one thread, by the
processor's time of this process, each pair on prompts of its own. The median over pairs of (with - without) / without, and an
interval that holds it in 95 of 100 draws of as many pairs (bootstrap).

memory: the most that one of four ranks holds in a step by `ep`, beside what `rondo check` traces (as `rondo bench fit` does).

Each part takes minutes, and may be kept by itself, which the table knows: `--as experts_gap --only gap`, and
`--as experts_memory --only memory`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from benchmarks import fit
from rondo.launch.bench import machine
from rondo.models import parallel
from rondo.models.config import MeshConfig, ModelConfig
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.routing import Routes, Routing, enable_replay, listen, through_routers
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import AlgorithmConfig, DataConfig, JobConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective, TrainRow, open_policy

NUM_SAMPLES, NUM_PROMPT, NUM_NEW = 16, 16, 32
MICRO_BATCH = 8
RANKS = 4
SEEDS, STEPS, BATCH, LENGTH, CONTINUED = (0, 1, 2), 200, 8, 64, 96
"""Of mixtures that learn: batches of so many pieces of so many bytes each; of what is sampled."""
MESHES = {
    "ep 4": MeshConfig(ep=4),
    "ep 2 x shard 2": MeshConfig(ep=2),
    "replicate 2 x ep 2": MeshConfig(dp_replicate=2, ep=2),
}
PARTS = ("ranks", "gap", "cost", "memory")


def mixture(**sizes: Any) -> Any:
    """With random weights; as wide as `sizes` say."""
    config = transformers.Qwen3MoeConfig(
        num_attention_heads=sizes["hidden_size"] // 32, num_key_value_heads=sizes["hidden_size"] // 64, head_dim=32,
        num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def written(model: Any, folder: Path) -> str:
    """As a path."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def write(folder: Path) -> str:
    """A folder with 12 million random parameters."""
    torch.manual_seed(0)
    return written(mixture(vocab_size=1024, hidden_size=256, num_hidden_layers=6, moe_intermediate_size=128), folder)


def pages() -> np.ndarray:
    """The bytes of `docs/`, int64."""
    texts = [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))]
    return np.frombuffer(b"\n".join(texts), np.uint8).astype(np.int64)


def learn(folder: Path, seed: int) -> str:
    """A folder with two million parameters that have learnt to write them."""
    torch.manual_seed(seed)
    model = mixture(vocab_size=266, hidden_size=128, num_hidden_layers=4, moe_intermediate_size=64).train()
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    draw, read = np.random.default_rng(seed), pages()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
        places = draw.integers(0, len(read) - LENGTH, BATCH)
        ids = torch.from_numpy(np.stack([read[at : at + LENGTH] for at in places]))
        model(input_ids=ids, labels=ids, output_router_logits=True).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return written(model, folder)


def job(path: str, mesh: MeshConfig = MeshConfig()) -> JobConfig:  # noqa: B008  # frozen
    """So small a rate that the weights stay those of the engine: what a step costs does not depend on it."""
    return JobConfig(
        name="experts", num_steps=1000, model=ModelConfig(path=path), data=DataConfig(rows=fit.rows, label="answer"),
        reward=RewardConfig(function=fit.reward), algorithm=AlgorithmConfig(loss_aggregation="token"),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=NUM_PROMPT, max_new_tokens=NUM_NEW),
        train=TrainConfig(mesh=mesh, lr=1e-12, router_replay="r3", hot_snapshot=False, clip_grad_norm=0.5),
    )  # fmt: skip


Policy = Backend[PolicyObjective]


def rows(seed: int, number: int) -> list[TrainRow]:
    draw, made = np.random.default_rng(seed), list[TrainRow]()
    for _ in range(number):
        response = int(draw.integers(NUM_NEW // 2, NUM_NEW))
        sampled, worth = (draw.normal(-1, 0.1, response).astype(np.float32) for _ in range(2))
        tokens = draw.integers(1, 1024, NUM_PROMPT + response).astype(np.int32)
        mask, versions = np.ones(response, np.uint8), np.zeros(response, np.int32)
        made.append(TrainRow(tokens, mask, sampled, worth, None, None, versions))
    return made


# ---- over ranks ---------------------------------------------------------------------------------------------------------


def on_ranks(work: Callable[[int, Path], None]) -> list[Any]:
    """`work(rank, folder)` on gloo ranks of their own, and what each wrote into `rank-N.pt`."""
    with tempfile.TemporaryDirectory(prefix="rondo-experts-") as folder:
        out = Path(folder)
        fit.fork(out, RANKS, lambda: work(dist.get_rank(), out))
        return [torch.load(path) for path in sorted(out.glob("rank-*.pt"))]


def updated(path: str, mesh: MeshConfig, rank: int, ranks: int) -> dict[str, Any]:
    """One update of 32 rows, dealt out to `ranks` in two micro-batches: loss, gradients, norms, seconds."""
    trainer = open_policy(job(path, mesh), path, world_size=ranks, device="cpu")
    mine, took = rows(0, 32)[rank::ranks], list[tuple[float, float]]()
    for _ in range(3):  # the last counts: the first one makes groups
        parallel.discard_gradients(trainer.model)
        trainer.discard()
        with exchanging() as exchanged:
            since = time.monotonic()
            for at, part in enumerate((mine[: len(mine) // 2], mine[len(mine) // 2 :])):
                spans = [[number + 100 * (rank + at * ranks), 0, 0, 1] for number in range(len(part))]
                trainer.accumulate(0, part, spans, last=at == 1)
            took.append((sum(exchanged), time.monotonic() - since))
    assert trainer._sums is not None
    total = trainer._sums.reduced(dist.group.WORLD if ranks > 1 else None)
    count = trainer.objective.denominator(total)
    parallel.scale_gradients(trainer.model, 1 / count)
    named = [(name, parameter.grad) for name, parameter in trainer.model.named_parameters()]
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each.clone() for name, each in named}
    norm = parallel.clip_grad_norm(trainer.model, 0.5)
    clipped = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named}
    after = float(torch.stack([each.norm() for each in clipped.values()]).norm())
    return {
        "loss": float(total.loss) / count, "gradients": whole, "norm": norm, "clipped": after,
        "exchange_share": took[-1][0] / took[-1][1],
    }  # fmt: skip


@contextmanager
def exchanging() -> Iterator[list[float]]:
    """Seconds of each all-to-all while the body runs."""
    took, plain = list[float](), dist.all_to_all_single

    @functools.wraps(plain)
    def timed_one(*args: Any, **kwargs: Any) -> Any:
        since = time.monotonic()
        found = plain(*args, **kwargs)
        took.append(time.monotonic() - since)
        return found

    dist.all_to_all_single = timed_one
    try:
        yield took
    finally:
        dist.all_to_all_single = plain


def over_ranks(path: str) -> dict[str, Any]:
    alone, found = updated(path, MeshConfig(), 0, 1), dict[str, Any]()
    for name, mesh in MESHES.items():

        def work(rank: int, out: Path, mesh: MeshConfig = mesh) -> None:
            torch.save(updated(path, mesh, rank, RANKS), out / f"rank-{rank}.pt")

        first, *others = on_ranks(work)
        gradients = {key: each for key, each in first["gradients"].items() if each is not None}
        found[name] = {
            "loss_diff": abs(first["loss"] - alone["loss"]),
            "grad_diff": max(float((alone["gradients"][key] - each).abs().max()) for key, each in gradients.items()),
            "norm_diff": abs(first["norm"] - alone["norm"]), "clipped": first["clipped"],
            "exchange_share": max(each["exchange_share"] for each in (first, *others)),
        }  # fmt: skip
        print(f"{name:20} " + ", ".join(f"{key} {value:.2g}" for key, value in found[name].items()), flush=True)
    print(f"{'one process':20} loss {alone['loss']:.6f}, norm {alone['norm']:.6f}, clipped {alone['clipped']:.6f}")
    return {
        "meshes": found, "loss": alone["loss"], "norm": alone["norm"], "clipped": alone["clipped"],
        "ep_grad_diff": max(each["grad_diff"] for each in found.values()), "ep_reshard_equal": resharded(path),
    }  # fmt: skip


def resharded(path: str) -> bool:
    """Whether weights and moments are the same bits on every rank after ep 2 -> 1 -> 2."""

    def work(rank: int, out: Path) -> None:
        kept: dict[str, torch.Tensor] = {}
        for at, ep in enumerate((2, 1, 2)):
            config = job(path, MeshConfig(ep=ep))
            config = config.model_copy(update={"train": config.train.model_copy(update={"lr": 1e-3})})
            trainer = open_policy(config, path, world_size=RANKS, device="cpu")
            if at == 0:
                trainer.accumulate(0, rows(rank, 4), [[rank, 0, number, 1] for number in range(4)], last=True)
                trainer.update(0)
                kept = {name: each.clone() for name, each in trainer.state()[0].items() if name[:6] != "random"}
            else:
                trainer.load_checkpoint(out / f"step_{at - 1:06}")
            trainer.save(out / f"step_{at:06}", {"version": at, "index": {}})
        again = trainer.state()[0]
        torch.save(all(torch.equal(each, again[name]) for name, each in kept.items()), out / f"rank-{rank}.pt")

    equal = all(on_ranks(work))
    print(f"ep 2 -> 1 -> 2: {'equal to the bit' if equal else 'DIFFERENT'}", flush=True)
    return equal


# ---- replay -------------------------------------------------------------------------------------------------------------


def half() -> torch.dtype:
    """What an engine on this processor computes in, beside float32."""
    return torch.bfloat16 if {"avx512_bf16", "amx_bf16"} & set(machine()["flags"]) else torch.float16


def requests(pair: int) -> list[Request]:
    draw = np.random.default_rng(pair)
    params = SamplingParams(max_new_tokens=NUM_NEW)
    return [
        Request(
            str(index), draw.integers(1, 1024, NUM_PROMPT).astype(np.int32), params, seed=NUM_SAMPLES * pair + index
        )
        for index in range(NUM_SAMPLES)
    ]


def engine(model: Any, *, tells: bool, num_slots: int = NUM_SAMPLES, new: int = NUM_NEW) -> SlotEngine:
    other = copy.deepcopy(model).to(half())
    return slot_engine(other, num_slots=num_slots, max_length=NUM_PROMPT + new, tells_experts=tells)


def generate(made: SlotEngine, asked: list[Request]) -> list[TrainRow]:
    for request in asked:
        made.add(request)
    done: dict[str, Completion] = {}
    while made.has_work:
        done |= {completion.request_id: completion for completion in made.step()}
    found = []
    for each in asked:
        one = done[each.id]
        size = len(one.tokens)
        tokens, advantages = np.concatenate([each.prompt, one.tokens]), np.ones(size, np.float32)
        found.append(
            TrainRow(
                tokens, np.ones(size, np.uint8), advantages, one.log_probs, None, None, one.policy_versions,
                routed_experts=one.routed_experts,
            )
        )  # fmt: skip
    return found


def gap_of(trainer: Policy, packing: Packing, sampled: list[TrainRow], *, replay: bool) -> np.ndarray:
    gaps = []
    for start in range(0, len(sampled), MICRO_BATCH):
        part = sampled[start : start + MICRO_BATCH]
        packed = packing.pack(
            [Packable(r.tokens, len(r.mask), None, r.routed_experts if replay else None) for r in part]
        )
        with torch.no_grad():
            log_probs, _ = response_log_probs(trainer.model, packed)
        gaps.append(log_probs.numpy() - np.concatenate([row.rollout_log_probs for row in part]))
    return np.concatenate(gaps).astype(np.float64)


def gaps(folder: Path) -> dict[str, Any]:
    found = {str(seed): gap(learn(folder / f"seed {seed}", seed), seed) for seed in SEEDS}
    reductions = [1 - of["with"] / of["without"] for seed in found.values() for of in seed["gaps"].values()]
    return {
        "learnt": found, "engine": str(half()).removeprefix("torch."), "r3_gap_reduction": float(np.mean(reductions)),
    }  # fmt: skip


def gap(path: str, seed: int) -> dict[str, Any]:
    model, read = transformers.AutoModelForCausalLM.from_pretrained(path).eval(), pages()
    places = np.random.default_rng(1000 + seed).integers(0, len(read) - NUM_PROMPT, 2 * NUM_SAMPLES)
    params = SamplingParams(max_new_tokens=CONTINUED)
    asked = [
        Request(str(n), read[at : at + NUM_PROMPT].astype(np.int32), params, seed=n) for n, at in enumerate(places)
    ]
    sampled, found = generate(engine(model, tells=True, num_slots=len(asked), new=CONTINUED), asked), dict[str, Any]()

    def both(mesh: MeshConfig, rank: int, ranks: int) -> dict[str, np.ndarray]:
        trainer = open_policy(job(path, mesh), path, world_size=ranks, device="cpu")
        packing, mine = trainer.objective._packing, sampled[rank::ranks]
        return {name: gap_of(trainer, packing, mine, replay=name == "with") for name in ("with", "without")}

    def work(rank: int, out: Path) -> None:
        found = both(MESHES["ep 2 x shard 2"], rank, RANKS)
        torch.save({name: torch.from_numpy(each) for name, each in found.items()}, out / f"rank-{rank}.pt")

    for where, parts in (("one process", [both(MeshConfig(), 0, 1)]), ("2 x 2 ranks", on_ranks(work))):
        told = found[where] = {}
        for name in ("with", "without"):
            each = np.concatenate([np.asarray(part[name]) for part in parts])
            told |= {name: float(np.abs(each).mean()), f"p99_{name}": float(np.quantile(np.abs(each), 0.99)),
                     f"k3_{name}": float((np.expm1(each) - each).mean())}  # fmt: skip
        less, nats = 1 - told["with"] / told["without"], f"{told['without']:.4f} nats, replayed {told['with']:.4f}"
        print(f"seed {seed}, {where}: {nats}, {less:.0%} less", flush=True)
    entropy = -np.concatenate([row.rollout_log_probs for row in sampled]).mean()
    return {"gaps": found, "entropy": float(entropy), **made_of(model, np.stack([row.tokens for row in sampled]))}


def made_of(model: Any, tokens: np.ndarray) -> dict[str, float]:
    """Of the gap between forwards of `model` and of one in half precision over the same tokens: how much less it is with what of
    the other one; and the part of routes that the two choose apart, and of tokens that have one."""
    other, ids, num_layers = copy.deepcopy(model).to(half()), torch.from_numpy(tokens).long(), len(model.model.layers)
    enable_replay(model)
    routed, outputs, own = dict[int, Any](), dict[int, Any](), dict[int, torch.Tensor]()
    for number, layer in enumerate(other.model.layers):
        layer.mlp.gate.register_forward_hook(lambda m, a, out, n=number: routed.update({n: out}))
        layer.mlp.register_forward_hook(lambda m, a, out, n=number: outputs.update({n: out.float()}))
    listen(model, own.__setitem__)

    def log_probs(of: Any, routes: Routes | None = None) -> torch.Tensor:
        with torch.no_grad(), through_routers(model, routes):
            logits = of(input_ids=ids, use_cache=False).logits[:, NUM_PROMPT - 1 : -1].float()
        return torch.log_softmax(logits, -1).gather(-1, ids[:, NUM_PROMPT:, None])

    def less(routes: Routes | None = None, **taken: Callable[[int, Any], Any]) -> float:
        """taken: module of a layer -> what stands in for its output."""
        handles = [
            layer.get_submodule(name.replace("_", ".")).register_forward_hook(lambda m, a, out, n=n, put=put: put(n, out))
            for n, layer in enumerate(model.model.layers) for name, put in taken.items()
        ]  # fmt: skip
        found = float((log_probs(model, routes) - there).abs().mean())
        for handle in handles:
            handle.remove()
        return 1 - found / whole

    there, here = log_probs(other), log_probs(model)
    whole = float((here - there).abs().mean())
    chosen = torch.stack([routed[n][2] for n in range(num_layers)], 1)
    apart = torch.stack([(own[n][:, :, None] != chosen[:, n, None]).all(-1) for n in range(num_layers)], 1)
    routes = Routes(chosen, torch.ones(len(chosen), dtype=torch.bool))
    told = {
        "less_with_routes": less(routes),
        "less_with_weights": less(routes, mlp_gate=lambda n, out: (out[0], routed[n][1].float(), out[2])),
        "less_with_outputs": less(mlp=lambda n, out: outputs[n]),
        "routes_apart": float(apart.float().mean()), "tokens_apart": float(apart.flatten(1).any(1).float().mean()),
    }  # fmt: skip
    print("  " + ", ".join(f"{name} {value:.1%}" for name, value in told.items()), flush=True)
    return told | {"forwards": whole}


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of the processor."""

    generate_s: float
    train_s: float

    @property
    def seconds(self) -> float:
        return self.generate_s + self.train_s


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    since = time.process_time()
    found = call()
    return time.process_time() - since, found


def one_step(made: SlotEngine, trainer: Policy, number: int) -> Step:
    generate_s, sampled = timed(lambda: generate(made, requests(number)))

    def trained() -> None:
        for start in range(0, len(sampled), MICRO_BATCH):
            part = sampled[start : start + MICRO_BATCH]
            spans = [[start + at, 0, 0, 1] for at in range(len(part))]
            trainer.accumulate(number, part, spans, last=start + MICRO_BATCH >= len(sampled))
        trainer.finish(number)

    return Step(generate_s, timed(trained)[0])


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of the median: 95 % of the medians of as many pairs, drawn again and again."""
    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def cost(path: str, pairs: int) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    trainer = open_policy(job(path), path, world_size=1, device="cpu")
    engines = {replay: engine(model, tells=replay) for replay in (False, True)}
    steps: dict[bool, list[Step]] = {False: [], True: []}
    for pair in range(pairs + 1):  # the first warms up
        order = (False, True) if pair % 2 else (True, False)
        for replay in order:
            step = one_step(engines[replay], trainer, pair)
            steps[replay] += [step] if pair else []
    result: dict[str, Any] = {"pairs": pairs}
    for name, part in {"r3_cost": "seconds", "record": "generate_s", "replay": "train_s"}.items():
        extra = [getattr(w, part) - getattr(wo, part) for w, wo in zip(steps[True], steps[False], strict=True)]
        relative = np.array(extra) / np.array([without.seconds for without in steps[False]])
        low, high = interval(relative)
        result |= {f"{name}_median": float(np.median(relative)), f"{name}_lower": low, f"{name}_upper": high}
        print(f"{name:8} {np.median(relative):+.2%} of a step, {low:+.2%} to {high:+.2%}", flush=True)
    routing = Routing.of(model)
    assert routing is not None
    return result | {"token_bytes": routing.token_bytes, "step_s": float(np.median([s.seconds for s in steps[False]]))}


# ---- memory -------------------------------------------------------------------------------------------------------------


def memory() -> dict[str, Any]:
    base = fit.Case(layers=2, experts=16, micro_batches=2, rows=4)
    found = {f"ep {ep}": fit.measure(replace(base, ep=ep)) for ep in (1, 2, 4)}
    kept = {n: {"step_bytes": of["peak_bytes"]["step"], "trace_error": of["trace_error"]} for n, of in found.items()}
    return {"memory": kept, "parameters": found["ep 1"]["parameters"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rondo-experts-") as folder:
        path = write(Path(folder) / "model")
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "ranks": lambda: over_ranks(path), "gap": lambda: gaps(Path(folder)),
            "cost": lambda: cost(path, options.pairs), "memory": memory,
        }  # fmt: skip
        figures: dict[str, Any] = {}
        for name, measured in parts.items():
            figures |= measured() if name in options.only else {}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
