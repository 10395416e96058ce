"""Router replay: recorded experts in place of the router's choice, held against a mixture of experts written out by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf

from rondo.models import parallel
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing, Sequence, pack
from rondo.models.routing import Heard, Routing, Scoring, enable_replay, listen, routers_of, scoring_of
from rondo.models.tiny import qwen3, qwen3_5, qwen3_omni, qwen3_vl
from rondo.runtime.errors import ConfigError
from tests.models import multimodal
from tests.models.builders import SIZES, recorded, sequences, tiny

LENGTHS = ((13, 5), (4, 3), (21, 11), (7, 6))
pack_flat = functools.partial(pack, share_prefixes=True)


def told(layers: int = 2, seed: int = 0) -> list[Sequence]:
    """Random sequences, with experts that no router chose; one of them has none."""
    return [each if index == 1 else recorded(each, layers) for index, each in enumerate(sequences(LENGTHS, seed))]


class ByHand(torch.nn.Module):
    """A layer of experts, one token after the other: recorded experts where there are some, its own choice elsewhere."""

    def __init__(self, block: Any, chosen: torch.Tensor) -> None:
        super().__init__()
        self.block, self.chosen = block, chosen  # int64 [positions, top_k]; -1 where nothing is recorded

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        experts, out = self.block.experts, []
        for token, recorded_ids in zip(hidden.flatten(0, 1), self.chosen, strict=True):
            probabilities = torch.softmax(self.block.gate.weight @ token, -1)
            ids = recorded_ids if recorded_ids[0] >= 0 else probabilities.topk(len(recorded_ids)).indices
            total = sum(probabilities[i] for i in ids)
            mixed = torch.zeros_like(token)
            for i in ids:
                gate, up = (experts.gate_up_proj[i] @ token).chunk(2)
                mixed = mixed + probabilities[i] / total * (experts.down_proj[i] @ (F.silu(gate) * up))
            out.append(mixed)
        return torch.stack(out).view_as(hidden)


def one_by_one(sequence: Sequence) -> torch.Tensor:
    """Log-probs of a response by hand, over layers and positions of one sequence alone."""
    model = tiny("qwen3_moe")
    num_places = len(sequence.tokens)
    for number, layer in enumerate(model.model.layers):
        chosen = torch.full((num_places, 2), -1)
        if sequence.experts is not None:
            chosen[:-1] = torch.from_numpy(sequence.experts[:, number].astype(np.int64))
        layer.mlp = ByHand(layer.mlp, chosen)
    one_by_one.model = model  # type: ignore[attr-defined]
    ids = torch.from_numpy(sequence.tokens.astype(np.int64))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -1 - sequence.response : -1]
    return torch.log_softmax(logits, -1).gather(1, ids[-sequence.response :, None])[:, 0]


def gates(model: Any) -> list[torch.Tensor]:
    return [parameter.grad for name, parameter in model.named_parameters() if name.endswith("gate.weight")]


def replayed(given: list[Sequence], way: Any = pack, **options: Any) -> tuple[torch.Tensor, Any]:
    """Log-probs, and the model with their gradients; `way` packs."""
    model = tiny("qwen3_moe")
    enable_replay(model)
    model = parallel.compute_in(model, **options)
    model.train()
    log_probs, _ = response_log_probs(model, way(given))
    log_probs.sum().backward()
    return log_probs.detach(), model


@pytest.mark.parametrize("way", [pack, pack_flat])
def test_packed_sequences_go_to_their_recorded_experts_and_the_gate_learns_as_by_hand(way: Any) -> None:
    sequences = told()
    found, model = replayed(sequences, way)
    expected, sums = [], [torch.zeros(4, 64), torch.zeros(4, 64)]
    for each in sequences:
        log_probs = one_by_one(each)
        log_probs.sum().backward()
        expected.append(log_probs.detach())
        for total, grad in zip(sums, gates(one_by_one.model), strict=True):  # type: ignore[attr-defined]
            total += grad
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
    for total, grad in zip(sums, gates(model), strict=True):
        assert total.norm() > 0.1
        torch.testing.assert_close(grad, total, atol=1e-3, rtol=1e-3)
    own, _ = replayed([Sequence(each.tokens, each.response) for each in sequences], way)
    responses = [each.response for each in sequences]
    far = [float((a - b).abs().max()) for a, b in zip(found.split(responses), own.split(responses), strict=True)]
    assert far[1] < 1e-5 and min(far[0], *far[2:]) > 1e-2


def test_samples_share_the_prompt_that_they_went_the_same_way_through_and_no_other() -> None:
    draw, prompt = np.random.default_rng(3), np.arange(9)
    answers = [np.concatenate([prompt, draw.integers(0, 256, length)]).astype(np.int32) for length in (4, 7, 5, 3)]
    first, *others = [recorded(Sequence(tokens, len(tokens) - 9)) for tokens in answers]
    assert first.experts is not None
    together = [first]
    for number, each in enumerate(others):
        assert each.experts is not None
        experts = each.experts.copy()
        if number != 1:  # the third went another way through its prompt
            experts[:9] = first.experts[:9]
        together.append(replace(each, experts=experts if number < 2 else None))  # the last one told none
    packed = pack_flat(together)
    assert packed.num_tokens == 3 * 9 + sum(len(tokens) - 10 for tokens in answers)
    found, _ = replayed(together, pack_flat)
    alone = torch.cat([replayed([each])[0] for each in together])
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)


def test_one_wrong_expert_changes_the_log_probs_behind_it_and_no_others() -> None:
    right, wrong = told(), told()
    experts = wrong[2].experts
    assert experts is not None
    experts[14, 1, 0] = next(i for i in range(4) if i not in experts[14, 1])
    change = (replayed(right)[0] - replayed(wrong)[0]).abs()
    _, _, behind, _ = change.split([each.response for each in right])
    assert behind[14 - 9] > 1e-4  # place 14 predicts token 15; the response has tokens 10 to 20
    assert change.count_nonzero() == behind.count_nonzero() and float(behind[: 14 - 9].max()) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_again_goes_the_same_way_also_after_another_forward(dtype: str) -> None:
    sequences, other = told(), told(seed=1)
    expected, plain = replayed(sequences, dtype=dtype)
    model = tiny("qwen3_moe")
    enable_replay(model)
    heard: list[torch.Tensor] = []
    listen(model, lambda layer, experts: heard.append(experts))
    model = parallel.compute_in(model, activation_checkpointing=True, dtype=dtype)
    model.train()
    heard.clear()
    found, _ = response_log_probs(model, pack(sequences))
    num_heard = len(heard)
    with torch.no_grad():
        response_log_probs(model, pack(other))
    del heard[num_heard:]
    found.sum().backward()
    assert torch.equal(found, expected)
    assert num_heard == 2 and len(heard) == 4
    assert torch.equal(heard[0], heard[3]) and torch.equal(heard[1], heard[2])  # the last layer runs first again
    for grad, once in zip(gates(model), gates(plain), strict=True):
        torch.testing.assert_close(grad, once, atol=1e-6, rtol=1e-5)


def test_its_own_choice_recorded_changes_no_bit() -> None:
    model = tiny("qwen3_moe")
    enable_replay(model)
    heard: dict[int, torch.Tensor] = {}
    listen(model, heard.__setitem__)
    [one, *_] = told()
    plain = Sequence(one.tokens, one.response)
    with torch.no_grad():
        own, _ = response_log_probs(model, pack([plain]))
        experts = torch.stack([heard[0], heard[1]], 1)[:-1].numpy().astype(np.uint8)
        again, _ = response_log_probs(model, pack([Sequence(one.tokens, one.response, experts=experts)]))
    assert torch.equal(own, again)


BUILDS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "qwen3": (qwen3.build, {"num_experts": 4}),
    "qwen3_vl": (qwen3_vl.build, {"num_experts": 4}),
    "qwen3_5": (qwen3_5.build, {"num_experts": 4}),
    "qwen3_omni": (qwen3_omni.build, {}),
}


@pytest.mark.parametrize("name", BUILDS)
def test_every_family_with_experts_replays(name: str, tmp_path: Path) -> None:
    build, arguments = BUILDS[name]
    build(tmp_path, **arguments)
    model = load_model(str(tmp_path))
    routing = Routing.of(model)
    assert routing is not None and (routing.top_k, routing.num_experts, routing.dtype) == (2, 4, np.uint8)
    assert routing.token_bytes == 2 * routing.num_layers
    packing = Packing.of(model)
    enable_replay(model)
    heard: dict[int, torch.Tensor] = {}
    listen(model, heard.__setitem__)
    sequences = told(layers=routing.num_layers)
    packed = packing.pack(sequences, train=True)
    with torch.no_grad():
        response_log_probs(model, packed)
    assert packed.routes is not None and int(packed.routes.recorded.sum()) == 12 + 20 + 6
    for layer in routers_of(model):
        chosen = packed.routes.experts[packed.routes.recorded, layer].long()
        assert torch.equal(heard[layer][packed.routes.recorded], chosen)
    assert len(routers_of(model)) == routing.num_layers


def test_a_model_whose_routing_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.router_replay must be 'off' for a model without routers"):
        enable_replay(tiny("qwen3"))

    class RawTopKRouter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 8))

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = hidden @ self.weight.T
            weights, experts = logits.topk(2)
            return logits, weights, experts

    with pytest.raises(
        ConfigError, match="routers like RawTopKRouter, which do not weigh experts with a softmax or a sigmoid"
    ):
        scoring_of(RawTopKRouter())
    with pytest.raises(AssertionError, match="enable_replay must be called"):
        response_log_probs(tiny("qwen3_moe"), pack(told()))


def choices(model: Any) -> dict[int, torch.Tensor]:
    """What the routers choose, by layer, filled by every forward."""
    heard: dict[int, torch.Tensor] = {}
    listen(model, heard.__setitem__)
    return heard


@pytest.mark.parametrize("way", [pack, pack_flat])
def test_routes_that_one_forward_records_are_those_of_each_sequence_alone_and_the_next_forward_takes_them(
    way: Any,
) -> None:
    """R2, whatever the weights of the second forward would choose."""
    model, plain = tiny("qwen3_moe"), [Sequence(each.tokens, each.response) for each in told()]
    plain[3] = replace(plain[3], tokens=np.concatenate([plain[0].tokens[:8], plain[3].tokens]), response=7)
    plain.append(Sequence(plain[2].tokens, 0))
    routing = enable_replay(model)
    heard = choices(model)
    packed, recording = way(plain), Heard(records=True)
    with torch.no_grad():
        before, _ = response_log_probs(model, packed, heard=recording)
        routes = packed.of_sequences(recording.routes(routing).numpy())
        for one, found in zip(plain, routes, strict=True):
            response_log_probs(model, pack([one]))
            own = torch.stack([heard[0], heard[1]], 1)[: len(one.tokens) - 1]
            assert found.dtype == np.uint8 and np.array_equal(found, own.numpy())
        again = way([replace(one, experts=found) for one, found in zip(plain, routes, strict=True)])
        assert again.num_tokens == packed.num_tokens  # what shared a prompt shares it still
        assert torch.equal(response_log_probs(model, again)[0], before)
        for router in routers_of(model).values():
            router.get_parameter("weight").neg_()
        response_log_probs(model, again)
    assert again.routes is not None
    for layer, chosen in heard.items():
        where = again.routes.recorded
        assert torch.equal(chosen[where], again.routes.experts[where, layer].long())


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_omni"])
def test_routes_of_prompts_with_media_are_recorded_and_taken_again_beside_what_the_towers_always_see(
    family: str,
) -> None:
    """R2: shared prompts stay shared, and the family's dummy is no part of any sequence."""
    model = multimodal.tiny(family)
    packing, routing = Packing.of(model), enable_replay(model)
    plain = multimodal.ragged(model)[:9]
    assert any(one.media is not None for one in plain) and any(one.media is None for one in plain)
    packed, recording = packing.pack(plain, train=True), Heard(records=True)
    with torch.no_grad():
        before, _ = response_log_probs(model, packed, heard=recording)
        routes = packed.of_sequences(recording.routes(routing).numpy())
        again = packing.pack([replace(one, experts=own) for one, own in zip(plain, routes, strict=True)], train=True)
        assert again.num_tokens == packed.num_tokens < sum(len(one.tokens) for one in plain)
        assert torch.equal(response_log_probs(model, again)[0], before)
        for router in routers_of(model).values():
            router.get_parameter("weight").neg_()
        heard = choices(model)
        response_log_probs(model, again)
    assert again.routes is not None and int((~again.routes.recorded).sum()) > 0
    for layer, chosen in heard.items():
        where = again.routes.recorded
        assert torch.equal(chosen[where], again.routes.experts[where, layer].long())


