"""Rewards for one right answer, compared as text, and where in a response an answer stands.

Owns the readers of answers and labels that the other files of the hub use. Does not own what a statement says
(`statements.py`), what is equal as mathematics (`symbolic.py`), or what the sources score (`published.py`). Every reader is
linear in the response.

    gsm8k("6 times 12 is 72.\\n#### 72", "... #### 72", prompt="...", metadata={})    ->   1.0

A label is the answer, or a list of answers of which any is right; one that no answer can equal is a RewardError. `inside` says
where a response has its answer: "boxed" (in the last \\boxed{...}), the name of a tag (in the last <answer>...</answer>), or
None, the whole response.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rondo.roles.rewards.hub import published
from rondo.roles.rewards.hub.named import named
from rondo.roles.rewards.hub.statements import (
    MAX_STATEMENT,
    choice_in,
    is_denied,
    is_withdrawn,
    last_number,
    number_in,
    plain,
    words,
)
from rondo.roles.rewards.scores import RewardError

LETTERS = string.ascii_uppercase[:8]
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"[{}]")
_BETWEEN_BOXES = re.compile(r"[\s$\\()]*(?:,|or|and)[\s$\\()]*")
_CHOICE = re.compile(r"\(?([A-Za-z])(?:[).:]\s*(.*))?", re.DOTALL)
_NO_SPAN = frozenset({"yes", "no", "noanswer"})
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@named(writes=lambda label, inside=None: written(label, inside))
def exact(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = None) -> float:
    """1 for the label and nothing else; spaces at both ends do not count."""
    right, answer = right_answers(label), found_in(response, inside)
    return float(answer is not None and answer.strip() in right)


@named(writes=lambda label: written(label, "boxed"))
def boxed(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """1 where the last \\boxed{...} holds the label, as text without spaces, Markdown and the wrappers of LaTeX."""
    right, answer = right_answers(label, _bare), last_boxed(response)
    return float(answer is not None and _bare(answer) in right)


@named(writes=lambda label, **_: f"#### {written(label).rpartition('####')[2]}", published=published.gsm8k)
def gsm8k(response: str, label: Any, *, prompt: Any, metadata: Any, anywhere: bool = False) -> float:
    """1 for the label's number behind the last "####" or, `anywhere`, as the last number of the response. The label is a number,
    or an answer of GSM8K with one behind "####". What follows a number with no other, with no operator and no hedge is its unit.

    As published (verl's gsm8k.py, strict and flexible) the digits behind the mark, or the last ones, are the answer whatever
    follows them, in a thought, too: "72 or 73" is 72; and digits are compared as text: "72.0" is not 72.
    """
    right = right_answers(
        label, lambda text: number_in(text.rpartition("####")[2]), "a number, or have one behind '####'"
    )
    said = last_number(response) if anywhere else number_in(unexclaimed(_marked(response)))
    return float(said is not None and said in right)


@named(writes=lambda label, inside="answer", **_: written(label, inside), published=published.multiple_choice)
def multiple_choice(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = "answer") -> float:
    """1 where the last <answer> is the label's: the letter that it decides for ("B", "(B)", "B. Paris"), or the label's text.

    As published (Relax) the first <answer> must have the label's text.
    """
    right, answer = right_answers(label, lambda text: _untagged(text).strip()), found_in(response, inside)
    if answer is None:
        return 0.0
    choices = [(_CHOICE.fullmatch(plain(each)), _shown(each)) for each in right]
    shown, letter = _shown(answer), choice_in(answer, string.ascii_uppercase)
    return float(
        any(
            shown == text
            or (found is not None and (found[1].upper() == letter or (found[2] or "").lower() == shown != ""))
            for found, text in choices
        )
    )


@named(writes=lambda label, **_: f"Answer: {_right_letters(label, None) or written(label)}", published=published.gpqa)
def gpqa(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """1 for the letter of the right choice, as the last verdict ("Answer: B", "B is correct") or the one letter that is left
    standing; or, where no letter is said, for its text. The label is a letter, a number (0 is A), or the text of one of
    `metadata["choices"]`.

    As published (slime's gpqa.py) the first mention of a letter behind "answer", "option" or "choice" is the answer, be it the
    first of a word, else the last capital that stands alone, and naming the text of every choice is right.
    """
    choices, letters = choices_of(metadata)
    right = _right_letters(label, metadata)
    if not right:  # texts, without choices
        choices = right_answers(label)
        right = string.ascii_lowercase[: len(choices)]
        letters = right
    said = choice_in(response, letters, choices)
    return float(said is not None and said in right)


@named(writes=lambda label, inside=None: written(label, inside))
def f1(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = None) -> float:
    """SQuAD's F1 of the words in answer and label (Rajpurkar et al. 2016), without case, punctuation and articles; the best of
    several labels. "yes", "no" and "noanswer" are equal or worth nothing (HotpotQA)."""
    right = right_answers(label, lambda text: text if _answer_words(text) else None, "a text with words")
    answer = found_in(response, inside)
    return 0.0 if answer is None else max(_f1(answer, each) for each in right)


def right_answers(label: Any, read: Callable[[str], Any] = str.strip, wanted: str = "a text or a number") -> list[Any]:
    """Return what `read` makes of the label, or of each in a list of labels, any of which is right. RewardError for a label that
    no answer can equal, of which `read` makes None or ""."""
    label = label.tolist() if hasattr(label, "tolist") else label
    labels = label if isinstance(label, Sequence) and not isinstance(label, str | bytes) else [label]
    texts = [_text_of(each) for each in labels]
    found = [value for text in texts if text.strip() and (value := read(text)) is not None and value != ""]
    if not found:
        way = (
            "Take the answer out of it with data.transform"
            if isinstance(label, Mapping)
            else "Name another column in data.label"
        )
        raise RewardError(f"label must be {wanted}, or a list of such, got {label!r:.80}. {way}, or leave the row out")
    return found


def _text_of(label: Any) -> str:
    """Return the text of one label, "" for what is none; a column with gaps has its integers as 72.0."""
    if label is None or (isinstance(label, Mapping | bytes | Sequence) and not isinstance(label, str)):
        return ""
    if isinstance(label, float):
        return "" if not math.isfinite(label) else str(int(label)) if label.is_integer() else str(label)
    return str(label)


def written(label: Any, inside: str | None = None) -> str:
    """Return the first answer of a label, written in the place of that name."""
    text = _untagged(str(right_answers(label)[0])) if inside == "answer" else str(right_answers(label)[0])
    return text if inside is None else f"\\boxed{{{text}}}" if inside == "boxed" else f"<{inside}>{text}</{inside}>"


def found_in(response: str, inside: str | None) -> str | None:
    """The answer in the place of that name; None where there is none."""
    if inside is None:
        return response
    return last_boxed(response) if inside == "boxed" else last_tagged(response, inside)


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} or \\fbox{...} holds, or the last ones with a comma, "or" or "and" between them, separated by
    commas; None where there is none, its end is missing, or the text around it denies or withdraws it."""
    boxes = list(_BOX.finditer(text))
    contents: list[str] = []
    start = len(text)
    for box in reversed(boxes):
        end = _end_of(text, box.end())
        if end is None or (contents and _BETWEEN_BOXES.fullmatch(text, end + 1, start) is None):
            break
        if (not contents and is_withdrawn(text[end + 1 : end + 300])) or is_denied(text[: box.start()][-60:]):
            return None
        contents.append(text[box.end() : end])
        start = box.start()
    return ", ".join(reversed(contents)) if contents else None


def _end_of(text: str, start: int) -> int | None:
    """Return where the brace closes that is open at `start`."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return brace.start()
    return None


def last_tagged(text: str, name: str) -> str | None:
    """What the last <name>...</name> holds; None without one."""
    before, closed, _ = text.rpartition(f"</{name}>")
    _, opened, inside = before.rpartition(f"<{name}>")
    return inside.strip() if closed and opened else None


def _marked(response: str) -> str:
    """Return the line behind the last "####", or, where that is a heading, the line below it."""
    rest = response.rstrip("# \n").rpartition("####")
    lines = [line for line in plain(rest[2][:MAX_STATEMENT]).splitlines() if line.strip()][:2] if rest[1] else []
    return next((line for line in lines if re.search("[0-9]", line)), "")


def unexclaimed(sentence: str) -> str:
    """Return a sentence without the exclamation marks at its end, which are no factorials behind a number."""
    return re.sub(r"(?<![\\!])!+(?=[\s*]*$)", "", sentence)


def _untagged(label: str) -> str:
    found = last_tagged(label, "answer")
    return label if found is None else found


def _bare(text: str) -> str:
    return "".join(plain(text, braces=True).split()).rstrip(".")


def _shown(text: str) -> str:
    return re.sub(r" ?, ?", ",", plain(text).lower().rstrip("."))


def choices_of(metadata: Any) -> tuple[list[str], str]:
    """Return the texts of the row's choices, and their letters; eight letters where the row has none."""
    given = (metadata or {}).get("choices") or ()
    choices = [str(each) for each in (given.values() if isinstance(given, Mapping) else given)]
    return choices, string.ascii_uppercase[: len(choices)] if choices else LETTERS


def _right_letters(label: Any, metadata: Any) -> str:
    """Return the letters that are right; "" where the row has no choices, and its label is a text."""
    choices, letters = choices_of(metadata)
    label = label if (letter := (metadata or {}).get("correct_letter")) is None else letter
    if isinstance(label, float | int) and not isinstance(label, bool) and math.isfinite(label):
        return letters[int(label)] if label in range(len(letters)) else _unknown(label, letters)
    texts = {words(plain(choice)): letter for letter, choice in zip(letters, choices, strict=False)}
    right = ""
    for text in right_answers(label):
        found = _CHOICE.fullmatch(text)
        letter = (
            found[1].upper() if found is not None and found[1].upper() in letters else texts.get(words(plain(text)), "")
        )
        right += letter
    return right if right or not choices else _unknown(label, letters)


def _unknown(label: Any, letters: str) -> str:
    raise RewardError(
        f"label must be one of the choices {letters}, its number from 0 or its text, got {label!r:.80}. Correct data.label or "
        "the choices in the metadata, or leave the row out"
    )


def _answer_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(answer: str, right: str) -> float:
    said, true = _answer_words(answer), _answer_words(right)
    if said != true and not _NO_SPAN.isdisjoint((" ".join(said), " ".join(true))):
        return 0.0
    same = sum((Counter(said) & Counter(true)).values())
    return 2 * same / (len(said) + len(true)) if same else 0.0
