"""Rewards for one right answer, compared as text, and where in a response an answer stands.

Owns the readers of answers that the other files of the hub use. Does not own what is equal as mathematics (`symbolic.py`).
Every reader is linear in the response.

    gsm8k("6 times 12 is 72.\\n#### 72", "... #### 72", prompt="...", metadata={})    ->   1.0

A label is the answer, or a list of answers of which any is right. `inside` says where a response has its answer: "boxed" (in the
last \\boxed{...}), the name of a tag (in the last <answer>...</answer>), or None, the whole response.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rondo.roles.rewards.hub.named import named

LETTERS = string.ascii_uppercase[:8]
_BRACE = re.compile(r"[{}]")
_NUMBER = re.compile(r"-?[0-9][0-9.,]*|-?\.[0-9]+")
_MARKED = re.compile(r"#### *\$?(-?[0-9.,]+)")
_CHOICE = re.compile(r"\(?([A-Za-z])(?:[).:].*)?", re.DOTALL)
_SAYS_LETTER = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:answer|option|choice)\s*(?:is|:)?\s*\(?([A-Z])\b",
        r"\b([A-Z])\)?\s*is\s*(?:the\s*)?correct",
    )
)
_NO_SPAN = frozenset({"yes", "no", "noanswer"})
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@named
def exact(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = None) -> float:
    """1 for the label and nothing else; spaces at both ends do not count."""
    answer = found_in(response, inside)
    return float(answer is not None and answer.strip() in right_answers(label))


@named
def boxed(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """1 where the last \\boxed{...} holds the label, as text without spaces."""
    answer = last_boxed(response)
    return float(answer is not None and _bare(answer) in map(_bare, right_answers(label)))


@named
def gsm8k(response: str, label: Any, *, prompt: Any, metadata: Any, anywhere: bool = False) -> float:
    """1 for the label's number behind the first "####" or, `anywhere`, as the last number of the response. The label is a number,
    or an answer of GSM8K with one behind "####"."""
    found = _NUMBER.findall(response) if anywhere else _MARKED.findall(response)
    if not found:
        return 0.0
    said = _decimal(found[-1] if anywhere else found[0])
    return float(
        said is not None and any(said == _decimal(right.rpartition("####")[2]) for right in right_answers(label))
    )


@named
def multiple_choice(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = "answer") -> float:
    """1 where the <answer> is the label's: letters as "B", "(B)" or "B. Paris", other texts as they are."""
    answer = found_in(response, inside)
    return float(answer is not None and _chosen(answer) in map(_chosen, map(_untagged, right_answers(label))))


@named
def gpqa(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """1 for the letter of the right choice, said as "Answer: B" or as the last letter that stands alone; or, where no letter is
    said, for its text. The label is a letter, a number (0 is A), or the text of one of `metadata["choices"]`."""
    given = (metadata or {}).get("choices") or ()
    choices = [str(each) for each in (given.values() if isinstance(given, Mapping) else given)]
    letters = string.ascii_uppercase[: len(choices)] if choices else LETTERS
    right = str((metadata or {}).get("correct_letter") or _letter_of(label, choices, letters) or "").upper()
    letter = _said_letter(response, letters)
    if letter is not None and right:
        return float(letter == right)
    texts = [
        *([choices[letters.index(right)]] if right in letters and choices and right else ()),
        *right_answers(label),
    ]
    words = f" {_words(response)} "
    return float(any(len(text) > 1 and f" {_words(text)} " in words for text in texts if _words(text)))


@named
def f1(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = None) -> float:
    """SQuAD's F1 of the words in answer and label (Rajpurkar et al. 2016), without case, punctuation and articles; the best of
    several labels. "yes", "no" and "noanswer" are equal or worth nothing (HotpotQA)."""
    answer = found_in(response, inside)
    return 0.0 if answer is None else max((_f1(answer, right) for right in right_answers(label)), default=0.0)


def right_answers(label: Any) -> list[str]:
    """The label as texts, any of which is right."""
    several = isinstance(label, Sequence) and not isinstance(label, str)
    return [str(each).strip() for each in (label if several else [label])]


def found_in(response: str, inside: str | None) -> str | None:
    """The answer in the place of that name; None where there is none."""
    if inside is None:
        return response
    return last_boxed(response) if inside == "boxed" else last_tagged(response, inside)


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} or \\fbox{...} holds; None where there is none, or its end is missing."""
    at = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if at < 0:
        return None
    start, depth = text.index("{", at) + 1, 0
    for brace in _BRACE.finditer(text, start):
        if brace[0] == "{":
            depth += 1
        elif depth == 0:
            return text[start : brace.start()]
        else:
            depth -= 1
    return None


def last_tagged(text: str, name: str) -> str | None:
    """What the last <name>...</name> holds; None without one."""
    before, closed, _ = text.rpartition(f"</{name}>")
    _, opened, inside = before.rpartition(f"<{name}>")
    return inside.strip() if closed and opened else None


def _untagged(label: str) -> str:
    found = last_tagged(label, "answer")
    return label if found is None else found


def _bare(text: str) -> str:
    return "".join(text.split())


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().strip("$").replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def _chosen(answer: str) -> str:
    found = _CHOICE.fullmatch(answer.strip())
    return answer.strip() if found is None else found[1].upper()


def _letter_of(label: Any, choices: Sequence[str], letters: str) -> str | None:
    if isinstance(label, int):
        return letters[label] if 0 <= label < len(letters) else None
    text = str(label).strip()
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    return next((letters[at] for at, choice in enumerate(choices) if _words(choice) == _words(text)), None)


def _said_letter(text: str, letters: str) -> str | None:
    for pattern in _SAYS_LETTER:
        found = pattern.search(text)
        if found is not None and found[1].upper() in letters:
            return found[1].upper()
    alone = [letter for letter in re.findall(r"\b[A-Z]\b", text) if letter in letters]
    return alone[-1] if alone else None


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _f1(answer: str, right: str) -> float:
    said, true = (_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split() for text in (answer, right))
    if said != true and not _NO_SPAN.isdisjoint((" ".join(said), " ".join(true))):
        return 0.0
    same = sum((Counter(said) & Counter(true)).values())
    return 2 * same / (len(said) + len(true)) if same else 0.0
