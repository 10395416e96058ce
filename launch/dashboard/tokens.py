"""Tokens: the trained samples of a prompt group token by token, as text, with what each was worth to the loss.

Owns how tokens become text that a page shows. Does not own the samples (`roles/training/trained_samples.py`) or the tokenizer's
file. Invariant: it reads the one group of the one step that is asked for, and no more tokens than `MOST` of a row.

    Tokens(run).group(12, 96)        # [{"sample": 0, "reward": 1.0, "texts": ["27", " +", ...], "log_probs": [...], ...}, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rondo.launch.dashboard.media import of_prompt
from rondo.launch.rundir import read_json
from rondo.roles.training.trained_samples import TrainedRow, rows_of_step

MOST = 4000
_ROWS, _MEDIA = 64, 32
_COLUMNS = ("tokens", "mask", "advantages", "rollout_log_probs", "policy_versions")
_OF_CHARACTER = 4
"""Tokens that a character of several bytes may lie in, at most."""
Decode = Callable[[list[int]], str]


class Tokens:
    """Of one run directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._decode: Decode | None = None

    def group(self, step: int, group: int) -> dict[str, Any]:
        """ "rows" of each sample of a prompt group that is kept, none where none are, or pyarrow is missing, as "why" says; and
        the "media" that they were shown, as they came, `media.of_prompt`."""
        media = of_prompt(self._run, step, group)
        told = {"media": media[:_MEDIA], "num_media": len(media)}
        if find_spec("pyarrow") is None:
            why = "Trained samples need pyarrow to be shown: pip install 'rondo-rl[data]'"
            return told | {"rows": [], "why": why}
        rows = sorted(rows_of_step(self._run, step, _COLUMNS, group), key=lambda row: (row.sample, row.part))
        return told | {"rows": [self._told(row) for row in rows[:_ROWS]], "why": ""}

    def _told(self, row: TrainedRow) -> dict[str, Any]:
        if self._decode is None:
            self._decode = _decoder(self._run)
        columns = row.columns
        begin = len(columns["tokens"]) - len(columns["mask"])
        return {
            "sample": row.sample, "part": row.part, "reward": row.reward, "finish": row.finish, "details": row.details,
            "num_prompt": min(begin, MOST), "num_left_out": max(0, len(columns["mask"]) - MOST),
            "texts": [
                *pieces(self._decode, columns["tokens"][:begin][-MOST:].tolist()),
                *pieces(self._decode, columns["tokens"][begin:][:MOST].tolist()),
            ],
            "log_probs": columns["rollout_log_probs"][:MOST], "advantages": columns["advantages"][:MOST],
            "versions": columns["policy_versions"][:MOST], "mask": columns["mask"][:MOST],
        }  # fmt: skip


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """The text of each token, as it stands behind those before it; of a character in several tokens all is the last one's."""
    found, before, held = list[str](), list[int](), list[int]()
    for id in ids:
        held.append(id)
        head, text = decode(before), decode(before + held)
        piece = text[len(head) :] if text.startswith(head) else decode(held)
        unfinished = piece.endswith("\ufffd") and len(held) < _OF_CHARACTER
        found.append("" if unfinished else piece)
        if not unfinished:
            before, held = held, []
    if held:
        found[-1] = decode(held)
    return found


def _decoder(run: Path) -> Decode:
    """Of the run's tokenizer; numbers where that has no file of its own."""
    prepared = run / "prepared.json"
    path = run / read_json(prepared)["model_path"] / "tokenizer.json" if prepared.exists() else prepared
    if not path.exists() or path == prepared:
        return lambda ids: "".join(f"⟨{id}⟩" for id in ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
