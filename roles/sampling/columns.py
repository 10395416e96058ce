"""What rollout writes of samples: their base columns, and what the bus is told of each row.

Pure: completions in, arrays out. Owns which tokens the loss counts: none of a sample whose reward failed, and with
`rollout.mask_truncated` none of one that its limit ended. Does not own when something is put (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rondo.comm.bus.group import FINISHES, NO_VERSION
from rondo.comm.ring.records import Column
from rondo.roles.config import JobConfig
from rondo.roles.engines.engine import Completion
from rondo.roles.streams import ROUTED


def columns_of(
    config: JobConfig, prompt: np.ndarray, done: Sequence[Completion], scored: Sequence[bool]
) -> list[Column]:
    """The base columns of some samples of a prompt, int32 [T]: pieces that lie end to end, and how much of them is each row's."""
    rollout = config.rollout
    responses = [len(c.tokens) for c in done]
    masks = [
        loss_mask(c, rollout.mask_old_tokens) * np.uint8(has and not (rollout.mask_truncated and cut_off(c)))
        for c, has in zip(done, scored, strict=True)
    ]
    pieces = [piece.astype(np.int32, copy=False) for c in done for piece in (prompt, c.tokens)]
    columns = [
        Column("tokens", "int32", pieces, [len(prompt) + response for response in responses]),
        Column("loss_mask", "uint8", masks, responses),
        Column("rollout_log_probs", "float32", [c.log_probs for c in done], responses),
        Column("policy_versions", "int32", [c.policy_versions for c in done], responses),
    ]
    if config.train.router_replay:
        told = [c.routed_experts for c in done]
        nothing = np.zeros(0, next((each.dtype for each in told if each is not None), np.dtype(np.uint8)))
        arrays = [nothing if each is None else each for each in told]
        columns.append(Column(ROUTED, arrays[0].dtype.name, arrays))
    return columns


def loss_mask(completion: Completion, mask_old: bool) -> np.ndarray:
    """The tokens that the loss counts, uint8 [R]: all that a policy sampled, or with `mask_old` those of the newest weights that
    the sample saw."""
    versions = completion.policy_versions
    chosen = (versions == versions.max()) & (versions != NO_VERSION) if mask_old else versions != NO_VERSION
    return chosen.astype(np.uint8)


def finish_of(completion: Completion) -> str:
    """How the response ended, one of `FINISHES`."""
    return completion.finish_reason if completion.finish_reason in FINISHES else "aborted"


def cut_off(completion: Completion) -> bool:
    """Whether the limit of its length ended it."""
    return completion.finish_reason == "length"


def info_of(prompt: np.ndarray, completion: Completion, reward: float | None) -> tuple[float | None, ...]:
    """As `Bus.put_samples` takes it. Versions are those of tokens that a policy sampled."""
    versions = completion.policy_versions[completion.policy_versions != NO_VERSION]
    span = (int(versions.min()), int(versions.max())) if len(versions) else (NO_VERSION, NO_VERSION)
    response = len(completion.tokens)
    return (len(prompt) + response, response, reward, *span, FINISHES.index(finish_of(completion)))
