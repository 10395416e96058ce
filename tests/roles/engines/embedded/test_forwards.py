from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.roles.engines.embedded.hf_forward import HFForward
from rondo.roles.engines.embedded.products import BLOCKED_FROM, Product
from rondo.roles.engines.embedded.qwen3_forward import ROWS_TOGETHER, Qwen3Forward, is_plain_qwen3, ranges
from rondo.runtime.errors import ConfigError
from tests.models.builders import full_tensors
from tests.roles.engines.engines import (
    full_log_probs,
    gap,
    llama,
    mistral,
    prompt_of,
    qwen3,
    qwen3_moe,
    qwen3_sliding,
    qwen3_tied,
    ragged,
    request,
    run,
)

PATHS = [
    pytest.param(qwen3, "fused", id="qwen3-fused"),
    pytest.param(qwen3, "hf", id="qwen3-hf"),
    pytest.param(qwen3_tied, "fused", id="tied-fused"),
    pytest.param(qwen3_tied, "hf", id="tied-hf"),
    pytest.param(qwen3_sliding, "hf", id="sliding-hf"),
    pytest.param(qwen3_moe, "hf", id="moe-hf"),
    pytest.param(llama, "hf", id="llama-hf"),
    pytest.param(mistral, "hf", id="mistral-hf"),
]
Make = Callable[..., Any]


@pytest.mark.parametrize(("make", "forward"), PATHS)
def test_log_probs_equal_a_full_forward_at_ragged_lengths(make: Make, forward: Any) -> None:
    model, requests = make(), ragged(14)
    done = run(slot_engine(model, num_slots=5, max_length=50, forward=forward), requests)
    assert gap(model, requests, done) < 2e-5


@pytest.mark.parametrize(("make", "forward"), PATHS)
def test_published_tensors_replace_every_weight(make: Make, forward: Any) -> None:
    engine, other = slot_engine(make(0), num_slots=3, max_length=40, forward=forward), make(1)
    run(engine, [request("warm", 5, 3)])
    engine.load_weights(1, dict(full_tensors(other)))
    requests = [request(name, num_prompt, 8) for name, num_prompt in (("a", 3), ("b", 12), ("c", 7))]
    assert gap(other, requests, run(engine, requests)) < 2e-5


@pytest.mark.parametrize(("make", "forward"), PATHS[:2] + PATHS[5:7])
@torch.no_grad()
def test_sequences_in_flight_keep_their_cache_across_a_flip(make: Make, forward: Any) -> None:
    old, new, asked = make(0), make(1), request("a", 9, 10)
    engine = slot_engine(make(0), num_slots=2, max_length=40, forward=forward)
    engine.add(asked)
    for _ in range(4):
        engine.step()
    engine.load_weights(1, dict(full_tensors(new)))
    done = run(engine)["a"]
    # The same by hand: prompt and first three tokens through the old weights, every later token through the new ones.
    ids = torch.from_numpy(np.concatenate([asked.prompt, done.tokens]).astype(np.int64))[None]
    cache = transformers.DynamicCache(config=old.config)
    rows = [old(input_ids=ids[:, :12], past_key_values=cache).logits[0, 8:]]
    rows += [new(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[0] for at in range(12, 18)]
    log_probs = torch.log_softmax(torch.cat(rows), -1).gather(-1, ids[0, 9:, None])[:, 0]
    np.testing.assert_allclose(done.log_probs, log_probs, atol=2e-5)
    assert np.abs(full_log_probs(new, asked, done.tokens) - done.log_probs)[4:].max() > 1e-2


def test_both_paths_draw_the_same_samples() -> None:
    model, requests = qwen3(), ragged(10)
    fused, hf = (
        run(slot_engine(model, num_slots=4, max_length=50, forward=forward), requests) for forward in ("fused", "hf")
    )
    for each in requests:
        assert fused[each.id].tokens.tolist() == hf[each.id].tokens.tolist()


@pytest.mark.parametrize("forward", ["fused", "hf"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.06), (torch.float16, 0.008)])
def test_half_precision_stays_near_the_full_forward_in_it(forward: Any, dtype: torch.dtype, most: float) -> None:
    model, requests = qwen3(initializer_range=0.1).to(dtype), ragged(8)
    done = run(slot_engine(model, num_slots=4, max_length=50, forward=forward), requests)
    assert gap(model, requests, done) < most
    assert gap(model.float(), requests, done) < most


def test_lengths_beyond_a_block_of_the_cache_are_exact() -> None:
    model = qwen3()
    requests = [request("short", 2, 70), request("long", 90, 40), request("edge", 16, 33)]
    for forward in ("fused", "hf"):
        done = run(slot_engine(model, num_slots=3, max_length=133, forward=forward), requests)
        assert gap(model, requests, done) < 3e-5


def test_rows_of_very_different_lengths_attend_in_parts_and_stay_exact() -> None:
    model, num = qwen3(), 2 * ROWS_TOGETHER + 3
    requests = [request(f"r{i}", 100 if i in (1, num - 1) else 2 + i, 6) for i in range(num)]
    engine = slot_engine(model, num_slots=num, max_length=112, forward="fused")
    done = run(engine, requests)
    assert any(start for start, _, _ in engine._forward._views)
    assert gap(model, requests, done) < 3e-5


def test_rows_of_one_length_attend_together() -> None:
    assert ranges(np.full(20, 17)) == [(20, 32)]
    assert ranges(np.array([15])) == [(1, 16)]


