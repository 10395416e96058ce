r"""What the sources of the hub's checkers say of responses: (response, label, their score); and where ours differ, with why.

Math-Verify: the pairs of its tests (tests/test_all.py) that are short. DAPO, DeepScaleR, GPQA, multiple choice, geo3k and
openr1mm: what the scorers of verl, slime and Relax return for these. GSM8K: verl's strict and flexible readers. F1: SQuAD's and
HotpotQA's.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    response: str
    label: Any
    theirs: float
    metadata: dict[str, Any] = {}  # noqa: RUF012 - never changed
    args: dict[str, Any] = {}  # noqa: RUF012


MATH = [
    # numbers
    Case("-5", "-5", 1),
    Case("7,425,000", "7425000", 1),
    Case("1 000", "1000", 1),
    Case("1000.0", "1000", 1),
    Case("1,000.0", "1000.0", 1),
    Case(".4", "0.4", 1),
    Case("1,000.99", "1000.99", 1),
    Case("$1,000.99", "1000.99", 1),
    Case("the number is not 10 which is 1,000.99€", "1000.99", 1),
    Case("so the number is 10 which is 1,000.99m²", "1000.99", 1),
    Case("1.22", "1,22", 1),
    Case("0.111", "0,111", 1),
    Case("AZYUK2A", "2", 0),
    # fractions, intervals, notation
    Case("\\frac{10}{9}", "10/9", 1),
    Case("-\\frac{10}{9}", "-10/9", 1),
    Case("$[0,1)$", "$[0,1)$", 1),
    Case("$[0,1)$", "$[0,9)$", 0),
    Case("$[0,9)$", "$(0,9)$", 0),
    Case("$-[0,1)$", "$1$", 0),
    Case("Answer \\[ 9 \\]", "$9$", 1),
    Case("Answer $ 9 $", "$9$", 1),
    Case("Answer $$ 9 $$", "$9$", 1),
    Case("Answer \\( 9 \\)", "$9$", 1),
    Case("Answer \\( (9+1) \\)", "$10$", 1),
    Case("Answer \\[ \n 9 \n \\]", "$9$", 1),
    Case("Answer $ \\frac{1}{2} \\$ = \\frac{10}{9} $", "$10/9$", 1),
    Case("$\\frac13 $", "$1/3$", 1),
    Case("$\\frac3{3} $", "$1$", 1),
    Case("$\\sqrt3 $", "$\\sqrt{3}$", 1),
    Case("$\\cfrac{1}{3} $", "$1/3$", 1),
    Case("$\\dfrac{1}{3} $", "$1/3$", 1),
    Case("$ 1/3 $", "$1/3$", 1),
    Case("$\\left( \\frac{1}{3} \\right)$", "$1/3$", 1),
    Case("$\\boxed{\\frac{1}{3}}$", "$1/3$", 1),
    Case("$\\frac{1}{3} \\text{meters}$", "$1/3$", 1),
    Case("$k = \\frac{1}{3}$", "$1/3$", 1),
    # per cent
    Case("28 percent", "$28\\%$", 1),
    Case("28 pct", "$28\\%$", 1),
    Case("28 %", "$28\\%$", 1),
    Case("$28$ %", "$28\\%$", 1),
    Case("$\\boxed{28}$ pct", "$28\\%$", 1),
    Case("$\\boxed{28 percent}", "$28\\%$", 1),
    Case("28", "$28\\%$", 1),
    Case("28", "$0.28$", 0),
    Case("28", "$28/100$", 0),
    Case("28/100", "$28$", 0),
    Case("28", "$\\frac{28}{100}$", 0),
    # from solutions of MATH
    Case("Thus $x-p=\\boxed{2-2p}$.", "$2-2p$", 1),
    Case("making for a total loss of $\\boxed{28\\%}$.", "$28 \\%$", 1),
    Case("is located between $\\boxed{12 $ and $13 }. $", "\\boxed{12\\text{ and }13}", 1),
    Case("$=2+\\frac{5}{3}+1=\\boxed{\\frac{14}{3}}$", "$\\frac{14}{3}$", 1),
    Case("Therefore, $\\boxed{\\text{Evelyn}}$ is our answer.", "$\\text{Evelyn}$", 1),
    Case("The distance is $\\boxed{125\\textnormal{ miles}}.$", "$125$ miles", 1),
    Case(
        "The solution set is $\\boxed{[-1, -\\tfrac12) \\cup (-\\tfrac12, 0) \\cup (0, 1) \\cup (1, \\infty)}.$",
        "$[-1, -\\frac{1}{2}) \\cup (-\\frac{1}{2}, 0) \\cup (0, 1) \\cup (1, \\infty)$",
        1,
    ),
    Case("The answer is $\\boxed{\\sqrt 2+\\sqrt 5}$", "$\\sqrt{2}+\\sqrt{5}$", 1),
    Case("Therefore $\\boxed{\\frac94\\pi}$.", "$\\frac{9}{4}\\pi$", 1),
    Case("x \\in \\boxed{\\{-1\\} \\cup [0,7)}.$", "x \\in \\boxed{\\{-1\\} \\cup [0,7)}.$", 1),
    # relations
    Case("Therefore $x \\geq 5$ is the solution.", "$x >= 5$", 1),
    Case("We find that $x \\lt 3$.", "$x < 3$", 1),
    Case("Thus $x <= 2$ is our answer.", "$x \\leq 2$", 1),
    Case("We find that $x \\neq 3$.", "$x != 3$", 1),
    Case("Therefore $x < 5$ is the solution.", "$x > 5$", 0),
    Case("The solution is $x \\leq 5$", "$x \\geq 5$", 0),
    Case("$5 \\geq x$", "$x \\leq 5$", 1),
    Case("$x = 5+5+1 = 7 =11$", "$x = 11$", 1),
    Case("$11a+c$", "$7 = 11a+c$", 0),
    Case("$x=11$", "$11$", 1),
    Case("$x\\approx11$", "$11$", 1),
    Case("$x=1/3\\approx1.3$", "$1/3$", 1),
    Case("$-x > -1$", "$x < 1$", 1),
    Case("$x > -1$", "$x < 1$", 0),
    Case("$0$", "$a +3z = 0$", 0),
    Case("$1$", "$2x + z = 1$", 0),
    Case("$1$", "$k=1$", 1),
    Case("$y=-\\frac{1}{2}x+\\frac{3}{4}$", "$2x+4y-3=0$", 1),
    Case("$x^2/16 + y^2/12 = 1/4$", "$x^2/4 + y^2/3 = 1$", 1),
    # matrices
    Case(
        "is $ \\begin{pmatrix}1 & 0 \\\\ 0 & 1\\end{pmatrix} $.", "$\\begin{pmatrix}1 & 0 \\\\ 0 & 1\\end{pmatrix}$", 1
    ),
    Case(
        "zero: $ \\begin{pmatrix}0 & 0 \\\\0 & 0\\end{pmatrix} $", "$\\begin{bmatrix}0 & 0 \\\\0 & 0\\end{bmatrix}$", 1
    ),
    Case(
        "$\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix} + \\begin{pmatrix}5 & 6 \\\\ 7 & 8\\end{pmatrix}$",
        "$\\begin{pmatrix}6 & 8 \\\\ 10 & 12\\end{pmatrix}$",
        1,
    ),
    Case("$\\begin{pmatrix}1 & 2 \\\\ 3 & 5\\end{pmatrix}$", "$\\begin{pmatrix}1 & 2 \\\\ 3 & 4\\end{pmatrix}$", 0),
    # expressions
    Case("$0.0833333333333333$", "$\\frac{1}{12}$", 1),
    Case("$(1,4.5)$", "$(1,\\frac{9}{2})$", 1),
    Case("$\\frac{x}{7}+\\frac{2}{7}$", "$\\frac{x+2}{7}$", 1),
    Case("$\\sec^2(y)$", "$\\tan^2(y)+1$", 1),
    Case("$-34x-45y+20z-100=0$", "$34x+45y-20z+100=0$", 1),
    Case(
        "$\\frac{\\sqrt{\\sqrt{11}+\\sqrt{194}}}{2\\sqrt{33}+15}$",
        "$\\frac{\\sqrt{\\sqrt{11}+\\sqrt{194}}}{15+2\\sqrt{33}}$",
        1,
    ),
    Case("$(+5)(b+2)$", "$(a+5)(b+2)$", 0),
    Case("$\\frac{1+\\sqrt{5}}{2}$", "$2$", 0),
    Case("$1$", "$1\\sqrt{19}$", 0),
    Case("$x+1$", "$x+2n+1$", 0),
    Case("Therefore, the probability that Alice wins the game is 2/3. <|im_start|>user", "$2/3$", 1),
    Case("we find that the domain of $q(x)$ is $(0, 1)$. I hope it is correct.", "$[0,1)$", 0),
]
DAPO = [
    Case("We solve the equation step by step.\nAnswer: 9", "9", 1),
    Case("We solve the equation step by step.\nAnswer: 8", "9", -1),
    Case("The answer is 9", "9", -1),
    Case("Answer: $9$", "9", 1),
    Case("Answer: \\boxed{9}", "9", 1),
    Case("Answer: $\\boxed{9}$.", "9", 1),
    Case("answer : x = 1,234 dollars", "1234", 1),
    Case("Answer: 3\nAnswer: 4", "4", 1),
    Case("Answer: 4\nAnswer: 3", "4", -1),
    Case("Answer: 34", "34.0", 1),
    Case("Answer: $\\frac{1}{2}$", "34", -1),
    Case("Answer: 7" + "." * 300, "7", -1),
    Case("\\boxed{9}", "9", -1),
    Case("Answer: 90^\\circ", "90", 1),
    Case("Answer: 12 \\text{ cm}", "12", 1),
    Case("", "9", -1),
]
GSM8K = [
    Case("So she has 6 * 12 = 72.\n#### 72", "72", 1),
    Case("So she has 6 * 12 = 72.", "72", 0),
    Case("#### 1,234", "1234", 1),
    Case("#### -3", "-3", 1),
    Case("####72", "72", 0),
    Case("#### 72.00", "72", 0),
    Case("#### $72", "72", 0),
    Case("#### 72.", "72", 0),
    Case("#### 71\n#### 72", "72", 1),
    Case("#### x", "72", 0),
    Case("The answer is 72", "72", 1, args={"anywhere": True}),
    Case("72 of 100", "72", 0, args={"anywhere": True}),
    Case("none", "72", 0, args={"anywhere": True}),
]
DEEPSCALER = [
    Case("<think>It is 2</think>The answer is \\boxed{2}", "2", 1),
    Case("<think>It is 2</think>The answer is \\boxed{3}", "2", 0),
    Case("The answer is \\boxed{2}", "2", 0),
    Case("<think>\\boxed{2}</think>The answer is 2", "2", 0),
    Case("###Response \\boxed{2}", "2", 1),
    Case("</think>\\boxed{\\frac{1}{2}}", "1/2", 1),
    Case("</think>\\boxed{0.5}", "\\frac{1}{2}", 1),
    Case("</think>\\boxed{1,000}", "1000", 1),
    Case("</think>\\boxed{(1,2)}", "(1, 2)", 1),
    Case("</think>\\boxed{(2,1)}", "(1, 2)", 0),
    Case("</think>\\boxed{2", "2", 0),
    Case("</think>\\boxed{2}", "", 0),
    Case("</think>\\boxed{2}", "\\boxed{2}", 1),
    Case("</think>\\boxed{2}", 2, 1),
]
GEO3K = [
    Case("<think>x</think> It is \\boxed{5}", "5", 1),
    Case("It is \\boxed{5}", "5", 0.9),
    Case("<think>x</think> It is \\boxed{6}", "5", 0.1),
    Case("It is 5", "5", 0),
    Case("<think>x</think> It is \\boxed{3 \\sqrt { 2 }}", "3\\sqrt{2}", 1),
    Case("so <think>x</think> It is \\boxed{5}", "5", 0.9),
]
OPENR1MM = [
    Case("<think>x</think>\n<answer>B</answer>", "<answer>B</answer>", 1),
    Case("<think>x</think>\n<answer>A</answer>", "<answer>B</answer>", 0),
    Case("<think>x</think>\n<answer>$\\frac{2}{4}$</answer>", "<answer>$0.5$</answer>", 1),
    Case("<answer>B</answer><answer>B</answer>", "<answer>B</answer>", 0),
    Case("<think>a</think><think>b</think><answer>B</answer>", "<answer>B</answer>", 0),
    Case("B", "B", 1),
    Case("<answer>5</answer>", "$5$", 1),
    Case("<answer>two cats</answer>", "<answer>two cats</answer>", 1),
]
MULTIPLE_CHOICE = [
    Case("<answer>B</answer>", "<answer>B</answer>", 1),
    Case("<answer> B </answer>", "<answer>B</answer>", 1),
    Case("<answer>A</answer>", "<answer>B</answer>", 0),
    Case("B", "<answer>B</answer>", 0),
    Case("<answer>B. Paris</answer>", "<answer>B</answer>", 0),
    Case("<answer>A</answer> no, <answer>B</answer>", "<answer>B</answer>", 0),
    Case("<answer>red car</answer>", "<answer>red car</answer>", 1),
]
_CITIES = {"choices": ["Rome", "Paris", "Oslo", "Bern"]}
GPQA = [
    Case("The answer is B", "B", 1, _CITIES),
    Case("Answer: B", "B", 1, _CITIES),
    Case("Answer: C", "B", 0, _CITIES),
    Case("<think>Answer: C</think> Answer: B", "B", 1, _CITIES),
    Case("I think B is correct", "B", 1, _CITIES),
    Case("It is (B)", "B", 1, _CITIES),
    Case("B", 1, 1, _CITIES),
    Case("B", "Paris", 1, _CITIES),
    Case("It must be Paris.", "B", 1, _CITIES),
    Case("It must be Rome.", "B", 1, _CITIES),
    Case("Answer: Z", "B", 0, _CITIES),
    Case("The answer is (B)", "B", 1),
    Case("", "B", 0, _CITIES),
    Case("The answer is clearly B", "B", 0, _CITIES),
]
F1 = [
    Case("the cat sat", "a cat", 2 / 3),
    Case("Cat!", "the cat", 1),
    Case("dog", "cat", 0),
    Case("yes", "no", 0),
    Case("yes it is", "yes", 0),
    Case("Denver Broncos won", "Denver Broncos", 0.8),
    Case("", "cat", 0),
]
PUBLISHED = {
    "math": MATH,
    "dapo": DAPO,
    "gsm8k": GSM8K,
    "deepscaler": DEEPSCALER,
    "geo3k": GEO3K,
    "openr1mm": OPENR1MM,
    "multiple_choice": MULTIPLE_CHOICE,
    "gpqa": GPQA,
    "f1": F1,
}
DIFFERS = {
    "math": {"1.22": "a comma between digits is a list, as in MATH's answers, or a thousand, and no decimal point"},
    "openr1mm": {"B": "an answer stands in <answer>"},
}
"""Checker -> response -> why ours scores another way, with `as_published` where it has that."""
