"""DAPO's reward: the last "Answer: ..." of a response, and the label, compared as numbers or, brought to one form, as text.

Owns that form: what Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1) takes out of answers and puts in others'
places. Imports the standard library alone.

    dapo("So x = 42.\\nAnswer: $42$", "42", prompt="...", metadata={})    ->   {"score": 1.0, "accuracy": 1.0, "said": "42"}
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

from rondo.roles.rewards.hub.answers import right_answers, unexclaimed, written
from rondo.roles.rewards.hub.named import named
from rondo.roles.rewards.hub.statements import MAX_STATEMENT, is_denied, is_name, is_withdrawn, number_in, plain

_LOOKED_AT = 300
"""Characters at the end of a response. The longest answer of MATH-500 has 159."""
_ANSWER = re.compile(r"answer[\s*]*:\s*([^\n]+)", re.IGNORECASE)
_PUBLISHED_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}",
    "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>",
)  # fmt: skip
_FIRST_MATH = re.compile(r"\$(.*?)\$")
_UNWRAPPED = re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_FRACTION = re.compile(r"frac([^{])(.)")
_ROOT = re.compile(r"sqrt([^{])")


def _published(response: str, label: Any, *, prompt: Any, metadata: Any) -> dict[str, Any]:
    """verl's math_dapo.py, without its box."""
    found = _PUBLISHED_ANSWER.findall(response[-_LOOKED_AT:])
    said = normalized(found[-1]) if found else None
    return _result(said is not None and said in map(_whole, map(normalized, map(str, right_answers(label)))), said)


@named(writes=lambda label, **_: f"Answer: {written(label)}", published=_published)
def dapo(response: str, label: Any, *, prompt: Any, metadata: Any) -> dict[str, Any]:
    """1 for a right answer, else -1 (Yu et al. 2025, arXiv 2503.14476); `accuracy` is 1 or 0.

    As published (verl's math_dapo.py) the answer stands in the last 300 characters, and Minerva's form alone is compared, in
    which "7,2" and "7 ways 2" are 72, "1 = 72" is 72, and "$72$ or $73$" is 72.
    """
    right, found = right_answers(label), deque(_ANSWER.finditer(response), 1)
    said = found[0][1].strip() if found else ""
    if not said or len(said) > MAX_STATEMENT:
        return _result(False, None)
    if is_withdrawn(response[found[0].end() :][:300]) or is_denied(f"{response[: found[0].start()][-60:]}answer is "):
        return _result(False, normalized(said))
    return _result(any(_equal(said, each) for each in right), normalized(said))


def _result(right: bool, said: str | None) -> dict[str, Any]:
    return {"score": 1.0 if right else -1.0, "accuracy": float(right), "said": said}


def _equal(answer: str, label: str) -> bool:
    number = number_in(label)
    if number is not None:
        return number_in(unexclaimed(answer)) == number
    *before, last = plain(answer, braces=True).split("=")
    if "=" not in label and any(not is_name(part) and _form(part) != _form(last) for part in before):
        return False
    return _form(plain(answer, braces=True)) == _form(plain(label, braces=True))


def normalized(answer: str) -> str:
    """An answer in Minerva's form: what stands behind "=", without units, spaces and wrappers."""
    text = _form(answer)
    bare = text.replace(",", "")
    return bare if bare.isdigit() else text


def _form(answer: str) -> str:
    text = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for gone in _REMOVED:
        text = text.replace(gone, "")
    if (found := _FIRST_MATH.search(text)) is not None:
        text = found[1]
    text = _BOXED.sub(r"\1", _UNWRAPPED.sub(r"\1", text))
    return _ROOT.sub(r"sqrt{\1}", _FRACTION.sub(r"frac{\1}{\2}", text)).replace("$", "").strip()


def _whole(label: str) -> str:
    """DAPO's answers are integers, some of which are written as 42.0."""
    try:
        return str(int(float(label))) if float(label).is_integer() else label
    except (ValueError, OverflowError):
        return label
