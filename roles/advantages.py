"""advantages: rewards of whole prompt groups in, one advantage a response token out; with a critic's values returns too. CPU
only, no model.

Owns the loop, and which rewards are post-processed together; the formulas are in `algorithms/advantages.py`,
`algorithms/values.py` or the user's own, picked by the algorithm's record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np

from rondo.comm.bus.bus import Row
from rondo.roles.algorithms.advantages import Scored, kl_of, of_group, with_teacher
from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.postprocess import Process, Rewarded, process_of
from rondo.roles.algorithms.teachers import DistillationConfig
from rondo.roles.algorithms.values import gae, token_rewards
from rondo.roles.job import groups_of, open_job, timed
from rondo.roles.streams import BEHIND, PARTS, REFERENCE_COLUMN, SOURCE, TURNS, VALUES
from rondo.runtime.worker.context import WorkerContext

TOKENS_PER_ROUND = 1 << 20  # no model runs here: as many groups at once as are ready


class AdvantagesRole:
    """Prompt groups arrive whole (the stream is declared `whole_groups`), so statistics need no other round."""

    role = "advantages"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        job = await open_job(self._ctx)
        algorithm = job.config.loss()
        weights = list(job.config.components.values())
        compute = None if algorithm.needs_critic else of_group(algorithm, weights)
        outputs = ("advantages", "returns") if compute is None else ("advantages",)
        reward, components, sources = job.config.reward, list(job.config.components), list(job.config.data.sources)
        process = None if reward.postprocess is None else process_of(reward.postprocess)
        await self._ctx.ready()
        async for made in timed(self._ctx, job.bus.stream(self.role, tokens=TOKENS_PER_ROUND)):
            with self._ctx.span("advantages", step=made.step, groups=groups_of(made)):
                taught = job.config.distillation
                columns: dict[str, list[np.ndarray]] = {name: [] for name in outputs}
                groups = [list(group) for _, group in groupby(made.rows, key=lambda row: row.group)]
                rewards: dict[tuple[int, int], float] = {}
                if process is not None:
                    for some in [groups] if reward.postprocess_per == "step" else [[rows] for rows in groups]:
                        rewards |= _processed(some, process, components, sources)
                for rows in groups:
                    found = (
                        [_advantages(rows, compute, taught, rewards)]
                        if compute
                        else _of_values(rows, algorithm, rewards)
                    )
                    for name, each in zip(outputs, found, strict=True):
                        columns[name] += each
                if made.rows:
                    job.bus.put_columns(made, columns)
            await job.bus.ack(made)
            self._ctx.progress()
            if self._ctx.stopping.is_set():
                return


def _advantages(
    rows: list[Row],
    compute: Callable[[Sequence[Scored]], list[np.ndarray]],
    taught: DistillationConfig | None = None,
    rewards: Mapping[tuple[int, int], float] | None = None,
) -> list[np.ndarray]:
    """float32 [R] for each row of one prompt group: among the samples that have a reward, 0 for the others; with what the teacher
    says where it is a part of them. To `compute` a sample is its rows end to end."""
    found = [np.zeros(row.response, np.float32) for row in rows]
    having = [(places, _scored([rows[at] for at in places], rewards)) for places in _samples(rows)]
    for (places, _), advantages in zip(having, compute([each for _, each in having]) if having else (), strict=True):
        _cut(advantages, rows, places, found)
    if taught is None or taught.form != "advantage":
        return found
    names = ("loss_mask", "rollout_log_probs", "teacher_log_probs")
    return [with_teacher(taught, own, *map(row.array, names)) for row, own in zip(rows, found, strict=True)]


def _processed(
    groups: Sequence[list[Row]], process: Process, components: Sequence[str], sources: Sequence[str]
) -> dict[tuple[int, int], float]:
    """(group, sample) -> what becomes of its reward, of the samples of some prompt groups that have one."""
    having = [[rows[at] for at in places] for rows in groups for places in _samples(rows)]
    if not having:
        return {}
    told = [_rewarded(rows, components, sources) for rows in having]
    found = process(np.array([rows[0].reward for rows in having], np.float32), told)
    return {(each.group, each.number): reward for each, reward in zip(told, found.tolist(), strict=True)}


def _rewarded(rows: Sequence[Row], components: Sequence[str], sources: Sequence[str]) -> Rewarded:
    first = rows[0]
    parts = dict(zip(components, first.array(PARTS).tolist(), strict=True)) if PARTS in first.columns else {}
    source = sources[int(first.array(SOURCE)[0])] if SOURCE in first.columns else ""
    num_tokens = sum(int(row.array("loss_mask").sum()) for row in rows)
    return Rewarded(first.group, first.sample, num_tokens, rows[-1].finish, parts, source)


def _samples(rows: Sequence[Row]) -> list[list[int]]:
    """Where the rows of each sample of a group stand that has a reward, in their order."""
    places = [at for at, row in enumerate(rows) if row.reward is not None]
    places.sort(key=lambda at: (rows[at].sample, rows[at].part))
    return [list(own) for _, own in groupby(places, key=lambda at: rows[at].sample)]


def _cut(whole: np.ndarray, rows: Sequence[Row], places: Sequence[int], found: list[np.ndarray]) -> None:
    """What is of a whole sample, in the places of its rows."""
    ends = np.cumsum([rows[at].response for at in places])[:-1]
    for at, own in zip(places, np.split(whole, ends), strict=True):
        found[at] = own


def _joined(rows: Sequence[Row], name: str) -> np.ndarray:
    return rows[0].array(name) if len(rows) == 1 else np.concatenate([row.array(name) for row in rows])


def _scored(rows: Sequence[Row], rewards: Mapping[tuple[int, int], float] | None = None) -> Scored:
    """What the stream brings of a sample, beside its reward, or what became of that."""
    first = rows[0]
    reward = rewards[first.group, first.sample] if rewards else first.reward
    assert reward is not None
    parts = first.array(PARTS) if PARTS in first.columns else None
    names = ("rollout_log_probs", REFERENCE_COLUMN, TURNS)
    told = (_joined(rows, name) if name in first.columns else None for name in names)
    return Scored(reward, _joined(rows, "loss_mask"), parts, *told)


def _of_values(
    rows: list[Row], algorithm: AlgorithmConfig, rewards: Mapping[tuple[int, int], float] | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages and returns, float32 [R] of each row of a prompt group with values; a sample without a reward has neither."""
    found = [np.zeros(row.response, np.float32) for row in rows]
    returns = [np.full(row.response, np.nan, np.float32) for row in rows]
    for places in _samples(rows):
        own = [rows[at] for at in places]
        sample, last, penalties = _scored(own, rewards), own[-1], None
        goes_on = algorithm.bootstrap_truncated and last.finish == "length"
        if algorithm.kl_in == "reward" and algorithm.kl_coef:
            penalties = algorithm.kl_coef * kl_of(sample, algorithm)
        both = gae(
            token_rewards(sample.reward, sample.mask, penalties), _joined(own, VALUES), sample.mask, gamma=algorithm.gamma,
            lam=algorithm.gae_lambda, value_after=float(last.array(BEHIND)[0]) if goes_on else 0.0,
        )  # fmt: skip
        for whole, of in zip(both, (found, returns), strict=True):
            _cut(whole, rows, places, of)
    return found, returns
