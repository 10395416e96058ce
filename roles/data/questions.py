"""Questions: rows that have their answers, as prompts that a model is to answer, with the answer as what the reward is told.

Owns what is taken off a row, and which rows the answers of a job without rollouts are measured on. Does not own rows
(`datasets.py`) or their prompts (`prompts.py`).

    Questions(held_out, source).row(0)      a chat whose last message is the answer -> the chat before it, label "1234"
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rondo.roles.config import DataConfig, JobConfig
from rondo.roles.data.datasets import Dataset, Row, Rows, evaluation_sets
from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.data.prompts import of_text
from rondo.roles.data.turns import without_answer


@dataclass(frozen=True, slots=True)
class Questions:
    """Rows, or pairs, without their answers; the label is the text of the answer, of a pair of the better one."""

    rows: Rows
    source: DataConfig

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> Row:
        row, answer = without_answer(self.rows.row(index), self.source)
        if isinstance(answer, list) and answer:
            answer = of_text(answer[-1]).get("content")
        return replace(row, label=answer, rejected=None)


def answered_sets(
    job: JobConfig, held_out: Dataset | None, fingerprints: Fingerprints | None = None
) -> dict[str, Rows]:
    """The evaluation sets of a job without rollouts by name, of the rows that it holds out, or of others. Raises like
    `open_splits`."""
    assert job.evaluation is not None
    sets, named = evaluation_sets(job, held_out, fingerprints), job.evaluation.named_sets()
    return {
        name: Questions(rows, job.demonstrated()) if named[name].data is None else rows for name, rows in sets.items()
    }
