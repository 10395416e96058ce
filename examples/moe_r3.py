"""Two CPU cores, no downloads, about two minutes: a tiny mixture of experts learns to sort four digits, with its routes replayed.

    rondo train examples/moe_r3.py

A Qwen3-MoE of eight experts a layer generates in bfloat16 and trains in float32, so that engine and trainer by themselves would
send some tokens to other experts. With `router_replay="r3"` the trainer takes the engine's: compare `log_prob_gap` in
`metrics.jsonl` with that of `--set train.router_replay=off`. `router_max_share` and `router_entropy` there say how evenly experts
are used. Data, demonstrations and reward are those of `quickstart.py`.
"""

from __future__ import annotations

from quickstart import config as dense

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, TrainConfig

config = RunConfig(
    **dict(dense)
    | {
        "name": "moe_r3",
        "num_steps": 100,
        "role_groups": fully_async(),
        "model": ModelConfig(
            build="rondo.models.tiny.qwen3:build",
            build_args={
                "hidden_size": 128,
                "num_layers": 2,
                "num_experts": 8,
                "moe_intermediate_size": 128,
                "tie_embeddings": False,
            },
            dtype="bfloat16",
        ),
        "algorithm": AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
        "train": TrainConfig(
            lr=2e-4, warmup_steps=5, micro_batch_tokens=4096, router_replay="r3", router_aux_loss_coef=1e-3
        ),
    }
)
