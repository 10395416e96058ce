"""Answers: what the policy answered to the same held-out prompts before the training and after it.

Owns which prompts are shown and how. Does not own the samples (`roles/sampling/evaluation.py` writes them down).

    What is 27 + 61? Answer with the number only.
      before  0.10  The sum of 27 and 61 is 78.
      after   1.00  88
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rondo.launch.report.records import read_records

NUM_SHOWN = 4
_MOST_CHARACTERS = 200


def answers(run: Path, num_shown: int = NUM_SHOWN) -> Iterator[str]:
    """The lines, of the first prompts that both evaluations have answers to; none where one of them is missing."""
    before, after = (_first(run, label) for label in ("start", "end"))
    for place in sorted(before.keys() & after.keys())[:num_shown]:
        yield _in_one_line(before[place]["prompt"])
        for label, line in (("before", before[place]), ("after", after[place])):
            reward = "-" if line["reward"] is None else f"{line['reward']:.2f}"
            yield f"  {label:<6}  {reward}  {_in_one_line(line['response'])}"


def _first(run: Path, label: str) -> dict[tuple[str, int], dict[str, Any]]:
    """(set, number of the prompt) -> its first sample in the evaluation of that label."""
    lines = (line for file in (run / "samples").glob(f"{label}.*.jsonl") for line in read_records(file))
    return {(line["set"], line["number"]): line for line in lines if line["sample"] == 0 and "response" in line}


def _in_one_line(text: Any) -> str:
    """A prompt, or an answer; of a chat what was said last."""
    said = text[-1].get("content", "") if isinstance(text, list) and text and isinstance(text[-1], dict) else text
    line = " ".join(str(said).split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."
