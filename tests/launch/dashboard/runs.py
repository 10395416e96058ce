"""Run directories made by hand, as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rondo.launch.report.steps import RoleUse, Step
from rondo.launch.report.summary import Summary, write
from rondo.roles.training.trained_samples import FOLDER, TrainedRow, encoded

STARTED = 1_760_000_000.0
OWNED = "document.title='owned'"
HOSTILE = f'<script>{OWNED}</script><img src=x onerror="{OWNED}">\u202e\u0000\x1b[31m{"W" * 30_000}'
SETTINGS = {
    "num_steps": 10, "job": "rl", "mode": "hybrid", "seed": 0, "max_staleness": 1, "reward": {"num_workers": 1},
    "rollout": {"spare_groups": 0, "prompts_per_step": 4},
    "role_groups": [
        {"roles": ["actor"], "replicas": 1, "processes": 1, "threads": 1},
        {"roles": ["rollout"], "replicas": 1, "processes": 1, "threads": 1},
    ],
}  # fmt: skip


def lines(path: Path, records: Iterable[Any], end: str = "\n") -> None:
    """Appends them; `end` of the last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n".join(json.dumps(each) for each in records) + end)


def of_step(step: int, **more: Any) -> dict[str, Any]:
    return {
        "time": STARTED + 2.0 * step, "kind": "metrics", "source": "actor-0", "step": step, "version": step + 1,
        "reward_mean": step / 10, "loss": -float(step), "tokens": 100, "num_samples": 8,
        "staleness_tokens": {"0": 5, "1": step}, "waits_s": {"call x": 1.0}, **more,
    }  # fmt: skip


def evaluated(version: int, reward: float) -> dict[str, Any]:
    sets = {"held_out": {"mean@1": reward, "pass@1": reward, "num_prompts": 2}}
    told = {
        "label": f"at_{version}",
        "version": version,
        "reward": reward,
        "num_prompts": 2,
        "num_samples": 2,
        "num_failed": 0,
    }
    return {"time": STARTED, "kind": "metrics", "source": "coordinator", "evaluation": told | {"sets": sets}}


def sample(group: int, reward: float | None = 1.0, response: str = "4", **more: Any) -> dict[str, Any]:
    line = {"time": STARTED, "group": group, "sample": 0, "prompt": f"what is {group} + 1?", "label": "4", "reward": reward,
            "response": response, "details": {}, "finish_reason": "stop", "num_tokens": 2, "versions": [0]}  # fmt: skip
    return line | more


def answer(number: int, reward: float, sample: int = 0) -> dict[str, Any]:
    place = {"time": STARTED, "set": "held_out", "number": number, "sample": sample}
    return place | {"prompt": "p", "reward": reward, "response": "r", "versions": [0]}


