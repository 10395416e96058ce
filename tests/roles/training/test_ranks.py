"""The trainer, the warm-up and the actor's settling on two real processes, which see unequal rows, against one."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rondo.comm.weights.slab import WeightSlab
from rondo.launch.config import load
from rondo.models.at_rest import resident
from rondo.models.load import load_model
from rondo.models.lora import published_adapter
from rondo.models.mesh import Mesh
from rondo.models.names import adapter_tensors, local_part
from rondo.models.packing import Sequence as Packable
from rondo.roles.actor import ActorRole
from rondo.roles.algorithms.whitening import contribution
from rondo.roles.config import CriticConfig, JobConfig, LoraConfig, MeshConfig
from rondo.roles.forward import Scored, Scorer
from rondo.roles.training.compute_turns import Turns
from rondo.roles.training.objective import TrainRow, open_policy
from rondo.roles.training.values import ValueRow, open_critic
from rondo.runtime.records.timeline import span
from tests.comm.memory import MemorySegment
from tests.models.builders import full_tensors
from tests.roles.training.test_backend import Policy, job, model, rows
from tests.roles.training.test_sft import config_of, folder, train, weights

__all__ = ["folder", "model"]
PATIENCE_S = 120
QUICKSTART = load(Path(__file__).parents[3] / "examples" / "quickstart.py")

CASES: dict[str, dict[str, Any]] = {
    "token": {"loss_aggregation": "token"},
    "sample": {"loss_aggregation": "sample"},
    "constant": {"loss_aggregation": "constant"},
    "adapters": {"loss_aggregation": "token"},
    "everything": {"loss_aggregation": "token", "normalize_batch": "tokens", "tis_high": 1.5, "tis_mode": "truncate"},
}
ROUNDS = {
    2: (((0, 3), (3, 4)), ((4, 5), (5, 5)), ((5, 5), (5, 8))),
    1: (((0, 2),), ((2, 5),), ((5, 8),)),
}
"""By the number of ranks: for every round of a step the rows of each rank, from and to. The second of two has no row in the
second round, the first none in the third."""


def batch(step: int, **columns: Any) -> list[TrainRow]:
    """Eight rows of one to six tokens, some of which no policy sampled."""
    made = [replace(row, **columns) for row in rows(step, num_rows=8)]
    return [replace(row, mask=(np.arange(len(row.mask)) % 3 != 1).astype(np.uint8)) for row in made]


def config_of_case(name: str, path: str) -> JobConfig:
    config = job(path, **CASES[name])
    if name == "adapters":  # and the base as the reference
        return config.model_copy(
            update={"train": config.train.model_copy(update={"lora": LoraConfig(rank=4)}), "sft": None}
        )
    if name != "everything":
        return config
    train = config.train.model_copy(update={"num_mini_batches": 2, "passes": 2})
    return config.model_copy(update={"train": train})


def trained(name: str, path: str, rank: int, num_ranks: int) -> dict[str, Any]:
    """Two steps of a case: weights, what each step told, and which rows it says that it trained. Of several ranks the trainer
    rests after each, and is read there."""
    config = config_of_case(name, path)
    torch.manual_seed(0)
    made = open_policy(config, path, world_size=num_ranks, device="cpu")
    told, whitens = [], config.algorithm.normalize_batch is not None
    for step in range(2):
        # The last rounds of a step are a mini-batch of their own where it has two.
        cuts: list[Sequence[Any]] = [ROUNDS[num_ranks][:2], ROUNDS[num_ranks][2:]] if whitens else [ROUNDS[num_ranks]]
        every = batch(step, old_log_probs=None) if whitens or name == "adapters" else batch(step)
        mine = [at for cut in cuts for ranks in cut for at in range(*ranks[rank])]
        if whitens:
            parts = [contribution(every[at].advantages, every[at].mask, "tokens") for at in mine]
            made.objective.whiten(made.gathered(parts, 3))
            for ranks in cuts[1]:
                made.objective.score(
                    made.model, every[slice(*ranks[rank])], [[at, 0, 0, 1] for at in range(*ranks[rank])]
                )
        for use in range(config.train.passes):
            for number, cut in enumerate(cuts):
                update = use * len(cuts) + number
                for ranks in cut:
                    chosen = range(*ranks[rank])
                    made.accumulate(
                        step, every[chosen.start : chosen.stop], [[at, 0, 0, 1] for at in chosen],
                        last=ranks is cut[-1], update=update,
                    )  # fmt: skip
                if update < config.train.passes * len(cuts) - 1:
                    made.update(step)
        metrics, spans = made.finish(step)
        told.append((metrics, sorted(spans)))
        if num_ranks > 1:
            made.wake()  # which it is
            made.rest()
            assert all(t.untyped_storage().data_ptr() in hosts(made) for t in resident(made.model))
            made.wake() if step == 0 else None
    return {"weights": dict(whole(made)), "told": told, "checksum": made.join_checksums(made.checksum())}


def valued(path: str, rank: int, num_ranks: int, saved: Path) -> dict[str, Any]:
    """Two steps of a critic with adapters in bfloat16, saved after the first by two ranks; one goes on from there, too."""
    config = job(path, name="ppo", kl_coef=0.0)
    critic = CriticConfig(lr=1e-2, micro_batch_tokens=64, lora=LoraConfig(rank=4))
    train = config.train.model_copy(update={"dtype": "bfloat16"})
    config = config.model_copy(update={"critic": critic, "train": train})
    opened = functools.partial(open_critic, config, path, path, world_size=num_ranks, device="cpu")
    made = opened()
    base = {name: t.clone() for name, t in full_tensors(made.model)}

    def step(number: int) -> dict[str, float]:
        for ranks in ROUNDS[num_ranks]:
            chosen = range(*ranks[rank])
            given = [ValueRow(row.tokens, row.advantages, row.advantages) for row in batch(number)[slice(*ranks[rank])]]
            made.accumulate(number, given, [[at, 0, 0, 1] for at in chosen], last=ranks is ROUNDS[num_ranks][-1])
        return made.finish(number)[0]

    told = [step(0)]
    if num_ranks > 1:
        made.save(saved, {"version": 1})
    else:
        told, made = [], opened()
        made.load_checkpoint(saved)
    told.append(step(1))
    learnt = {name: t.detach().clone() for name, t in adapter_tensors(made.model).items()}
    after = {name: t for name, t in full_tensors(made.model) if name not in learnt and name != "score.weight"}
    assert {t.dtype for t in learnt.values()} == {torch.float32} and {t.dtype for t in after.values()} == {
        torch.bfloat16
    }
    assert all(torch.equal(t, base[name]) for name, t in after.items())
    return {"learnt": learnt, "told": told, "checksum": made.join_checksums(made.checksum())}


def hosts(made: Policy) -> set[int]:
    """Where the host memory lies that it rests in."""
    return {host.untyped_storage().data_ptr() for host in made._at_rest._hosts.values()}


def scaled(path: str, rank: int) -> list[dict[str, float]]:
    """What two steps in float16 told; in the first one the gradient of the second rank's rows alone overflows."""
    config = job(path)
    config = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "float16"})})
    made, told = open_policy(config, path, world_size=2, device="cpu"), []
    for step in range(2):
        mine = batch(step, old_log_probs=None)[rank * 4 : rank * 4 + 4]
        if step == 0 and rank == 1:
            mine = [replace(row, advantages=row.advantages * 1e9) for row in mine]
        made.accumulate(step, mine, [[at, 0, 0, 1] for at in range(4)], last=True)
        told.append(made.finish(step)[0])
    return told


