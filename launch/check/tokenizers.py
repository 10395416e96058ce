"""Whether two tokenizers mean the same by the same ids: what a teacher needs to judge the policy's own tokens.

Owns how that is found: by their vocabularies, id by id, by a text that both encode, and by their special ids. Does not own whose
they are.

    why_different(mine, other)   ->   "", or "the id 17 for ' the' in the policy's vocabulary and for 'of' in the teacher's"
"""

from __future__ import annotations

from typing import Any

PROBE = 'Sort 3142 -> 1234; f(x) = {a: [1, 2]}\n\n\tthe naïve café, 数学 и код.  "Don\'t" 🙂 0.125e-3'
"""Digits, brackets, white space, accents, other scripts: where tokenizers of one vocabulary still cut otherwise."""
_SPECIAL = ("bos_token_id", "eos_token_id")


def why_different(mine: Any, other: Any) -> str:
    """The first difference by which the policy's tokens are not the teacher's, in words; empty where there is none. Tokens that
    the teacher alone has are none."""
    own, others = ({number: word for word, number in each.get_vocab().items()} for each in (mine, other))
    for number in sorted(own):
        if own[number] != others.get(number):
            theirs = repr(others[number]) if number in others else "nothing"
            return f"the id {number} for {own[number]!r} in the policy's vocabulary and for {theirs} in the teacher's"
    made = [each(PROBE, add_special_tokens=False)["input_ids"] for each in (mine, other)]
    if made[0] != made[1]:
        at = next((i for i, pair in enumerate(zip(*made, strict=False)) if len(set(pair)) > 1), min(map(len, made)))
        return f"another cut of a probe text, {made[0][at : at + 4]} and {made[1][at : at + 4]} from its token {at} on"
    return ""


def other_specials(mine: Any, other: Any) -> str:
    """Special ids that differ, as with a base model and one that was made to chat: both know the tokens, and end at others."""
    pairs = {name: (getattr(mine, name, None), getattr(other, name, None)) for name in _SPECIAL}
    return ", ".join(f"{name} {own} and {theirs}" for name, (own, theirs) in pairs.items() if own != theirs)
