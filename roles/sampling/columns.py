"""What rollout writes of samples: the base columns of their rows, and what the bus is told of each row.

Pure: rows in, arrays out. Owns which tokens the loss counts: none of a sample whose reward failed, and with
`rollout.mask_truncated` none of one that its limit ended, whatever its rows. Does not own when something is put (`groups.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import orjson

from rondo.comm.bus.group import FINISHES, NO_VERSION
from rondo.comm.ring.records import Column
from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import Row
from rondo.roles.engines.engine import Completion
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.episode import Made, SampleRow
from rondo.roles.shown import written
from rondo.roles.streams import PARTS, ROUTED, SHOWN, TURNS, turn_bytes
from rondo.runtime.values import as_json

NOTHING = np.zeros(0, np.uint8)


def columns_of(config: JobConfig, made: Sequence[Made], results: Sequence[RewardResult]) -> list[Column]:
    """The base columns of the rows of some samples, in the order of `in_parts`, with the result of each sample: pieces that lie
    end to end, and how much of them is each row's."""
    order, rollout = in_parts(made), config.rollout
    rows = [made[at].rows[part] for at, part in order]
    done, results = [row.completion for row in rows], [results[at] for at, _ in order]
    responses = [len(c.tokens) for c in done]
    oldest = [max(0, each.newest) if rollout.mask_old_tokens else 0 for each in made]
    left_out = [rollout.mask_truncated and cut_off(each.last) for each in made]
    masks = [
        loss_mask(c, oldest[at]) * np.uint8(r.score is not None and not left_out[at])
        for c, r, (at, _) in zip(done, results, order, strict=True)
    ]
    pieces = [each.astype(np.int32, copy=False) for row in rows for each in (row.prompt, row.completion.tokens)]
    lengths = [len(row.prompt) + response for row, response in zip(rows, responses, strict=True)]
    columns = [
        Column("tokens", "int32", pieces, lengths),
        Column("loss_mask", "uint8", masks, responses),
        Column("rollout_log_probs", "float32", [c.log_probs for c in done], responses),
        Column("policy_versions", "int32", [c.policy_versions for c in done], responses),
    ]
    if config.train.router_replay == "r3":
        told = [c.routed_experts for c in done]
        nothing = np.zeros(0, next((each.dtype for each in told if each is not None), np.dtype(np.uint8)))
        arrays = [nothing if each is None else each for each in told]
        columns.append(Column(ROUTED, arrays[0].dtype.name, arrays))
    if config.algorithm.by_turn:
        columns.append(Column(TURNS, "float32", [turn_rewards(row) for row in rows], responses))
    if turn_bytes(config):
        columns.append(Column(SHOWN, "uint8", [written(row.shown) for row in rows]))
    if config.num_parts:
        names = list(config.components)
        parts = [[np.nan if r.score is None else r.details.get(name, np.nan) for name in names] for r in results]
        columns.append(Column(PARTS, "float32", [np.array(each, np.float32) for each in parts]))
    return columns


def words_of(row: Row, result: RewardResult, most: int, response: str | None = None) -> np.ndarray:
    """Return what people read beside the tokens of a sample of `row`, as JSON of at most `most` bytes, uint8; longer texts are
    cut. `response`: the text of the tokens."""
    fields = {
        "response": response, "prompt": row.prompt, "label": row.label, "details": result.details, "error": result.error,
    }  # fmt: skip
    fields = {name: as_json(value) for name, value in fields.items() if value is not None}
    try:
        text = orjson.dumps(fields, default=str)
    except TypeError:  # keys, numbers or characters that are not JSON's
        text = orjson.dumps({name: str(value).encode(errors="replace").decode() for name, value in fields.items()})
    for name in fields:
        if len(text) <= most:
            break
        whole = orjson.loads(text)
        value = orjson.dumps(whole[name])
        room = max(0, most - len(text) + len(value) - 8) // 2  # a text in a text may be twice as long
        text = orjson.dumps(whole | {name: value[:room].decode(errors="ignore") + "…"})
    return np.frombuffer(text, np.uint8)


def loss_mask(completion: Completion, oldest: int = 0) -> np.ndarray:
    """The tokens that the loss counts, uint8 [R]: those that a policy sampled, of this version or a newer one."""
    return (completion.policy_versions >= oldest).astype(np.uint8)


def pieces_of(completion: Completion) -> list[tuple[np.ndarray, bool]]:
    """(tokens, int32 [R], whether the policy sampled them) of its turns and of what was said between them, in their order."""
    sampled = completion.policy_versions != NO_VERSION
    cuts = np.flatnonzero(np.diff(sampled)) + 1
    pieces = zip(np.split(completion.tokens, cuts), np.split(sampled, cuts), strict=True)
    return [(tokens, bool(own[0])) for tokens, own in pieces if len(own)]


def turn_rewards(row: SampleRow) -> np.ndarray:
    """float32 [R]: what each turn of the policy is worth at its last token, 0 where nothing was said of it; NaN elsewhere."""
    sampled = row.completion.policy_versions != NO_VERSION
    found = np.where(sampled & ~np.append(sampled[1:], False), np.float32(0), np.float32(np.nan))
    for place, worth in row.rewards:
        found[place] = np.nan_to_num(found[place]) + worth  # nothing may have been said behind the turn
    return found


def with_score(made: Made, score: float) -> Made:
    """The sample with what its turns are not worth of its score at its end, where the reward function gave it; one without a turn
    as it is."""
    *before, last = made.rows
    sampled = np.flatnonzero(last.completion.policy_versions != NO_VERSION)
    if not len(sampled):
        return made
    place = int(sampled[-1])
    return replace(made, rows=(*before, replace(last, rewards=(*last.rewards, (place, score - (made.reward or 0.0))))))


def finish_of(completion: Completion) -> str:
    """How the response ended, one of `FINISHES`."""
    return completion.finish_reason if completion.finish_reason in FINISHES else "aborted"


def cut_off(completion: Completion) -> bool:
    """Whether the limit of its length ended it."""
    return completion.finish_reason == "length"


def info_of(row: SampleRow, finish: str, reward: float | None, verdict: float | None) -> tuple[float | None, ...]:
    """As `Bus.put_samples` takes it, of a row whose sample ended so. Versions are those of tokens that a policy sampled; its
    length has what encoders take of its own media."""
    done = row.completion
    versions = done.policy_versions[done.policy_versions != NO_VERSION]
    span = (int(versions.min()), int(versions.max())) if len(versions) else (NO_VERSION, NO_VERSION)
    response, encoded = len(done.tokens), sum(media.encoder_positions for _, media in row.shown)
    return (len(row.prompt) + response + encoded, response, reward, *span, FINISHES.index(finish), verdict)


def in_parts(made: Sequence[Made]) -> list[tuple[int, int]]:
    """(which of these samples, which of its rows) of every row, part by part, as they are put."""
    most = max(len(each.rows) for each in made)
    return [(at, part) for part in range(most) for at, each in enumerate(made) if part < len(each.rows)]
