"""Pairs of answers as objectives of a backend: direct preference optimisation.

Owns what is made of a row with a better and a worse answer, the forward of both in one micro-batch (their prompt is computed once
where the model can), and the reference's log-probs, which are computed once for each row before the first step: by the weights
that the job begins with. Does not own formulas (`roles/algorithms/preference.py`), batches and steps (`supervised.py`).

    backend = open_supervised(config, path, 100, world_size=1, device="cpu")
    backend.objective.refer(backend, pairs)          # with the weights that it begins with
    Learning(backend, pair_encoder(...), ...)
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.algorithms.preference import preference_sums
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import DataConfig, DpoConfig, PairsConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import check_demonstration
from rondo.roles.data.turns import Turns, encode_answer, without_answer
from rondo.roles.training.backend import Backend, Objective, Use
from rondo.roles.training.sft import Prepare, prompt_of
from rondo.roles.training.supervised import cut
from rondo.runtime.records.record import write_whole

log = logging.getLogger(__name__)

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """One row: the same prompt with two answers."""

    chosen: Packable
    rejected: Packable
    margin: float = 0.0

    @property
    def cost(self) -> int:
        return self.chosen.cost + self.rejected.cost

    @property
    def num_bytes(self) -> int:
        media = self.chosen.media
        tokens = self.chosen.tokens.nbytes + self.rejected.tokens.nbytes
        return int(tokens + (media.num_bytes if media is not None else 0))

    @property
    def key(self) -> bytes:
        """Of what its log-probs depend on beside the weights."""
        media = self.chosen.media
        parts = (
            self.chosen.tokens.tobytes(),
            self.rejected.tokens.tobytes(),
            b"" if media is None else media.key.encode(),
        )
        named = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hashlib.blake2b(named, digest_size=_KEY_BYTES).digest()


def pair_encoder(
    tokenizer: Any, config: PairsConfig, source: DataConfig, *, prepare: Prepare | None = None
) -> Callable[[Row], Pair]:
    """Return what makes a row into both of its answers, as `encode_answer` has them, behind one prompt; without a label the
    prompt ends with the better one. Raises like `render_prompt`."""
    most, place = config.micro_batch_tokens // 2, config.place  # both sides are in one micro-batch

    def encode(row: Row) -> Pair:
        row, better = without_answer(row, source)
        sides = [encode_answer(tokenizer, row, answer, source) for answer in (better, row.rejected)]
        longest = max((side.tokens for side in sides), key=len)
        tokens, media = prompt_of(tokenizer, row, source, len(longest), most, prepare=prepare, place=place)
        check_demonstration(row, tokens, longest, most, source, place)
        shared = min((side.prompt(tokens) for side in sides), key=len)

        def packable(side: Turns) -> Packable:
            answer = np.concatenate([side.prompt(tokens)[len(shared) :], side.tokens])
            return Packable(np.concatenate([shared, answer]), len(answer), media)

        chosen, rejected = map(packable, sides)
        if np.array_equal(chosen.tokens, rejected.tokens):
            raise RowError(f"{row.name}: the answers of a pair must differ, got the same twice. Remove the row")
        return Pair(chosen, rejected, row.margin)

    return encode


class PreferenceLoss(Objective):
    """The objective."""

    def __init__(self, config: DpoConfig, packing: Packing, device: str | torch.device) -> None:
        self._config, self._packing, self._device = config, packing, device
        self.reference: dict[bytes, tuple[float, float]] = {}
        """Key of a pair -> log-probs of its answers under the weights that the job began with."""

    @property
    def refers(self) -> bool:
        """Whether the loss asks for the reference."""
        return self._config.reference

    def sums(self, model: Any, rows: Sequence[Pair], use: Use) -> LossSums:
        pairs = rows or [DUMMY]
        chosen, rejected = self._log_probs(model, pairs)
        told = [self.reference[pair.key] if rows and self.refers else (0.0, 0.0) for pair in pairs]
        reference = torch.tensor(told, dtype=torch.float32, device=self._device)
        counts = [(pair.chosen.response, pair.rejected.response) for pair in pairs]
        tokens = torch.tensor(counts, dtype=torch.float32, device=self._device)
        sums = preference_sums(
            self._config, chosen=chosen, rejected=rejected, reference_chosen=reference[:, 0],
            reference_rejected=reference[:, 1], chosen_tokens=tokens[:, 0], rejected_tokens=tokens[:, 1],
        )  # fmt: skip
        return sums if rows else sums.weightless()

    def _log_probs(self, model: Any, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
        sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        packed = self._packing.pack(sides, train=True).to(self._device)
        flat, _ = response_log_probs(model, packed, chunk_tokens=self._config.log_prob_chunk_tokens)
        summed = torch.stack([part.sum() for part in flat.split([side.response for side in sides])])
        return summed[::2], summed[1::2]

    def refer(self, backend: Backend[Any], pairs: Iterable[Pair]) -> None:
        """Compute what is not known yet of these pairs, with the weights that the model has now (collective)."""
        missing = list({pair.key: pair for pair in pairs if pair.key not in self.reference}.values())
        mesh, found = backend.mesh, list[tuple[float, float, float]]()
        for micro_batches in cut([pair.cost for pair in missing], self._config.micro_batch_tokens, mesh.size):
            own = micro_batches[mesh.rank]
            with torch.no_grad():
                log_probs = torch.stack(self._log_probs(backend.model, [missing[i] for i in own] or [DUMMY]), 1)
            found += [(float(i), *both) for i, both in zip(own, log_probs.tolist(), strict=False)]
        for index, better, worse in backend.gathered(found, 3):
            self.reference[missing[int(index)].key] = (better, worse)

    def known(self, encode: Callable[[Row], Pair]) -> Callable[[Row], Pair]:
        """`encode`, refusing pairs that the reference, once it is computed, was not computed for: of rows that could not be read
        then, or were changed since."""
        if not self.reference:
            return encode

        def encode_known(row: Row) -> Pair:
            pair = encode(row)
            if pair.key not in self.reference:
                raise RowError(
                    f"{row.name}: a pair must be as it was when the reference's log-probs were computed, got another or one that "
                    "could not be read then. Restore the row, or remove reference-*.npz of the run before it is resumed"
                )
            return pair

        return encode_known

    def keep(self, file: Path) -> None:
        """Write the reference's log-probs into `file`, whole or not at all: without room for it the job goes on."""
        keys = np.frombuffer(b"".join(self.reference), np.uint8).reshape(-1, _KEY_BYTES)
        out = io.BytesIO()
        np.savez(out, keys=keys, log_probs=np.array(list(self.reference.values()), np.float32))
        try:
            write_whole(file, out.getvalue())
        except OSError as error:
            log.warning("the reference's log-probs are not kept, a restart computes them anew: %s", error)

    def take(self, file: Path) -> None:
        """What `keep` wrote."""
        with np.load(file, allow_pickle=False) as kept:
            pairs = zip(kept["keys"], kept["log_probs"].tolist(), strict=True)
            self.reference = {key.tobytes(): (better, worse) for key, (better, worse) in pairs}

    def denominator(self, total: LossSums) -> float:
        return float(total.sums["samples"])


DUMMY = Pair(Packable(np.zeros(2, np.int32), 1), Packable(np.zeros(2, np.int32), 1))
"""What a rank computes that has no pairs."""
