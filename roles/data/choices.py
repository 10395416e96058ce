"""Rows with choices: from the columns of GPQA, NExT-QA and AVQA-R1 to a prompt, the right letter, and what a checker needs.

Transforms, as `data.transform` takes them; a row that lacks a column is refused by its place. Pure.

    {"Question": "Why?", "Correct Answer": "x", "Incorrect Answer 1": "y", ...}
    ->  {"prompt": "Why?\n\nA. y\nB. x ...", "label": "B", "metadata": {"choices": ["y", "x", ...]}}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from rondo.roles.data.sources import RowError, missing_column

_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_NEXTQA = ("a0", "a1", "a2", "a3", "a4")


def gpqa(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The right answer stands first in the rows: their order is drawn from the question, the same everywhere."""
    for number, row in enumerate(rows):
        question, *answers = _columns(row, number, ("Question", *_GPQA))
        drawn = [hashlib.sha256(f"{question}/{at}".encode()).digest() for at in range(len(answers))]
        order = sorted(range(len(answers)), key=drawn.__getitem__)
        yield _asked(question, [answers[at] for at in order], order.index(0))


def nextqa(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Multiple choice, in the order of the rows; `video` is an id, its file `ID.mp4` in the folder of `media.root`."""
    for number, row in enumerate(rows):
        video, question, answer, *answers = _columns(row, number, ("video", "question", "answer", *_NEXTQA))
        if not answer.isdecimal() or int(answer) >= len(answers):
            raise RowError(
                f"row {number} must have the number of the right choice in 'answer', from 0 to {len(answers) - 1}, got "
                f"{answer:.40}. Correct the row"
            )
        # The rows begin with a small letter, and end without a mark.
        told = question[:1].upper() + question[1:].rstrip("?") + "?"
        yield _asked(told, answers, int(answer)) | {"video": video if "." in video else f"{video}.mp4"}


def avqa(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Multiple choice as EchoInk-R1 has it: `options` begin with their letters, `solution` is the right one in <answer>, `path`
    an object with the files of `image` and `audio`, either of which may be missing."""
    for number, row in enumerate(rows):
        problem, _, solution, _ = _columns(row, number, ("problem", "options", "solution", "path"))
        options, path = row["options"], row["path"]
        if not isinstance(options, list) or not isinstance(path, Mapping):
            raise RowError(
                f"row {number} must have a list of 'options' and an object in 'path', got {type(options).__name__} and "
                f"{type(path).__name__}. Correct the row"
            )
        listed = "\n".join(map(str, options))
        media = {"image": path.get("image"), "audio": path.get("audio")}
        yield {"prompt": f"{problem}\n\n{listed}", "label": solution, **media}


def _columns(row: Mapping[str, Any], number: int, names: Sequence[str]) -> list[str]:
    if missing := [name for name in names if name not in row]:
        raise missing_column(f"row {number}", missing[0], list(row), "data.transform")
    return [str(row[name]).strip() for name in names]


def _asked(question: str, choices: Sequence[str], right: int) -> dict[str, Any]:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False))
    return {
        "prompt": f"{question}\n\n{listed}", "label": ascii_uppercase[right], "metadata": {"choices": list(choices)},
    }  # fmt: skip
