"""Rewards for answers that are equal as mathematics, which math-verify parses and compares.

Owns what of a response reaches it, and for how long. What is so long, so deep or so large that it would hold the processor in
C, where nothing can stop it, is compared as text; what takes more than a second of processor time is not equal. math-verify's
own deadlines are off: they count a loaded machine's time. Does not own how answers are found (`answers.py`), or the deadline of
the whole reward (`reward.deadline_s`), at which a process is killed.

    math("So it is $\\\\boxed{\\\\frac{2}{4}}$", "1/2", prompt="...", metadata={})    ->   1.0
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from rondo.roles.rewards.hub.answers import last_boxed, last_tagged, right_answers
from rondo.roles.rewards.hub.named import named
from rondo.roles.rewards.hub.processor_time import TookTooLong, at_most
from rondo.runtime.errors import ConfigError

try:
    from math_verify import parse, verify
except ModuleNotFoundError as error:
    raise ConfigError(
        "math-verify must be installed for the rewards math, deepscaler, geo3k and openr1mm, got no such package. Run: "
        "pip install 'rondo-rl[rewards]'"
    ) from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadlines are off

_PROCESSOR_S = 1.0
"""Of a comparison."""
_LOOKED_AT = 2000
"""Characters at the end of a response without a box."""
_MAX_DEPTH, _MAX_DIGITS = 24, 400
_MAX_EXPONENT = 10_000
"""The product of the numbers in the exponents of an answer."""
_SHORT = re.compile(r"[-+]?\d{1,200}")
_NESTING = re.compile(r"[{(\[]|[})\]]")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*(\{[^{}]*\}|\([^()]*\)|[-+]?\d+|.)")
_TOWER = re.compile(r"(?:\^|\*\*)\s*[{(\s]*[-+]?[\d.]+[\s})]*(?:\^|\*\*|!)|[\d})]\s*!\s*!|\d{4,}\s*[})]*\s*!|[})]\s*!")
_UNTYPED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@named
def math(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """1 where the last \\boxed{...}, or without one the last expression, equals the label."""
    answer = last_boxed(response)
    return float(any(same(response[-_LOOKED_AT:] if answer is None else answer, right, answer is not None)
                     for right in right_answers(label)))  # fmt: skip


@named
def deepscaler(response: str, label: Any, *, prompt: Any, metadata: Any, whole: str = "") -> float:
    """1 where the solution behind "</think>" or "###Response" has the label in its last box (DeepScaleR)."""
    _, mark, solution = response.rpartition("###Response")
    answer = last_boxed(solution) if mark or response != whole else None
    return float(answer is not None and any(same(answer, right) for right in right_answers(label) if right))


@named
def geo3k(response: str, label: Any, *, prompt: Any, metadata: Any, whole: str = "") -> dict[str, float]:
    """0.9 for the label in the last box and 0.1 for the form <think>...</think>...\\boxed{...}: `accuracy` and `format`."""
    answer = last_boxed(response)
    accuracy = float(answer is not None and any(same(answer, right) for right in right_answers(label)))
    form = float(whole.startswith("<think>") and "</think>" in whole and answer is not None)
    return {"score": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form}


@named
def openr1mm(response: str, label: Any, *, prompt: Any, metadata: Any, whole: str = "") -> float:
    """1 where the <answer> equals the label as mathematics or as text. More than one thought or answer is worth nothing."""
    if any(whole.count(tag) > 1 for tag in ("</think>", "<answer>", "</answer>")):
        return 0.0
    answer = last_tagged(response, "answer")
    said = response if answer is None else answer
    truths = [right if (found := last_tagged(right, "answer")) is None else found for right in right_answers(label)]
    if said.strip() in truths:
        return 1.0
    boxed = last_boxed(said)
    return float(
        any(same(said[-_LOOKED_AT:] if boxed is None else boxed, right, boxed is not None) for right in truths)
    )


def same(answer: str, label: str, whole: bool = True) -> bool:
    """Whether an answer equals the label as mathematics. `whole`: it is the answer and nothing else; otherwise its last
    expression is. What is too large to compare is equal where it is the same text."""
    said, right = answer.strip(), label.strip().strip("$")
    said = said.strip("$") if whole else said
    if said == right and right:
        return True
    if _SHORT.fullmatch(said) and _SHORT.fullmatch(right):
        return int(said) == int(right)
    if _is_large(said):
        return False
    try:
        with at_most(_PROCESSOR_S):
            return bool(verify(_parsed(right), _read(said, whole), timeout_seconds=None))
    except (TookTooLong, RecursionError, MemoryError):
        return False


def _is_large(text: str) -> bool:
    """Whether to compute with it may take long, or more memory than there is."""
    if len(text) > _LOOKED_AT or _UNTYPED.search(text):
        return True
    depth = most = 0
    for each in _NESTING.findall(text):
        depth += 1 if each in "{([" else -1
        most = max(most, depth)
    product = 1
    for exponent in _EXPONENT.findall(text):
        for number in re.findall(r"\d+", exponent):
            product *= max(1, int(number[:9]))
    digits = max(map(len, re.findall(r"\d+", text)), default=0)
    return most > _MAX_DEPTH or digits > _MAX_DIGITS or product > _MAX_EXPONENT or _TOWER.search(text) is not None


@functools.lru_cache(maxsize=4096)
def _parsed(label: str) -> Any:
    return _read(label, last_boxed(label) is None)


def _read(text: str, whole: bool) -> Any:
    """math-verify's expressions. What is whole is put into a box, which it takes for LaTeX; other text as it comes."""
    return parse(f"\\boxed{{{text}}}" if whole else text, parsing_timeout=None)
