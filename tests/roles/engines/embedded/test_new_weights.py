"""New weights in mid-sample: what each way of going on samples from, held against a whole forward without any cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rondo.comm.bus.group import NO_VERSION
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Completion, OnNewWeights, Prefix, Request, experts_of_whole
from rondo.roles.engines.replica import Replica
from rondo.roles.engines.stops import Stops
from rondo.roles.sampling.columns import info_of, loss_mask
from rondo.roles.sampling.episode import SampleRow
from rondo.roles.sampling.groups import PromptGroups
from rondo.runtime.errors import ConfigError
from tests.comm.served import served
from tests.models.builders import full_tensors
from tests.roles.engines.engines import (
    full_log_probs,
    qwen3,
    qwen3_moe,
    qwen3_sliding,
    ragged,
    request,
    run,
)

MODELS: dict[str, Callable[[int], Any]] = {"fused": qwen3, "experts": qwen3_moe, "sliding": qwen3_sliding}


def engine_for(model: Any, num_slots: int = 4, **options: Any) -> SlotEngine:
    return slot_engine(model, num_slots=num_slots, max_length=64, **options)


def asked(on_new_weights: OnNewWeights, requests: Iterable[Request], interruptions: int | None = None) -> list[Request]:
    return [replace(each, on_new_weights=on_new_weights, interruptions=interruptions) for each in requests]


def run_with_flips(
    engine: SlotEngine, requests: Iterable[Request], flips: Mapping[int, tuple[int, Any]]
) -> dict[str, Completion]:
    """Steps to the end; `flips`: after so many steps -> (version, model whose weights come)."""
    for each in requests:
        engine.add(each)
    done: dict[str, Completion] = {}
    steps = 0
    while engine.has_work:
        if steps in flips:
            version, model = flips[steps]
            done |= {each.request_id: each for each in engine.load_weights(version, dict(full_tensors(model)))}
        done |= {completion.request_id: completion for completion in engine.step()}
        steps += 1
    return done


def gap_under(model: Any, each: Request, done: Completion, version: int) -> float:
    """The largest difference of the tokens of one version to a fresh forward under it over the whole sequence."""
    chosen = done.policy_versions == version
    if not chosen.any():
        return 0.0
    return float(np.abs(full_log_probs(model, each, done.tokens) - done.log_probs)[chosen].max())


@pytest.mark.parametrize("name", MODELS)
def test_a_recomputed_sequence_goes_on_as_a_fresh_prefill_under_the_new_weights(name: str) -> None:
    old, new = MODELS[name](0), MODELS[name](1)
    requests = asked("recompute", ragged(6))
    engine = engine_for(MODELS[name](0), max_prefill_tokens=40)
    done = run_with_flips(engine, requests, {6: (1, new)})
    crossing = [each for each in requests if set(done[each.id].policy_versions.tolist()) == {0, 1}]
    assert len(crossing) >= 3
    for each in requests:
        assert gap_under(old, each, done[each.id], 0) < 1e-4 and gap_under(new, each, done[each.id], 1) < 1e-4
        assert len(done[each.id].tokens) == each.params.max_new_tokens
    assert engine.stats().num_interrupted == len(crossing)
    assert engine.stats().num_completed == len(requests)


def test_recomputing_under_equal_weights_changes_no_token() -> None:
    requests = ragged(8)
    undisturbed = run(engine_for(qwen3()), requests)
    flips = {step: (step, qwen3()) for step in (3, 4, 9)}
    done = run_with_flips(engine_for(qwen3(), max_prefill_tokens=30), asked("recompute", requests), flips)
    for each in requests:
        assert done[each.id].tokens.tolist() == undisturbed[each.id].tokens.tolist()
        np.testing.assert_allclose(done[each.id].log_probs, undisturbed[each.id].log_probs, atol=1e-5)


def test_what_waits_to_be_recomputed_stands_in_front_and_in_order() -> None:
    requests = asked("recompute", [request(f"r{number}", 4, 8) for number in range(6)])
    engine = engine_for(qwen3(), num_slots=3, max_prefill_tokens=6)
    for each in requests:
        engine.add(each)
    for _ in range(3):
        engine.step()
    assert engine.load_weights(1, dict(full_tensors(qwen3(1)))) == []
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 6)
    engine.step()
    assert engine.stats().num_running == 1
    ended = engine.cancel("r2")
    assert ended is not None and (ended.finish_reason, len(ended.tokens)) == ("cancelled", 3)
    done = run(engine)
    assert list(done) == ["r0", "r1", "r3", "r4", "r5"]


async def test_an_interrupted_sample_is_taken_up_by_an_engine_that_never_saw_it() -> None:
    """The second engine has the new weights from the start: the whole state lies in the request."""
    old, new = qwen3(0), qwen3(1)
    each = replace(request("a", 7, 20, temperature=1.3), on_new_weights="interrupt")
    thread = _Stepped()
    first = EmbeddedEngine(engine_for(qwen3(0)), thread, turn_s=0.0)
    asking = asyncio.create_task(first.generate(each))
    await asyncio.wait_for(thread.sixth.wait(), 60)
    flipping = asyncio.create_task(first.update_weights(1, dict(full_tensors(new))))
    part = await asking
    await flipping
    await first.close()
    assert part.finish_reason == "interrupted" and set(part.policy_versions.tolist()) == {0}
    resumed = each.resumed(part)
    done = run(engine_for(qwen3(1), version=1), [resumed])["a"]
    assert len(done.tokens) == 20 and done.finish_reason == "length"
    assert done.tokens[: len(part.tokens)].tolist() == part.tokens.tolist()
    assert done.policy_versions.tolist() == [0] * len(part.tokens) + [1] * (20 - len(part.tokens))
    assert gap_under(old, each, done, 0) < 1e-4 and gap_under(new, each, done, 1) < 1e-4
    np.testing.assert_array_equal(done.log_probs[: len(part.tokens)], part.log_probs)


class _Stepped:
    """A compute thread that lets the event loop go round before every turn, of one step each."""

    def __init__(self) -> None:
        self.sixth = asyncio.Event()
        self._num_turns = 0

    async def __call__(self, function: Callable[[], Any]) -> Any:
        self._num_turns += 1
        if self._num_turns == 6:
            self.sixth.set()
        await asyncio.sleep(0)
        return function()


@pytest.mark.parametrize("way", ["recompute", "interrupt"])
def test_beyond_its_limit_a_sample_goes_on_in_place(way: OnNewWeights) -> None:
    models = [qwen3(seed) for seed in range(3)]
    (each,) = asked(way, [request("a", 5, 12)], interruptions=1)
    engine = engine_for(qwen3(0))
    engine.add(each)
    for version in (1, 2):
        for _ in range(3):
            assert engine.step() == []
        for part in engine.load_weights(version, dict(full_tensors(models[version]))):
            engine.add(each.resumed(part))
    done = run(engine)["a"]
    assert done.policy_versions.tolist() == [0] * 3 + [1] * 3 + [2] * 6
    assert engine.stats().num_interrupted == 1
    assert gap_under(models[1], each, done, 1) < 1e-4 < 1e-2 < gap_under(models[2], each, done, 2)


def test_each_request_has_its_own_way_through_new_weights() -> None:
    ways: tuple[OnNewWeights, ...] = ("interrupt", "continue", "recompute", "interrupt")
    requests = [replace(request(f"r{i}", 3 + i, 10), on_new_weights=way) for i, way in enumerate(ways)]
    new = qwen3(1)
    engine = engine_for(qwen3(0))
    done = run_with_flips(engine, requests, {4: (1, new)})
    assert [done[each.id].finish_reason for each in requests] == ["interrupted", "length", "length", "interrupted"]
    assert [len(done[each.id].tokens) for each in requests] == [4, 10, 10, 4]
    assert gap_under(new, requests[2], done["r2"], 1) < 1e-4
    assert gap_under(new, requests[1], done["r1"], 1) > 1e-2


class _Interrupting:
    """An engine of a model with experts whose weights are new after every third token; each tells its version as the expert."""

    def __init__(self) -> None:
        self.version = -1
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.version += 1
        self.asked.append(request)
        before = request.prefix or Prefix(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
        fresh = np.full(min(3, request.params.max_new_tokens - len(before.tokens)), self.version, np.int32)
        versions = np.concatenate([before.policy_versions, fresh])
        ended = len(versions) == request.params.max_new_tokens
        return Completion(
            request.id, versions, versions.astype(np.float32), versions, "length" if ended else "interrupted",
            experts_of_whole(
                request.prefix, np.full((len(request.prompt) + len(versions) - 1, 2, 1), self.version, np.uint8)
            ),
        )  # fmt: skip


async def test_a_sample_that_is_interrupted_twice_keeps_the_experts_its_tokens_were_sampled_with() -> None:
    groups, engine = PromptGroups.__new__(PromptGroups), _Interrupting()
    groups.engine, groups.stops = cast(Any, engine), Stops(())
    done = await groups._generate(request("a", 4, 8))
    assert done.policy_versions.tolist() == [0] * 3 + [1] * 3 + [2] * 2
    # A token's experts are known once it is followed by another: those of 4 + 3 - 1 places under version 0, and so on.
    assert done.routed_experts is not None and done.routed_experts.shape == (4 + 8 - 1, 2, 1)
    assert done.routed_experts[:, 0, 0].tolist() == [0] * 6 + [1] * 3 + [2] * 2
    assert [each.prefix is None for each in engine.asked] == [True, False, False]


def test_experts_of_a_prefix_that_came_without_them_are_those_it_was_computed_anew_with() -> None:
    two, told = np.zeros(2, np.int32), np.ones((5, 1, 1), np.uint8)
    known = Prefix(two, two.astype(np.float32), two, routed_experts=np.zeros((3, 1, 1), np.uint8))
    unknown = replace(known, routed_experts=None)
    assert experts_of_whole(known, None) is None
    for before, expected in ((known, [0, 0, 0, 1, 1]), (unknown, [1] * 5), (None, [1] * 5)):
        found = experts_of_whole(before, told)
        assert found is not None and found.ravel().tolist() == expected


def test_tokens_of_older_weights_can_be_left_out_of_the_loss() -> None:
    versions = np.array([3, 3, 5, 5, 5], np.int32)
    done = Completion("a", versions, versions.astype(np.float32), versions, "length")
    assert loss_mask(done, 5).tolist() == [0, 0, 1, 1, 1] and loss_mask(done).tolist() == [1] * 5
    assert loss_mask(done, 5).dtype == np.uint8
    acted = replace(done, policy_versions=np.array([NO_VERSION, 3, NO_VERSION, 4, NO_VERSION], np.int32))
    assert loss_mask(acted).tolist() == [0, 1, 0, 1, 0] and loss_mask(acted, 4).tolist() == [0, 0, 0, 1, 0]
    assert info_of(SampleRow(versions[:2], acted), "length", 0.5, 0.75) == (7, 5, 0.5, 3, 4, 1, 0.75)
    none = replace(done, policy_versions=np.full(5, NO_VERSION, np.int32))
    assert info_of(SampleRow(versions[:2], none), "length", 0.5, None) == (7, 5, 0.5, NO_VERSION, NO_VERSION, 1, None)


def test_a_prefix_that_does_not_fit_its_request_is_refused() -> None:
    each, three = request("a", 4, 3), np.zeros(3, np.int32)
    with pytest.raises(ConfigError, match="prefix of request 'a' must hold 1 to 2 tokens"):
        replace(each, prefix=Prefix(three, np.zeros(3, np.float32), three))
    with pytest.raises(ConfigError, match=r"got \[1, 2, 1\]"):
        replace(each, prefix=Prefix(three[:1], np.zeros(2, np.float32), three[:1]))
    engine = engine_for(qwen3())
    with pytest.raises(ConfigError, match=r"the tokens of request 'a' must be in \[0, 97\), got 97"):
        engine.add(replace(each, prefix=Prefix(three[:1] + 97, np.zeros(1, np.float32), three[:1])))


async def test_weights_that_a_server_could_not_be_given_again_do_not_keep_their_slot() -> None:
    async with served(max_staleness=0) as run:
        bus, actor = await run.bus("rollout-0"), await run.bus("actor-0")
        await actor.call("commit", 0, 0, 7, [])
        for version in (0, 1):
            slot = (await actor.call("begin_publish", version))["slot"]
            await actor.call("end_publish", slot, version, 40 + version)
        ctx = SimpleNamespace(rank=0, segments=run.client())
        job = SimpleNamespace(bus=bus, config=SimpleNamespace(num_weight_slots=2))
        with pytest.raises(KeyError):  # the slab is not there
            async with Replica(cast(Any, ctx), cast(Any, job)).newest_weights():
                pass
        await actor.call("end_publish", (await actor.call("begin_publish", 2))["slot"], 2, 42)
        assert await actor.call("begin_publish", 3) == {"slot": slot}