def test_a_part_reads_up_to_its_own_longest_row() -> None:
    assert ranges(np.array([3] * 8 + [3] * 7 + [200] + [40] * 2)) == [(8, 16), (16, 208), (18, 48)]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (qwen3, Qwen3Forward),
        (qwen3_tied, Qwen3Forward),
        (qwen3_sliding, HFForward),
        (qwen3_moe, HFForward),
        (llama, HFForward),
    ],
)
def test_the_fused_path_is_taken_for_plain_qwen3_alone(make: Make, kind: type) -> None:
    model = make()
    assert is_plain_qwen3(model) == (kind is Qwen3Forward)
    assert type(slot_engine(model, num_slots=1, max_length=8)._forward) is kind


def test_a_qwen3_with_biases_or_other_rotations_is_not_plain() -> None:
    assert not is_plain_qwen3(qwen3(attention_bias=True))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert not is_plain_qwen3(qwen3(rope_parameters=dynamic))


def test_scaled_rotary_angles_are_taken_from_the_model() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model, requests = qwen3(rope_parameters=yarn), ragged(5)
    done = run(slot_engine(model, num_slots=3, max_length=50, forward="fused"), requests)
    assert gap(model, requests, done) < 2e-5


def test_forcing_the_fused_path_on_another_model_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        slot_engine(llama(), num_slots=1, max_length=8, forward="fused")
    assert str(caught.value) == (
        "forward='fused' must come with a plain dense Qwen3, got LlamaForCausalLM. Use forward='auto'."
    )
    with pytest.raises(ConfigError, match="forward must be auto, fused or hf, got 'fast'"):
        slot_engine(llama(), num_slots=1, max_length=8, forward="fast")  # type: ignore[arg-type]


def test_layers_of_chunked_attention_are_refused() -> None:
    model = llama()
    model.config.layer_types, model.config.attention_chunk_size = ["full_attention", "chunked_attention"], 4
    with pytest.raises(ConfigError) as caught:
        slot_engine(model, num_slots=1, max_length=8)
    assert str(caught.value) == (
        "the layers of LlamaForCausalLM must be full, sliding or linear attention for the embedded engine, "
        "got chunked_attention. Generate with an SGLang engine."
    )


def test_loading_keeps_every_parameter_in_its_place() -> None:
    model = qwen3()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    engine = slot_engine(model, num_slots=2, max_length=20)
    forward = engine._forward
    assert isinstance(forward, Qwen3Forward)
    fused = [
        product._weight.data_ptr() for layer in forward._layers for product in (layer.qkv, layer.out, layer.gate_up)
    ]
    engine.load_weights(1, dict(full_tensors(qwen3(1))))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert fused == [
        product._weight.data_ptr() for layer in forward._layers for product in (layer.qkv, layer.out, layer.gate_up)
    ]


def test_a_model_in_training_mode_generates_in_evaluation_mode() -> None:
    model = qwen3(attention_dropout=0.5).train()
    requests = [request("a", 6, 8)]
    for forward in ("fused", "hf"):
        done = run(slot_engine(model, num_slots=2, max_length=20, forward=forward), requests)
        assert gap(model, requests, done) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 24), (512, 256)])
def test_a_product_is_a_linear_layer_for_the_weight_it_was_last_given(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    tolerance = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.25, "rtol": 0.02}
    assert (first.numel() >= BLOCKED_FROM) == (shape == (512, 256))
    with torch.inference_mode():
        product = Product(first, num_rows=8)
        for weight in (first, second):
            product.set(weight)
            for num_rows in (1, 8, 33):
                x = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
                residual = torch.randn(num_rows, shape[0], generator=generator).to(dtype)
                torch.testing.assert_close(product(x), F.linear(x, weight), **tolerance)
                expected = residual + F.linear(x, weight)
                torch.testing.assert_close(product.add(residual, x), expected, **tolerance)


def test_a_plain_product_follows_a_parameter_that_changes_in_place() -> None:
    parameter = torch.nn.Parameter(torch.eye(3))
    with torch.inference_mode():
        product = Product(parameter, num_rows=4)
    with torch.no_grad():
        parameter.mul_(2.0)
    with torch.inference_mode():
        torch.testing.assert_close(product(torch.ones(1, 3)), torch.full((1, 3), 2.0))


def test_large_weights_go_through_the_blocked_layout_end_to_end() -> None:
    wide = {"vocab_size": 600, "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "head_dim": 64}
    model, other = qwen3(initializer_range=0.05, **wide), qwen3(1, initializer_range=0.05, **wide)
    engine = slot_engine(model, num_slots=3, max_length=40)
    requests = [request("a", 5, 6), request("b", prompt_of(17), 9)]
    assert gap(model, requests, run(engine, requests)) < 2e-5
    engine.load_weights(1, dict(full_tensors(other)))
    assert gap(other, requests, run(engine, requests)) < 2e-5


@pytest.mark.cuda
@pytest.mark.parametrize("forward", ["fused", "hf"])
def test_log_probs_equal_a_full_forward_on_a_gpu(forward: Any) -> None:
    model, requests = qwen3().cuda(), ragged(14)
    done = run(slot_engine(model, num_slots=5, max_length=50, forward=forward), requests)
    assert gap(model.cpu(), requests, done) < 1e-3