def whole(made: Policy) -> dict[str, torch.Tensor]:
    tensors = dict(full_tensors(made.model)) | published_adapter(made.model)
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Bus:
    """The stand-in for a rank's bus: one round a step, with rows of its own. A commit waits until both ranks have trained a round
    of the next step."""

    def __init__(self, rank: int, store: dist.Store, log: Callable[[str], None]) -> None:
        self._rank, self._store, self._log = rank, store, log

    async def stream(self, *_: Any, step: int, **__: Any) -> AsyncIterator[Any]:
        chosen = (range(0, 5), range(5, 8))[self._rank]
        named = [
            SimpleNamespace(
                group=at,
                sample=0,
                part=0,
                media=None,
                response=1,
                columns=("tokens",),
                array=lambda _, at=at: batch(step)[at].mask,  # as many as tokens
                reward=1.0,
                finish="stop",
            )
            for at in chosen
        ]
        yield SimpleNamespace(
            rows=named,
            spans=[[at, 0, 0, 1] for at in chosen],
            last=True,
            closes=True,
            update=0,
            step=step,
            key=f"{step}",
        )

    async def call(self, method: str, *arguments: Any, **_: Any) -> dict[str, Any]:
        if method in ("commit", "await_version"):
            version = arguments[1] if method == "commit" else arguments[0]
            awaited = [f"round {version} of {rank}" for rank in range(2)] if method == "commit" else [f"{version}"]
            if version < 2 or method == "await_version":
                await asyncio.to_thread(self._store.wait, awaited, timedelta(seconds=PATIENCE_S))
        if method == "commit":
            self._log("commit")
            self._store.set(f"{version}", "committed")
        return {"slot": 0}

    def check(self, made: Any) -> None: ...


