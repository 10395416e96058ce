"""What router replay costs in CPU seconds of a step, and how much nearer engine and trainer come by it.

    rondo bench router_replay [--pairs 20]

A step generates samples with the embedded engine in bfloat16, packs them, and takes forward, backward and an optimizer step
in float32, from the same weights: a random mixture of experts, sharpened so that routes matter. With replay the engine
records and the trainer replays; without, neither does. The two are timed in turns on one thread, by the processor's time of
this process, each pair on prompts of its own. `share`: the median over pairs of (with - without) / without; the interval
holds it in 95 of 100 draws of as many pairs (bootstrap). `gap`: mean absolute difference of log-probs between engine and
trainer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from rondo.models.logprobs import response_log_probs
from rondo.models.optimizer import make_optimizer
from rondo.models.packing import Packing, Sequence
from rondo.models.routing import Routing, enable_replay, routers_of
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Request, SamplingParams

NUM_SAMPLES, NUM_PROMPT, NUM_NEW = 32, 16, 64
MICRO_BATCH = 16
SHARPER = 4.0
"""What the routers' weights are multiplied with: those of a model at its start choose nearly at random."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its seconds, and per token the difference of log-probs."""

    generate_s: float
    train_s: float
    gaps: np.ndarray

    @property
    def seconds(self) -> float:
        return self.generate_s + self.train_s


def build() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True, max_position_embeddings=256,
        initializer_range=0.05, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for router in routers_of(model).values():
            router.get_parameter("weight").mul_(SHARPER)
    return model


def requests(pair: int) -> list[Request]:
    draw = np.random.default_rng(pair)
    params = SamplingParams(max_new_tokens=NUM_NEW)
    return [
        Request(
            str(index), draw.integers(1, 1024, NUM_PROMPT).astype(np.int32), params, seed=NUM_SAMPLES * pair + index
        )
        for index in range(NUM_SAMPLES)
    ]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    since = time.process_time()
    found = call()
    return time.process_time() - since, found


def generate(engine: SlotEngine, asked: list[Request]) -> dict[str, Any]:
    for request in asked:
        engine.add(request)
    done = {}
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def one_step(engine: SlotEngine, model: Any, optimizer: Any, asked: list[Request]) -> Step:
    generate_s, done = timed(lambda: generate(engine, asked))
    rows = [
        Sequence(np.concatenate([each.prompt, done[each.id].tokens]), NUM_NEW, experts=done[each.id].routed_experts)
        for each in asked
    ]

    packing = Packing.of(model)

    def trained() -> list[np.ndarray]:
        found = []
        for start in range(0, len(rows), MICRO_BATCH):
            log_probs, _ = response_log_probs(model, packing.pack(rows[start : start + MICRO_BATCH], train=True))
            (-log_probs.sum() / (NUM_SAMPLES * NUM_NEW)).backward()
            found.append(log_probs.detach().numpy())
        optimizer.step()
        optimizer.zero_grad()
        return found

    train_s, found = timed(trained)
    sampled = np.concatenate([done[each.id].log_probs for each in asked])
    return Step(generate_s, train_s, np.concatenate(found) - sampled)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Of the median: 95 % of the medians of as many pairs, drawn again and again."""
    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build()
    engines = {
        replay: slot_engine(
            copy.deepcopy(model).to(torch.bfloat16), num_slots=NUM_SAMPLES, max_length=NUM_PROMPT + NUM_NEW,
            tells_experts=replay,
        )
        for replay in (False, True)
    }  # fmt: skip
    routing = Routing.of(model)
    assert routing is not None
    enable_replay(model)
    # So small a rate that the weights stay those of the engines: what an optimizer step costs does not depend on it.
    optimizer = make_optimizer(model, lr=1e-12)
    steps: dict[bool, list[Step]] = {False: [], True: []}
    for pair in range(options.pairs + 1):  # the first warms up
        order = (False, True) if pair % 2 else (True, False)
        found = {replay: one_step(engines[replay], model, optimizer, requests(pair)) for replay in order}
        for replay, step in found.items():
            steps[replay] += [step] if pair else []
    parts = {"share": "seconds", "record": "generate_s", "replay": "train_s"}
    result: dict[str, Any] = {}
    for name, part in parts.items():
        extra = [getattr(w, part) - getattr(wo, part) for w, wo in zip(steps[True], steps[False], strict=True)]
        relative = np.array(extra) / np.array([without.seconds for without in steps[False]])
        low, high = interval(relative)
        result |= {name: float(np.median(relative)), f"{name}_low": low, f"{name}_high": high}
        print(f"{name:8} {result[name]:+.2%} of a step, {low:+.2%} to {high:+.2%}")
    for replay in (False, True):
        gaps = np.concatenate([step.gaps for step in steps[replay]]).astype(np.float64)
        name = "with" if replay else "without"
        result |= {
            f"gap_{name}": float(np.abs(gaps).mean()),
            f"gap_p99_{name}": float(np.quantile(np.abs(gaps), 0.99)),
            f"k3_{name}": float((np.expm1(gaps) - gaps).mean()),
        }
        print(f"gap {name:8} mean {result[f'gap_{name}']:.4f}, p99 {result[f'gap_p99_{name}']:.4f} nats")
    for replay in (False, True):
        whole = [step.seconds for step in steps[replay]]
        result["step_s_with" if replay else "step_s_without"] = float(np.median(whole))
    result |= {
        "pairs": options.pairs,
        "token_bytes": routing.token_bytes,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
