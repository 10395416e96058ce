"""A tiny Qwen3-Omni on rows of text, image, audio, video and several at once, four of them broken, each in another way; two
actor processes that mostly see different modalities; one version stale; the gap between engine and trainer limited."""

from __future__ import annotations

import io
import os
import time
import wave
from pathlib import Path
from typing import Any

import numpy as np

from rondo.comm.bus.journal import files, read
from rondo.launch.config import RunConfig
from rondo.launch.groups import RoleGroup
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.supervision.spec import RUN_DIR

_RATE = 16_000


def picture(seed: int) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sound(seed: int, seconds: float = 0.3) -> bytes:
    samples = np.random.default_rng(seed).integers(-9000, 9000, int(_RATE * seconds), dtype=np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def question(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def image(source: Any) -> dict[str, Any]:
    return {"type": "image", "image": source}


def audio(source: Any) -> dict[str, Any]:
    return {"type": "audio", "audio": source}


def video(source: Any) -> dict[str, Any]:
    return {"type": "video", "video": source}


def whole(n: int) -> list[dict[str, Any]]:
    frames = [picture(4 * n + i) for i in range(4)]
    kinds = [
        question(),
        question(image(picture(n))),
        question(audio(sound(n))),
        question(video(frames)),
        question(image(picture(n)), audio(sound(n))),
    ]
    return kinds[n % len(kinds)]


BROKEN = {
    8: question(audio(sound(1, seconds=0.0))),
    9: question(image(b"not a picture")),
    13: question(image("https://example.invalid/cat.png")),
    18: [{"role": "user", "content": [image(picture(1)), {"type": "text", "text": "<|image_pad|>"}]}],
}


LAST = (26, 31, 39, 40, 42, 48)
"""The rows of the last step: none of them is begun before version 4 is there."""


def rows() -> list[dict[str, Any]]:
    return [{"prompt": BROKEN.get(n) or whole(n), "label": str(n)} for n in range(60)]


def demonstrations() -> list[dict[str, Any]]:
    return [{"prompt": BROKEN.get(n) or whole(n), "answer": str(n % 10)} for n in range(20)]


def wordy(response: str, label: str, *, prompt: Any, metadata: dict[str, object]) -> float:
    return float(len(response) % 2)


def behind_the_reference(response: str, label: str, *, prompt: Any, metadata: dict[str, object]) -> float:
    """`wordy`; the last step is not rewarded before the reference has newer weights than its first."""
    while int(label) in LAST and len(proved_by_reference(Path(os.environ[RUN_DIR]))) < 2:
        time.sleep(0.05)
    return wordy(response, label, prompt=prompt, metadata=metadata)


def proved_by_reference(run: Path) -> list[int]:
    """The versions that the reference has had so far."""
    events = (event for file in files(run / "journal") for event in read(file))
    return [e["version"] for e in events if e["event"] == "proved" and e["reader"].endswith("/reference.0")]


config = RunConfig(
    name="omni",
    num_steps=6,
    supervision=SupervisionConfig(silence_s=120, grace_s=120),
    max_staleness=1,
    role_groups=(
        RoleGroup(name="rollout", roles=("rollout",)),
        RoleGroup(name="actor", roles=("actor",), processes=2),
        RoleGroup(
            name="scoring", roles=("actor_fwd", "reference", "advantages")
        ),  # all that score share one process's imports
    ),
    model=ModelConfig(build="rondo.models.tiny.qwen3_omni:build"),
    data=DataConfig(
        rows=rows, apply_chat_template=True, shuffle=False, balance="natural", held_out=6, max_bad_rows=0.5
    ),
    media=MediaConfig(video_min_tokens=4, max_group_bytes=1 << 20),
    evaluation=EvalConfig(num_prompts=6),
    reward=RewardConfig(function=wordy, max_failures=1, deadline_s=120),
    algorithm=AlgorithmConfig(kl_coef=0.01, kl="k1", kl_in="reward"),
    reference=ReferenceConfig(refresh_every=3),
    rollout=RolloutConfig(
        prompts_per_step=6, samples_per_prompt=4, max_prompt_tokens=128, max_new_tokens=4, num_slots=16
    ),
    train=TrainConfig(lr=1e-4, micro_batch_tokens=512, max_log_prob_gap=1e-4),
    sft=SftConfig(
        data=DataConfig(rows=demonstrations, label="answer", apply_chat_template=True, max_bad_rows=0.5),
        steps=3,
        batch_size=8,
        micro_batch_tokens=1024,
    ),
)
