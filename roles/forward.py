"""reference and actor_fwd: one forward pass over finished samples, one column of log-probs back. One class, two weights.

Owns when a group is scored (as soon as it is put; beside a trainer in its waits, `compute_turns.py`) and under which weights:
`actor_fwd` with the newest version it has proved, which is no older than any that a row was sampled under; `reference` with
weights that never change, or with one of every `reference.refresh_every` versions. The processes of a group have a shard of the
model each, and score every round together, under one version (`group_versions.py`). Decides nothing about rows: rounds come from
the coordinator. A teacher is another one of them (`teacher.py`).


    round -> pack -> log-probs of the response tokens -> put column -> acknowledge
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.bus import POLL_S, Round, Row
from rondo.comm.bus.group import NO_VERSION
from rondo.models.attention import chosen
from rondo.models.config import MeshConfig, ModelConfig
from rondo.models.device_memory import device_memory
from rondo.models.load import DTYPES
from rondo.models.logprobs import Scores, response_scores
from rondo.models.lora import load_published
from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.models.mesh import Mesh
from rondo.models.names import adapter_tensors, local_part
from rondo.models.packing import Sequence as Packable
from rondo.models.parallel import compute_in
from rondo.models.routing import Heard, Routing, enable_replay
from rondo.roles.algorithms.teachers import NONE
from rondo.roles.job import Job, groups_of, open_job, timed
from rondo.roles.shown import read
from rondo.roles.streams import LIKELIEST, ROUTED, SHOWN
from rondo.roles.training.backend import open_model
from rondo.roles.training.group_versions import follow_together
from rondo.roles.training.scorer_state import NONE as NO_STATE
from rondo.roles.training.scorer_state import ScorerState
from rondo.runtime.waits import totals, waiting
from rondo.runtime.worker.context import WorkerContext

REPORT_S = 5.0
REFERENCE = "reference"
"""Folder in the run directory with the weights of version 0, where a warm-up made them; else the model's own folder."""


@dataclass(frozen=True, slots=True)
class Scored:
    """`log_probs` after the temperature, float32 [R] for each row, under policy version `version`; None where that is older than
    what a rank asked for. `stops`: a rank leaves behind this round, so all do."""

    version: int
    log_probs: list[np.ndarray] | None
    stops: bool = False
    routes: list[np.ndarray] | None = None
    """Where its routers sent all tokens but the last, uint8 or int16 [T - 1, layers, top_k] for each row; None: not recorded."""
    compared: list[tuple[np.ndarray, np.ndarray]] | None = None
    """Other tokens at each place and their log-probs, int32 and float32 [R, K] for each row, NONE for no token; None: not asked
    for."""


