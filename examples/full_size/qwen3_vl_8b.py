"""One machine with 8 GPUs of 80 GB: Qwen3-VL-8B on questions about a picture, four devices to generate with SGLang, four train.

    rondo check examples/full_size/qwen3_vl_8b.py --devices 8 --device-gib 80 --memory-gib 1000 --set model.path=FOLDER

`data.path` names JSON Lines with a `question`, a short `answer`, and in `image` the path of a picture, from the file's own
folder. The vision tower stays as it is; its projector learns along. `make sglang` builds the environment of the servers. To
check, a folder with config.json, tokenizer and processor files is enough.
"""

from __future__ import annotations

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SGLangConfig,
    full_size,
)

TRAIN = {"lr": 1e-6, "warmup_steps": 10, "freeze": ("vision",), "max_log_prob_gap": 0.1, "save_every": 50}


def names_the_answer(response: str, label: str, *, prompt: object, metadata: dict[str, object]) -> float:
    """1 when the last line of the response is the answer, whatever its case."""
    lines = response.strip().splitlines() or [""]
    return float(lines[-1].strip(" .").casefold() == label.strip(" .").casefold())


config = RunConfig(
    name="qwen3_vl_8b",
    num_steps=200,
    max_staleness=1,
    role_groups=fully_async(rollout_replicas=4, rollout_devices=1, actor_processes=4, actor_devices=1),
    model=ModelConfig(path="Qwen/Qwen3-VL-8B-Instruct"),
    data=DataConfig(
        path="pictures/train.jsonl",
        prompt="question",
        label="answer",
        media_columns={"image": "image"},
        apply_chat_template=True,
        held_out=256,
    ),
    # A picture of 1,024 tokens is 25 MB once processed; a ring holds the groups of two steps that one replica makes.
    media=MediaConfig(image_max_tokens=1024, num_workers=4, max_group_bytes=26 << 20),
    evaluation=EvalConfig(num_prompts=256),
    reward=RewardConfig(function=names_the_answer, num_workers=4),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=64,
        samples_per_prompt=8,
        max_prompt_tokens=1280,
        max_new_tokens=768,
        num_slots=64,
        sglang=SGLangConfig(python=".venv-sglang/bin/python", weights="tensor"),
    ),
    train=full_size(8.8e9, ranks=4, **TRAIN),
    bus=BusConfig(ring_bytes=1 << 30),
)
