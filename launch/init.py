"""`rondo init`: a config module from a few answers, which `rondo check` passes.

    rondo init mine.py                          asks, on a terminal
    rondo init mine.py --machine gpu --modality text --model Qwen/Qwen3-0.6B --data train.jsonl --reward math --algorithm grpo

Owns the questions, which answers go together, and the text of the module. Does not own what the settings mean.

Invariant: what is written loads; a file that is there stays as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rondo.launch.config import load
from rondo.roles.algorithms.algorithm import ALGORITHMS
from rondo.roles.rewards import hub
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import nearest

MACHINES = {"laptop": "processors alone", "gpu": "one GPU", "slurm": "a node with eight, by `rondo slurm`"}
MODALITIES = ("text", "image", "audio", "video")
TINY, MADE, OWN = "tiny", "made", "own"
_Answers = Mapping[str, str]

QUESTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "machine": ("Where will it run: " + ", ".join(f"{name} ({what})" for name, what in MACHINES.items()), "laptop", (*MACHINES,)),
    "modality": ("What do prompts hold: " + ", ".join(MODALITIES), "text", MODALITIES),
    "model": ("Model: a Hugging Face folder, a name on the hub, a GGUF file, or tiny (made here, to try things)", TINY, ()),
    "data": ("Data: a .jsonl or .parquet file, hub:NAME/SPLIT, or made (rows that the module makes)", MADE, ()),
    "prompt": ("Column with the prompt", "prompt", ()),
    "label": ("Column with the right answer", "label", ()),
    "reward": (f"Reward: own (a function in the module), {', '.join(hub.__all__)}", OWN, (OWN, *hub.__all__)),
    "algorithm": (f"Algorithm: {', '.join(ALGORITHMS)}", "grpo", (*ALGORITHMS,)),
}  # fmt: skip
"""Name of the option -> what is asked, what an empty answer is, and the answers there are; any where there are none."""
_COLUMNS = ("prompt", "label")
_TINY_SIZES = {"prompts_per_step": 16, "samples_per_prompt": 8, "max_prompt_tokens": 8, "max_new_tokens": 6}
_GPU_SIZES = {"prompts_per_step": 16, "samples_per_prompt": 8, "max_prompt_tokens": 1024, "max_new_tokens": 1024}
_SIZES = {
    "laptop": {
        "prompts_per_step": 4, "samples_per_prompt": 4, "max_prompt_tokens": 512, "max_new_tokens": 128, "num_slots": 16,
    },
    "gpu": _GPU_SIZES,
    "slurm": _GPU_SIZES | {"prompts_per_step": 64},
}  # fmt: skip
"""Machine -> sizes of a step: two cores sample and train 16 short answers of a model of 135M parameters in some ten seconds."""


def main(file: Path, **given: str | None) -> int:
    """Asks for what is not given, where there is a terminal, and writes the module. ConfigError for what cannot be."""
    if file.suffix != ".py" or file.exists():
        raise ConfigError(f"FILE must be a new file that ends in .py, got {file}. Name another one")
    asks, answers = sys.stdin.isatty() and sys.stdout.isatty(), dict[str, str]()
    if not asks and (missing := [f"--{name}" for name in QUESTIONS if given[name] is None and name not in _COLUMNS]):
        raise ConfigError(
            f"{', '.join(missing)} must be given where there is no terminal to ask on, got nothing. Add what `rondo init --help` "
            "offers"
        )
    for name in QUESTIONS:
        value, needless = given[name], name in _COLUMNS and answers["data"] == MADE
        if value is not None and needless:
            raise ConfigError(
                f"--{name} must not be given with --data {MADE}, which has its own, got {value!r}. Remove it"
            )
        if value is None and asks and not needless:
            _ask(name, answers)
        else:
            answers[name] = QUESTIONS[name][1] if value is None else value
            _confirm(name, answers)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text(file.stem, answers))
    except OSError as error:
        raise ConfigError(
            f"FILE must be one that can be made, got {file}: {error.strerror}. Name another one"
        ) from error
    try:
        load(file)
    except ConfigError:
        file.unlink()
        raise
    print(f"wrote {file}. Next: rondo check {file}, then rondo {_STARTS[answers['machine']].format(file)}")
    return 0


_STARTS = {"laptop": "train {}", "gpu": "train {}", "slurm": "slurm {} --submit"}
_GROUPS = {
    "laptop": "hybrid(threads=1{})",
    "gpu": "colocate(devices=1{})",
    "slurm": "hybrid(rollout_replicas=4, rollout_devices=1, processes=4, devices=1{})",
}


def _ask(name: str, answers: dict[str, str]) -> None:
    question, default, _ = QUESTIONS[name]
    while True:
        try:
            answers[name] = input(f"{question} [{default}]: ").strip() or default
        except EOFError as error:
            raise ConfigError(f"{name} must be answered, got the end of the input. Give --{name}") from error
        try:
            return _confirm(name, answers)
        except ConfigError as error:
            print(error)


def _confirm(name: str, answers: _Answers) -> None:
    """ConfigError for an answer that there is not, or that does not go with those before it."""
    value, choices = answers[name], QUESTIONS[name][2]
    if choices and value not in choices:
        raise ConfigError(
            f"--{name} must be one of {', '.join(choices)}, got {value!r}. {nearest(value, list(choices))}"
        )
    if name in ("model", "data") and answers["modality"] != "text" and value in (TINY, MADE):
        raise ConfigError(
            f"--{name} must be yours with {answers['modality']}, got {value!r}, which is text alone. Name it"
        )
    if name == "data" and (value != MADE and answers["model"] == TINY):
        raise ConfigError(
            f"--data must be made with the tiny model, which knows few letters, got {value!r}. Name a --model"
        )


def text(name: str, answers: _Answers) -> str:
    """The module."""
    tiny, made, own = answers["model"] == TINY, answers["data"] == MADE, answers["reward"] == OWN
    algorithm = ALGORITHMS[answers["algorithm"]]
    functions = ((_DIGITS if tiny else _SUMS) if made else "", (_OWN_DIGITS if tiny else _OWN_TEXT) if own else "")
    reward = "reward" if own else json.dumps(answers["reward"])
    sizes = _TINY_SIZES if tiny else _SIZES[answers["machine"]]
    fields = {each: str(value) for each, value in sizes.items()}
    if algorithm.get("needs_dynamic_sampling"):
        fields["filter"] = '"zero_std"'
    return _MODULE.format(
        name="".join(c if c.isalnum() else "_" for c in name).strip("_") or "mine",
        imports="import random\n\n" if made else "",
        functions="".join(f"\n\n{each}" for each in functions if each),
        mode="colocate" if answers["machine"] == "gpu" else "hybrid",
        groups=_GROUPS[answers["machine"]].format(", critic=True" if algorithm.get("advantage") == "gae" else ""),
        model='build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 128}'
        if tiny
        else f"path={json.dumps(answers['model'])}",
        data=_lines(_data(answers, tiny=tiny)),
        # What compares components is given one.
        reward=f'function={{"right": {reward}}}, components={{"right": 1.0}}'
        if algorithm.get("advantage") == "decoupled"
        else f"function={reward}",
        algorithm=answers["algorithm"],
        rollout=_lines(fields),
        lr="2e-4" if tiny else "1e-6, micro_batch_tokens=1024" if answers["machine"] == "laptop" else "1e-6",
        num_prompts=16 if answers["machine"] == "laptop" and not tiny else 64,
    )


def _data(answers: _Answers, *, tiny: bool) -> dict[str, str]:
    if answers["data"] == MADE:
        fields = {"rows": "rows"}
    else:
        fields = {"path": answers["data"], "prompt": answers["prompt"], "label": answers["label"]}
        fields = {name: json.dumps(value) for name, value in fields.items()}
    if answers["modality"] != "text":
        fields["media_columns"] = f'{{"{answers["modality"]}": "{answers["modality"]}"}}'
    return fields | ({} if tiny else {"apply_chat_template": "True"}) | {"held_out": "64"}


def _lines(fields: Mapping[str, str]) -> str:
    return "".join(f"        {name}={value},\n" for name, value in fields.items())


_DIGITS = '''def rows(num_rows: int = 4000) -> list[dict[str, str]]:
    """Digits to sort: {"prompt": "s3142>", "label": "1234"}."""
    digits = [f"{each:04}" for each in random.Random(0).sample(range(10_000), num_rows)]
    return [{"prompt": f"s{each}>", "label": "".join(sorted(each))} for each in digits]
'''
_SUMS = '''def rows(num_rows: int = 2000) -> list[dict[str, str]]:
    """Sums, to try the model on; put rows of yours here."""
    pairs = random.Random(0).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], num_rows)
    return [{"prompt": f"What is {a} + {b}? Answer with the number only.", "label": str(a + b)} for a, b in pairs]
'''
_OWN_DIGITS = '''def reward(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """The part of the answer that is right, character by character."""
    return sum(one == other for one, other in zip(response, label)) / max(len(label), len(response))
'''
_OWN_TEXT = '''def reward(response: str, label: str, *, prompt: object, metadata: dict[str, object]) -> float:
    """1 where the answer ends with what is right; what counts as right is yours to say."""
    return float(response.strip().rstrip(".").endswith(str(label)))
'''
_MODULE = '''"""Written by `rondo init`: `rondo check` tells what is wrong with it, `rondo show` all settings that it has."""

from __future__ import annotations

{imports}from rondo.launch.config import RunConfig
from rondo.launch.modes import {mode}
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, EvalConfig, RewardConfig, RolloutConfig, TrainConfig
{functions}

config = RunConfig(
    name="{name}",
    num_steps=200,
    # Which roles share processes, and on what they compute.
    role_groups={groups},
    model=ModelConfig({model}),
    # The rows that are held out are never trained on; evaluation takes them before the first step and after the last.
    data=DataConfig(
{data}    ),
    evaluation=EvalConfig(num_prompts={num_prompts}),
    reward=RewardConfig({reward}),
    algorithm=AlgorithmConfig(name="{algorithm}"),
    rollout=RolloutConfig(
{rollout}    ),
    # A checkpoint every 50 steps; `rondo resume` goes on from the newest.
    train=TrainConfig(lr={lr}, save_every=50),
)
'''
