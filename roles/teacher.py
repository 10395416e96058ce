"""teacher: what other models say of the tokens that the policy sampled, for it to learn from.

Owns which teacher a sample has, what that sees of it, and how those with weights here and those behind servers are asked beside
each other. The loop is that of every role that scores (`forward.py`); servers are asked by `engines/scoring_servers.py`; what is
learnt is `algorithms/distillation.py`'s.

    round -> rows of each teacher -> log-probs of the sampled tokens, or of several at each place -> put columns -> acknowledge
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import Round, Row
from rondo.comm.bus.group import NO_VERSION
from rondo.models.config import MeshConfig
from rondo.models.mesh import Mesh
from rondo.models.packing import Sequence as Packable
from rondo.roles.engines.scoring_servers import ScoringServers
from rondo.roles.forward import ForwardRole, Scored, Scorer
from rondo.roles.job import Job, open_job
from rondo.roles.streams import COMPARED, CONTEXT, LIKELIEST, TEACHER
from rondo.roles.training.group_versions import follow_together
from rondo.runtime.errors import ConfigError

TOKENS_AT_SERVERS = 1 << 17
"""Of a round, where no model runs here."""
Asked = tuple[int, Packable, np.ndarray | None]
"""The place of a row's teacher, the row, and tokens to tell of."""


class Teachers:
    """Several models that score, each the rows of its own: these come with the place of their model, and perhaps tokens to tell
    of."""

    def __init__(self, scorers: Mapping[int, Scorer], mesh: Mesh, tokens: int) -> None:
        """tokens: that go through a model at once; a longer row does so alone."""
        self._scorers, self.mesh, self._tokens = scorers, mesh, tokens
        self.version = 0
        self.attention = next((scorer.attention for scorer in scorers.values()), None)

    def score(
        self,
        rows: Sequence[Asked],
        *,
        needs: int = NO_VERSION,
        stops: bool = False,
    ) -> Scored:
        """As `Scorer.score` (collective). A model that no rank has rows for rests."""
        found: dict[int, np.ndarray] = {}
        compared: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        [stopping] = self.mesh.most(stops)
        for number, scorer in self._scorers.items():
            parts = self._cut(rows, [at for at, (teacher, *_) in enumerate(rows) if teacher == number])
            [num_parts] = self.mesh.most(len(parts))
            for mine in parts + [[]] * (num_parts - len(parts)):
                ids = [told for at in mine if (told := rows[at][2]) is not None]
                scored = scorer.score([rows[at][1] for at in mine], ids=ids)
                found.update(zip(mine, scored.log_probs or (), strict=True))
                compared.update(zip(mine, scored.compared or (), strict=False))
        in_order = [compared[at] for at in range(len(rows))] if compared else None
        log_probs = [found[at] for at in range(len(rows))]
        return Scored(self.version, log_probs, bool(stopping), compared=in_order)

    def _cut(self, rows: Sequence[Asked], chosen: Sequence[int]) -> list[list[int]]:
        """What a teacher sees may be longer than what a round was planned by."""
        parts: list[list[int]] = []
        room = 0
        for at in chosen:
            room -= (cost := rows[at][1].cost)
            if room < 0:
                parts.append([])
                room = self._tokens - cost
            parts[-1].append(at)
        return parts

    def load(self, version: int, tensors: Mapping[str, Any], numbers: Sequence[int]) -> None:
        """A version of the policy for these of them (collective)."""
        for number in numbers:
            self._scorers[number].load(version, tensors)
        self.version = version

    @property
    def lasting(self) -> Mapping[str, torch.Tensor]:
        """The averages, by the place of their teacher and the name of a tensor."""
        return {
            f"{number}.{name}": tensor
            for number, scorer in self._scorers.items()
            for name, tensor in scorer.lasting.items()
        }

    def restored(self, version: int) -> None:
        for scorer in self._scorers.values():
            if scorer.lasting:
                scorer.restored(version)
        self.version = version


