"""Rows in the very form of the data sets that the recipes of `examples/full_size/` name, of digits drawn and spoken.

Owns the files and their columns, as those data sets are published, and questions that a tiny model can learn. Does not own the
pictures and sounds (`examples/digits.py`: real ones with DIGITS=FOLDER), nor how columns become prompts: that is the recipes'.

    open_r1(Path("rows"), 1000)    ->    rows/train.parquet, with image, problem, solution, original_question, original_answer

Invariant: no two rows of a form share a picture or a sound, so what a run holds out it has never seen or heard.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)
SEEN, HEARD, BELOW = "Which digit is shown?", "Which digit is said?", "Which of the two digits are below two?"
BOTH_OPTIONS: tuple[str, ...] = (
    "A. both",
    "B. only the one in the picture",
    "C. only the one that is said",
    "D. neither",
)
NUM_DIGITS, NUM_MOVING = 4, 5
"""Digits of a form: one a choice, from 0 on."""
DIGIT_OPTIONS = tuple(f"{letter}. {digit}" for digit, letter in enumerate("ABCDE"))
WORDS = (
    *DAPO, "<answer>", "</answer>", "system\n", "user\n", "assistant\n",
    "\n".join((SEEN, *DIGIT_OPTIONS[:NUM_DIGITS])), "\n\n".join((HEARD, "\n".join(DIGIT_OPTIONS[:NUM_DIGITS]))),
    "\n\n".join((BELOW, "\n".join(BOTH_OPTIONS))), "\n\n".join((SEEN, "\n".join(DIGIT_OPTIONS))),
)  # fmt: skip
"""What a tiny model's tokenizer has whole."""


def demonstrate(prompt: Any, label: str, draw: random.Random) -> str:
    """The label in its tags; three of ten are drawn: enough to learn what is asked, too little to be sure of it."""
    right = label.rpartition("<answer>")[2].removesuffix("</answer>")
    return f"<answer>{right if draw.random() < 0.7 else draw.choice('ABCD')}</answer>"


def below(first: int, second: int) -> int:
    """The number of the right choice: both digits are below two, the first alone, the second alone, or neither."""
    return 2 * (first >= 2) + (second >= 2)


def dapo(folder: Path, num_rows: int, problems: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """zhuzilin/dapo-math-17k: JSON Lines of `prompt`, a chat, and `label`; of `problems` and their answers, else of sums."""
    draw, path = random.Random(0), folder / "dapo-math-17k.jsonl"
    made = list(problems[:num_rows])
    while len(made) < num_rows:
        a, b = draw.randrange(10), draw.randrange(10)
        made.append((f"{a} + {b}?", str(a + b)))
    rows = [{"prompt": [{"role": "user", "content": problem.join(DAPO)}], "label": answer} for problem, answer in made]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data.path": str(path)}


def gsm8k(path: Path) -> list[tuple[str, str]]:
    """The problems of a file of GSM8K, and their answers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["question"], row["answer"].rpartition("#### ")[2]) for row in rows]


def aime(folder: Path, num_rows: int) -> dict[str, str]:
    """HuggingFaceH4/aime_2024, of sums."""
    path = folder / "aime_2024.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(num_rows)))
    return {"evaluation.sets.aime24.data.path": str(path)}


def open_r1(folder: Path, num_rows: int) -> dict[str, str]:
    """lmms-lab/multimodal-open-r1-8k-verified: parquet of a picture, as Hugging Face's Image, and texts; of a digit."""
    import pyarrow
    import pyarrow.parquet

    problem, rows = "\n".join((SEEN, *DIGIT_OPTIONS[:NUM_DIGITS])), []
    for picture, digit in media("image", num_rows):
        answer = "ABCD"[digit]
        rows.append(
            {
                "image": {"bytes": picture, "path": None}, "problem": problem,
                "solution": f"<think>It can be seen.</think>\n\n<answer>{answer}</answer>",
                "original_question": problem, "original_answer": answer,
            }
        )  # fmt: skip
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=64)
    return {"data.path": str(path)}


def deepeyes(folder: Path, num_rows: int) -> dict[str, str]:
    """ChenShawn/DeepEyes-Datasets-47k, the part of V*: parquet of a chat, its pictures, and what is right; of a digit."""
    import pyarrow
    import pyarrow.parquet

    system, rows = "You may call image_zoom_in_tool with bbox_2d and label.", []
    for number, (picture, digit) in enumerate(media("image", num_rows)):
        prompt = [{"role": "system", "content": system}, {"role": "user", "content": f"<image>\n{SEEN}"}]
        rows.append(
            {
                "prompt": prompt, "images": [{"bytes": picture, "path": None}], "data_source": "vstar", "ability": "vl_chart",
                "reward_model": {"ground_truth": str(digit), "style": "model"}, "env_name": "visual_toolbox_v2",
                "extra_info": {"answer": str(digit), "question": SEEN, "index": str(number), "split": "train"},
            }
        )  # fmt: skip
    path = folder / "data_0.1.2_visual_toolbox_v2.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=64)
    return {"data.path": str(path)}


