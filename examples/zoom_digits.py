"""Thinking with pictures: two CPU cores, no downloads, about three minutes. A tiny Qwen3-VL learns where to look, and to look.

    rondo train examples/zoom_digits.py
    TOOL=none rondo train examples/zoom_digits.py             # the same without the tool
    TOOL=listen rondo train examples/zoom_digits.py           # or seek: a window of a long sound, a frame of a video
    DIGITS=PATH/TO/data rondo train examples/zoom_digits.py   # real handwriting and speech, see digits.py

One digit stands somewhere on a large canvas, which the policy sees so small that it can tell where the digit is and hardly which.
It may call "zoom" with a box, is shown that part of the canvas in the next turn, and says the digit. As in DeepEyes the reward is
0.8 for a right answer, and 1.2 more for one behind a look through the tool; an answer in another form costs 0.2. A warm-up on
answers without the tool, and calls and answers of which a sixth are wrong, has shown the policy what both look like.
"""

from __future__ import annotations

import functools
import io
import json
import os
import random
import wave
from typing import Any

import digits

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)

TOOL = os.environ.get("TOOL", "zoom")
NUM_DIGITS = 4  # 0 to 3: tiny models learn to see these in few steps
SIDE, CELL = 3, 96  # cells of a canvas, in each direction, and their pixels; the digit has 28
SECONDS, RATE = 6, 8000
FRAMES = 12  # two a second, each with a digit; the question is about one of them
TIMES = [word for at in range(FRAMES) for word in (f"{at / 2}", f'"at_s": {at / 2}')] + ["<2.8 seconds>"]
"""Words of a question and a call, and what the processor writes of the two frames that are shown of a video."""
Question = tuple[list[dict[str, Any]], str, Any]
"""Parts of the message, the digit, and its place."""


@functools.cache
def few(kind: str, held_out: bool) -> list[digits.Medium]:
    return [medium for medium in digits.media(kind, held_out) if medium[1] < NUM_DIGITS]


def canvas(draw: random.Random, held_out: bool) -> Question:
    from PIL import Image

    picture, digit = draw.choice(few("image", held_out))
    place = draw.randrange(SIDE), draw.randrange(SIDE)
    image = Image.new("L", (SIDE * CELL, SIDE * CELL), 128)
    image.paste(Image.open(io.BytesIO(picture)), tuple(CELL * at + 34 + draw.randint(-2, 2) for at in place))
    image.save(file := io.BytesIO(), "PNG", compress_level=1)
    return [{"type": "image", "image": file.getvalue()}], str(digit), place


def long_sound(draw: random.Random, held_out: bool) -> Question:
    """Silence, but for a digit in one of its seconds."""
    said, digit = draw.choice(few("audio", held_out))
    with wave.open(io.BytesIO(said)) as reader:
        samples, place = reader.readframes(RATE), draw.randrange(SECONDS)
    before = bytes(2 * RATE * place)
    with wave.open(file := io.BytesIO(), "wb") as writer:
        writer.setparams((1, 2, RATE, 0, "NONE", ""))
        writer.writeframes((before + samples).ljust(2 * RATE * SECONDS, b"\0"))
    return [{"type": "audio", "audio": file.getvalue()}], str(digit), place


def video(draw: random.Random, held_out: bool) -> Question:
    shown = [draw.choice(few("image", held_out)) for _ in range(FRAMES)]
    place = draw.randrange(1, FRAMES - 1)
    parts = [{"type": "video", "video": [frame for frame, _ in shown]}, {"type": "text", "text": f"{place / 2}"}]
    return parts, str(shown[place][1]), place


def box(place: tuple[int, int]) -> dict[str, Any]:
    """The middle of a cell, a third of its sides, in thousandths of the canvas."""
    size = 1000 // (3 * SIDE)
    left, top = ((3 * at + 1) * size for at in place)
    return {"bbox_2d": [left, top, left + size, top + size]}


TASKS: dict[str, tuple[Any, Any, Any]] = {
    "none": (canvas, None, None),
    "zoom": (canvas, lambda draw: (draw.randrange(SIDE), draw.randrange(SIDE)), box),
    "listen": (long_sound, lambda draw: draw.randrange(SECONDS), lambda at: {"from_s": at, "to_s": at + 1}),
    "seek": (video, lambda draw: draw.randrange(FRAMES), lambda at: {"at_s": at / 2}),
}
"""A tool's questions, another place, and the arguments by which it is asked for one."""
make, elsewhere, arguments = TASKS[TOOL]