class Scorer:
    """A model that only scores, cut over `mesh` (collective). Runs on the compute thread."""

    def __init__(
        self,
        path: str,
        job: Job,
        *,
        mesh: Mesh = Mesh(),  # noqa: B008  # frozen
        replay: str = "off",
        adapts: bool = False,
        model: ModelConfig | None = None,
        top_k: int = 0,
        decay: float | None = None,
        lasts: bool = False,
    ) -> None:
        """replay: as in the settings, "r3" of the experts that rows come with; "r2" records its own. adapts: it loads versions,
        adapters if these alone are published. model: its settings, where it is not the policy's. top_k: how many of the likeliest
        tokens it tells of. decay: its weights are an exponential moving average of versions, from those at `path` on; the average
        is kept in float32, since a hundredth of a small step is nothing to bfloat16. lasts: a restart needs its weights, which no
        newer version gives back."""
        config, dtype = job.config, job.config.train.dtype
        adapters = DTYPES[dtype] if adapts and config.adapts_engines else None
        if model is not None:
            config = config.model_copy(update={"model": model})
        self._model, self._packing = open_model(config, path, mesh, device=job.device, dtype=dtype, adapters=adapters)
        routing = None if replay == "off" else enable_replay(self._model)
        self._records: Routing | None = routing if replay == "r2" else None
        own = adapter_tensors(self._model) or dict(self._model.named_parameters())
        here = {name: local_part(tensor.detach()) for name, tensor in own.items()}
        self._decay = decay
        self._means = {} if decay is None else {name: tensor.float().clone() for name, tensor in here.items()}
        self._here = here if lasts or decay is not None else {}
        self.lasting: Mapping[str, torch.Tensor] = self._means or self._here
        compute_in(self._model, config.train.dtype)
        self.version = 0
        self.mesh = mesh
        self.attention = chosen(self._model)
        self._device = job.device
        self._temperature = config.rollout.temperature
        self._chunk = config.train.log_prob_chunk_tokens
        self._top_k = top_k

    def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        """This rank's part of `tensors` (published names), which may go when it returns: all ranks have theirs (collective)."""
        load_published(self._model, tensors)
        kept = 1.0 if self._decay is None else self._decay ** max(0, version - self.version)
        for name, mean in self._means.items():
            self._here[name].copy_(mean.lerp_(self._here[name].float(), 1 - kept))
        self.mesh.most(version)
        self.version = version

    def restored(self, version: int) -> None:
        """Score with what `lasting` hold, which is the state of `version`."""
        for name, mean in self._means.items():
            self._here[name].copy_(mean)
        self.version = version

    def score(
        self,
        rows: Sequence[Packable],
        *,
        needs: int = NO_VERSION,
        stops: bool = False,
        ids: Sequence[np.ndarray] | None = None,
    ) -> Scored:
        """The rows of this rank (collective). No rows: of several ranks, a dummy through the same modules. needs: the oldest
        version that will do for them; stops: this rank leaves behind this round; ids: tokens to tell of, int [R, K] for each
        row."""
        needs, stopping = self.mesh.most(needs, stops)
        if needs > self.version:
            return Scored(self.version, None, bool(stopping))
        if not rows and self.mesh.size == 1:
            return Scored(self.version, [], bool(stopping))
        packed = self._packing.pack(rows or [Packable(np.zeros(2, np.int32), 1)]).to(self._device)
        heard = None if self._records is None else Heard(records=True)
        with torch.no_grad():
            told = torch.from_numpy(np.concatenate(ids)).to(self._device, torch.int64) if ids else None
            found = response_scores(
                self._model, packed, temperature=self._temperature, chunk_tokens=self._chunk, ids=told,
                top_k=self._top_k, heard=heard,
            )  # fmt: skip
        routes = None
        if heard is not None and self._records is not None:
            routes = packed.of_sequences(heard.routes(self._records).cpu().numpy())[: len(rows)]
        ends = np.cumsum([row.response for row in rows])

        def of_rows(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
            return np.split(values.to(dtype).cpu().numpy(), ends)[: len(rows)]

        pairs, compared = None, _compared(told, found)
        if compared is not None:
            pairs = list(zip(of_rows(compared[0], torch.int32), of_rows(compared[1]), strict=True))
        return Scored(self.version, of_rows(found.log_probs), bool(stopping), routes, pairs)


def _compared(told: torch.Tensor | None, found: Scores) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ids and log-probs of all tokens that were asked for, each once: those that were told, and the likeliest."""
    likeliest = None if found.top_ids is None else (found.top_ids, found.top_log_probs)
    if told is None or likeliest is None:
        return likeliest if told is None else (told, found.others)
    again = torch.stack([(likeliest[0] == told[:, [at]]) for at in range(told.size(1))]).any(0)
    ids = torch.cat([told, likeliest[0].masked_fill(again, NONE)], 1)
    return ids, torch.cat([found.others, likeliest[1]], 1)


def media_of(row: Row) -> MediaInputs | None:
    """The media of a sample, its prompt's and its turns', as views into the ring that last as long as the row's."""
    prompt = None if row.media is None else MediaInputs(row.media_key, row.media)
    return with_turns(prompt, read(row.array(SHOWN))) if SHOWN in row.columns else prompt


class ForwardRole:
    """The loop of all of them."""

    role: str
    follows = False
    """Whether it scores with the weights of the policy's versions, adapters among them, and replays or records routes
    (`train.router_replay`), or tokens go where the model's own routers send them."""
    asked = False
    """Whether the likeliest tokens are told, where a teacher is to tell of them too."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._installed = asyncio.Event()
        self._reported_at = time.monotonic()
        self._num_tokens = self._num_reported = 0

    def columns(self, scored: Scored, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """What is put for the rows of a round."""
        raise NotImplementedError

    def needs(self, rows: Sequence[Row]) -> int:
        """The oldest version of the weights that some rows may be scored under."""
        return NO_VERSION

    async def _initial(self, job: Job) -> str:
        """Where the policy lies as it is before the first step: after a warm-up, once version 0 is committed."""
        if job.config.sft is None:
            return job.model_path
        await job.bus.call("await_version", 0, deadline_s=POLL_S)
        return str(self._ctx.run_dir / REFERENCE)

    def tokens(self, job: Job) -> int:
        """Of a round."""
        return job.config.train.micro_batch_tokens

    def read(self, row: Row) -> Any:
        """A row as the scorer takes it."""
        experts = row.array(ROUTED) if ROUTED in row.columns else None
        return Packable(row.array("tokens"), row.response, media_of(row), experts)

    async def _open(self, path: str, job: Job) -> Any:
        """The scorer with the model at `path`, cut over the processes of the group, which open it in one turn."""
        async with job.turns.scoring(f"load of {self.role}"):
            with self._ctx.section("load", self._ctx.load_s):
                return await self._ctx.compute(self._open_scorer, path, job)

    def _open_scorer(self, path: str, job: Job) -> Any:
        """On the compute thread (collective)."""
        taught = job.config.distillation
        top_k = taught.top_k or 0 if self.asked and taught is not None and taught.asks_policy else 0
        mesh = self._mesh(job, job.config.train.mesh.of_scorers(self._ctx.world_size))
        replay = job.config.train.router_replay if self.follows else "off"
        lasts = self.role == "reference" and job.config.reference.refresh_every is not None
        return Scorer(path, job, mesh=mesh, replay=replay, adapts=self.follows, top_k=top_k, lasts=lasts)

    async def _restored(self, job: Job, scorer: Any) -> ScorerState | None:
        """The state of a scorer that has one, brought back where this process or the run starts again."""
        if not scorer.lasting:
            return None
        train = job.config.train
        state = ScorerState(self._ctx, scorer, train.save_every, in_memory=train.hot_snapshot)
        committed = (await job.bus.call("committed"))["version"]
        if await self._ctx.compute(state.restore, NO_STATE if committed is None else committed):
            await self._ctx.report("restored", {"role": self.role, "version": state.version})
        return state

    def _mesh(self, job: Job, config: MeshConfig) -> Mesh:
        self._ctx.init_process_group(job.device)
        return Mesh.open(config, self._ctx.world_size, job.device)

    async def _score_rounds(self, job: Job, scorer: Any) -> None:
        if self._ctx.rank == 0 and scorer.attention is not None:
            await self._ctx.report("attention", asdict(scorer.attention))
        await self._ctx.ready()
        async for made in timed(self._ctx, job.bus.stream(self.role, tokens=self.tokens(job))):
            rows = [self.read(row) for row in made.rows]
            scored = await self._scored(job, scorer, made, rows)
            if scored.log_probs is not None:
                if rows:
                    job.bus.put_columns(made, self.columns(scored, scored.log_probs))
                await job.bus.ack(made)
            self._ctx.progress()
            if scored.stops:
                return
            self._num_tokens += sum(row.length for row in made.rows)
            await self._report(job)

    async def _score_following(self, job: Job, every: int = 1) -> None:
        """Under published weights, of so many versions one."""
        scorer = await self._open(job.model_path, job)
        state = await self._restored(job, scorer)

        async def install(version: int, tensors: Mapping[str, Any]) -> None:
            load = functools.partial(scorer.load, version, tensors)
            await (self._ctx.compute(load) if state is None else state.load(version, load))
            self._installed.set()

        since = NO_STATE if state is None else state.version
        async with follow_together(self._ctx, job, self.role, install, every, since) as first:
            await first.wait()
            await self._score_rounds(job, scorer)
        if state is not None:
            await state.save()

    async def _scored(self, job: Job, scorer: Any, made: Round, rows: Sequence[Any]) -> Scored:
        """The rows of a round, under weights that are new enough for those of every rank; not where a rank leaves."""
        needs = self.needs(made.rows)
        while True:
            async with job.turns.scoring(self.role):
                with self._ctx.span("forward", step=made.step, groups=groups_of(made)):
                    stops = (
                        self._ctx.stopping.is_set()
                    )  # asked of all: who left alone would hang the others in their next round
                    found = await self._ctx.working("forward", scorer.score, rows, needs=needs, stops=stops)
            if found.log_probs is not None or found.stops:
                return found
            async with waiting("newer weights", peer="actor", deadline_s=POLL_S, moved=lambda: job.bus.held_up_at):
                while scorer.version <= found.version:
                    self._installed.clear()
                    await self._installed.wait()

    async def _report(self, job: Job) -> None:
        """What this process has scored and how long it has waited for what, every few seconds."""
        if (passed_s := time.monotonic() - self._reported_at) > REPORT_S:
            made, self._num_reported = self._num_tokens - self._num_reported, self._num_tokens
            self._reported_at = time.monotonic()
            told = {"tokens": self._num_tokens, "tokens_per_s": made / passed_s}
            beside = {"rank": self._ctx.rank, "waits_s": totals()} | device_memory(job.device)
            await self._ctx.report("metrics", {"forward": {self.role: told}} | beside)


class ReferenceRole(ForwardRole):
    role = "reference"

    def columns(self, scored: Scored, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        return {"ref_log_probs": log_probs}

    async def run(self) -> None:
        job = await open_job(self._ctx)
        if job.config.reference.refresh_every is not None:
            await self._score_following(job, job.config.reference.refresh_every)
            return
        await self._score_rounds(job, await self._open(await self._initial(job), job))


class ActorForwardRole(ForwardRole):
    role = "actor_fwd"
    follows = asked = True

    def columns(self, scored: Scored, log_probs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        found = {"log_probs": log_probs, "log_probs_version": [np.array([scored.version], np.int32)] * len(log_probs)}
        if scored.routes is not None:
            found[ROUTED] = scored.routes
        if scored.compared is not None:
            found[LIKELIEST] = [ids for ids, _ in scored.compared]
        return found

    def needs(self, rows: Sequence[Row]) -> int:
        """No older than what sampled any token: pi_old stands between that and the policy in training."""
        return max((int(row.array("policy_versions").max(initial=NO_VERSION)) for row in rows), default=NO_VERSION)

    async def run(self) -> None:
        job = await open_job(self._ctx)
        await self._score_following(job)