class TeacherRole(ForwardRole):
    """The teachers of `distillation`: every process has a shard of each that has weights here, and asks the servers of the others
    itself."""

    role = "teacher"

    def read(self, row: Row) -> Asked:
        teacher = int(row.array(TEACHER)[0]) if TEACHER in row.columns else 0
        seen = super().read(row)
        if CONTEXT in row.columns and len(context := row.array(CONTEXT)):
            answer = seen.tokens[len(seen.tokens) - seen.response :]
            seen = Packable(np.concatenate([context, answer]), seen.response)
        return teacher, seen, row.array(LIKELIEST) if LIKELIEST in row.columns else None

    def columns(self, scored: Scored, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        if scored.compared is None:
            if self._floor is None and any(np.isneginf(each).any() for each in log_probs):
                raise ConfigError(
                    "distillation.min_log_prob must be set with a teacher that has no chance for a token that the policy "
                    "samples, got a log-prob of -inf. Set it, such as to -20"
                )
            return {"teacher_log_probs": log_probs}
        return dict(zip(COMPARED, map(list, zip(*scored.compared, strict=True)), strict=True))

    def tokens(self, job: Job) -> int:
        """Where no model runs here, what keeps servers busy."""
        assert job.config.distillation is not None
        away = all(teacher.urls for teacher in job.config.distillation.named().values())
        return max(super().tokens(job), TOKENS_AT_SERVERS) if away else super().tokens(job)

    def _open_scorer(self, path: str, job: Job) -> Teachers:
        taught, mesh = job.config.distillation, self._mesh(job, MeshConfig())
        assert taught is not None
        return Teachers(
            {
                number: Scorer(
                    job.teacher_paths.get(name, path),
                    job,
                    mesh=mesh,
                    model=teacher.model,
                    top_k=taught.teacher_top_k,
                    adapts=teacher.follows,
                    decay=teacher.decay,
                )
                for number, (name, teacher) in enumerate(taught.named().items())
                if not teacher.urls
            },
            mesh,
            job.config.train.micro_batch_tokens,
        )

    async def _scored(self, job: Job, scorer: Any, made: Round, rows: Sequence[Asked]) -> Scored:
        """The rows of models here and those of servers beside each other."""
        assert job.config.distillation is not None
        away = [at for at, (number, *_) in enumerate(rows) if number in self._servers]
        here = [at for at in range(len(rows)) if at not in set(away)]
        calls = [
            self._servers[rows[at][0]].score(
                rows[at][1].tokens, rows[at][1].response, job.config.distillation.teacher_top_k
            )
            for at in away
        ]
        mine, *told = await asyncio.gather(super()._scored(job, scorer, made, [rows[at] for at in here]), *calls)
        if not away:
            return mine
        log_probs = dict(zip(here, mine.log_probs or (), strict=True))
        compared = dict(zip(here, mine.compared or (), strict=False))
        for at, (values, likeliest) in zip(away, told, strict=True):
            log_probs[at] = values
            if likeliest is not None:
                compared[at] = likeliest
        order = range(len(rows))
        return replace(
            mine,
            log_probs=[log_probs[at] for at in order],
            compared=[compared[at] for at in order] if compared else None,
        )

    async def run(self) -> None:
        job = await open_job(self._ctx)
        assert job.config.distillation is not None
        self._floor = job.config.distillation.min_log_prob
        self._servers = {
            number: ScoringServers.of(teacher)
            for number, teacher in enumerate(job.config.distillation.named().values())
            if teacher.urls
        }
        named = job.config.distillation.named().values()
        follows = [number for number, teacher in enumerate(named) if teacher.follows]
        path = await self._initial(job) if any(teacher.begins for teacher in named) else job.model_path
        async with AsyncExitStack() as stack:
            for servers in self._servers.values():
                await stack.enter_async_context(servers)
            scorer = await self._open(path, job)
            state = await self._restored(job, scorer)

            async def install(version: int, tensors: Mapping[str, Any]) -> None:
                load = functools.partial(scorer.load, version, tensors, follows)
                await (self._ctx.compute(load) if state is None else state.load(version, load))

            if follows:
                # One that follows and has no state needs a version first.
                every_has_state = all(teacher.decay is not None for teacher in named if teacher.follows)
                since = state.version if state is not None and every_has_state else -1
                first = await stack.enter_async_context(
                    follow_together(self._ctx, job, self.role, install, since=since)
                )
                await first.wait()
            await self._score_rounds(job, scorer)
        if state is not None:
            await state.save()
