"""Two machines with 8 GPUs of 80 GB each: Qwen3-Omni-30B-A3B's thinker on pictures, sounds and videos; one of them generates.

    rondo check examples/full_size/qwen3_omni_30b.py --nodes 2 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

`data.path` names JSON Lines with `messages`, in whose parts pictures, sounds and videos are written as OpenAI's or Hugging
Face's chats have them, and a short `answer`. The encoders stay as they are; experts, projectors and all else learn. Experts lie
over the eight devices that train, and routes are replayed, as in `qwen3_30b_a3b.py`. To check, a folder with config.json,
tokenizer and processor files is enough; `rondo train` starts runs of one machine only.
"""

from __future__ import annotations

from qwen3_30b_a3b import SERVERS, TRAIN

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
    full_size,
)


def names_the_answer(response: str, label: str, *, prompt: object, metadata: dict[str, object]) -> float:
    """1 when the last line of the response is the answer, whatever its case."""
    lines = response.strip().splitlines() or [""]
    return float(lines[-1].strip(" .").casefold() == label.strip(" .").casefold())


config = RunConfig(
    name="qwen3_omni_30b",
    num_steps=200,
    max_staleness=1,
    role_groups=fully_async(rollout_replicas=1, rollout_devices=8, actor_processes=8, actor_devices=1),
    model=ModelConfig(path="Qwen/Qwen3-Omni-30B-A3B-Instruct"),
    data=DataConfig(
        path="media/train.jsonl", prompt="messages", label="answer", apply_chat_template=True, held_out=256
    ),
    # 32 frames of 256 tokens are 16 x 1,024 patches of 6,144 bytes: 101 MB once processed.
    media=MediaConfig(
        image_max_tokens=1024,
        video_max_tokens=256,
        max_frames=32,
        use_audio_in_video=True,
        num_workers=4,
        max_group_bytes=112 << 20,
    ),
    evaluation=EvalConfig(num_prompts=256),
    reward=RewardConfig(function=names_the_answer, num_workers=4),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=64,
        samples_per_prompt=8,
        max_prompt_tokens=6144,
        max_new_tokens=1024,
        num_slots=64,
        sglang=SERVERS,
    ),
    train=full_size(31.7e9, ranks=8, **TRAIN | {"freeze": ("vision", "audio"), "max_log_prob_gap": 0.1}),
    # Two steps of 64 prompt groups: 112 MB of media, and 2.8 MB a sample.
    bus=BusConfig(ring_bytes=20 << 30),
)
