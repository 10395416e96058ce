r"""What a statement says: the one number, or the one choice, that it leaves standing.

Owns how answers are written: Markdown, LaTeX's wrappers, units, currencies, hedges and negations. Does not own where in a
response the statement stands (`answers.py`). Imports the standard library alone.

    number_in("**$1,234.00**")  -> 1234           number_in("72 or 73")  -> None
    choice_in("Option A is wrong. Answer: C", "ABCD")  -> "C"

Invariant: several numbers or choices left standing are none. Every reader is linear in the text.
"""

from __future__ import annotations

import ast
import operator
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction

MAX_STATEMENT = 1000
"""Characters of a statement."""
_MAX_CUES = 20
"""Places, from the end, at which a verdict may stand."""
_SIGNS = str.maketrans("−–—×÷·⁄’", "---*/*/'", "°`\u200b") | {ord("²"): "^2", ord("³"): "^3"}
_MARKUP = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:boxed|fbox|text(?:bf|it|rm|normal)?|math(?:rm|bf)|mbox|operatorname)\s*\{([^{}]*)\}", r"\1"),
        (
            r"<\|[^<>|]{1,40}\|>|</?(?:b|i|s|u|em|strong|span|p|br|answer)>|~~[^~\n]*~~|\*\*|__|\\[()\[\]!]"
            r"|\\(?:left|right|displaystyle|boxed|fbox|text)(?![a-z])",
            "",
        ),
        (r"\^\{?\\circ\}?|\\circ", ""),
        (r"\\[,;: ]|\\q?quad(?![a-z])|~", " "),
        (r"\\([dt]?frac)\s*([0-9])\s*([0-9])", r"\\frac{\2}{\3}"),
        (r"\\[cdt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2"),
        (r"\\(?:cdot|times)(?![a-z])", "*"),
        (r"\{,\}", ","),
        (r"(?<!\w)\*(?=\w)([^*\n]+)\*(?!\w)", r"\1"),
        (r"\\([%#&_])|\\?[$€£¥]", r"\1"),
        (r"[^\S\n]+", " "),
    )
]
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_BRACES = str.maketrans("", "", "{}")
_ONE = (
    r"(?:(?:[1-9][0-9]?(?:,[0-9]{2}){1,4},[0-9]{3}|[1-9][0-9]{0,2}(?:(?:,[0-9]{3}){1,8}|(?: [0-9]{3}){1,8}))(?![0-9])|[0-9]+)"
    r"(?:\.[0-9]+)?|\.[0-9]+"
)
_SCALED = rf"(?:{_ONE})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
_NUMBER = re.compile(rf"([-+] ?)?(?:([0-9]{{1,9}}) +([0-9]{{1,9}})/([0-9]{{1,9}})|({_SCALED})(?: ?/ ?({_SCALED}))?)")
_UNITS = {
    "kilometer": "km", "kilometre": "km", "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm",
    "kilogram": "kg", "gram": "g", "liter": "l", "litre": "l", "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s",
    "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "mile": "mi", "pound": "lb", "pct": "percent",
}  # fmt: skip
_UNIT = re.compile(r"(?<=[A-Za-z]) ?\^ ?-?[0-9]|(?<=[A-Za-z])/(?=[A-Za-z])|(?<=[0-9]) ?/ ?(?=[A-Za-z]{2})")
_NO_NUMBER = re.compile(
    r"n't\b|\b(?:not|cannot|never|neither|nor|either|than|least|most|wrong|incorrect|false|except|between"
    r"|and an?|wait|sorry)\b|\bno\b(?!\s+[a-z])|[*^+/?<>±≤≥≠√\\|¬✗✘✖❌❎]|\.\."
    r"|thing but|(?<=[0-9])(?:!|_[0-9]| ?(?:(?-i:[kKMBTxyzni])|squared|cubed|(?:tenth|hundred|thousand"
    r"|million|billion|trillion)(?:th)?s?"
    r"|dozens?|halves|thirds|fifths|lakhs?|crores?|bn|mln|tn)\b| ?[十百千万亿億萬])"
    r"|\b(?:or|and|maybe|perhaps|possibly) (?:more|less|fewer|up|down|above|over|below|under|beyond|higher|lower|greater|smaller"
    r"|larger|zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,5}teen|(?:twen|thir|for|fif|six|seven|eigh"
    r"|nine)ty)\b"
    r"|(?<![A-Za-z0-9.])[A-Za-z][0-9]"
    r"|\b(?:over|under|above|below|up to|no|without|root of|half of|twice|double) (?=-?[0-9])",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"(?!.*\\(?:sqrt|log|ln|lg|exp|frac|not))(?:[\s$:;,.'\"~#]|(?<=[a-zA-Z)]) ?\+ ?(?=[a-zA-Z])"
    r"|\\?(?<![^\W\d_])[^\W\d_]+(?![^\W\d_])'*(?:_?[0-9](?![0-9])|_[a-zA-Z0-9]+)?(?:\([^()]*\))?)*",
    re.DOTALL,
)
_ARITHMETIC = (
    (r"(?<=[0-9]),(?=[0-9]{2,3}(?![0-9]))", ""), (r"%", "/100"), (r"\bplus\b", "+"), (r"\bdivided by\b", "/"), (r"\^", "**"),
    (r"\b(?:of|times|multiplied by)\b|(?<=[0-9)])\s?x\s?(?=[0-9(])", "*"),
    (r"/? ?(?<![\\a-z])(?!pi\b)[a-z]{2,}(?:\*\*-?[0-9])?|[:,;#]", " "),
)  # fmt: skip
_OPERATORS: dict[type, Callable[..., Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_JOINT = re.compile(r"\W*(?:or|and|to|through)?\W*", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?;])\s+")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|<answer>", re.IGNORECASE)
_CUE = re.compile(
    r"\b(?:(?:answer|choice|option|solution)\b\W{0,3}?(?:\s*(?:is|must be|should be|has to be|would be)\b|\s*[:=])"
    r"|(?P<weak>(?:choose|chose|pick|select|go(?:ing)? with|it(?:'s| is| must be| has to be)|therefore|hence|thus|so)\b))"
    r"|答案\s?(?:应该)?(?:是|为|為|:)|(?<![\w'])\(?(?P<said>[A-Z])\)? (?:is|must be) (?:(?:the|clearly|indeed"
    r"|therefore|definitely) ){0,2}"
    r"(?:correct|right|best|true|answer)\b",
    re.IGNORECASE,
)
_ARTICLE = (
    r"(?! (?!seems|looks|appears|false|wrong|incorrect|because|since|as|for|is|and|or|but|not|with|due|given)[a-z])"
)
_FILLER = r"[\W_]*(?i:(?:clearly|definitely|indeed|therefore|probably|likely|then|thus|option|choice|letter|the|either)\W+){0,3}"
_WORD_FOLLOWS = re.compile(f"(?!{_ARTICLE})")
_STATED = re.compile(rf"{_FILLER}\(?(?:(A{_ARTICLE}|[B-Z])|([a-z])(?=\W*$|[).:\]]))(?!\w|'\w)")
_SEVERAL = re.compile(
    rf"(?:[\s()]*|\W*(?:[,/&;+|]|(?i:or|and|as well as|plus|otherwise|alternatively))\W*)"
    rf"(?:(?:maybe|perhaps|possibly|even|else|also) )*(?:A{_ARTICLE}|[B-HJ-Z])"
    r"(?!\w|'\w| ?(?:is|was|would|has|does|can)\b)"
)
_DENIED = re.compile(
    r"\s*\?|\W*(?:(?:is|was|are|seems|looks|appears) (?:not|no longer|never|wrong|incorrect|false|out"
    r"|ruled out|possible|plausible)\b"
    r"|isn't|wasn't|(?:can't|cannot|can not|couldn't|could not) be\b)|[ :=()*-]*(?:(?:wrong|incorrect"
    r"|false)\b|no\b(?! \w)|[✗✘✖❌❎])",
    re.IGNORECASE,
)
_WITHDRAWN = re.compile(
    r"(?:^|[.!?,;:\n-])\W{0,4}(?:wait\b|actually\b|scratch that|correction\b|sorry\b|oops\b|i meant\b"
    r"|no(?: wait\b|\s?[,.;:!]|\W*$)"
    r"|(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|false|not (?:right|correct|true)))"
    r"|^\W{0,4}(?:(?:is|was) (?:not|wrong|incorrect|false)\b|isn't\b|wasn't\b)",
    re.IGNORECASE,
)
_DENIES = re.compile(
    r"(?:\bnot|cannot|n't|no longer|neither|nor|than|instead of|except|thing but|all but|(?:rul(?:e|es|ed|ing) out|eliminate[sd]?"
    r"|exclude[sd]?|reject(?:s|ed)?|discard(?:s|ed)?))\W+(?:(?:be|option|choice|an?|the)\W+){0,2}\(?$",
    re.IGNORECASE,
)
_DOUBTED = re.compile(
    r"(?:n't|\b(?:not|never|unlikely|doubt))\b(?:(?!\bbut\b)[^.,;\n]){0,25}$|\b(?:wrong|incorrect) $"
    r"|not the case that[^.;\n]{0,25}$",
    re.IGNORECASE,
)
_REFUTED = re.compile(
    r"(?:\bnot|cannot be|n't|n't be)[\s$\\(*:]*$|\b(?:wrong|incorrect) (?:(?:answer|result|value)\s*)?(?:is|:|=)?[\s$\\(*:]*$"
    r"|not (?:the case|true) that[^.;\n]*$",
    re.IGNORECASE,
)
"""Of the text before a box or an answer."""
_LETTER = re.compile(rf"(?<!\w)(?<!\w')([A-Z])(?!\w|'\w){_ARTICLE}")
_ALONE = re.compile(r"(?:option|choice)?[\W_]*([A-Za-z])(?:[^\w?]|_)*", re.IGNORECASE)
_WORD = re.compile(r"(?<!\w)-?[0-9]+(?:\.[0-9]+)?(?![^\W_])|[^\W_]+")
_ARTICLES = frozenset(("a", "an", "the"))


