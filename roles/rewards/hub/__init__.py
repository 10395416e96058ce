"""Rewards with names: what `reward.function` takes in the place of a function of the user's.

named          what holds for all that judge answers: thoughts are cut off first; published, what their sources score
statements     the one number or choice that a statement says
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

_FACE = {
    "exact": "rondo.roles.rewards.hub.answers",
    "boxed": "rondo.roles.rewards.hub.answers",
    "gsm8k": "rondo.roles.rewards.hub.answers",
    "multiple_choice": "rondo.roles.rewards.hub.answers",
    "gpqa": "rondo.roles.rewards.hub.answers",
    "f1": "rondo.roles.rewards.hub.answers",
    "dapo": "rondo.roles.rewards.hub.minerva",
    "math": "rondo.roles.rewards.hub.symbolic",
    "deepscaler": "rondo.roles.rewards.hub.symbolic",
    "geo3k": "rondo.roles.rewards.hub.symbolic",
    "openr1mm": "rondo.roles.rewards.hub.symbolic",
    "code": "rondo.roles.rewards.hub.programs",
    "ifeval": "rondo.roles.rewards.hub.instructions",
    "ifbench": "rondo.roles.rewards.hub.instructions",
    "remote": "rondo.roles.rewards.hub.service",
    "reasoning_gym": "rondo.roles.rewards.hub.gym",
    "tags": "rondo.roles.rewards.hub.forms",
    "format": "rondo.roles.rewards.hub.forms",
    "random": "rondo.roles.rewards.hub.forms",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