class Ahead(torch.nn.Module):
    """A head that predicts the token after the next: layers of its own, with a router, behind the decoder's."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])


def test_layers_that_do_not_route_shift_the_routes_of_no_other() -> None:
    """A dense first layer, one layer in two, and a head for further tokens, whose layer has the number 0 as well."""
    sizes = SIZES | {"num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(5)
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, mlp_only_layers=[1], decoder_sparse_step=2))
    whole = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes))
    model.mtp = Ahead(whole.model.layers[0])
    assert sorted(routers_of(model)) == [3] and sorted(routers_of(whole)) == [0, 1, 2, 3, 4]
    assert sum(type(each).__name__ == "Qwen3MoeTopKRouter" for each in model.modules()) == 2
    routing = enable_replay(model)
    assert routing == Routing(5, 2, 4)
    heard = choices(model)
    given = told(layers=5)
    packed, recording = pack(given), Heard(records=True)
    with torch.no_grad():
        response_log_probs(model, packed, heard=recording)
    assert packed.routes is not None and heard.keys() == {3}
    where = packed.routes.recorded
    assert torch.equal(heard[3][where], packed.routes.experts[where, 3].long())
    found = recording.routes(routing)
    assert torch.equal(found[where, 3], packed.routes.experts[where, 3]) and not found[:, [0, 1, 2, 4]].any()


def test_a_router_of_sigmoids_replays_with_its_factor_whatever_bias_it_chooses_by() -> None:
    sizes = SIZES | {
        "num_hidden_layers": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    torch.manual_seed(5)
    groups = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
    model = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**sizes, **groups, first_k_dense_replace=1))
    assert sorted(routers_of(model)) == [1, 2]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
        for router in routers_of(model).values():
            router.e_score_correction_bias.normal_()
    assert {scoring_of(router) for router in routers_of(model).values()} == {Scoring(sigmoid=True, factor=2.5)}
    routing = enable_replay(model)
    [one, *_] = told()
    packed, recording = pack([Sequence(one.tokens, one.response)]), Heard(records=True)
    with torch.no_grad():
        own, _ = response_log_probs(model, packed, heard=recording)
        [routes] = packed.of_sequences(recording.routes(routing).numpy())
        for router in routers_of(model).values():
            router.e_score_correction_bias.neg_()
        other, _ = response_log_probs(model, packed)
        again, _ = response_log_probs(model, pack([Sequence(one.tokens, one.response, experts=routes)]))
    torch.testing.assert_close(again, own, atol=1e-6, rtol=1e-6)
    assert float((other - own).abs().max()) > 1e-3


def test_experts_of_other_tokens_are_refused() -> None:
    one = told()[0]
    assert one.experts is not None
    with pytest.raises(
        ConfigError, match="experts of sequence 0 must be those of all its 13 tokens but the last, got 11"
    ):
        pack([Sequence(one.tokens, one.response, experts=one.experts[:-1])])
