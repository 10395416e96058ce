"""Whether an engine computes with the adapters that it is given: asked once, before its first version; and whether one of this
process holds them, looked at with every version.

Owns the questions. Does not own what the answer must be (`training/mismatch.py`), nor how an engine takes adapters.

    await prove_adapters(engine, 0, tensors, Canary.read(run_dir), lora, name="rollout-0.0", alike=True)
    await engine.update_weights(0, tensors)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from rondo.models.config import LoraConfig
from rondo.models.lora import canary_of, published_adapter
from rondo.roles.engines.engine import Engine, Request, SamplingParams
from rondo.roles.training.mismatch import Canary
from rondo.runtime.errors import Fatal


async def prove_adapters(
    engine: Engine,
    version: int,
    tensors: Mapping[str, Any],
    canary: Canary,
    lora: LoraConfig,
    *,
    name: str,
    alike: bool,
) -> None:
    """Gives it the canary as `version`, whose `tensors` (published names) come behind it; nothing is sampled of that yet. Fatal
    where what it finds is not what the trainer found."""
    drawn = canary_of({name: tensor.shape for name, tensor in tensors.items()}, lora)
    await engine.update_weights(version, drawn)
    greedy = SamplingParams(max_new_tokens=1, temperature=0.0)
    prompts = [np.array(prompt, np.int32) for prompt in canary.prompts]
    asked = [engine.generate(Request(f"canary/{n}", prompt, greedy, seed=0)) for n, prompt in enumerate(prompts)]
    found = [(int(each.tokens[0]), float(each.log_probs[0])) for each in await asyncio.gather(*asked)]
    canary.refuse(found, name, alike=alike)


def refuse_older(model: Any, version: int, tensors: Mapping[str, Any]) -> None:
    """Fatal unless the adapters of an engine's model are `tensors` (published names), which it was just given as `version`."""
    own = published_adapter(model)
    kept = [name for name, tensor in own.items() if not tensors[name].to(tensor).equal(tensor)]
    if kept:
        raise Fatal(
            f"an engine must generate with the adapter that it is given, got other tensors than version {version} in {len(kept)} "
            f"of {len(own)} ({', '.join(kept[:3])}). It kept an older one, or the base: this is a fault in rondo"
        )
