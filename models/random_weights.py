"""Random weights that are drawn where they are needed: for models whose size matters and not what they say.

Owns a folder of config and tokenizer without a file of weights, and the draw. Loading does the rest as with any folder
(`filling.py`), so trainer, scorers, engines and exports of a run have one model, whatever its size: what a process does not hold
it does not draw.

    ModelConfig(build="rondo.models.random_weights:build", build_args={"config": "Qwen/Qwen3-4B", "seed": 3})

Matrices are normal, as wide as the config's `initializer_range`; vectors are what transformers begins with (ones for norms, zeros
for biases). Servers that are programs of their own read files alone: for those, `rondo export` writes some.

Invariant: a number depends on the seed, its tensor's name in memory and its place in it alone: neither on a mesh, nor on what
else is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from rondo.models.names import memory_tensors, own_slices

FILE = "random_weights.json"
"""What such a folder has in the place of weights: the seed."""
_BLOCK = 1 << 18
"""About how many numbers are drawn at once: whole rows."""


def build(folder: Path, *, config: str, seed: int = 0, **changed: Any) -> None:
    """Such a folder, with the config and the tokenizer of another one, or of a name on the hub. `changed`: fields of the config,
    such as num_hidden_layers."""
    found = AutoConfig.from_pretrained(config)
    for name, value in changed.items():
        setattr(found.get_text_config(), name, value)
    found.save_pretrained(folder)
    AutoTokenizer.from_pretrained(config).save_pretrained(folder)
    (folder / FILE).write_bytes(orjson.dumps({"seed": seed}))


def drawn(model: Any, folder: Path, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in memory, this rank's part) of all weights of a model that has none yet."""
    seed = orjson.loads((folder / FILE).read_bytes())["seed"]
    width = getattr(model.config.get_text_config(), "initializer_range", None) or 0.02
    plain = _plain(model, seed)
    for name, place in memory_tensors(model).items():
        own = own_slices(place, place) or tuple(slice(0, size) for size in place.shape)
        if name in plain:
            part = plain[name][own].clone()
        else:
            rows, *within = own
            part = width * _normal(seed, name, place.shape, rows)[(slice(None), *within)]
        yield name, part.to(dtype_of(name))


def _plain(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Vectors and persistent buffers, whole, as transformers makes them: they are small."""
    owners = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    found: dict[str, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in model.named_modules():
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            made = {
                key: t for key, t in buffers.items() if t is not None and key not in module._non_persistent_buffers_set
            }
            made |= {key: t for key, t in parameters.items() if t is not None and t.ndim < 2}
            if not made:
                continue
            owner = owners[max((each for each in owners if f"{name}.".startswith(f"{each}.") or not each), key=len)]
            torch.manual_seed(key_of(seed, name) % (1 << 63))
            try:
                for key, t in (parameters | buffers).items():
                    if t is not None:
                        empty = torch.empty(t.shape, dtype=t.dtype, device="cpu" if key in made else "meta")
                        at = module._parameters if key in parameters else module._buffers
                        at[key] = torch.nn.Parameter(empty, t.is_floating_point()) if key in parameters else empty
                owner._init_weights(module)
                found |= {f"{name}.{key}" if name else key: getattr(module, key).detach() for key in made}
            finally:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
    return found


def key_of(seed: int | str, name: str) -> int:
    """What the numbers of this name are drawn by."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest(), "little")


def _normal(seed: int, name: str, shape: torch.Size, rows: slice) -> torch.Tensor:
    """float32: these rows of a tensor of normal numbers."""
    key, rest = key_of(seed, name), shape[1:]
    size = max(1, _BLOCK // max(1, rest.numel()))  # rows of a block
    found = np.empty((rows.stop - rows.start, *rest), np.float32)
    for block in range(rows.start // size, -(-rows.stop // size)):
        begin, end = block * size, min((block + 1) * size, shape[0])
        draw = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, block]))
        numbers = draw.standard_normal((end - begin, *rest), np.float32)
        first, last = max(begin, rows.start), min(end, rows.stop)
        found[first - rows.start : last - rows.start] = numbers[first - begin : last - begin]
    return torch.from_numpy(found)
