"""Settings of the samples that a run keeps in full.

Owns which samples, and how much room they may take; and the halves of a run that live by them. Does not own the files
(`roles/training/trained_samples.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from zlib import crc32

from pydantic import AfterValidator, Field

from rondo.runtime.section import FREE, Section, fixed

_Absolute = Annotated[Path, AfterValidator(Path.absolute)]
_OF_RUN = fixed("it says which half of a run it is")


class SamplesConfig(Section):
    """Which trained samples are kept as they were trained, in parquet files under `samples/trained/`."""

    place = "samples"

    keep: float = Field(0.0, ge=0, le=1)
    """The share of prompt groups that is kept: 1 keeps all of them. Whether one is kept follows from its number, also after a
    resume."""
    rewards: tuple[float | None, float | None] = (None, None)
    """Of these groups the samples whose reward is at least and at most so much; None for no bound. With a bound, one whose reward
    failed is not kept."""
    max_bytes: int = Field(16 << 30, ge=1 << 20)
    """Of all files, over all ranks. The oldest steps make room."""
    media_bytes: int = Field(4 << 30, ge=0)
    """Of the images, sounds and videos of kept samples as they came, once each, for the dashboard; 0 keeps none. Those that no
    sample had for the longest time make room."""
    text_bytes: int = Field(8 << 10, ge=1 << 10, le=1 << 20)
    """The most that the texts of a sample's row take: response, prompt, label, and reward details. Longer ones are cut."""

    def refused(self) -> Iterator[str]:
        least, most = self.rewards
        if least is not None and most is not None and least > most:
            yield f"samples.rewards must be (least, most), got {self.rewards}. Swap them"
        if self.rewards != (None, None) and not self.keep:
            yield (
                f"samples.keep must be above 0 with samples.rewards, which says which of them, got {self.keep}. Set it to 1, or "
                "remove samples.rewards"
            )
        if self.keep and find_spec("pyarrow") is None:
            yield (
                f"samples.keep must be 0 without pyarrow, which writes parquet, got {self.keep}. "
                "Install it: pip install 'rondo-rl[data]'"
            )

    def keeps(self, group: int) -> bool:
        """Whether a prompt group is one of the share."""
        return crc32(group.to_bytes(8, "little")) < self.keep * (1 << 32)

    def keeps_reward(self, reward: float | None) -> bool:
        least, most = self.rewards
        if reward is None:
            return self.rewards == (None, None)
        return (least is None or reward >= least) and (most is None or reward <= most)

    @property
    def whole_steps(self) -> bool:
        """Whether every sample of a step is kept."""
        return self.keep == 1 and self.rewards == (None, None)


class ProfileConfig(Section):
    """Steps of the actor under torch's profiler; each process writes a trace into `profile/` of the run directory."""

    place = "debug.profile"
    first: int = Field(2, ge=0)
    """Step that the window begins with; the first ones are slower than all others."""
    last: int = Field(3, ge=0)
    """Step that it ends with. A step is millions of lines: keep it short."""
    memory: bool = False
    """Tells allocations in the trace too, and on a CUDA device writes a memory snapshot beside it."""

    def refused(self) -> Iterator[str]:
        if self.last < self.first:
            yield f"debug.profile.last must be debug.profile.first or later, got {self.last} and {self.first}. Raise it"


class DebugConfig(Section):
    """Half of a run by itself, and a look at what its trainer computes."""

    place = "debug"
    train_only: Annotated[_Absolute | None, _OF_RUN] = None
    """A run directory with `samples.keep` 1: its steps are trained on its samples, and nothing is generated for them."""
    steps: Annotated[tuple[int, int] | None, _OF_RUN] = None
    """Of `train_only`, the first step that is trained and the one before which it ends, in a run that goes on from a checkpoint
    of that run and gives each prompt group the samples that it had; `rondo replay` sets it. None: all of its steps."""
    rollout_only: Annotated[bool, _OF_RUN] = False
    """Samples are generated, scored and kept (`samples.keep`), and nothing is trained: every version is the first."""

    profile: Annotated[ProfileConfig | None, FREE] = None
    """A window of steps that is profiled."""

    def refused(self) -> Iterator[str]:
        if self.train_only is not None and self.rollout_only:
            yield "debug.rollout_only must be False with debug.train_only, which generates nothing, got True. Remove one"
        if self.steps is not None and (self.train_only is None or not 0 <= self.steps[0] < self.steps[1]):
            yield (
                f"debug.steps must be (first, end) of debug.train_only, with 0 <= first < end, got {self.steps}. Remove it, or "
                "use `rondo replay`"
            )
