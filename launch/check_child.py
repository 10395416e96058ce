"""The part of the check that needs torch, transformers, datasets or the user's code, in a process of its own.

Reads a resolved config as JSON on stdin, writes one JSON object on stdout: {"findings": [...], "facts": {...}}. What user
code prints goes to stderr. Owns no rule about numbers: it reports facts, and `check.py` judges them.

    python -m rondo.launch.check_child FOLDER < runs/latest/config.resolved.json
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.config import RunConfig, unresolve
from rondo.runtime.errors import RondoError
from rondo.runtime.reference import load_reference

_NUM_ROWS = 16
"""Rows whose prompts are rendered; the rest is checked as the run comes to it."""


class Report:
    """Findings and facts, filled by one look after another."""

    def __init__(self) -> None:
        self.findings: list[dict[str, str]] = []
        self.facts: dict[str, int | str | None] = {}

    def add(self, level: str, text: str) -> None:
        self.findings.append({"level": level, "text": text})

    def look(self, at: Callable[[], None], what: str) -> None:
        """Runs one look. An error of ours has its text; one of user code or of a library is told with type and place."""
        try:
            at()
        except RondoError as error:
            self.add("error", str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any failure of user code is a finding
            self.add(
                "error",
                f"{what} must load without errors, got {type(error).__name__}: {error}{_place(error)}. Correct it",
            )


def main() -> int:
    # The answer has stdout for itself; prints of user code and of libraries go to stderr.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    config = unresolve(orjson.loads(sys.stdin.buffer.read()))
    report = Report()
    report.look(lambda: look_at_reward(config), "reward.function")
    tokenizers: list[Any] = []
    report.look(lambda: look_at_model(config, Path(sys.argv[1]) / "model", report, tokenizers), "model")
    report.look(lambda: look_at_data(config, report, tokenizers), "data")
    if config.sft is not None:
        report.look(lambda: look_at_demonstrations(config, tokenizers), "sft")
    if any(group.devices for group in config.groups):
        import torch

        report.facts["num_devices"] = torch.cuda.device_count()
    answer.write(orjson.dumps({"findings": report.findings, "facts": report.facts}))
    answer.close()
    return 0


def look_at_reward(config: RunConfig) -> None:
    """The function can be imported, and takes what it will be given."""
    from rondo.runtime.errors import ConfigError

    function = load_reference(config.reward.function, "reward.function")
    try:
        inspect.signature(function).bind("", "", prompt="", metadata={})
    except TypeError as error:
        raise ConfigError(
            f"reward.function must take (response, label, *, prompt, metadata), got {config.reward.function} ({error}). "
            "Change its parameters"
        ) from error
    except ValueError:
        return  # a builtin without a signature


def look_at_model(config: RunConfig, folder: Path, report: Report, tokenizers: list[Any]) -> None:
    from rondo.models.load import load_config, load_tokenizer, num_parameters

    path = config.model.materialize(folder)
    shape = load_config(path)
    report.facts["model_path"] = path
    report.facts["max_positions"] = getattr(shape.get_text_config(), "max_position_embeddings", None)
    report.facts["num_parameters"], report.facts["num_tensors"] = num_parameters(path)
    needs_template = config.data.apply_chat_template
    tokenizers.append(load_tokenizer(path, needs_chat_template=needs_template))


def look_at_data(config: RunConfig, report: Report, tokenizers: list[Any]) -> None:
    from rondo.roles.datasets import open_splits
    from rondo.roles.prompts import render_prompt

    train, held_out = open_splits(config)
    parts = [(train, config.data)]
    if held_out is not None:
        own = config.evaluation.data if config.evaluation is not None else None
        parts.append((held_out, own or config.data))
    report.facts["num_rows"] = len(train)
    report.facts["num_held_out"] = len(held_out) if held_out is not None else 0
    for data, settings in parts:
        for index in range(min(_NUM_ROWS, len(data))):
            row = data.row(index)
            if tokenizers and not row.media:
                render_prompt(tokenizers[0], row, settings, config.rollout.max_prompt_tokens)
    report.add("ok", f"{len(train)} rows to train on, {report.facts['num_held_out']} held out")


def look_at_demonstrations(config: RunConfig, tokenizers: list[Any]) -> None:
    from rondo.roles.datasets import demonstrations
    from rondo.roles.prompts import encode_answer

    data = demonstrations(config)
    for index in range(min(_NUM_ROWS, len(data)) if tokenizers else 0):
        encode_answer(tokenizers[0], data.row(index))


def _place(error: BaseException) -> str:
    """ " (file:line)" of the last step that is the user's, not ours and not a library's."""
    import traceback

    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (
            "/site-packages/" not in frame.filename
            and "/rondo/" not in frame.filename
            and not frame.filename.startswith("<")
        ):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
