"""A run with router replay whose trainer and actor_fwd would by themselves send every token to other experts than the engine.

The recorded experts alone make their log-probs those of the engine, which the settings demand; with `forget` they are thrown away
in front of the trainer. With `train.router_replay=r2` actor_fwd goes its own way, which is the engine's, and records it.

With `pictures` or `sounds` prompts have some (with `sounds` pictures, too: Qwen3-Omni's thinker), layers are computed again in
the backward, and every new version interrupts. Each rank that trains writes what its micro-batches held into `seen.RANK.jsonl` of
the run (`routed_roles.py`), and ends where a router sends a token elsewhere than it was recorded, in a forward or in what is
computed again.

    python -m tests.e2e.routed FOLDER MODE [forget] [pictures | sounds] [SETTING=VALUE ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rondo.launch import train
from rondo.launch.config import RunConfig, override
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.launch.plan import group_specs
from rondo.launch.train import TrainOptions
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.supervision.spec import GroupSpec
from tests.e2e.omni import audio, image, picture, question, sound
from tests.strength import LONG

NAME, NUM_STEPS, NUM_EXPERTS = "routed", 5, 4
MODES = {
    "fully_async": fully_async(actor_processes=2, actor_fwd_replicas=1),
    "hybrid": hybrid(actor_fwd=True, processes=2 if LONG else 1),
    "colocate": colocate(processes=2),
}


def some_with_pictures() -> list[dict[str, Any]]:
    return [{"prompt": question(*([image(picture(n))] if n % 4 else [])), "label": str(n)} for n in range(40)]


def some_with_sounds() -> list[dict[str, Any]]:
    kinds = ((), (audio,), (image, audio), (image,))
    given: dict[Any, Any] = {audio: sound, image: picture}
    return [{"prompt": question(*(kind(given[kind](n)) for kind in kinds[n % 4])), "label": str(n)} for n in range(40)]


MEDIA: dict[str, tuple[str, Any]] = {
    "": ("qwen3", "tests.e2e.updates:words"),
    "pictures": ("qwen3_vl", "tests.e2e.routed:some_with_pictures"),
    "sounds": ("qwen3_omni", "tests.e2e.routed:some_with_sounds"),
}
"""What prompts have -> a family that takes it, and its rows."""


def config_of(folder: Path, mode: str, media: str = "") -> RunConfig:
    staleness = 0 if mode == "colocate" else 2
    interrupted: dict[str, Any] = {"on_new_weights": "interrupt"} if staleness else {}
    if staleness and not media:
        interrupted["max_interruptions"] = 1
    sizes = {"hidden_size": 64, "num_experts": NUM_EXPERTS, "moe_intermediate_size": 32, "tie_embeddings": False}
    family, rows = MEDIA[media]
    return RunConfig(
        name=NAME,
        run_dir=folder,
        num_steps=NUM_STEPS,
        max_staleness=staleness,
        supervision=SupervisionConfig(silence_s=120, grace_s=120),
        role_groups=MODES[mode],
        roles={"rollout": "tests.e2e.held:HeldRollout"} if staleness else {},
        model=ModelConfig(build=f"rondo.models.tiny.{family}:build", build_args=sizes),  # as SGLang serves mixtures
        data=DataConfig(rows=rows, apply_chat_template=bool(media)),
        media=MediaConfig(max_group_bytes=1 << 20) if media else None,
        reward=RewardConfig(function="tests.e2e.updates:parity", deadline_s=120),
        algorithm=AlgorithmConfig(old_log_probs="actor_fwd" if staleness else "auto"),
        rollout=RolloutConfig(
            prompts_per_step=4, samples_per_prompt=4, max_prompt_tokens=64 if media else 8, max_new_tokens=48,
            num_slots=8, **interrupted,
        ),
        train=TrainConfig(
            lr=1e-3, micro_batch_tokens=512 if media else 160, router_replay="r3", max_log_prob_gap=1e-5,
            activation_checkpointing=bool(media) or mode != "hybrid",
        ),
    )  # fmt: skip


def diverted(spec: GroupSpec, *, forget: bool, replay: str) -> GroupSpec:
    other = {"actor": "ForgetfulActor" if forget else "DivertedActor"}
    if replay == "r3":
        other["actor_fwd"] = "DivertedForward"
    roles = [
        f"tests.e2e.routed_roles:{other[role]}" if role in other else path
        for role, path in zip(spec.role_names, spec.roles, strict=True)
    ]
    return replace(spec, roles=tuple(roles))


if __name__ == "__main__":
    folder, mode, *rest = sys.argv[1:]
    config = config_of(Path(folder), mode, next((word for word in rest if word in MEDIA), ""))
    config = override(config, [text for text in rest if "=" in text])
    replay = config.train.router_replay
    specs = tuple(diverted(spec, forget="forget" in rest, replay=replay) for spec in group_specs(config))
    sys.exit(train.main(config, TrainOptions(Path(__file__), plain=True), groups=specs))