def a_run(parent: Path, name: str = "demo", *, steps: int = 10, settings: Any = None) -> Path:
    """A finished one, of a few prompt groups a step."""
    run = parent / name
    run.mkdir(parents=True)
    (run / "config.resolved.json").write_text(json.dumps(SETTINGS | {"num_steps": steps} | (settings or {})))
    lines(run / "metrics.jsonl", [evaluated(0, 0.25), *map(of_step, range(steps)), evaluated(steps, 0.75)])
    life = ((1, "starting"), (1, "ready"), (1, "died"), (2, "starting"), (2, "ready"))
    of_actor = {"time": STARTED, "source": "supervisor", "group": "actor-0"}
    born = [of_actor | {"kind": kind, "incarnation": n} for n, kind in life]
    committed = [
        {"time": STARTED + step, "kind": "committed", "source": "coordinator", "version": step} for step in range(steps)
    ]
    lines(run / "events.jsonl", [*born, *committed])
    for step in range(steps):
        made = [sample(4 * step + each, float(each % 2)) for each in range(3)]
        failed = sample(4 * step + 3, None, HOSTILE, error="the reward raised ValueError", sample=1)
        lines(run / "samples" / f"step_{step:06d}.jsonl", [*made, sample(4 * step + 3), failed])
    for label in ("start", "end"):
        lines(
            run / "samples" / f"{label}.0.jsonl",
            [answer(number, 0.5, each) for number in range(2) for each in range(2)],
        )
    roles = {"actor": RoleUse(1, 0.5, {}), "rollout": RoleUse(1, 0.8, {"actor": 0.7})}
    parts = {"train": 0.5, "wait for rollout": 1.0, "other": 0.0}
    lines(
        run / "timeline" / "steps.jsonl",
        [asdict(Step(n, STARTED + 2 * n, 1.5, parts, 0.1, roles)) for n in range(steps)],
    )
    pieces = (("step", 0, 1500), ("train", 0, 500), ("wait for a round", 500, 900), ("commit", 1400, 100))
    spans = [
        [name, "actor", 2 * 10**9 * n + at * 10**6, length * 10**6, n, {}, 0]
        for n in range(steps)
        for name, at, length in pieces
    ]
    anchor = {
        "timeline": 1,
        "group": "actor-0",
        "rank": 0,
        "incarnation": 1,
        "wall_ns": round(STARTED * 1e9),
        "monotonic_ns": 0,
    }
    waits = [["call x", "waits/main", 0, 10**9, None, {}, 0]]
    loads = [
        ["load weights", "rollout/weights", 10**9 * n + 10**8, 10**8, None, {"version": n}, 0] for n in range(steps)
    ]
    lines(run / "timeline" / "actor-0.0" / "000001.000000.jsonl", [anchor | {"boot": "b"}, *spans, *waits, *loads])
    lines(run / "logs" / "attempt_0" / "actor-0.1.log", ["a line of a log"])
    counts = {"samples_admitted": 80, "samples_trained": 80, "samples_lost": 0, "samples_trained_twice": 0}
    measured = {"staleness_histogram": {"0": 40, "1": 40}, "memory_bytes": {"actor-0": 1 << 20}}
    told: dict[str, Any] = {**counts, **measured, "waits_s": {"actor": {"call x": 2.0}}}
    write(run, Summary(name, 0, 0, steps, 12.0, **told))
    return run


def bytes_for_tokens(run: Path) -> None:
    """The tokenizer of the run has a token for each byte, whose number that is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in visible]
    letters = {each: chr(each) for each in visible} | {each: chr(256 + at) for at, each in enumerate(hidden)}
    assert {*letters.values()} == {*pre_tokenizers.ByteLevel.alphabet()}
    tokenizer = Tokenizer(models.BPE({letter: each for each, letter in letters.items()}, []))
    tokenizer.decoder = decoders.ByteLevel()
    (run / "model").mkdir()
    tokenizer.save(str(run / "model" / "tokenizer.json"))
    (run / "prepared.json").write_text(json.dumps({"model_path": "model"}))


def trained(run: Path, step: int, group: int, responses: dict[str, float | None], prompt: str = "what?") -> None:
    """A response for each sample, with its reward, as a run keeps it whose tokens are bytes; its first token is not trained."""
    rows = []
    for number, (response, reward) in enumerate(responses.items()):
        ids, length = list((prompt + response).encode()), len(response.encode())
        mask = np.ones(length, np.uint8)
        mask[0] = 0
        log_probs = -np.arange(length, dtype=np.float32) / 4
        columns = {
            "tokens": np.array(ids, np.int32), "mask": mask, "advantages": np.full(length, (-1.0) ** number, np.float32),
            "rollout_log_probs": log_probs, "policy_versions": np.arange(length, dtype=np.int32) // 8,
        }  # fmt: skip
        rows.append(TrainedRow(step, 0, 0, group, number, 0, reward, "stop", columns, details={"right": reward}))
    path = run / FOLDER / f"step_{step:06d}.0-of-1.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(rows))
