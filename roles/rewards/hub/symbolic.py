"""Rewards for answers that are equal as mathematics, which math-verify parses and compares.

Owns what of a response reaches it, and for how long, and what it does not compare: words, units, kinds of brackets, and
equations of numbers. What is so long, so deep or so large that it would hold the processor in
C, where nothing can stop it, is compared as text; what takes more than a second of processor time is not equal. math-verify's
own deadlines are off: they count a loaded machine's time. Does not own how answers are found (`answers.py`), or the deadline of
the whole reward (`reward.deadline_s`), at which a process is killed.

    math("So it is $\\\\boxed{\\\\frac{2}{4}}$", "1/2", prompt="...", metadata={})    ->   1.0
"""

from __future__ import annotations

import functools
import logging
import re
import string
from collections.abc import Sequence
from typing import Any

from rondo.roles.rewards.hub.answers import found_in, last_boxed, last_tagged, right_answers, unexclaimed, written
from rondo.roles.rewards.hub.named import named
from rondo.roles.rewards.hub.processor_time import TookTooLong, at_most
from rondo.roles.rewards.hub.statements import is_denied, is_name, is_withdrawn, number_in, plain, units_of
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
_MAX_DEPTH, _MAX_DIGITS, _MAX_CHAIN = 24, 400, 4
_MAX_EXPONENT = 10_000
"""The product of the numbers in the exponents of an answer."""
_SHORT = re.compile(r"[-+]?\d{1,200}")
_NESTING = re.compile(r"[{(\[]|[})\]]")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*(\{[^{}]*\}|\([^()]*\)|[-+]?\d+|.)")
_TOWER = re.compile(r"(?:\^|\*\*)\s*[{(\s]*[-+]?[\d.]+[\s})]*(?:\^|\*\*|!)|[\d})]\s*!\s*!|\d{4,}\s*[})]*\s*!|[})]\s*!")
_TIDIED = [
    (re.compile(pattern), new)
    for pattern, new in (
        (
            r"\*\*|\\\$|\\(?:left|right|displaystyle)(?![a-z])|\\[,;:!](?![0-9]{3}(?![0-9]))|^[a-zA-Z]\s*\\in(?![a-z])",
            " ",
        ),
        (r"(?<=[0-9])(?:\\[,;: !]|\{,\}|,\\!| )(?=[0-9]{3}(?![0-9]))", ""),
        (r"(?<![0-9])([0-9]{1,9}) +([0-9]{1,9})/([0-9]{1,9})", r"\1\\frac{\2}{\3}"),
        (r"\\(?:text|mathrm|textbf|mbox)\s*\{\s*(and|or)\s*\}|(?<=[0-9)}]) (?:and|or) (?=[-0-9\\({]|[a-z] ?=)", ","),
        (r"\\varnothing|\\\{\s?\\\}|∅", r"\\emptyset"),
        (r"^\\text\s*\{\s*(?:[Tt]he )?(?:[Ff]inal )?[Aa]nswer(?: is)?\s*:?\s*\}", ""),
    )
]
_COMMAND = re.compile(r"\\[A-Za-z]+|[a-z](?= *=)")
_ASCII = frozenset(string.ascii_letters)
_BASE = re.compile(r"(?<=[0-9])_\{?([0-9]+)")
_VARIABLE = re.compile(r"[0-9][A-Za-z](?![A-Za-z])")
_NO_TERM = re.compile(r"[A-Za-z]{2,}|[<>≤≥!?±:]|\\approx")
_UNIT = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}(\^[0-9])?|(?<![\\A-Za-z{])([ckm]m|kg|ft|min|mi|lb|in)(?![A-Za-z])(\^[0-9])?"
)
"""Of an expression, in which other letters are variables."""
_WORDS = re.compile(r"\(?([^\W\d_]+(?:[ '-]+[^\W\d_]+)*)\)?")
_PRODUCT = re.compile(r"[a-dA-D]{1,3}|[w-zW-Z]{1,4}|[p-tP-T]{1,3}|[kmn]{1,3}|[i-k]{1,3}|[a-zA-Z]")
"""Letters that are variables side by side, and no word."""
_BRACKETS = re.compile(r"\\\{.*\\\}|[(\[].*[)\]]", re.DOTALL)
_RATIO = re.compile(r"[^:]+(?::[^:=]+)+")
_RELATION = re.compile(r"\\(leq?|geq?|lt|gt)(?![a-z])|(<=|>=|[<>≤≥])")
_UNEQUAL = re.compile(
    r"\\(?:n?(?:eq?|leq?|geq?)(?:q|slant)?|not|lt|gt|ll|gg|l?dots[bc]?|cdots|sim|propto|to)(?![a-z])|[≠≤≥…]"
)
_SYMBOLS = {"le": "<=", "leq": "<=", "≤": "<=", "ge": ">=", "geq": ">=", "≥": ">=", "lt": "<", "gt": ">"}
_SIGNS = str.maketrans("−–", "--")
_CUE = re.compile(
    r"answer\W{0,3}(?:\s*(?:is|are)\b|\s*[:=])[\s*:]*|####|^[#*_ ]{1,8}(?:the )?(?:final )?answer[*_: ]{0,8}$",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_CUE = re.compile(
    r"(?:.*\b(?:is|are|equals?|get|gives|obtain|have|yields)\b|(?:so|hence|thus|therefore)\b,?)[\s:]*",
    re.DOTALL | re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_NEGATED = re.compile(r"n't|\bnot\b|\bnever\b", re.IGNORECASE)
_UNTYPED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def _published(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    answer = last_boxed(response)
    said = response[-_LOOKED_AT:] if answer is None else answer
    return float(any(_compared(said, right, answer is not None) for right in right_answers(label)))


@named(writes=lambda label, **_: written(label, "boxed"), published=_published)
def math(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    """1 where the last \\boxed{...} equals the label or, without one, what the response says last: behind "answer is" or "####",
    or the last "is" of its last sentence.

    As published (math-verify alone, which compares no words, units and kinds of brackets) the last number or expression of a
    response without a box is its answer.
    """
    right, answer = right_answers(label), last_boxed(response)
    if answer is None and (said := stated(response)) is not None:
        return float(_is_any(said, right) or _is_any(unexclaimed(said), right))
    return float(_is_any(answer, right))


@named(writes=lambda label: f"</think>{written(label, 'boxed')}")
def deepscaler(response: str, label: Any, *, prompt: Any, metadata: Any, whole: str = "") -> float:
    """1 where the solution behind "</think>" or "###Response" has the label in its last box (DeepScaleR, which compares
    by a grader of its own)."""
    right, (_, mark, solution) = right_answers(label), response.rpartition("###Response")
    return float((bool(mark) or response != whole) and _is_any(last_boxed(solution), right))


@named(writes=lambda label: f"<think></think>{written(label, 'boxed')}")
def geo3k(response: str, label: Any, *, prompt: Any, metadata: Any, whole: str = "") -> dict[str, float]:
    """0.9 for the label in the last box and 0.1 for the form <think>...</think>...\\boxed{...}: `accuracy` and `format`. Its
    source, verl's geo3k.py, also pays a box in a thought, and compares as mathruler does."""
    right, answer = right_answers(label), last_boxed(response)
    accuracy = float(_is_any(answer, right))
    form = float(whole.startswith("<think>") and "</think>" in whole and answer is not None)
    return {"score": 0.9 * accuracy + 0.1 * form, "accuracy": accuracy, "format": form}


@named(writes=lambda label: written(label, "answer"))
def openr1mm(response: str, label: Any, *, prompt: Any, metadata: Any, whole: str = "") -> float:
    """1 where the <answer> equals the label as mathematics or as text. More than one thought or answer is worth nothing.
    Its source also pays an answer in a thought or without a tag, and compares as math-verify does."""
    right = right_answers(label, lambda text: found_in(text, "answer") or text.strip())
    if any(whole.count(tag) > 1 for tag in ("</think>", "<answer>", "</answer>")):
        return 0.0
    if (answer := last_tagged(response, "answer")) is None:
        return 0.0
    return float(_is_any(stated(response) if (in_box := last_boxed(answer)) is None else in_box, right))


def stated(response: str) -> str | None:
    """Return what a response without a box says last; None where it says nothing of that kind."""
    answer = last_tagged(response, "answer")
    text = response[-_LOOKED_AT:] if answer is None else answer
    if "\\boxed" in text:  # and its end is missing, or it is withdrawn
        return None
    if cues := list(_CUE.finditer(text)):
        said, *rest = _SENTENCE_END.split(text[cues[-1].end() :].strip(), maxsplit=1)
        return None if is_withdrawn("".join(rest)) or is_denied(text[: cues[-1].end()]) else said
    if len(text) < _LOOKED_AT and (answer is not None or not _PROSE.search(text)):
        return text
    sentence = _SENTENCE_END.split(text.strip())[-1]
    cue = _SENTENCE_CUE.match(sentence)
    return sentence[cue.end() :] if cue is not None and not _NEGATED.search(sentence) else None


def _is_any(answer: str | None, labels: Sequence[str]) -> bool:
    return answer is not None and any(same(answer, label) for label in labels)


def same(answer: str, label: str) -> bool:
    """Whether an answer, which is that and nothing else, equals the label as mathematics. What is too large to compare is equal
    where it is the same text."""
    if len(answer) > _LOOKED_AT:
        return answer.strip() == label.strip()
    boxed = last_boxed(label)
    said, right = _tidy(answer), _tidy(label if boxed is None else boxed)
    if said == right and right:
        return True
    if any(words := [_words(text) for text in (said, right)]):
        return (words[0] or [plain(said)]) == (words[1] or [plain(right)])
    if _is_interval(said) or _is_interval(right):
        said, right = _as_interval(said), _as_interval(right)
    if (kind := _kind(said)) != _kind(right):
        return False
    has_variable = any(_VARIABLE.search(_COMMAND.sub(" ", text)) for text in (said, right))
    if kind == "" and not has_variable and (number := number_in(right)) is not None:
        units = [units_of(text) for text in (said, right)]
        if (value := number_in(said)) is not None:
            return value == number and (units[0] == units[1] or not all(units))
        if _NO_TERM.search(_COMMAND.sub(" ", said)):
            return False
    elif (
        all(units := [units_of(" ".join(map("".join, _UNIT.findall(text)))) for text in (said, right)])
        and units[0] != units[1]
    ):
        return False
    bases = [_BASE.findall(text) for text in (said, right)]
    if (bases[0] and bases[0] != bases[1]) or (_UNEQUAL.search(said) and not _UNEQUAL.search(right)):
        return False
    if kind == "ratio":
        said, right = _in_parts(said), _in_parts(right)
    letters = [set(_COMMAND.sub("", text)) & _ASCII for text in (said, right)]
    if letters[0] != letters[1] and {*map(str.lower, letters[0])} == {*map(str.lower, letters[1])}:
        return False
    *others, last = said.split("=")
    is_term = re.compile(r"(?!.*(?<![\\A-Za-z])[A-Za-z])") if "=" in right else re.compile("")
    terms = [part for part in others[-_MAX_CHAIN:] if kind == "" and is_term.match(part) and not is_name(plain(part))]
    return _compared(said, right) and all(_compared(term, last) for term in terms)


def _tidy(text: str) -> str:
    """Return the text without what does not change its meaning, and its numbers as math-verify reads them."""
    text = text.translate(_SIGNS).strip().strip("$")
    for pattern, new in _TIDIED:
        text = pattern.sub(new, text)
    return text.strip().rstrip(".").strip().strip("$").strip()


def _words(text: str) -> list[str]:
    """Return the words of a text that is words alone, or the letter of a choice, "(C)"; nothing for mathematics."""
    found = _WORDS.fullmatch(plain(text)) if len(text) <= _LOOKED_AT else None
    if found is None or "\\" in re.sub(r"\\(?:text|math)[a-z]*", "", text):
        return []
    if _PRODUCT.fullmatch(found[1]):
        return [found[1]] if found[0] != found[1] or "\\text" in text else []
    return re.findall(r"\w+", found[1].lower())


def _kind(text: str) -> str:
    """Return what a text is by its brackets: "set" (also a list without any), "(", "[", "ratio", or "" for all else."""
    depth, flat = 0, ""
    for character in re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text) if text[:1] not in "([\\" else text:
        depth += (character in "([{") - (character in ")]}")
        flat += character if depth == 0 and character not in ")]}" else ""
    if "," in flat or "\\pm" in flat:
        return "set"
    text, flat = (part.rpartition("=")[2].strip() for part in (text, flat))
    if not flat.strip("\\ ") and _BRACKETS.fullmatch(text):
        return "set" if text[0] == "\\" else "bracket" if "," in text else ""
    return "ratio" if _RATIO.fullmatch(text) else ""


def _is_interval(text: str) -> bool:
    return text[:1] in "([" and text[-1:] in ")]" and "," in text


def _as_interval(text: str) -> str:
    """Return an inequality of one variable as its interval, anything else as it is."""
    parts = [part.strip() for part in _RELATION.sub("\n", text).split("\n")]
    signs = [_SYMBOLS.get(found[1] or found[2], found[2]) for found in _RELATION.finditer(text)]
    if len(parts) == 2 and re.fullmatch("[a-z]", parts[1]):
        parts, signs = parts[::-1], [signs[0].translate(str.maketrans("<>", "><"))]
    if len(parts) == 2 and re.fullmatch("[a-z]", parts[0]):
        closed = signs[0].endswith("=")
        below, above = (parts[1], "\\infty") if signs[0][0] == ">" else ("-\\infty", parts[1])
        left, right = ("[" if closed and signs[0][0] == ">" else "("), ("]" if closed and signs[0][0] == "<" else ")")
        return f"{left}{below}, {above}{right}"
    if len(parts) == 3 and re.fullmatch("[a-z]", parts[1]) and {sign[0] for sign in signs} == {"<"}:
        return f"{'[' if signs[0] == '<=' else '('}{parts[0]}, {parts[2]}{']' if signs[1] == '<=' else ')'}"
    return text


def _in_parts(ratio: str) -> str:
    """Return a ratio with 1 as its first part."""
    first, *rest = ratio.split(":")
    return "(1, " + ", ".join(f"\\frac{{{part}}}{{{first}}}" for part in rest) + ")"


def _compared(answer: str, label: str, whole: bool = True) -> bool:
    """Whether math-verify calls them equal. `whole`: the answer is that and nothing else; otherwise its last expression is. What
    is too large to compare is equal where it is the same text."""
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
