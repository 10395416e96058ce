"""Rewards with names: what `reward.function` takes in the place of a function of the user's.

answers        one right answer, as text: exact, boxed, gsm8k, multiple_choice, gpqa, f1; and how answers are found in responses
minerva        dapo: answers brought to one form; symbolic, compared as mathematics: math, deepscaler, geo3k, openr1mm
instructions   ifeval, ifbench: what a program can check of instructions; processor_time, a bound on what it may take
programs       code: a program's tests, run in the sandbox
service        remote: what an HTTP service gives
gym            reasoning_gym: what that package says of answers to its own rows
forms          the form alone: tags, format; and random, a control
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_NAMES = {
    "answers": ("exact", "boxed", "gsm8k", "multiple_choice", "gpqa", "f1"),
    "minerva": ("dapo",),
    "symbolic": ("math", "deepscaler", "geo3k", "openr1mm"),
    "programs": ("code",),
    "instructions": ("ifeval", "ifbench"),
    "service": ("remote",),
    "gym": ("reasoning_gym",),
    "forms": ("tags", "format", "random"),
}
_FACE = {name: f"{__name__}.{file}" for file, names in _NAMES.items() for name in names}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