def plain(text: str, braces: bool = False) -> str:
    """Return the text without Markdown and LaTeX's wrappers, with ASCII signs; with `braces` those of LaTeX stay."""
    text = unicodedata.normalize("NFKC", _VULGAR.sub(r" \g<0>", text.translate(_SIGNS))).translate(_SIGNS)
    for pattern, new in _MARKUP:
        text = pattern.sub(new, text)
    return (text if braces else text.translate(_BRACES)).strip()


def number_in(statement: str) -> Fraction | None:
    """Return the number that the statement says, whatever its unit; None without one, with several, with a hedge or a term."""
    if len(statement) > MAX_STATEMENT or statement.count("{") > statement.count("}"):
        return None
    *before, text = re.split(r"=|\\approx|≈", re.sub(r"\b(?:minus|negative) (?=[0-9])", "-", plain(statement)))
    text = _UNIT.sub(" ", text)
    values = [_value(found) for found in _NUMBER.finditer(text)]
    if len(values) != 1 or _NO_NUMBER.search(_without_fractions(text)):
        return None
    [value] = values
    return value if all(is_name(part) or _evaluated(part) == value for part in before) else None


def is_name(left: str) -> bool:
    """Return whether the left side of an equation, in plain text, names a quantity: words, "x", "f(2)", "m + n"."""
    return _NAME.fullmatch(left) is not None


