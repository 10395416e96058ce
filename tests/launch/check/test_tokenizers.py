"""Teachers whose tokens are not the policy's are told by what differs."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.launch.check.tokenizers import PROBE, other_specials, why_different


class Bytes:
    """A token a byte, as the tiny models have; `cut` bytes a token, `words` with other ids."""

    def __init__(self, words: dict[str, int] | None = None, *, cut: int = 1, eos: int = 0) -> None:
        self._words = {f"byte {number}": number for number in range(256)} | (words or {})
        self._cut, self.eos_token_id, self.bos_token_id = cut, eos, None

    def get_vocab(self) -> dict[str, int]:
        return self._words

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, Any]:
        found = text.encode()
        return {"input_ids": [found[at] for at in range(0, len(found), self._cut)]}


def test_one_tokenizer_is_no_other_also_where_the_teacher_knows_more_tokens() -> None:
    assert why_different(Bytes(), Bytes()) == ""
    assert why_different(Bytes(), Bytes({"<think>": 256})) == ""


@pytest.mark.parametrize(
    ("mine", "other", "said"),
    [
        (Bytes({"a": 256}), Bytes({"b": 256}), "the id 256 for 'a' in the policy's vocabulary and for 'b' in the teacher's"),
        (Bytes({"a": 256}), Bytes(), "the id 256 for 'a' in the policy's vocabulary and for nothing in the teacher's"),
        (Bytes(), Bytes(cut=2), "another cut of a probe text, [111, 114, 116, 32] and [114, 32, 49, 50] from its token 1 on"),
    ],
)  # fmt: skip
def test_what_differs_is_told(mine: Bytes, other: Bytes, said: str) -> None:
    assert why_different(mine, other) == said


def test_other_ends_of_the_same_tokens_are_told_apart() -> None:
    assert other_specials(Bytes(), Bytes()) == ""
    assert other_specials(Bytes(), Bytes(eos=3)) == "eos_token_id 0 and 3"
    assert len(PROBE.encode()) > len(PROBE)
