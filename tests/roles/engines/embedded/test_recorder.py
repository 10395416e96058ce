"""Routed experts of the embedded engine, held against the routers of one whole forward; through new weights, copies and media."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.routing import Routing, routers_of
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.roles.engines.embedded.shared_weights import Flip, Lent
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Completion, OnNewWeights, Request
from rondo.runtime.errors import ConfigError
from tests.models.builders import full_tensors
from tests.roles.engines.embedded.test_new_weights import asked, run_with_flips
from tests.roles.engines.engines import qwen3, qwen3_moe, ragged, request, run

MAX_LENGTH = 64


def engine_for(model: Any, num_slots: int = 4, **options: Any) -> SlotEngine:
    return slot_engine(model, num_slots=num_slots, max_length=MAX_LENGTH, tells_experts=True, **options)


@torch.no_grad()
def routed(model: Any, each: Request, tokens: np.ndarray) -> np.ndarray:
    """Of all tokens but the last, from one forward without any cache."""
    found: dict[int, torch.Tensor] = {}
    handles = [
        router.register_forward_hook(lambda _, __, output, layer=layer: found.__setitem__(layer, output[2]))
        for layer, router in routers_of(model).items()
    ]
    ids = torch.from_numpy(np.concatenate([each.prompt, tokens]).astype(np.int64))[None]
    model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([found[layer] for layer in sorted(found)], 1)[:-1].numpy()


def told(done: Completion) -> np.ndarray:
    assert done.routed_experts is not None and done.routed_experts.dtype == np.uint8
    return done.routed_experts


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_every_token_but_the_last_has_the_experts_of_a_whole_forward(fixed_shapes: bool) -> None:
    requests = [request("s1", 6, 9), request("s2", 6, 3), request("s3", 6, 12), *ragged(9)]
    engine = engine_for(qwen3_moe(), max_prefill_tokens=40, fixed_shapes=fixed_shapes)
    done = run(engine, requests)
    assert engine.stats().shared_prompt_tokens > 0
    model = qwen3_moe()
    for each in requests:
        found = told(done[each.id])
        assert found.shape == (len(each.prompt) + len(done[each.id].tokens) - 1, 2, 2)
        np.testing.assert_array_equal(found, routed(model, each, done[each.id].tokens))


def test_a_layer_without_experts_has_zeros() -> None:
    model = qwen3_moe(num_hidden_layers=3, mlp_only_layers=[1])
    requests = ragged(5)
    done = run(engine_for(model), requests)
    for each in requests:
        found = told(done[each.id])
        assert found.shape[1:] == (3, 2) and not found[:, 1].any()
        np.testing.assert_array_equal(found[:, [0, 2]], routed(model, each, done[each.id].tokens))


@pytest.mark.parametrize("way", ["continue", "recompute", "interrupt"])
def test_through_new_weights_each_token_keeps_the_experts_it_was_sampled_with(way: OnNewWeights) -> None:
    """What is recomputed goes elsewhere the second time, and still what was told is how the old tokens were sampled."""
    old, new = qwen3_moe(0), qwen3_moe(1)
    requests = asked(way, ragged(6))
    engine = engine_for(qwen3_moe(0), max_prefill_tokens=40)
    done = run_with_flips(engine, requests, {6: (1, new)})
    for each in [each for each in requests if done[each.id].finish_reason == "interrupted"]:
        assert len(told(done[each.id])) == len(each.prompt) + len(done[each.id].tokens) - 1
        done |= run(engine, [each.resumed(done[each.id])])
    crossing = [each for each in requests if set(done[each.id].policy_versions.tolist()) == {0, 1}]
    assert len(crossing) >= 3
    for each in crossing:
        found, tokens = told(done[each.id]), done[each.id].tokens
        assert len(found) == len(each.prompt) + len(tokens) - 1
        # The last token of the old weights went into the cache with the new ones: it is what the next was sampled from.
        num_old = len(each.prompt) + int((done[each.id].policy_versions == 0).sum()) - 1
        by_old, by_new = routed(old, each, tokens), routed(new, each, tokens)
        np.testing.assert_array_equal(found[:num_old], by_old[:num_old])
        if way != "continue":
            np.testing.assert_array_equal(found[num_old:], by_new[num_old:])
        assert (by_old != by_new)[:num_old].any()


def test_a_cancelled_sample_tells_the_experts_of_what_it_has_and_a_waiting_one_those_it_came_with() -> None:
    engine = engine_for(qwen3_moe(), num_slots=1)
    each = replace(request("a", 5, 12), on_new_weights="interrupt")
    engine.add(each)
    for _ in range(4):
        engine.step()
    (part,) = engine.load_weights(1, dict(full_tensors(qwen3_moe())))
    engine.add(request("first", 3, 9))
    engine.step()
    engine.add(each.resumed(part))
    waiting, running = engine.cancel("a"), engine.cancel("first")
    assert waiting is not None and running is not None
    np.testing.assert_array_equal(told(waiting), told(part))
    assert told(part).shape == (5 + 4 - 1, 2, 2) and told(running).shape == (3 + 1 - 1, 2, 2)


def test_an_engine_with_the_trainers_tensors_that_sleeps_between_steps_tells_experts_too() -> None:
    model = qwen3_moe()
    lent = Lent(model)
    engine = engine_for(lent.model, lent=lent, sleeps=True)
    for version, each in ((0, request("a", 5, 8)), (1, request("b", 9, 8))):
        lent.holds(version)
        engine.load_weights(version, Flip(version))
        done = run(engine, [each])[each.id]
        np.testing.assert_array_equal(told(done), routed(model, each, done.tokens))
        engine.sleep()
        lent.moves()


def test_a_model_of_many_experts_tells_int16_and_one_without_is_refused() -> None:
    assert Routing(48, 8, 256).dtype == np.uint8 and Routing(48, 8, 256).token_bytes == 384
    assert Routing(48, 8, 512).dtype == np.int16 and Routing(48, 8, 512).token_bytes == 768
    with pytest.raises(ConfigError, match=r"train\.router_replay must be 'off' for a model without routers"):
        engine_for(qwen3())
    quiet = run(slot_engine(qwen3_moe(), num_slots=2, max_length=32), [request("a", 3, 4)])["a"]
    assert quiet.routed_experts is None
