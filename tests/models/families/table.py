"""Every family that transformers builds small: how it trains and generates here, and how far from transformers' own log-probs.

    .venv/bin/python -m tests.models.families.table          writes docs/families.md

A family is a small random model of its default config (`models/stand_in.py`): windows of 8 tokens under sequences of up to 61.
Training is what the trainer computes, with chunks of 7 rows and with one; the engine has prompts of different lengths, which
start and end beside each other.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from rondo.models.acceptance import accept
from rondo.models.families import FAMILIES
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Sequence
from rondo.models.stand_in import stand_in
from rondo.models.trials import Failed
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.runtime.errors import ConfigError
from tests.models.builders import unpacked
from tests.roles.engines.engines import gap, request, run

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
LIMIT = 5e-3
"""In nats, float32: some families run their layers many times over, and each time adds to the rounding."""
CAUSAL = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WITH_MEDIA = tuple(name for family in FAMILIES for name in family.model_types)
OTHERS_WITH_MEDIA = tuple(sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - {*CAUSAL, *WITH_MEDIA}))
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1] * 48, "long_factor": [4.0] * 48,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    "phimoe": {"sliding_window": 2047},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
}
"""What released models of a family set and its default config does not."""
_WAYS = {
    (True, True): "prompts once",
    (True, False): "prompts once",
    (False, True): "rows shared",
    (False, False): "rows apart",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One family. `way` is "" where it is refused, and `engine` None where the embedded one is; `refused` says why."""

    kind: str
    way: str
    nats: float
    engine: float | None
    refused: str


def config_of(kind: str) -> Any:
    return CONFIG_MAPPING[kind](**SETTINGS.get(kind, {}))


def measured(kind: str) -> Row | None:
    """None where transformers builds no small one, or it computes nothing."""
    try:
        model = stand_in(config_of(kind))
    except Exception:  # noqa: BLE001 - a config without defaults
        return None
    if model is None:
        return None
    name = type(model).__name__
    try:
        packing = accept(model)
    except Failed:
        return None
    except ConfigError as error:
        return Row(kind, "", 0.0, None, _told(error, name))
    nats = 0.0
    batch = groups()
    with torch.no_grad():
        expected = torch.cat([unpacked(model, one)[0] for one in batch])
        for chunk_tokens in (7, 2048):
            found, _ = response_log_probs(model, packing.pack(batch, train=True), chunk_tokens=chunk_tokens)
            nats = max(nats, float((found - expected).abs().max()))
    asked = [
        request(f"r{n}", prompt, new) for n, (prompt, new) in enumerate([(3, 30), (20, 20), (33, 25), (1, 9), (12, 40)])
    ]
    way = _WAYS[packing.share_prefixes, packing.share_rows]
    try:
        engine = slot_engine(model, num_slots=3, max_length=64, forward="hf")
    except ConfigError as error:
        return Row(kind, way, nats, None, _told(error, name))
    return Row(kind, way, nats, gap(model, asked, run(engine, asked)), "")


def _told(error: ConfigError, name: str) -> str:
    """Without the name of the class, and without figures, which differ between machines."""
    return re.sub(r"[\d.e-]+ of their norm", "a part of their norm", str(error).replace(name, "the model"))


def groups() -> list[Sequence]:
    """Answers to three prompts, up to seven windows long."""
    rng, found = np.random.default_rng(0), []
    for length in (3, 21, 33):
        prompt = rng.integers(4, 200, length)
        for answer in (1, 2, 9, 20, 28):
            found.append(Sequence(np.append(prompt, rng.integers(4, 200, answer)).astype(np.int32), answer))
    return found


def page(rows: list[Row]) -> str:
    lines = [
        "# Which models train here",
        "",
        f"What causal LMs of transformers {transformers.__version__} do here, family by family, as small random models in",
        "float32: the largest difference to the log-probs of the model's own forward, in nats, of a packed micro-batch and of",
        "the embedded engine, over sequences longer than the windows of their layers. `rondo check` asks a small model of your",
        "config before anything starts, and every process asks the model itself when it opens it. bfloat16 adds its rounding.",
        "",
        "*prompts once*: what samples begin with (a prompt, turns, what branches left) is computed once for all of them; *rows",
        "shared*: samples lie behind each other in rows of one length; *rows apart*: each has a row of its own, padded to the",
        "longest of its micro-batch. Layers that carry a state from token to token (linear attention, as in qwen3_5) cannot",
        "branch here: such families compute every row whole.",
        "",
        "Phi-3 is here with `longrope`, PhiMoE and Qwen2 with windows.",
        "",
        "| family | how it trains | training | embedded engine |",
        "|---|---|---|---|",
    ]
    trained = [row for row in rows if row.way]
    lines += [
        f"| {row.kind} | {row.way} | {row.nats:.0e} | {'refused' if row.engine is None else f'{row.engine:.0e}'} |"
        for row in trained
    ]
    lines += [
        "",
        "Refused by the embedded engine; SGLang may serve them:",
        "",
        *_reasons([row for row in trained if row.refused]),
    ]
    lines += ["", "Refused for training:", "", *_reasons([row for row in rows if not row.way])]
    lines += [
        "",
        f"With images, audio or video: {', '.join(WITH_MEDIA)} ([media.md](media.md)); other families with media are refused",
        f"when they are loaded: {', '.join(OTHERS_WITH_MEDIA)}.",
        "",
        "Rotations that depend on the longest sequence of a batch (`longrope`, `dynamic`) are right up to the length at which",
        "they change; longer samples are refused. What transformers keeps in float32 beside bfloat16 weights is trained and",
        "published in float32.",
        "",
        "`python -m tests.models.families.table` writes this page.",
    ]
    return "\n".join(lines) + "\n"


def _reasons(rows: list[Row]) -> list[str]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        found[row.refused].append(row.kind)
    return [f"- {', '.join(kinds)}: {reason}" for reason, kinds in sorted(found.items(), key=lambda item: item[1])]


def main(tell: Callable[[str], None]) -> None:
    logging.disable(logging.WARNING)
    rows = []
    for kind in CAUSAL:
        if kind not in WITH_MEDIA and (row := measured(kind)) is not None:
            rows.append(row)
            tell(str(row))
    PAGE.write_text(page(rows))


if __name__ == "__main__":
    main(lambda text: print(text, flush=True))
