"""What the policy answered to the same prompts before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from rondo.launch.report.answers import answers


def write(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / name).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def sample(number: int, response: str, reward: float | None, of: int = 0, prompt: Any = None) -> dict[str, Any]:
    asked = prompt or f"What is {number} + 1?"
    return {"set": "held_out", "number": number, "sample": of, "prompt": asked, "response": response, "reward": reward}


def test_the_first_prompts_with_an_answer_in_both_are_shown_with_both(tmp_path: Path) -> None:
    assert list(answers(tmp_path)) == []
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And\n2 + 1?"}]
    write(tmp_path, "start.0.jsonl", sample(2, "long " * 60, None, prompt=chat), sample(0, "I think\n\n7.", 0.1))
    write(
        tmp_path, "start.1.jsonl", sample(1, "2", 1.0), {"set": "held_out", "number": 3, "sample": 0, "error": "torn"}
    )
    assert list(answers(tmp_path)) == []  # the run ended before it was evaluated again
    ended = [sample(number, str(number + 1), 1.0) for number in (3, 2, 0)]
    write(tmp_path, "end.0.jsonl", sample(0, "another", 0.0, of=1), *ended)
    shown = list(answers(tmp_path))
    assert shown[:3] == ["What is 0 + 1?", "  before  0.10  I think 7.", "  after   1.00  1"]
    assert shown[3] == "And 2 + 1?" and shown[4].startswith("  before  -  long long") and len(shown[4]) == 213
    assert shown[5:] == ["  after   1.00  3"]
    assert list(answers(tmp_path, 1)) == shown[:3]
