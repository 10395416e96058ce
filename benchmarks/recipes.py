"""Do the recipes learn? Each on rows of its data set's very form, with its column maps, prompt and reward, and a tiny model.

    rondo bench recipes                                  # drawn, dialled and moving digits
    rondo bench recipes --data PATH/TO/data              # handwriting (mnist/) and speech (fsdd/)
    rondo bench recipes --cells image --seeds 0

image is the recipe of multimodal-open-r1-8k-verified, mixed that of AVQA-R1-6K, audio the same with sounds alone, video that of
NExT-QA. A warm-up on answers of which three in ten are drawn by lot comes first; what is measured is what reinforcement learning
adds to it. Rewards are of sampled answers to 256 held-out rows, none of whose pictures and sounds is in a training row. Cells are
kept in `--folder`: what is there is not made again, so a benchmark that was stopped goes on.

Prints a line a cell, and JSON last: {cell: {"before": [by seed], "after": [..], "gap": [largest of a step],
"last": [reward, length, gap and clipped part of the last step, by its modality], "wall_s": [..]}}.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import recipe_rows
from benchmarks.runs import ROOT, Cells, run

CELLS = {
    "image": "open_r1_qwen3_vl_4b",
    "audio": "avqa_qwen3_omni_30b_lora",
    "video": "nextqa_qwen3_omni_30b_lora",
    "mixed": "avqa_qwen3_omni_30b_lora",
}
NUM_ROWS, NUM_HELD_OUT = 740, 256
WARM_UP = {"steps": 240, "batch_size": 16, "lr": 3e-3, "warmup_steps": 20, "micro_batch_tokens": 16384}
LONGER = {"audio": {"steps": 480}, "video": {"steps": 480}, "mixed": {"steps": 480}}
"""Where a digit moves or is said, a warm-up of 240 steps ends at a guess under some seeds, from which little is learnt."""
TOLD = ("reward_mean", "response_tokens", "log_prob_gap", "clip_fraction")


def config_of(cell: str) -> Path:
    return ROOT / "examples" / "full_size" / f"{CELLS[cell]}.py"


def rows_of(cell: str, folder: Path) -> dict[str, str]:
    """Writes the rows of a cell, unless they are there; the settings that name them."""
    made, done = folder / cell, folder / f"{cell}.json"
    if not done.exists():
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        found = {
            "image": lambda: recipe_rows.open_r1(made, NUM_ROWS + NUM_HELD_OUT),
            "audio": lambda: recipe_rows.avqa(made, NUM_ROWS, NUM_HELD_OUT, picture=False),
            "video": lambda: recipe_rows.nextqa(made, NUM_ROWS + NUM_HELD_OUT),
            "mixed": lambda: recipe_rows.avqa(made, NUM_ROWS, NUM_HELD_OUT),
        }[cell]()
        done.write_text(json.dumps(found))
    settings: dict[str, str] = json.loads(done.read_text())
    return settings


def tiny(config: Path) -> dict[str, Any]:
    """Settings by which a recipe runs on two cores: the model, the machine and the lengths in the place of its own."""
    from rondo.launch.config import load
    from rondo.launch.modes import colocate

    recipe = load(config)
    name = str(recipe.model.path)
    family = "qwen3_vl" if "VL" in name else "qwen3_omni" if "Omni" in name else "qwen3"
    build_args = {"max_positions": 512, "words": [*recipe_rows.WORDS, *filter(None, [recipe.data.system])]}
    build_args |= {"init_std": 0.08} if family != "qwen3" else {}
    build_args |= {"mel_bins": 64} if family == "qwen3_omni" else {}
    media = {"num_workers": 2, "max_group_bytes": 1 << 18} if recipe.media is not None else {}
    if "video" in recipe.data.media_columns:
        media |= {"video_min_tokens": 4, "video_max_tokens": 4}
    rollout = {"prompts_per_step": 16, "samples_per_prompt": 8, "max_prompt_tokens": 256, "max_new_tokens": 6}
    sections = {
        "model": {"build": f"rondo.models.tiny.{family}:build", "build_args": build_args},
        "role_groups": [group.model_dump(mode="json") for group in colocate()],
        "rollout": rollout | {"num_slots": 128},
        "train": {"lr": 3e-4, "micro_batch_tokens": 8192},
        "bus": {},
    }
    return {
        **{name: json.dumps(section) for name, section in sections.items()},
        **{f"media.{name}": value for name, value in media.items()},
        "max_staleness": 0,
        "reward.num_workers": 1,
    }


def measured(cell: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    warm_up = WARM_UP | LONGER.get(cell, {}) | {"demonstrate": f"{recipe_rows.__file__}:demonstrate"}
    values = tiny(config_of(cell)) | rows_of(cell, folder / "rows")
    values |= {"seed": seed, "num_steps": steps, "sft": json.dumps(warm_up), "evaluation.num_prompts": NUM_HELD_OUT}
    values |= {"train.warmup_steps": 5} | ({"data.held_out": NUM_HELD_OUT} if cell in ("image", "video") else {})
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rondo-recipes-") as made:
        records, held_out = run(config_of(cell), Path(made), values)
    return {
        "before": round(held_out[0], 4), "after": round(held_out[-1], 4),
        "gap": max(record["log_prob_gap"] for record in records),
        "last": {name: records[-1][f"{name}_{cell}"] for name in TOLD},
        "wall_s": round(time.monotonic() - began, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/mnist.parquet and fsdd/fsdd.parquet")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_recipes"), help="of cells and rows")
    options = parser.parse_args()
    if options.data is not None:
        os.environ["DIGITS"] = str(options.data.resolve())
    digits = "drawn" if options.data is None else "real"
    folder = options.folder.resolve() / digits
    cells = Cells(folder / "cells.jsonl")
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in options.cells}
    for seed in options.seeds:
        for name in options.cells:
            of: dict[str, Any] = {"cell": name, "seed": seed, "steps": options.steps}
            of |= {"warm_up": WARM_UP | LONGER.get(name, {})}
            figures = cells.made(of, functools.partial(measured, name, seed, options.steps, folder))
            for key, value in figures.items():
                found[name].setdefault(key, []).append(value)
    print(json.dumps(found | {"steps": options.steps, "digits": digits}))


if __name__ == "__main__":
    main()
