"""Families of transformers: each trains and generates as its own forward computes, or is refused: as docs/families.md says."""

from __future__ import annotations

import re

import pytest

from tests.models.families.table import CAUSAL, LIMIT, OTHERS_WITH_MEDIA, PAGE, WITH_MEDIA, measured
from tests.strength import LONG

KINDS = ("llama", "gemma3_text", "mistral", "phi3", "qwen2", "gpt_oss", "deepseek_v3", "phimoe", "jamba", "gemma2")
"""Plain; windows of some layers; of all; longrope; biases and windows; sinks; values of another size; windows in masks alone;
recurrent layers, which the embedded engine refuses; caps on logits, which training does."""


@pytest.mark.parametrize("kind", [kind for kind in CAUSAL if kind not in WITH_MEDIA] if LONG else KINDS)
def test_a_family_does_what_the_page_says(kind: str) -> None:
    row, text = measured(kind), PAGE.read_text()
    if row is None:
        assert kind not in KINDS and not re.search(rf"^\| {re.escape(kind)} \|", text, re.MULTILINE)
        return
    if row.refused:
        (told,) = [line for line in text.splitlines() if re.search(rf"^- (.*, )?{re.escape(kind)}[,:]", line)]
        assert told.endswith(row.refused)
    if row.way:
        (line,) = re.findall(rf"^\| {re.escape(kind)} \| (.*?) \| .* \| (.*) \|$", text, re.MULTILINE)
        assert line[0] == row.way
        assert row.nats < LIMIT
        assert (line[1] == "refused") == (row.engine is None)
        assert row.engine is None or row.engine < LIMIT


def test_the_page_names_every_family_with_media() -> None:
    words = set(re.findall(r"[\w.-]+", PAGE.read_text()))
    assert {*WITH_MEDIA, *OTHERS_WITH_MEDIA} <= {word.rstrip(".") for word in words}
