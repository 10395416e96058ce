"""What a replay waits for: stage times at the paper's scale, divided by one time scale, and the lengths of every sample.

Owns the arithmetic between `paper_stages.json` and the waits of each role, and the bound that a run is held against. Does not own
who waits (`replay_roles.py`) or how a run is started (`paper.py`).

    replay = Replay.of("qwen3_4b", "fully_async", time_scale=20)
    replay.bound_s                      125.5 / 20: the trainer is the slowest role
    replay.draws(run_seed)[seed]        (step, response tokens) of the request with this seed

Invariant: every step holds the same drawn lengths, dealt anew to its prompts, so that each has the file's law, its long tail and
its totals: the longest sample takes the whole generation stage, and a token of a forward or of the training always takes equally
long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rondo.roles.engines.engine import sample_seed

STAGES = Path(__file__).with_name("paper_stages.json")
NAME = "replay.json"
"""In the run directory: what its roles replay."""

Mode = Literal["colocate", "fully_async"]
PROMPT_TOKENS = 256
_LAW_SEED = 2604
_PATCHES = 1024


@dataclass(frozen=True)
class Replay:
    """One model in one mode. Seconds are scaled; `prompts`, `samples`, tokens and bytes of rows are the paper's."""

    model: str
    mode: Mode
    time_scale: float
    num_steps: int
    stages_s: Mapping[str, float]
    prompts: int
    samples: int
    median_tokens: float
    sigma: float
    max_tokens: int
    media_bytes: int
    routed_bytes: int
    """A response token, as the engine of a mixture of experts records them for router replay."""
    weights_bytes: int
    """Scaled by time and by devices: one process stands for all of them."""
    devices: int

    @classmethod
    def of(cls, model: str, mode: Mode, *, time_scale: float, num_steps: int = 6, path: Path = STAGES) -> Replay:
        known = json.loads(path.read_text(encoding="utf-8"))[model]
        assumed, law = known["assumed"], known["assumed"]["response_tokens"]
        return cls(
            model=model,
            mode=mode,
            time_scale=time_scale,
            num_steps=num_steps,
            stages_s={name: seconds / time_scale for name, seconds in assumed[mode].items()},
            prompts=assumed["prompts_per_step"],
            samples=assumed["samples_per_prompt"],
            median_tokens=law["median"],
            sigma=law["sigma"],
            max_tokens=law["max"],
            media_bytes=int(assumed["media_bytes_per_prompt"]),
            routed_bytes=assumed["routed_experts_bytes_per_token"],
            weights_bytes=int(assumed["weights_bytes"] / time_scale / known["devices"]),
            devices=known["devices"],
        )

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Replay:
        fields: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return cls(**fields)

    # ---- time -------------------------------------------------------------------------------------------------------

    @property
    def bound_s(self) -> float:
        """A step, if nothing but the stages took time."""
        return sum(self.stages_s.values()) if self.colocated else max(self.stages_s.values())

    @property
    def colocated(self) -> bool:
        return self.mode == "colocate"

    @property
    def generate_s(self) -> float:
        """All samples of a step side by side: what the longest one takes."""
        return self.stages_s["generate" if self.colocated else "rollout"]

    def sample_s(self, tokens: int) -> float:
        return self.generate_s * tokens / int(self.lengths.max())

    def stage_s(self, stage: str, tokens: int) -> float:
        """So many tokens of prompts and responses in a stage that goes through all of a step's."""
        return self.stages_s[stage] * tokens / self.step_tokens

    # ---- lengths ----------------------------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [samples of a step], drawn once."""
        draw = np.random.default_rng(_LAW_SEED)
        drawn = self.median_tokens * np.exp(self.sigma * draw.standard_normal(self.prompts * self.samples))
        return np.clip(drawn, 16, self.max_tokens).astype(np.int64)

    @property
    def step_tokens(self) -> int:
        return int(self.lengths.sum()) + PROMPT_TOKENS * len(self.lengths)

    def draws(self, run_seed: int) -> dict[int, tuple[int, int]]:
        """Seed of a request -> (step, response tokens), for every sample of the run."""
        found = {}
        for step in range(self.num_steps):
            dealt = np.random.default_rng((_LAW_SEED, step)).permutation(self.lengths)
            for number, tokens in enumerate(dealt.tolist()):
                prompt, sample = divmod(number, self.samples)
                found[sample_seed(run_seed, "train", step * self.prompts + prompt, sample)] = (step, tokens)
        return found

    # ---- bytes ------------------------------------------------------------------------------------------------------

    @property
    def round_tokens(self) -> int:
        """A micro-batch of every device at once: one process stands for all of them."""
        longest = PROMPT_TOKENS + self.max_tokens
        patches = _PATCHES if self.media_bytes else 0
        return self.devices * (longest + longest // 5 + patches)

    def media_arrays(self) -> dict[str, np.ndarray]:
        """Patches of as many bytes as the media of a prompt have; empty for text."""
        if not self.media_bytes:
            return {}
        return {"pixel_values": np.ones((_PATCHES, self.media_bytes // (4 * _PATCHES)), np.float32)}
