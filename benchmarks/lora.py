"""What adapters buy and cost: a run that trains its whole model and one that trains adapters, from one base: reward, bytes, gap.

    rondo bench lora [--steps 150] [--seeds 0 1]
    rondo bench lora --as lora_pretrained --config examples/pretrained_sums.py --model FILE.gguf --lr 2e-4 --full-lr 2e-5 \\
        --steps 20

The base is the quick start's model after its warm-up (`rondo sft examples/quickstart.py`), or `--model`, a folder or a GGUF
file; both runs are `--config` on-policy, without a warm-up and without a KL, from that base, one after the other, seed by seed.
The last line is JSON: of each, by the number of steps, the mean reward of the last ten of them (five of fewer than 40), and the
seconds of all so far (of the actor, waits included); seconds a step, and the rewards held out before and after; bytes of a
published version in float32, and the largest mean gap of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, rondo, run, settings
from rondo.models.config import ModelConfig

QUICKSTART = ROOT / "examples" / "quickstart.py"


def published_bytes(model: str, lora: dict[str, Any]) -> tuple[int, int]:
    """Of a version of adapters and of one of all weights."""
    from rondo.models.config import LoraConfig
    from rondo.models.load import empty_model
    from rondo.models.lora import adapt, published_adapter
    from rondo.models.published import published_shapes

    made = empty_model(model).float()
    whole = sum(tensor.nbytes for tensor in published_shapes(made).values())
    adapt(made, LoraConfig(**lora))
    return sum(tensor.nbytes for tensor in published_adapter(made).values()), whole


def figures(runs: Sequence[tuple[list[dict[str, Any]], list[float]]]) -> dict[str, Any]:
    steps = min(len(records) for records, _ in runs)
    window = 10 if steps >= 40 else 5
    ends = range(window, steps + 1, window)
    rewards = {
        end: statistics.mean(each["reward_mean"] for records, _ in runs for each in records[end - window : end])
        for end in ends
    }
    seconds = {
        end: statistics.mean(sum(each["step_s"] for each in records[:end]) for records, _ in runs) for end in ends
    }
    return {
        "reward_by_step": {end: round(reward, 4) for end, reward in rewards.items()},
        "seconds_by_step": {end: round(each, 1) for end, each in seconds.items()},
        "step_s": round(statistics.median(each["step_s"] for records, _ in runs for each in records[1:]), 4),
        "held_out": [[round(reward, 4) for reward in held_out] for _, held_out in runs],
        "gap_max": max(each.get("log_prob_gap", 0.0) for records, _ in runs for each in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument(
        "--model", help="a folder or GGUF file to begin with; default: the quick start's after its warm-up"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3, help="of the adapters")
    parser.add_argument("--full-lr", type=float, default=2e-4)
    options = parser.parse_args()
    from rondo.models.load import prepare

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = options.model
        if model is None:
            rondo("sft", str(QUICKSTART), *settings({"run_dir": place, "name": "base"}))
            found = next(place.glob("base-sft/checkpoints/step_*/hf"))
            model = str(found)
        model = prepare(ModelConfig(path=str(Path(model).resolve())), place / "model")
        lora = {"rank": options.rank}
        groups = '[{"name": "rollout", "roles": ["rollout"]}, {"name": "actor", "roles": ["actor", "advantages"]}]'
        same = {
            "model": json.dumps({"path": model, "dtype": "float32"}), "num_steps": options.steps, "max_staleness": 0,
            "algorithm.kl_coef": 0, **({"sft": "null", "role_groups": groups} if options.config == QUICKSTART else {}),
        }  # fmt: skip
        kinds = {
            "full": {"train.lr": options.full_lr},
            "lora": {"train.lr": options.lr, "train.lora": json.dumps(lora)},
        }
        told: dict[str, Any] = {}
        for kind, own in kinds.items():
            runs = [
                run(options.config, place / f"{kind}_{seed}", {**same, **own, "seed": seed}) for seed in options.seeds
            ]
            told[kind] = figures(runs)
            print(kind, json.dumps(told[kind]), flush=True)
        adapter, whole = published_bytes(model, lora)
    print(json.dumps(told | {"adapter_bytes": adapter, "full_bytes": whole, "bytes_part": round(adapter / whole, 4)}))


if __name__ == "__main__":
    main()