def _evaluated(text: str) -> Fraction | None:
    """Return the value of arithmetic in which words are units; None for anything else."""
    for pattern, new in _ARITHMETIC:
        text = re.sub(pattern, new, text, flags=re.IGNORECASE)
    try:
        return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value_of(node.operand))
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError
    left, right = _value_of(node.left), _value_of(node.right)
    if isinstance(node.op, ast.Pow) and (right.denominator > 1 or abs(right) > 20 or len(str(left)) > 40):
        raise ValueError
    return _OPERATORS[type(node.op)](left, right)


def units_of(statement: str) -> list[str]:
    """Return the units behind the number of a statement that says one, in one spelling."""
    text = re.split(r"=|\\approx|≈", plain(statement))[-1]
    text = re.sub(r"\b(square|cubic) ([a-z]+)", lambda found: f"{found[2]}^{2 if found[1] == 'square' else 3}", text)
    found = re.findall(r"(?<![A-Za-z\\])(?!e[-+]?[0-9])([A-Za-z]+)(\^-?[0-9])?", text)
    return [_UNITS.get(name.lower().removesuffix("s"), name.lower().removesuffix("s")) + power for name, power in found]


def last_number(text: str) -> Fraction | None:
    """Return the last number of the text; None where it is one of several that stand together, or a hedge."""
    line = next((line for line in reversed(text.splitlines()) if re.search("[0-9]", line)), "")[-MAX_STATEMENT:]
    sentence = next((part for part in reversed(_SENTENCE.split(plain(line))) if re.search("[0-9]", part)), "")
    if (value := number_in(sentence)) is not None:
        return value
    found = list(_NUMBER.finditer(sentence))[-2:]
    if len(found) < 2 or _JOINT.fullmatch(sentence, found[0].end(), found[1].start()):
        return None
    return number_in(sentence[found[0].end() :])


def _value(found: re.Match[str]) -> Fraction | None:
    sign, whole, top, bottom, over, under = found.groups()
    parts = [part and part.replace(",", "").replace(" ", "") for part in (whole, top, bottom, over, under)]
    try:
        if whole:
            value = Fraction(parts[0]) + Fraction(int(parts[1]), int(parts[2]))
        else:
            value = Fraction(parts[3]) / Fraction(parts[4] or 1)
    except (ValueError, ZeroDivisionError):  # also of more than 4300 digits
        return None
    return -value if sign and "-" in sign else value


