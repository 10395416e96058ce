"""What test_checkpoint.py starts: forks savers that kill themselves with SIGKILL at one file operation after another.

A saver that dies at operation n has done n - 1 of them; the last saver lives. Takes a folder to save in and one beside it;
prints one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from rondo.models import checkpoint
from rondo.models.optimizer import make_optimizer
from rondo.runtime.checkpoints import newest_complete
from tests.models.builders import LR

OUT, SAVED = Path(sys.argv[1]), Path(sys.argv[2])
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


MODEL = torch.nn.Linear(8, 8)  # any module will do, and few tensors are saved fast
OPTIMIZER = make_optimizer(MODEL, lr=LR)


def fill(value: float) -> None:
    with torch.no_grad():
        for parameter in MODEL.parameters():
            parameter.fill_(value)


def die_at(number: int) -> None:
    """SIGKILL this process at its file operation `number` in OUT."""
    seen = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in OPERATIONS and str(OUT) in str(args[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def saver(version: int, value: float, number: int) -> bool:
    """Saves in a process of its own that dies at operation `number`; whether it lived."""
    pid = os.fork()
    if pid == 0:
        fill(value)
        die_at(number)
        checkpoint.save(OUT / f"step_{version:06d}", MODEL, OPTIMIZER, {"value": value})
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def picked() -> list[Any]:
    """[name of the newest checkpoint, its extra's value, whether all its weights have that value]."""
    folder = newest_complete(OUT)
    assert folder is not None
    fill(0.0)
    value = checkpoint.load(folder, MODEL, OPTIMIZER)["value"]
    return [folder.name, value, all(bool(parameter.eq(value).all()) for parameter in MODEL.parameters())]


def main() -> None:
    torch.set_num_threads(1)
    os.fsync = lambda fd: None  # a kill loses nothing that was written; on some disks the flushes take a minute in all
    saver(1, 1.0, 0)
    facts: dict[str, Any] = {"new": [], "again": []}
    number, lived = 0, False
    while not lived:
        number += 1
        lived = saver(2, 2.0, number)
        facts["new"].append(picked())
        shutil.rmtree(OUT / "step_000002", ignore_errors=True)
    saver(2, 2.0, 0)
    first = SAVED / "step_000002"
    (OUT / "step_000002").rename(first)
    number, lived = 0, False
    while not lived:
        number += 1
        shutil.rmtree(OUT / "step_000002", ignore_errors=True)
        shutil.copytree(first, OUT / "step_000002")
        lived = saver(2, 3.0, number)
        facts["again"].append(picked())
    facts["left"] = sorted(path.name for path in OUT.iterdir())
    print(json.dumps(facts))


main()
