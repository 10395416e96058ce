"""Answers that a checker must survive: huge, nested, slow to simplify, of control characters, torn; the same for a seed."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator

_WORDS = [
    "\\frac", "\\sqrt", "\\sum", "\\int", "\\left(", "\\right)", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "^", "_", "{",
    "}", "$", "x", "y", "\\pi", "\\infty", "\\binom", "!", "=", "<", "\\leq", "\\cup", "\\in", "7", "12", ".", ",", "%",
    "\\text{", "\\lim", "\\log", "\\boxed{", "\\sin", "|", "[", "]", "(", ")", "+", "-", "\\cdot", "\\times", "/",
]  # fmt: skip


def _number(draw: random.Random, digits: int) -> str:
    return "".join(draw.choices(string.digits, k=draw.randint(1, digits))).lstrip("0") or "7"


def _tower(draw: random.Random) -> str:
    height = draw.randint(2, 9)
    return "^{".join(_number(draw, 4) for _ in range(height)) + "}" * (height - 1)


def _flat_tower(draw: random.Random) -> str:
    return "(" * 6 + _number(draw, 3) + "".join(f")^{{{_number(draw, 5)}}}" for _ in range(6))


def _product_exponent(draw: random.Random) -> str:
    return f"{_number(draw, 3)}^{{" + "*".join(_number(draw, 6) for _ in range(draw.randint(2, 6))) + "}"


def _factorial(draw: random.Random) -> str:
    form = draw.choice(
        ("{}!", "({})!", "{}!!", "{}!!!", "\\left({}\\right)!", "{}! + 1", "\\frac{{{}!}}{{7}}", "10^{{{}!}}")
    )
    return form.format(_number(draw, 9))


def _binomial(draw: random.Random) -> str:
    return f"\\binom{{{_number(draw, 9)}}}{{{_number(draw, 8)}}}"


def _sum(draw: random.Random) -> str:
    body = draw.choice(("k^{k}", "\\frac{1}{k}", "k!", "\\sin(k)", "2^{k}", "\\sqrt{k}", "\\frac{(-1)^k}{k!}"))
    sign = draw.choice(("\\sum", "\\prod"))
    return f"{sign}_{{k=1}}^{{{draw.choice((_number(draw, 8), 'n', chr(92) + 'infty'))}}} {body}"


def _integral(draw: random.Random) -> str:
    body = draw.choice(
        ("e^{-x^2}", "\\frac{\\sin(x)}{x}", "x^{x}", "\\sqrt{\\tan(x)}", "\\ln(x)^{5} \\cos(x)", "\\frac{1}{x^{7}+x+1}")
    )
    return f"\\int_{{0}}^{{{draw.choice(('1', 'a', chr(92) + 'pi', chr(92) + 'infty'))}}} {body} dx"


def _trigonometric(draw: random.Random) -> str:
    functions = ("\\sin", "\\cos", "\\tan", "\\sec", "\\log", "\\arctan")
    terms = (
        f"{draw.choice(functions)}^{{{draw.randint(2, 9)}}}({draw.randint(2, 40)}{draw.choice('xyz')})"
        for _ in range(14)
    )
    return "".join(term + draw.choice("+-") for term in terms) + "1"


def _polynomial(draw: random.Random) -> str:
    return "(x+y+z+1)^{" + _number(draw, 4) + "}" + f"(x-y+{_number(draw, 3)})^{{{_number(draw, 3)}}}"


def _radicals(draw: random.Random) -> str:
    depth = draw.randint(3, 60)
    return "\\sqrt{" + f"{_number(draw, 2)}+\\sqrt{{" * depth + "2" + "}" * (depth + 1)


def _denested(draw: random.Random) -> str:
    return "+".join(
        f"\\sqrt[{draw.randint(2, 9)}]{{{_number(draw, 3)}+\\sqrt{{{_number(draw, 3)}}}}}" for _ in range(7)
    )


def _matrix(draw: random.Random) -> str:
    size = draw.randint(2, 12)
    rows = " \\\\ ".join(" & ".join(_number(draw, 3) for _ in range(size)) for _ in range(size))
    return f"\\begin{{pmatrix}}{rows}\\end{{pmatrix}}" + draw.choice(("", "^{-1}", "^{99999}", "^{T}"))


def _set(draw: random.Random) -> str:
    return "\\{" + ",".join(f"\\sqrt{{{_number(draw, 3)}}}" for _ in range(draw.randint(5, 200))) + "\\}"


def _intervals(draw: random.Random) -> str:
    return " \\cup ".join(f"({_number(draw, 3)}, \\sqrt{{{_number(draw, 5)}}}]" for _ in range(draw.randint(2, 40)))


def _digits(draw: random.Random) -> str:
    return "".join(draw.choices(string.digits + ".,", k=draw.randint(100, 20_000)))


def _scientific(draw: random.Random) -> str:
    return f"{_number(draw, 3)} \\times 10^{{{_number(draw, 9)}}}" + draw.choice(("", f"e{_number(draw, 9)}"))


def _deep(draw: random.Random) -> str:
    opened, closed = draw.choice(
        (("{", "}"), ("(", ")"), ("\\frac{1}{", "}"), ("\\left(", "\\right)"), ("\\boxed{", "}"), ("|", "|"))
    )
    depth = draw.randint(5, 5000)
    return opened * depth + "7" + closed * draw.choice((depth, depth - 1, 0))


def _controls(draw: random.Random) -> str:
    return "".join(
        chr(draw.choice((*range(32), 127, 0x202E, 0x2028, 0xFEFF, 0x1F600, 0xE000, 49, 50))) for _ in range(200)
    )


def _torn(draw: random.Random) -> str:
    return "".join(draw.choices(_WORDS, k=draw.randint(3, 120)))


def _repeated(draw: random.Random) -> str:
    return draw.choice(
        ("\\boxed{", "$", "Answer: ", "1/", "9^", "<answer>", "</think>", "\\text{", "1,", "- ", "=", "\\frac")
    ) * draw.randint(50, 20_000)


def _equations(draw: random.Random) -> str:
    return " = ".join(
        f"x^{{{draw.randint(2, 9)}}} + {_number(draw, 4)} x y - \\sqrt{{{draw.choice('xyz')}}}"
        for _ in range(draw.randint(2, 20))
    )


_CALCULUS = [
    "\\lim_{x \\to 0} \\frac{\\sin(\\tan(x)) - \\tan(\\sin(x))}{x^{7}}", "\\frac{d}{dx} x^{x^{x}}", "\\log_{2}(3^{99999})",
    "\\gcd(12345678901234567890, 98765432109876543210)", "7 \\mod 3", "\\lfloor 9^{99} \\rfloor", "\\zeta(3)",
    "\\Gamma(99999)", "\\lim_{n \\to \\infty} (1+1/n)^{n^{2}}",
]  # fmt: skip


def _calculus(draw: random.Random) -> str:
    return draw.choice(_CALCULUS)


KINDS: tuple[Callable[[random.Random], str], ...] = (
    _tower, _flat_tower, _product_exponent, _factorial, _binomial, _sum, _integral, _trigonometric, _polynomial, _radicals,
    _denested, _matrix, _set, _intervals, _digits, _scientific, _deep, _controls, _torn, _repeated, _equations, _calculus,
)  # fmt: skip
LABELS = (
    "72",
    "\\frac{1}{2}",
    "x^2+1",
    "\\sqrt{2}",
    "(1,2)",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
    "x=5",
    "\\sin(x)+1",
    "\\{1,2\\}",
)
_FORMS = ("\\boxed{{{}}}", "So it is ${}$", "{}", "<think>x</think> <answer>{}</answer>", "#### {}", "Answer: {}")


def hostile(number: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """(kind, response, label), each kind as often."""
    draw = random.Random(seed)
    for at in range(number):
        kind = KINDS[at % len(KINDS)]
        yield kind.__name__.lstrip("_"), draw.choice(_FORMS).format(kind(draw)), draw.choice(LABELS)