def _without_fractions(text: str) -> str:
    return _NUMBER.sub(lambda found: re.sub(r"/|(?<=[eE])\+", "", found[0]), text).removeprefix("+")


def choice_in(text: str, letters: str, choices: Sequence[str] = ()) -> str | None:
    """Return the letter that the text decides for: by its last explicit verdict, or because it is the only one, or its choice's
    text the only one, that is left standing. None where several are, or none."""
    text = plain(_BOX.sub("\nAnswer: {", text))
    is_doubted, cues = False, deque(_CUE.finditer(text), _MAX_CUES)
    is_explicit = any(cue["weak"] is None for cue in cues)
    for cue in reversed(cues):
        at = cue.start() if cue["said"] else cue.end()
        statement = text[at : at + MAX_STATEMENT].strip().partition("\n")[0]
        letter = _stated(statement, letters, choices)
        if letter and is_withdrawn(text[at + len(statement) : at + MAX_STATEMENT]):
            letter = ""
        if letter is None and not (cue["weak"] and is_explicit):
            letter = _mentioned(statement, letters, choices)
        if not letter and (letter is None or (cue["weak"] and is_explicit)):
            continue
        if not _DOUBTED.search(text[max(0, cue.start() - 40) : cue.start()]):
            return letter or None
        is_doubted = True
    if is_doubted:
        return None
    if (alone := _ALONE.fullmatch(text)) is not None:
        return alone[1].upper() if alone[1].upper() in letters else None
    standing = [
        found[1] for found in _LETTER.finditer(text) if found[1] in letters and not _is_denied(text, *found.span())
    ]
    if not standing:
        return _mentioned(text, letters, choices) or None
    lines = [line for line in text.splitlines() if line.strip()]
    closes = _ALONE.fullmatch(lines[-1]) is not None and _ALONE.fullmatch(lines[-2] if lines[1:] else "") is None
    return standing[-1] if len(set(standing)) == 1 or closes else None


def is_withdrawn(rest: str) -> bool:
    """Return whether the text behind an answer takes it back ("Wait, ...", "No, ...", "is wrong")."""
    return _WITHDRAWN.search(plain(rest[:MAX_STATEMENT])) is not None


def is_denied(before: str) -> bool:
    """Return whether the text before an answer denies it ("not", "the wrong answer is")."""
    return _REFUTED.search(before[-60:]) is not None


def _stated(statement: str, letters: str, choices: Sequence[str]) -> str | None:
    """Return the letter that begins the statement, "" for one that is no choice, not the only one, or doubted, or that another
    choice's text follows."""
    found = _STATED.match(statement)
    if found is None:
        return None
    letter, rest = (found[1] or found[2]).upper(), statement[found.end() :]
    if _DENIED.match(rest):
        return "" if rest.startswith("?") else None
    named = words(re.split(r"[.,;](?:\s|$)", rest.lstrip(" ).:]*-"), maxsplit=1)[0])
    owner = next((at for at, text in zip(letters, choices, strict=False) if words(plain(text)) == named), None)
    if owner is None and _WORD_FOLLOWS.match(rest):
        return None
    is_one = letter in letters and owner in (None, letter) and not _SEVERAL.match(rest) and not _WITHDRAWN.search(rest)
    return letter if is_one else ""


def _is_denied(text: str, start: int, end: int) -> bool:
    return _DENIES.search(text[max(0, start - 30) : start]) is not None or _DENIED.match(text, end) is not None


def words(text: str) -> str:
    """Return the words of the text in lower case, without articles, between spaces."""
    return " ".join(["", *(word for word in _WORD.findall(text.lower()) if word not in _ARTICLES), ""])


def _mentioned(text: str, letters: str, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice whose text is mentioned and not denied, "" of several."""
    by_words = {words(plain(choice)): letter for letter, choice in zip(letters, choices, strict=False)}
    names = [re.escape(name) for name in sorted(by_words, key=len, reverse=True) if name.strip()]
    said = words(text).replace("n t ", "n't ")
    if not names:
        return None
    found = re.finditer(f"(?={'|'.join(f'({name})' for name in names)})", said)
    standing, end = set[str](), 0
    for match in found:
        name = next(group for group in match.groups() if group)
        if match.start() < end:
            continue
        end = match.start() + len(name) - 1
        if not _is_denied(said, match.start() + 1, end):
            standing.add(by_words[name])
    return None if not standing else standing.pop() if len(standing) == 1 else ""
