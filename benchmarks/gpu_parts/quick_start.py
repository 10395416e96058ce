"""The quick start on the GPUs of this machine: seconds from the command to the first trained step, and what it learns.

On one GPU all roles take turns in a process; on two, generation and training have one each; on four, the scoring roles too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import start
from benchmarks.gpu import Options

_SHORT = (
    "train.warmup_steps=1", "sft.steps=4", "sft.warmup_steps=1", "sft.batch_size=8", "evaluation.num_prompts=8",
    "rollout.prompts_per_step=4",
)  # fmt: skip


def measure(options: Options, tell: Callable[[dict[str, Any]], None]) -> None:
    changes = [*sets(options.num_devices), *(_SHORT if options.tiny else ())]
    seconds, summary = start.start(0, 2 if options.tiny else None, changes)
    tell({"seconds": seconds, "summary": summary})


def sets(num_devices: int) -> list[str]:
    """What of `examples/quickstart.py` is changed for so many GPUs."""
    if num_devices == 1:
        group = {"name": "actor", "roles": ["rollout", "actor", "advantages", "reference"], "devices": 1}
        return ["max_staleness=0", f"role_groups={[group]}"]
    given = {0: (), 2: (0, 1), 3: (0, 1), 4: (0, 1, 3, 4)}[min(num_devices, 4)]
    return [f"role_groups.{number}.devices=1" for number in given]