def call(place: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': TOOL, 'arguments': arguments(place)})}\n</tool_call>"


def rows(num_rows: int = 1500, held_out: bool = False) -> list[dict[str, Any]]:
    draw = random.Random(f"{TOOL} {held_out}")
    found = [make(draw, held_out) for _ in range(num_rows)]
    return [{"prompt": [{"role": "user", "content": parts}], "label": digit} for parts, digit, _ in found]


def held_out_rows() -> list[dict[str, Any]]:
    return rows(256, held_out=True)


def demonstrations(num_rows: int = 7200) -> list[dict[str, Any]]:
    """Answers without a look, calls, and answers behind one; of each a sixth are wrong."""
    from rondo.models.media.config import MediaConfig
    from rondo.models.media.refs import MediaRef
    from rondo.roles.sampling import media_tools, tools

    draw, made = random.Random("demonstrations"), []
    for number in range(num_rows):
        parts, digit, place = make(draw, False)
        prompt, is_right = [{"role": "user", "content": parts}], draw.random() < 5 / 6
        answer = digit if is_right else str(draw.randrange(NUM_DIGITS))
        if TOOL != "none" and number % 5 in (1, 2):
            answer = call(place if is_right else elsewhere(draw))
        elif TOOL != "none" and number % 5 > 2:
            kind = parts[0]["type"]
            media = media_tools.Media([MediaRef(kind, parts[0][kind])], MediaConfig())
            shown = tools.answered(getattr(media_tools, TOOL).__wrapped__(media, **arguments(place))).content
            prompt += [{"role": "assistant", "content": call(place)}, {"role": "tool", "content": shown}]
        made.append({"prompt": prompt, "answer": answer})
    return made


def looked(response: str, label: str, *, turns: list[dict[str, str]]) -> dict[str, float]:
    """DeepEyes' reward."""
    right, is_digit = float(response == label), len(response) == 1 and response.isdigit()
    return {"accuracy": right, "format": is_digit - 1.0, "tool": right * (len(turns) > 1)}


config = RunConfig(
    name=f"{TOOL}_digits",
    num_steps=40,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build=f"rondo.models.tiny.{'qwen3_omni' if TOOL == 'listen' else 'qwen3_vl'}:build",
        build_args={
            "max_positions": 512,
            "init_std": 0.08,
            "words": [
                f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{',
                "}}\n</tool_call>",
                "user\n",
                "system\n",
            ]
            + ["assistant\n", "tool\n", f"{TOOL} <tool_call>"]
            + [f'"bbox_2d": {box((x, y))["bbox_2d"]}' for x in range(SIDE) for y in range(SIDE)]
            + (TIMES if TOOL == "seek" else []),
        }
        | ({"mel_bins": 64} if TOOL == "listen" else {}),
    ),
    data=DataConfig(rows=rows, apply_chat_template=True),
    media=MediaConfig(
        image_max_tokens=SIDE**2,  # the canvas with a token a cell, 48 x 48 pixels; a box of the size above as 32 x 32
        video_min_tokens=4,
        video_max_tokens=4,
        max_frames=2 if TOOL == "seek" else 768,
        min_frames=2 if TOOL == "seek" else 4,
        max_group_bytes=1 << 19,  # a long sound, and what a look at it gives
        max_turn_bytes=0 if TOOL == "none" else 1 << 18,
    ),
    evaluation=EvalConfig(
        num_prompts=256, data=DataConfig(rows=held_out_rows, apply_chat_template=True, shuffle=False)
    ),
    reward=RewardConfig(function=looked, components={"accuracy": 0.8, "format": 0.2, "tool": 1.2}),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=160,
        max_new_tokens=160,
        max_turns=1 if TOOL == "none" else 3,
        environment=None if TOOL == "none" else EnvironmentConfig(tools=(TOOL,)),
        num_slots=128,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(
        rows=demonstrations,
        steps=600 if TOOL == "seek" else 450,  # a frame is no part of what was seen before, so looks alone show digits
        batch_size=16,
        lr=3e-3,
        warmup_steps=20,
        micro_batch_tokens=16384,
    ),
)
