"""A step at the paper's scale, by replay: everything is real but the compute, which waits for stage times that were published.

    rondo bench paper [--time-scale 20 60] [--steps 7] [--models qwen3_4b qwen3_omni_30b] [--modes colocate fully_async]

`paper_stages.json` has the seconds that each stage of arXiv 2604.11554 takes in a step, read from it or assumed, for a 4B text
model and a 30B omni model on 16 devices. A replay divides all of them by one time scale and lets each role wait for its own;
rows, media, routed experts, rounds, leases, commits, snapshots and weights are those of a real run (`replay_roles.py`), in
processes that a supervisor starts. What a step takes beyond its bound is what rondo costs.

- bound: `colocate` the sum of its stages, `fully_async` (staleness 1) the slowest one, each role on its own devices.
- Rows, media and routed experts keep their full size, so that the bus carries `time scale` times the paper's bytes a second.
- Weights and optimizer are scaled by the time scale and by the 16 devices, since one process stands for all of them: it copies
  as many bytes a second as each device's would. The hot snapshot, which is no stage of the paper's, comes on top.
- Rounds hold a micro-batch of every device.
- The first three steps fill the pipeline, and touch shared memory for the first time; they are left out, the others' mean counts.

Of several time scales the first is the result and the last line's; the others show the trend: most of what rondo adds is
seconds, not a share, so a smaller time scale comes closer to the bound. `data_wait_share` is the trainer's wait from the end of
a step or a round to the next round, in `fully_async`, the larger of the two models. Relax's own figures stand beside: 1.76x and
2.00x over colocate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.replay_stages import PROMPT_TOKENS, Mode, Replay
from rondo.comm.bus.config import BusConfig
from rondo.comm.bus.serve import CONFIG as COORDINATOR_CONFIG
from rondo.comm.ring.records import ALIGN_BYTES, worst_case_bytes
from rondo.launch import train
from rondo.launch.config import RunConfig
from rondo.launch.modes import colocate, fully_async
from rondo.launch.plan import group_specs
from rondo.launch.report.records import step_records
from rondo.launch.rundir import RunDir, write_json
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.runtime.supervision.spec import GroupSpec

ROOT = Path(__file__).resolve().parent.parent
ROLE_CLASSES = {
    "rollout": "benchmarks.replay_roles:ReplayRollout",
    "actor": "benchmarks.replay_roles:ReplayActor",
    "actor_fwd": "benchmarks.replay_roles:ReplayActorForward",
    "reference": "benchmarks.replay_roles:ReplayReference",
    "advantages": "benchmarks.replay_roles:AdvantagesRole",
}
PAPER = {"qwen3_4b": 1.76, "qwen3_omni_30b": 2.00}
SHORT = {"qwen3_4b": "4b", "qwen3_omni_30b": "omni"}
_FILL = 3
"""Steps until every role of `fully_async` works on another step, and all shared memory was touched."""
_MIB = 1 << 20


def questions() -> list[dict[str, str]]:
    """Prompts of the replay's length in bytes, which are the tiny tokenizer's tokens."""
    return [{"prompt": f"{number:06d} ".ljust(PROMPT_TOKENS, "?"), "label": str(number)} for number in range(512)]


def scored(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """Something that differs between the samples of a prompt."""
    return float((len(response) + int(label)) % 2)


def config_of(replay: Replay, folder: Path, *, hot_snapshot: bool) -> RunConfig:
    """The run of a replay: real settings, whose model has as many parameters as the replay has bytes of weights to publish."""
    hidden = 512 if replay.weights_bytes < 50e6 else 1024
    layers = max(1, round(replay.weights_bytes / (2 * 9 * hidden**2)))  # 9 h^2 parameters a layer, two bytes each
    longest = PROMPT_TOKENS + replay.max_tokens
    colocated = replay.mode == "colocate"
    return RunConfig(
        name=f"{SHORT[replay.model]}-{replay.mode}-{replay.time_scale:g}".replace("_", "-"),
        num_steps=replay.num_steps,
        max_staleness=0 if colocated else 1,
        role_groups=colocate(reference=True, actor_fwd=True)
        if colocated
        else fully_async(reference_replicas=1, actor_fwd_replicas=1),
        run_dir=folder,
        model=ModelConfig(
            build="rondo.models.tiny.qwen3:build",
            build_args={"hidden_size": hidden, "num_layers": layers, "max_positions": longest},
            dtype="bfloat16",
        ),
        data=DataConfig(rows="benchmarks.paper:questions"),
        reward=RewardConfig(function="benchmarks.paper:scored"),
        algorithm=AlgorithmConfig(name="grpo", kl_coef=0.01, old_log_probs="actor_fwd"),
        rollout=RolloutConfig(
            prompts_per_step=replay.prompts,
            samples_per_prompt=replay.samples,
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=replay.max_tokens,
            num_slots=replay.prompts * replay.samples,
        ),
        train=TrainConfig(micro_batch_tokens=replay.round_tokens, hot_snapshot=hot_snapshot),
        bus=BusConfig(ring_bytes=_ring_bytes(replay), column_ring_bytes=256 * _MIB),
    )


def _row_bytes(replay: Replay) -> int:
    response = replay.max_tokens
    columns = [("tokens", 4, PROMPT_TOKENS + response), ("loss_mask", 1, response)]
    columns += [("rollout_log_probs", 4, response), ("policy_versions", 4, response)]
    return worst_case_bytes(1, [*columns, ("routed_experts", 1, response * replay.routed_bytes)])


def _media_bytes(replay: Replay) -> int:
    return replay.media_bytes + worst_case_bytes(1, [("pixel_values", 1, ALIGN_BYTES)]) if replay.media_bytes else 0


def _ring_bytes(replay: Replay) -> int:
    """Two steps of the longest rows, and a quarter more."""
    step = replay.prompts * (replay.samples * _row_bytes(replay) + _media_bytes(replay))
    return max(256, step * 5 // 2 // _MIB) * _MIB


def specs_of(config: RunConfig) -> tuple[GroupSpec, ...]:
    """The plan's groups with the replay's roles in them."""
    return tuple(
        replace(spec, roles=tuple(ROLE_CLASSES[role] for role in spec.role_names)) for spec in group_specs(config)
    )


def prepare(replay: Replay, run: RunDir) -> None:
    """Tell the roles what they replay, and the bus how large its rows, media and routed experts are."""
    replay.write(run.path)
    known = orjson.loads((run.path / COORDINATOR_CONFIG).read_bytes())
    rules = known["rules"]
    rules["row_bytes"], rules["media_bytes"] = _row_bytes(replay), _media_bytes(replay)
    if replay.routed_bytes:
        rules["base_columns"] = [*rules["base_columns"], "routed_experts"]
        for stream in rules["streams"]:
            if stream["name"] == "actor":
                stream["inputs"] = [*stream["inputs"], "routed_experts"]
    write_json(run.path / COORDINATOR_CONFIG, known)


def measure(replay: Replay, folder: Path, *, hot_snapshot: bool) -> dict[str, Any]:
    """Run it; the means over the steps of a filled pipeline, in scaled seconds."""
    config = config_of(replay, folder, hot_snapshot=hot_snapshot)
    options = train.TrainOptions(Path(__file__), plain=True)
    code = train.main(config, options, groups=specs_of(config), before=lambda run: prepare(replay, run))
    if code:
        raise SystemExit(f"the replay of {config.name} must end with exit code 0, got {code}. See {folder}")
    steps = step_records(folder / config.name / "metrics.jsonl")[_FILL:]

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps)

    step_s = mean("step_s")
    return {
        "model": replay.model, "mode": replay.mode, "time_scale": replay.time_scale,
        "bound_s": replay.bound_s, "step_s": step_s, "of_bound": replay.bound_s / step_s,
        "worst": replay.bound_s / max(step["step_s"] for step in steps),
        "data_wait_share": mean("data_wait_s") / step_s, "num_rounds": mean("num_rounds"),
        "snapshot_s": mean("snapshot_s"), "commit_s": mean("commit_s"), "publish_s": mean("publish_s"),
        "train_s": mean("train_s"), "steps": len(steps),
    }  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    lines = [
        "scale  model           mode         bound      step   of bound  (worst)  data wait  rounds  commit (snapshot)  publish"
    ]
    for r in results:
        lines.append(
            f"{r['time_scale']:<6g} {r['model']:<15} {r['mode']:<11} {r['bound_s']:6.3f} s  {r['step_s']:6.3f} s  "
            f"{r['of_bound']:7.2%}  {r['worst']:7.2%}  {r['data_wait_share']:8.3%}  {r['num_rounds']:6.1f}  "
            f"{1e3 * r['commit_s']:4.0f} ms ({1e3 * r['snapshot_s']:.0f} ms)  {1e3 * r['publish_s']:6.0f} ms"
        )
    return "\n".join(lines)


def ratios(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The keys of the last line, of one time scale."""
    found: dict[str, float] = {}
    of = {(r["model"], r["mode"]): r for r in results}
    for model, short in SHORT.items():
        slow, fast = of.get((model, "colocate")), of.get((model, "fully_async"))
        if fast is not None:
            found[f"of_bound_{short}"] = fast["of_bound"]
        if slow is not None and fast is not None:
            found[f"speedup_{short}"] = slow["step_s"] / fast["step_s"]
    shared = [r["of_bound"] for r in results if r["mode"] == "colocate"]
    waits = [r["data_wait_share"] for r in results if r["mode"] == "fully_async"]
    found |= {"of_bound_colocate": min(shared)} if shared else {}
    return found | ({"data_wait_share": max(waits)} if waits else {})


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps at the paper's scale, by replay, against their bound.")
    parser.add_argument("--time-scale", type=float, nargs="+", default=[20.0, 60.0], help="the first one counts")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=list(SHORT), choices=list(SHORT))
    parser.add_argument("--modes", nargs="+", default=["colocate", "fully_async"], choices=["colocate", "fully_async"])
    parser.add_argument("--no-hot-snapshot", action="store_true", help="leave out what a restart of the actor needs")
    parser.add_argument("--keep", type=Path, help="folder for the run directories; without it they are removed")
    options = parser.parse_args()
    if options.steps <= _FILL:
        parser.error(f"--steps must be more than {_FILL}, which fill the pipeline, got {options.steps}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rondo-paper-") as temporary:
        folder = options.keep or Path(temporary)
        for scale in options.time_scale:
            for model in options.models:
                for mode in options.modes:
                    results.append(run_one(model, mode, scale, options, folder))
                    print(table(results[-1:]), flush=True)
    print(table(results))
    for scale in options.time_scale:
        of_scale = ratios([r for r in results if r["time_scale"] == scale])
        for model, short in SHORT.items():
            if f"speedup_{short}" in of_scale:
                print(
                    f"scale {scale:g}: {model} {of_scale[f'speedup_{short}']:.3f}x over colocate (paper {PAPER[model]:.2f}x)"
                )
    print(json.dumps({name: round(value, 5) for name, value in ratios(results[: _num_of_first(results)]).items()}))


def run_one(model: str, mode: Mode, scale: float, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    replay = Replay.of(model, mode, time_scale=scale, num_steps=options.steps)
    print(f"{model} {mode}: stages {', '.join(f'{k} {v:.2f}' for k, v in replay.stages_s.items())} s", file=sys.stderr)
    return measure(replay, folder, hot_snapshot=not options.no_hot_snapshot)


def _num_of_first(results: Sequence[dict[str, Any]]) -> int:
    return sum(r["time_scale"] == results[0]["time_scale"] for r in results)


if __name__ == "__main__":
    main()