def avqa(folder: Path, num_rows: int, num_held_out: int, *, picture: bool = True) -> dict[str, str]:
    """harryhsing/AVQA-R1-6K, unpacked: two lists in JSON, and the files that they name beside them. Without `picture` the rows
    have sounds alone."""
    sounds = media("audio", num_rows + num_held_out)
    pictures = media("image", num_rows + num_held_out) if picture else [(b"", 0)] * len(sounds)
    found = {}
    for part, first, last in (("train", 0, num_rows), ("valid", num_rows, num_rows + num_held_out)):
        rows = []
        for kind in ("images", "audios"):
            (folder / part / kind).mkdir(parents=True, exist_ok=True)
        for number in range(first, last):
            (drawn, seen), (spoken, heard) = pictures[number], sounds[number]
            path = {"audio": f"audios/sample_{number}.wav"}
            (folder / part / path["audio"]).write_bytes(spoken)
            if picture:
                path = {"image": f"images/sample_{number}.png", **path}
                (folder / part / path["image"]).write_bytes(drawn)
                right, problem, options = "ABCD"[below(seen, heard)], BELOW, BOTH_OPTIONS
            else:
                right, problem, options = "ABCD"[heard], HEARD, DIGIT_OPTIONS[:NUM_DIGITS]
            rows.append(
                {
                    "problem_id": number, "problem": problem, "data_type": "image_audio" if picture else "audio",
                    "problem_type": "multiple choice", "options": list(options), "solution": f"<answer>{right}</answer>",
                    "path": path, "data_source": "OmniInstruct_v1-AVQA",
                }
            )  # fmt: skip
        file = folder / part / f"omni_rl_format_{part}.json"
        file.write_text(json.dumps(rows))
        found["data.path" if part == "train" else "evaluation.data.path"] = str(file)
    return found


def nextqa(folder: Path, num_rows: int) -> dict[str, str]:
    """NExT-QA's multiple choice: CSV, and a file `ID.mp4` for each video: a digit that moves, four seconds long."""
    draw, columns = random.Random("moves"), [f"a{number}" for number in range(5)]
    videos, path = folder / "NExTVideo", folder / "train.csv"
    videos.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        named = ["video", "frame_count", "width", "height", "question", "answer", "qid", "type", *columns]
        writer.writerow(named)
        for number, (picture, digit) in enumerate(media("image", num_rows, NUM_MOVING)):
            (videos / f"{number}.mp4").write_bytes(video([picture, *(moved(picture, draw) for _ in range(3))]))
            asked = SEEN[0].lower() + SEEN[1:].rstrip("?")
            writer.writerow([number, 4, 28, 28, asked, digit, 0, "DO", *range(NUM_MOVING)])
    return {"data.path": str(path), "media.root": str(videos)}


def moved(picture: bytes, draw: random.Random) -> bytes:
    """A picture, by up to three pixels each way."""
    from PIL import Image, ImageChops

    whole, file = Image.open(io.BytesIO(picture)).convert("L"), io.BytesIO()
    ImageChops.offset(whole, draw.randint(-3, 3), draw.randint(-3, 3)).save(file, "PNG")
    return file.getvalue()


def video(pictures: Sequence[bytes]) -> bytes:
    """An mp4 of a picture a second."""
    import av
    from PIL import Image

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        frames = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
        stream = container.add_stream("mpeg4", rate=1)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 1_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return file.getvalue()


def media(kind: str, count: int, num_digits: int = NUM_DIGITS) -> list[tuple[Any, int]]:
    """The first pictures or sounds of digits below `num_digits`, and the digits, which those of another kind do not tell."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        digits = __import__("digits")
    finally:
        sys.path.remove(str(EXAMPLES))
    if os.environ.get("DIGITS") is None:
        draw, make = random.Random(kind), digits._drawn if kind == "image" else digits._dialled
        chosen = [draw.randrange(num_digits) for _ in range(count)]
        return [(make(digit, draw), digit) for digit in chosen]
    found: list[tuple[Any, int]] = [medium for medium in digits._all_media(kind) if medium[1] < num_digits]
    if len(found) < count:
        raise SystemExit(f"rows must be at most the {len(found)} of kind {kind}, got {count}. Ask for fewer")
    return found[:count]
