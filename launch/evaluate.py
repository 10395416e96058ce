"""`rondo eval`: a checkpoint, or any folder of a model, on evaluation sets, as a run without a step.

Owns which weights and sets are meant, the settings of that run, and its result. Does not own evaluating: the rollout role does,
with the engine, workflow, rewards and seeds of a run (`roles/evaluate.py`), so a checkpoint gets the samples that its run's
evaluation of that version got.

    rondo eval runs/quickstart --checkpoint best --only math
    rondo eval runs/quickstart --benchmark aime24    # sets that have a name (`roles/config/evaluations.py`), not the run's own
    rondo eval runs/quickstart --live                # the run itself, while it goes on: its newest weights (`questions.py`)

    runs/quickstart-eval/
      evaluation.json    {"checkpoint": "step_000040", "finished": true, "reward": 0.4, "num_failed": 0,
                          "sets": {"math": {"mean@4": 0.4, "pass@1": 0.4, ..., "num_prompts": 64}}, ...}
      samples/           every sample, a line each

Invariant: however it ends, what was found is written and told, and a figure is of whole prompts.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rondo.launch import train
from rondo.launch.config import RunConfig, load, resolve, unresolve
from rondo.launch.export import adapters_of
from rondo.launch.plan import group_specs
from rondo.launch.report.records import evaluation_records, read_records
from rondo.launch.report.status import ask
from rondo.launch.report.view import pairs, say
from rondo.launch.rundir import checkpoint_of, existing_run, supervisor_record, write_json
from rondo.roles.config import EvalConfig, EvalSet, benchmark
from rondo.roles.config.evaluations import NAMES
from rondo.runtime.checkpoints import MARKER, has, is_named
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.processes.guard import module_command
from rondo.runtime.section import nearest
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.supervision.orders import EXIT_DONE, EXIT_FAILED

FILE = "evaluation.json"
_ROLE = "rondo.roles.evaluate:EvaluateRole"
_LOOK_S = 0.5
_LABEL = "start"
"""What the evaluation of version 0 is called."""
_OF_TRAINING = (
    "endpoint", "filter", "keep", "on_new_weights", "mask_old_tokens", "max_interruptions", "spare_groups",
    "straggler_deadline_s",
)  # fmt: skip
"""Settings of the rollout that an evaluation has nothing of."""


@dataclass(frozen=True, slots=True)
class Meant:
    """The settings, the module that they are from, and the model; of a run, the checkpoint."""

    settings: RunConfig
    module: Path
    model: str
    checkpoint: Path | None = None


def main(
    source: str,
    config: Path | None,
    sets: Sequence[str],
    only: Sequence[str],
    checkpoint: str | None,
    *,
    plain: bool,
    live: bool = False,
    benchmarks: Sequence[str] = (),
) -> int:
    """0 with every sample, 130 where it was stopped before, 1 where it failed. ConfigError where nothing was started."""
    if live:
        if config is not None or sets or checkpoint is not None or len(only) > 1 or benchmarks:
            raise ConfigError("--live must come with a run and at most one --only, got other options. Remove them")
        return _evaluate_live(Path(source), next(iter(only), None))
    named = _named(benchmarks)  # paths are those of whoever calls: a run works where it began
    meant = _meant(source, config, checkpoint)
    with _weights(meant) as model, Nursery() as nursery:
        settings = settings_of(meant.settings, model, only, sets, named)
        specs = tuple(
            replace(spec, roles=(_ROLE,)) if spec.role_names == ("rollout",) else spec
            for spec in group_specs(settings)
            if spec.role_names in (("rollout",), ("genrm",), ("scorer",))
        )
        options = train.TrainOptions(meant.module, plain=plain, trains=False)
        with train.prepared(settings, f"{settings.name}-eval", options, nursery, specs, num_steps=0) as (run, admin):
            say(f"measuring {meant.checkpoint or source}, whose weights are version 0 of this evaluation")
            outcome = train.supervised(train.settings_of(run.path), run, options, admin, nursery, specs, attempt=0)
            found = found_in(run.path, settings)
            of = {"source": source, "checkpoint": meant.checkpoint and meant.checkpoint.name, "seed": settings.seed}
            write_json(run.path / FILE, of | found)
            _tell(run.path, found)
    return train.ended(outcome)


def _named(names: Sequence[str]) -> EvalConfig | None:
    """The sets of `NAME` or `NAME=PATH` each, under their short names."""
    found: dict[str, EvalSet] = {}
    for text in names:
        name, _, path = text.partition("=")
        short = next((short for short, hub in NAMES.items() if name == hub), name)
        if short in found:
            raise ConfigError(f"--benchmark must name each set once, got {name!r} twice. Remove one")
        path = path if path.startswith("hub:") or not path else str(Path(path).absolute())
        found[short] = benchmark(name, path=path or None)
    return EvalConfig(sets=found) if found else None


def _evaluate_live(path: Path, name: str | None) -> int:
    """Asks a run that goes on, and waits for its answer."""
    run = existing_run(path)
    record = supervisor_record(run)
    if record is None:
        raise ConfigError(f"RUN must be alive for --live, got {run.name}, which is not. Leave --live out")
    found = ask(record, "/evaluate", {} if name is None else {"set": name})
    while found["status"] in ("PENDING", "RUNNING"):
        time.sleep(_LOOK_S)
        found = ask(record, f"/evaluate/{found['id']}")
    if found["status"] == "FAILED":
        print(found["result"]["skipped"], file=sys.stderr)
        return EXIT_FAILED
    say(f"version {found['result']['version']}")
    _tell_figures(found["result"])
    return EXIT_DONE


def _meant(source: str, config: Path | None, checkpoint: str | None) -> Meant:
    path = Path(source)
    if (path / MARKER).is_file() or (path / "config.resolved.json").is_file():
        run, found = checkpoint_of(path, checkpoint)
        if config is not None:
            return Meant(load(config), config, str(path), found)
        settings = train.settings_of(run)
        train.work_where_it_began(run)
        return Meant(settings, run / "config.py", str(path), found)
    if is_named(path):
        raise ConfigError(
            f"MODEL must be a whole checkpoint, got {path} without its {MARKER} marker. It is being written or removed, or was "
            "cut off: choose another"
        )
    if not path.exists():
        raise ConfigError(
            f"MODEL must be a run, a checkpoint or a model's folder, got {path}: it is not there. Correct it"
        )
    if config is None:
        raise ConfigError(
            f"--config must be given with a model that is of no run, got {path} alone. Name a module of settings"
        )
    if checkpoint is not None:
        raise ConfigError(
            f"--checkpoint must not be given with a model that is of no run, got {checkpoint!r}. Remove it"
        )
    return Meant(load(config), config, str(path.resolve()))


@contextmanager
def _weights(meant: Meant) -> Iterator[str]:
    """Where the model is. Weights of a checkpoint without a Hugging Face folder are written beside the runs while it lasts."""
    if meant.checkpoint is None or has(meant.checkpoint, "hf"):
        yield meant.model if meant.checkpoint is None else str(meant.checkpoint / "hf")
        return
    parent = meant.settings.run_dir
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".weights-", dir=parent) as folder:
        out = Path(folder).resolve() / "hf"
        merged = ["--merged"] if adapters_of(meant.checkpoint.parent.parent) is not None else []
        command = module_command("rondo.launch.cli", "export", str(meant.checkpoint), str(out), *merged)
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # torch stays out of this process
        if done.returncode:
            raise RondoError(done.stderr.strip() or f"rondo export ended with {done.returncode}")
        yield str(out)


def settings_of(
    settings: RunConfig, model: str, only: Sequence[str] = (), sets: Sequence[str] = (), named: EvalConfig | None = None
) -> RunConfig:
    """Those of a run that evaluates `model` on the evaluation sets `only`, all without, as `settings` evaluate, or on
    those `named`; with `--set` changes. What trains has none of their devices, and is not started."""
    if settings.job == "reward_model":
        raise ConfigError(
            "the settings must be of a model that answers, got a reward model's, which scores. Choose another run"
        )
    if named is not None:
        settings = settings.model_copy(update={"evaluation": named})
    source = settings.group_of("rollout") or settings.group_of("actor")  # of a job without rollouts
    if settings.evaluation is None:
        raise ConfigError(
            "the settings must have evaluation sets, got none. Add evaluation=EvalConfig(...), name a module that has it with "
            "--config, or a set with --benchmark"
        )
    assert source is not None
    known = settings.evaluation.named_sets()
    for name in only:
        if name not in known:
            raise ConfigError(f"--only must name an evaluation set, got {name!r}. {nearest(name, sorted(known))}")
    tree = resolve(settings)
    evaluation = tree["evaluation"] | {"at_start": True, "at_end": False, "every": None}
    evaluation["sets"] = {name: each for name, each in evaluation["sets"].items() if not only or name in only}
    rollout = {name: value for name, value in tree["rollout"].items() if name not in _OF_TRAINING}
    served = rollout["sglang"]
    if served is not None:
        served |= {"release_memory": None}
    # A job without rollouts that holds out rows of its own stays one: its section says how they are read and what is asked.
    stays = settings.own is not None and settings.data == settings.demonstrated()
    num_replicas = 1 if stays else source.replicas * source.processes
    groups = [
        {
            "name": "rollout", "roles": ["rollout"], "replicas": num_replicas, "threads": source.threads,
            "devices": 0 if served is not None and served["urls"] else source.devices,
        },
        {"name": "actor", "roles": ["actor", "advantages"]},
    ]  # fmt: skip
    for role in settings.judges:
        if (judges := settings.group_of(role)) is not None:
            held = {name: getattr(judges, name) for name in ("processes", "replicas", "threads", "devices")}
            groups.append({"name": role, "roles": [role], **held})
    job = {} if stays else {"job": "rl", "num_steps": 1, "sft": None, "dpo": None}
    longest = rollout["max_prompt_tokens"] + rollout["max_new_tokens"]
    less = job | {
        "max_staleness": 0, "roles": {}, "algorithm": {}, "admin": {}, "debug": {}, "samples": {}, "critic": None,
        "distillation": None,
        "train": {
            "hot_snapshot": False, "dtype": tree["train"]["dtype"],
            "micro_batch_tokens": max(longest, tree["train"]["micro_batch_tokens"]),
        },
        "data": tree["data"] | {"sources": {name: of | {"teacher": None} for name, of in tree["data"]["sources"].items()}},
    }  # fmt: skip
    made = {
        "model": {"path": model, **{name: tree["model"][name] for name in ("dtype", "attn")}},
        "evaluation": {name: value for name, value in evaluation.items() if name not in ("share", "num_slots")},
        # Without the role nothing was sampled: how long prompts and answers may be was not meant for an evaluation.
        "rollout": {}
        if stays and settings.group_of("rollout") is None
        else rollout | {"prompts_per_step": 1, "samples_per_prompt": max(2, rollout["samples_per_prompt"])},
        "role_groups": groups,
    }
    return unresolve(tree | less | made, "the settings of an evaluation", sets)


def found_in(run: Path, settings: RunConfig) -> dict[str, Any]:
    """The result of the run, or what its samples say where it has none."""
    assert settings.evaluation is not None
    whole = evaluation_records(run / "metrics.jsonl")
    if whole:
        return {"finished": True} | {
            name: value for name, value in whole[-1].items() if name not in ("version", "label")
        }
    from rondo.roles.sampling.evaluation import result  # loads what engines need

    sets = settings.evaluation.named_sets()
    lines = [line for file in (run / "samples").glob(f"{_LABEL}.*.jsonl") for line in read_records(file)]
    rewards: dict[tuple[str, int], list[float | None]] = {}
    for line in sorted(lines, key=lambda line: int(line["sample"])):
        rewards.setdefault((line["set"], line["number"]), []).append(line["reward"])
    part = {
        "rewards": [[*of, found] for of, found in rewards.items() if len(found) == sets[of[0]].samples_per_prompt],
        "failed": min((line["error"] for line in lines if "error" in line), default=""),
    }
    found = {name: value for name, value in result(sets, 0, [part]).items() if name != "version"}
    return {"finished": False, "num_asked": sum(each.num_prompts for each in sets.values()), **found}


def _tell(run: Path, found: dict[str, Any]) -> None:
    _tell_figures(found)
    if not found["finished"]:
        say(
            f"ended before its end: of at most {found['num_asked']} prompts {found['num_prompts']} have all their samples"
        )
    say(f"samples and figures: {run / FILE}")


def _tell_figures(found: dict[str, Any]) -> None:
    for name, figures in found["sets"].items():
        say(f"{name}  {pairs(figures)}")
    if found["num_failed"]:
        failed = f"{found['num_failed']} of {found['num_samples']} rewards failed, and are in no mean"
        say(f"{failed}; the first: {found['first_failed']}")