class Actor(ActorRole):
    """With a real trainer, a compute thread and a copying thread, a slab that both ranks map, and no snapshots."""

    def __init__(self, path: str, rank: int, store: dist.Store, log: Callable[[str], None], slab: WeightSlab) -> None:
        computing = ThreadPoolExecutor(1)

        async def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = getattr(function, "__name__", "")
            log(name)
            found = await asyncio.get_running_loop().run_in_executor(computing, lambda: function(*args, **kwargs))
            if name == "accumulate":
                store.set(f"round {args[0]} of {rank}", "trained")
            return found

        async def report(*_: Any) -> None: ...

        async def working(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return await compute(function, *args, **kwargs)

        context: Any = SimpleNamespace(
            world_size=2, rank=rank, attempt=0, compute=compute, working=working, report=report,
            progress=lambda: None, span=lambda name, **_: span(name, "actor"),
        )  # fmt: skip
        super().__init__(context)
        torch.manual_seed(0)
        self._rank, self._store, self._log = rank, store, log
        self._trainer = open_policy(job(path), path, world_size=2, device="cpu")
        self._snapshot, self._publishing, self._slab = None, None, slab
        self._parity: Any = SimpleNamespace(write=self._told, taken=tuple, add=lambda _: None)
        config = QUICKSTART.model_copy(update={"num_steps": 2})
        self._job: Any = SimpleNamespace(
            config=config,
            device="cpu",
            bus=Bus(rank, store, log),
            turns=Turns(),
            lent=None,
            publishes=True,
            takes_turns=False,
            rests=False,
            has_actor_fwd=True,
        )
        self._step_began = 0.0

    def _read(self, made: Any) -> tuple[list[TrainRow], list[np.ndarray]]:
        chosen = [batch(made.step)[at] for at, *_ in made.spans]
        return chosen, [np.zeros(len(row.mask), np.int64) for row in chosen]

    def _told(self, *_: Any) -> None:
        self._log("parity")

    async def _copying(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = await super()._copying(function, *args, **kwargs)
        if function == self._trainer.join_checksums and self._rank == 1:
            # The other rank goes on: what is not done before it is behind its commit.
            await asyncio.to_thread(self._store.wait, ["1"], timedelta(seconds=PATIENCE_S))
        return found

    async def two_steps(self) -> None:
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as self._tasks:
            for step in range(2):
                await self._train(step)
            await self._settled()


def settled(path: str, rank: int, store: dist.Store, out: Path) -> dict[str, torch.Tensor]:
    """Two steps of an actor; both ranks write what they do into one file, in the order in which they do it. What is published."""
    with (out / "log").open("ab", buffering=0) as file, (out / "slab").open("r+b") as memory:
        slab = WeightSlab(MemorySegment(fd=memory.fileno()), 1)
        actor = Actor(path, rank, store, lambda name: file.write(f"{rank} {name}\n".encode()) and None, slab)
        asyncio.run(actor.two_steps())
    if rank > 0:
        return {}
    ((version, (slot, checksum)),) = slab.complete().items()
    return {
        name: tensor.clone() for name, tensor in slab.read(slot, attempt=0, version=version, checksum=checksum).items()
    }


def scored(path: str, rank: int, mesh: Mesh) -> tuple[bool, list[Scored]]:
    """Whether this rank has a part of the model alone; the log-probs of its rows, of which the second rank has none: under the
    first weights, where the first rank asks for newer ones, and under those, when the second one leaves."""
    made: Any = SimpleNamespace(config=job(path), device="cpu")
    scorer = Scorer(path, made, mesh=mesh)
    newer = {name: 1.5 * tensor for name, tensor in full_tensors(load_model(path))}
    sequences = [Packable(row.tokens, len(row.mask)) for row in batch(0)] if rank == 0 else []
    found = [scorer.score(sequences), scorer.score(sequences, needs=3 - 4 * rank)]
    scorer.load(3, newer)
    found += [scorer.score(sequences, needs=3 - 4 * rank, stops=rank == mesh.size - 1)]
    mean = Scorer(path, made, mesh=mesh, decay=0.5)
    first = [local_part(parameter).clone() for parameter in mean._model.parameters()]
    mean.load(1, newer)
    for parameter, began in zip(mean._model.parameters(), first, strict=True):
        torch.testing.assert_close(local_part(parameter), 1.25 * began)
    held = sum(local_part(parameter).numel() for parameter in scorer._model.parameters())
    whole = sum(parameter.numel() for parameter in scorer._model.parameters())
    return held < 0.6 * whole, found


def rank_of_two(path: str, folder: Path, out: Path) -> None:
    rank, store = dist.get_rank(), dist.FileStore(str(out / "store"), 2)
    facts: dict[str, Any] = {name: trained(name, path, rank, 2) for name in CASES}
    facts["settled"] = settled(path, rank, store, out)
    facts["scored"] = scored(path, rank, Mesh.open(MeshConfig(), 2))
    facts["scaled"] = scaled(path, rank)
    facts["valued"] = valued(path, rank, 2, out / "step_000001")
    seen: list[dict[str, float]] = []
    # 3 demonstrations of 3 rounds over 2 ranks: one rank runs dummies. Only rank 1 asks to stop.
    config = config_of(folder, steps=9, batch_size=3, micro_batch_tokens=20)
    warm, _ = train(folder, config, world_size=2, on_step=seen.append, should_stop=lambda: rank == 1 and len(seen) == 3)
    facts["warm_up"] = (seen, weights(warm))
    torch.save(facts, out / f"{rank}.pt")


BOTH = """
import sys
from functools import partial
from pathlib import Path
from tests.models.ranks import fork
from tests.roles.training.test_ranks import rank_of_two

path, folder, out = sys.argv[1:]
fork(2, partial(rank_of_two, path, Path(folder), Path(out)), Path(out))
"""


@pytest.fixture(scope="module")
def two(model: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What each of two ranks found, and the lines that both wrote."""
    out = tmp_path_factory.mktemp("ranks")
    (out / "slab").write_bytes(bytes(1 << 23))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", BOTH, model, folder, out], cwd=Path(__file__).parents[3], env=environment, check=True
    )
    ranks = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(ranks=ranks, log=(out / "log").read_text().splitlines(), saved=out / "step_000001")


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_with_unequal_rows_train_the_policy_as_one_does(two: Any, model: str, name: str) -> None:
    alone = trained(name, model, 0, 1)
    first, second = (found[name] for found in two.ranks)
    before = whole(open_policy(config_of_case(name, model), model, world_size=1, device="cpu"))
    assert first["checksum"] == second["checksum"]
    for key, tensor in alone["weights"].items():
        torch.testing.assert_close(first["weights"][key], tensor, atol=2e-6, rtol=0)
    assert max((alone["weights"][key] - before[key]).abs().max() for key in before) > 1e-3
    assert first["told"] == second["told"]
    for (metrics, spans), (wanted, every) in zip(first["told"], alone["told"], strict=True):
        assert spans == every == [[at, 0, 0, 1] for at in range(8)]
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_a_critic_with_adapters_and_a_head_goes_on_in_one_process_from_the_checkpoint_of_two(
    two: Any, model: str
) -> None:
    first, second = (found["valued"] for found in two.ranks)
    assert first["checksum"] == second["checksum"] and first["told"] == second["told"]
    assert all(torch.equal(tensor, second["learnt"][name]) for name, tensor in first["learnt"].items())
    alone = valued(model, 0, 1, two.saved)
    assert alone["told"][0] == pytest.approx(first["told"][1], rel=2e-2, abs=1e-3)
    for name, tensor in alone[
        "learnt"
    ].items():  # each step moves a number by up to 0.01, whose sign bfloat16 may change
        assert (first["learnt"][name] - tensor).abs().mean() < 1e-3, name


def test_a_gradient_that_overflows_on_one_rank_is_skipped_and_halves_the_scale_on_both(two: Any) -> None:
    first, second = (found["scaled"] for found in two.ranks)
    assert [(step["skipped"], step["loss_scale"]) for step in first] == [(1.0, 1024.0), (0.0, 1024.0)]
    assert [(step["skipped"], step["loss_scale"]) for step in second] == [(1.0, 1024.0), (0.0, 1024.0)]
    assert 0 < first[1]["grad_norm"] == second[1]["grad_norm"] < float("inf")


def test_two_ranks_that_hold_a_shard_each_score_and_take_new_weights_as_one_does_also_without_rows(
    two: Any, model: str
) -> None:
    (first_is_a_part, theirs), (second_is_a_part, none) = (found["scored"] for found in two.ranks)
    is_a_part, alone = scored(model, 0, Mesh())
    assert (first_is_a_part, second_is_a_part, is_a_part) == (True, True, False)
    for found in (theirs, none, alone):
        assert [(each.version, each.log_probs is None, each.stops) for each in found] == [
            (0, False, False), (0, True, False), (3, False, True)
        ]  # fmt: skip
    before, _, after = [None if each.log_probs is None else np.concatenate(each.log_probs) for each in alone]
    assert before is not None and after is not None and np.abs(before - after).max() > 0.01
    for ours, other, empty in zip(alone, theirs, none, strict=True):
        assert (ours.log_probs is None) == (other.log_probs is None) == (empty.log_probs is None)
        if ours.log_probs is not None and other.log_probs is not None:
            assert len(ours.log_probs) == 8 and empty.log_probs == []
            assert all(map(np.array_equal, ours.log_probs, other.log_probs))


def test_a_step_is_committed_beside_the_next_and_its_optimizer_waits_for_it_on_every_rank(two: Any, model: str) -> None:
    of_rank = [[line[2:] for line in two.log if line[0] == str(rank)] for rank in range(2)]
    steps = ["accumulate", "finish", "sum_over_ranks"]
    assert [name for name in of_rank[0] if name in (*steps, "commit")] == [
        *steps,
        "accumulate",
        "commit",
        *steps[1:],
        "commit",
    ]
    assert [name for name in of_rank[1] if name in steps] == [*steps, *steps]


def test_every_rank_has_told_what_it_trained_before_any_rank_can_commit(two: Any) -> None:
    assert two.log.index("1 parity") < two.log.index("0 commit")


def test_collectives_of_a_commit_and_of_the_rounds_beside_it_do_not_cross(two: Any, model: str) -> None:
    config = job(model)
    torch.manual_seed(0)
    alone = open_policy(config, model, world_size=1, device="cpu")
    for step in range(2):
        alone.accumulate(step, batch(step), [[at, 0, 0, 1] for at in range(8)], last=True)
        alone.finish(step)
    for key, tensor in whole(alone).items():
        torch.testing.assert_close(two.ranks[0]["settled"][key], tensor, atol=2e-6, rtol=0)


def test_two_ranks_warm_up_as_one_and_stop_together(two: Any, folder: Path) -> None:
    theirs_seen, theirs = two.ranks[0]["warm_up"]
    seen: list[dict[str, float]] = []
    config = config_of(folder, steps=9, batch_size=3)
    alone, _ = train(folder, config, on_step=seen.append, should_stop=lambda: len(seen) == 3)
    assert len(theirs_seen) == len(two.ranks[1]["warm_up"][0]) == 3
    for ours, other in zip(seen, theirs_seen, strict=True):
        assert other == pytest.approx(ours, rel=1e-4)
    for name, tensor in weights(alone).items():
        np.testing.assert_allclose(theirs[name].numpy(), tensor.detach().numpy(), rtol=1e-3, atol=2e-5)
