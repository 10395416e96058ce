"""What the published sources of the hub's rewards score where ours do not: for comparisons, by `as_published=True`.

Owns no more than that: each function pays what its source pays, wrong answers among it. Imports the standard library alone.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_GPQA = (r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])", r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)")


def gsm8k(response: str, label: Any, *, prompt: Any, metadata: Any, anywhere: bool = False) -> float:
    """verl's gsm8k.py: the strict reader, or the flexible one."""
    found = re.findall(r"-?[0-9.,]+" if anywhere else r"#### (-?[0-9.,]+)", response)
    said = [each if anywhere else each.replace(",", "") for each in found if not anywhere or each not in ("", ".")]
    return float(bool(said) and said[-1] == str(label).rpartition("####")[2].strip().replace(",", ""))


def multiple_choice(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = "answer") -> float:
    """Relax: the text of the first <answer>."""
    tag = re.compile(rf"<{inside}>((?:(?!<{inside}>).)*?)</{inside}>", re.DOTALL)
    said, right = (found and found[1].strip() for found in (tag.search(response), tag.search(str(label))))
    return float(said is not None and said == (str(label).strip() if right is None else right))


def gpqa(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """slime's gpqa.py: the first letter behind "answer", "option" or "choice", the last capital, or the text of the choice."""
    given = (metadata or {}).get("choices") or ()
    choices = [str(each) for each in (given.values() if isinstance(given, Mapping) else given)]
    letters = string.ascii_uppercase[: len(choices) or 8]
    right = str((metadata or {}).get("correct_letter") or label).strip()
    if isinstance(label, int) and label in range(len(letters)):
        right = letters[label]
    right = next((letters[at] for at, choice in enumerate(choices) if _words(choice) == _words(right)), right)
    letter, said = right.upper() if right.upper() in letters else None, response.rpartition("</think>")[2]
    found = [re.search(pattern, said, re.IGNORECASE) for pattern in _GPQA]
    first = [match[1].upper() for match in found if match is not None and match[1].upper() in letters]
    stated = (first or [alone for alone in re.findall(r"\b[A-Z]\b", said)[::-1] if alone in letters] or [None])[0]
    if stated and letter:
        return float(stated == letter)
    texts = [_words(right), *([_words(choices[letters.index(letter)])] if letter and choices else [])]
    return float(any(text and text in _words(said) for text in texts))


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))
