"""Trained samples on the page: token by token, as text, with what the loss was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.launch.dashboard import tokens
from rondo.launch.dashboard.tokens import Tokens, pieces
from tests.launch.dashboard.runs import HOSTILE, bytes_for_tokens, trained


def test_a_prompt_group_is_told_token_by_token_with_the_rewards_of_its_samples(tmp_path: Path) -> None:
    bytes_for_tokens(tmp_path)
    trained(tmp_path, 3, 7, {"\u00e9!": 1.0, HOSTILE[:9000]: None})
    trained(tmp_path, 4, 8, {"other": 0.5})
    first, second = Tokens(tmp_path).group(3, 7)["rows"]
    assert first["texts"] == [*"what?", "", "\u00e9", "!"] and first["num_prompt"] == 5
    assert [first[name].tolist() for name in ("mask", "log_probs", "advantages", "versions")] == [
        [0, 1, 1], [0.0, -0.25, -0.5], [1.0] * 3, [0] * 3
    ]  # fmt: skip
    assert (first["reward"], second["reward"], first["details"]) == (1.0, None, {"right": 1.0})
    assert "".join(second["texts"]).startswith("what?" + HOSTILE[:50])
    assert len(second["texts"]) - 5 == tokens.MOST == len(second["mask"])
    assert second["num_left_out"] == len(HOSTILE[:9000].encode()) - tokens.MOST
    nothing = {"rows": [], "why": "", "media": [], "num_media": 0}
    assert Tokens(tmp_path).group(3, 8) == nothing == Tokens(tmp_path / "none").group(0, 0)


def test_tokens_without_a_tokenizer_are_numbers_and_without_pyarrow_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 0, 0, {"!": 1.0}, prompt="")
    assert Tokens(tmp_path).group(0, 0)["rows"][0]["texts"] == ["\u27e833\u27e9"]
    monkeypatch.setattr(tokens, "find_spec", lambda name: None)
    assert "pip install 'rondo-rl[data]'" in Tokens(tmp_path).group(0, 0)["why"]


def test_a_character_that_never_ends_is_shown_and_a_token_that_changes_what_stood_before_it_too() -> None:
    decode = {(): "", (1,): "\ufffd", (1, 1): "\ufffd" * 2, (2,): "a", (2, 3): "b", (3,): "c"}
    assert pieces(lambda ids: decode[tuple(ids)], [1, 1]) == ["", "\ufffd" * 2]
    assert pieces(lambda ids: decode[tuple(ids)], [2, 3]) == ["a", "c"]
