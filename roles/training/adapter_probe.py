"""Whether a server computes with the version of an adapter that it says it has: what it must find for a few prompts.

A server tells checksums of its base alone. So the trainer tells with every version its log-probs of some prompts' own tokens,
with the adapter and without: a server that was given the version must be nearer to the first than to the second, once they are
further apart than trainer and server are without any. That adapters reach it at all, while they change nothing yet, its canary
shows (`mismatch.py`).

    run_dir/adapter_probe.json        the prompts, the base's log-probs, those of the newest versions

    prober = Prober(model, canary.prompts)                        # the trainer
    write(run_dir, "0.7", prober.prompts, prober.base, prober.measure())
    probe = AdapterProbe.read(run_dir, "0.7")                     # whoever has a server
    probe.check(told_base, told)                                  # CorruptData where it computes without

Owns the file and the comparison. Does not own how a server is asked, nor what follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from rondo.models.lora import base_alone
from rondo.models.trials import logits_of
from rondo.models.units import drop_copies
from rondo.runtime.errors import CorruptData

_FILE = "adapter_probe.json"
_KEPT = 8
"""Versions: a server may be given one while the next is published."""
_OVER_NOISE = 4.0


class Prober:
    """Of a model with adapters. On the compute thread, between two steps (collective where it is sharded)."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model, self.prompts = model, np.array(prompts, np.int64)
        with base_alone(model):
            self.base = self.measure()

    @torch.no_grad()
    def measure(self) -> np.ndarray:
        """float32 [prompts, T - 1]: log-probs of all tokens but the first of each, as the model is now."""
        ids = torch.from_numpy(self.prompts).to(next(self._model.parameters()).device)
        try:
            found = torch.log_softmax(logits_of(self._model, input_ids=ids)[:, :-1], -1)
        finally:
            drop_copies(self._model)
        return found.gather(2, ids[:, 1:, None])[..., 0].float().cpu().numpy()


def write(folder: Path, name: str, prompts: np.ndarray, base: np.ndarray, log_probs: np.ndarray) -> None:
    """Before the version is published. Whole or not at all, for whoever reads it meanwhile."""
    known = _read(folder).get("versions", {})
    known = dict([*((key, value) for key, value in known.items() if key != name), (name, log_probs)][-_KEPT:])
    aside = folder / f".{_FILE}"
    told = {"prompts": prompts, "base": base, "versions": known}
    aside.write_bytes(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY))
    aside.replace(folder / _FILE)


@dataclass(frozen=True, slots=True)
class AdapterProbe:
    """`prompts` int [N, T]; `base` and `adapter`, the trainer's log-probs of all tokens but the first, float32 [N, T - 1]."""

    prompts: np.ndarray
    base: np.ndarray
    adapter: np.ndarray

    @classmethod
    def read(cls, folder: Path, name: str) -> AdapterProbe:
        """CorruptData for a version that no trainer told of."""
        told = _read(folder)
        if name not in told.get("versions", {}):
            raise CorruptData(
                f"{folder / _FILE} must tell of version {name} before it is published, got {', '.join(told.get('versions', {}))}"
            )
        arrays = (np.array(part, np.float32) for part in (told["base"], told["versions"][name]))
        return cls(np.array(told["prompts"], np.int64), *arrays)

    def check(self, told_base: np.ndarray, told: np.ndarray) -> bool:
        """Whether a server's log-probs, without an adapter and with the version, show it; False where it is still too near to the
        base for that. CorruptData where they are nearer to the base's."""
        reach = apart(self.adapter, self.base)
        if reach <= _OVER_NOISE * apart(told_base, self.base):
            return False
        near, far = apart(told, self.adapter), apart(told, self.base)
        if not near < far:
            raise CorruptData(
                "log-probs under an adapter must be nearer to the trainer's with it than to those without, got "
                f"{near:.3g} and {far:.3g} nats from them, which are {reach:.3g} apart"
            )
        return True


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Mean absolute difference, in nats; infinite where they have other shapes or a number that is not finite."""
    if one.shape != other.shape:
        return math.inf
    found = float(np.abs(one.astype(np.float64) - other).mean())
    return found if math.isfinite(found) else math.inf


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return {}
    return found
