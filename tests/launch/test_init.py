"""`rondo init`: what it writes loads, whatever is answered, and what it cannot write it says."""

from __future__ import annotations

import itertools
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.launch.cli import main
from rondo.launch.config import load
from rondo.launch.init import MACHINES, OWN, QUESTIONS, text
from rondo.roles.algorithms.algorithm import ALGORITHMS
from rondo.roles.rewards import hub
from tests.strength import LONG, strength

PLAIN = {"machine": "laptop", "modality": "text", "model": "tiny", "data": "made", "reward": "own", "algorithm": "grpo"}
SOURCES = (
    ("text", "tiny", "made"),
    ("text", "Org/Model", "made"),
    *((kind, "Org/Model", "rows.jsonl") for kind in QUESTIONS["modality"][2]),
)


def line(file: Path, **answers: str) -> list[str]:
    return ["init", str(file), *(part for name, value in answers.items() for part in (f"--{name}", value))]


def test_every_combination_loads(tmp_path: Path) -> None:
    rewards = ((OWN, "math"), (OWN, *hub.__all__))[LONG]
    combinations = [*itertools.product(MACHINES, SOURCES, rewards, ALGORITHMS)]
    for number, (machine, source, reward, algorithm) in enumerate(combinations[:: strength(quick=11, full=1)]):
        given = dict(zip(("modality", "model", "data"), source, strict=True))
        answers = {name: QUESTIONS[name][1] for name in QUESTIONS} | given
        file = tmp_path / f"made_{number}.py"
        file.write_text(text(file.stem, answers | {"machine": machine, "reward": reward, "algorithm": algorithm}))
        config = load(file)
        columns = {source[0]: source[0]} if source[0] != "text" else {}
        assert (config.algorithm.name, config.data.media_columns) == (algorithm, columns)
        assert (
            sum(group.replicas * group.processes for group in config.role_groups if group.devices)
            == {"laptop": 0, "gpu": 1, "slurm": 8}[machine]
        )


def test_a_step_of_a_laptop_is_smaller_than_that_of_a_gpu(tmp_path: Path) -> None:
    tokens = {}
    for machine in MACHINES:
        file = tmp_path / f"{machine}.py"
        file.write_text(text(machine, {**PLAIN, "model": "Org/Model", "machine": machine}))
        rollout = load(file).rollout
        tokens[machine] = rollout.prompts_per_step * rollout.samples_per_prompt * rollout.max_new_tokens
    assert tokens == {"laptop": 2048, "gpu": 131_072, "slurm": 524_288}


def test_options_alone_write_a_module_that_trains_what_it_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    assert main(line(file, **PLAIN)) == 0
    assert capsys.readouterr().out == f"wrote {file}. Next: rondo check {file}, then rondo train {file}\n"
    before = file.read_text()
    config = load(file)
    assert (config.name, config.group_of("actor") is config.group_of("rollout")) == ("mine", False)
    assert main(line(file, **PLAIN)) == 2 and file.read_text() == before
    assert capsys.readouterr().err.startswith("FILE must be a new file that ends in .py, got ")
    if LONG:
        assert main(["check", str(file)]) == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": "grop"}, "--algorithm must be one of grpo, "),
        ({"modality": "image"}, "--model must be yours with image, got 'tiny', which is text alone. Name it"),
        ({"modality": "video", "model": "M"}, "--data must be yours with video, got 'made', which is text alone. Name it"),
        ({"data": "rows.jsonl"}, "--data must be made with the tiny model, "),
        ({"label": "x"}, "--label must not be given with --data made, which has its own, got 'x'. Remove it"),
    ],
)  # fmt: skip
def test_answers_that_do_not_go_together_are_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(tmp_path / "mine.py", **PLAIN | changes)) == 2
    assert capsys.readouterr().err.startswith(told) and not list(tmp_path.iterdir())


def test_without_a_terminal_what_is_missing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(tmp_path / "mine.py", machine="gpu", data="made")) == 2
    told = (
        "--modality, --model, --reward, --algorithm must be given where there is no terminal to ask on, got nothing. "
    )
    assert capsys.readouterr().err.startswith(told)
    assert main(line(tmp_path / "none" / "mine.py", **PLAIN)) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_on_a_terminal_it_asks_again_where_an_answer_cannot_be(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    answers = ("", "pictures", "image", "tiny", "Org/Model", "made", "rows.jsonl", "question", "", "math", "")
    os.write(ours, "".join(f"{each}\n" for each in answers).encode())
    command = [sys.executable, "-m", "rondo.launch.cli", "init", "mine.py"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path) as asked:
        os.close(theirs)
        told = b""
        try:
            while part := os.read(ours, 4096):
                told += part
        except OSError:  # the other end is closed
            os.close(ours)
    assert asked.returncode == 0, told.decode()
    assert b"--modality must be one of text, image, audio, video, got 'pictures'." in told
    assert b"--model must be yours with image" in told and b"--data must be yours with image" in told
    config = load(tmp_path / "mine.py")
    assert (config.data.prompt, config.data.label, config.model.path) == ("question", "label", "Org/Model")
