"""Whether the run that `debug.train_only` names has what is to be trained. Owns that rule; reads no sample."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from rondo.launch.check.findings import Finding, error, ok
from rondo.launch.config import RunConfig
from rondo.roles.config.samples import SamplesConfig
from rondo.roles.training.trained_samples import steps_of


def look_at_given(config: RunConfig) -> Iterator[Finding]:
    """What `debug.train_only` names must have whole steps for all that are to be trained."""
    if (run := config.debug.train_only) is None:
        return
    steps, file = steps_of(run), run / "config.resolved.json"
    of = orjson.loads(file.read_bytes()) if file.exists() else {}
    theirs, names = of.get("rollout", {}), ("prompts_per_step", "samples_per_prompt")
    same = all(theirs.get(name) == getattr(config.rollout, name) for name in names)
    whole = SamplesConfig.model_validate(of.get("samples", {})).whole_steps
    first, end = config.debug.steps or (0, config.num_steps)
    missing = [step for step in range(first, end) if step not in steps]
    if not same or not whole or missing:
        got = f"nothing of step {missing[0]}" if missing else "others" if whole else "a part of its samples"
        yield error(
            f"debug.train_only must name a run with samples.keep 1, and prompts and samples a step as here, that has steps "
            f"{first} to {end - 1}, got {got} in {run}. Lower num_steps, or name another run"
        )
        return
    yield ok(f"{end - first} steps are trained on samples of {run}, and nothing is generated for them")
