"""What is computed once for all who begin with it: the same log-probs and gradients, from fewer tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models import parallel, shared_prefixes
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import with_turns
from rondo.models.packing import Packing, Sequence
from rondo.models.routing import enable_replay
from rondo.models.shared_prefixes import Segment, lay_out, why_apart
from rondo.models.trials import TOLERANCE
from tests.models import multimodal
from tests.models.builders import SIZES, sequences, tiny, unpacked


def groups(num_prompts: int = 3, num_samples: int = 5, seed: int = 0, vocabulary: int = 256) -> list[Sequence]:
    """Samples of each prompt, of different lengths, in no order; one prompt has no response, one is another's beginning."""
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(1, 40, num_prompts):
        prompt = rng.integers(0, vocabulary, length)
        for response in [1, *rng.integers(1, 50, num_samples - 1)]:
            answer = rng.integers(0, vocabulary, response)
            found.append(Sequence(np.concatenate([prompt, answer]).astype(np.int32), int(response)))
    found += [Sequence(found[0].tokens, 0), Sequence(found[0].tokens[: -found[0].response + 1 or None], 1)]
    return [found[i] for i in rng.permutation(len(found))]


@pytest.mark.parametrize("seed", range(10))
def test_each_segment_lies_in_one_block_of_neighbours_of_about_its_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [Segment(int(n)) for n in rng.integers(1, 90, 6)]
    segments = [*prompts, *(Segment(int(rng.integers(0, 200)), int(rng.integers(0, 6))) for _ in range(30))]
    starts, shared = lay_out(segments)
    lying = sorted((start, segment.length) for start, segment in zip(starts, segments, strict=True) if segment.length)
    ends = [start + length for start, length in lying]
    assert [start for start, _ in lying] == [0, *ends[:-1]]
    blocks = [(block.start, block.stop) for block in shared.parts]
    assert [begin for begin, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == ends[-1]
    for block in shared.parts:
        lengths = [length for start, length in lying if block.start <= start < block.stop]
        assert len(lengths) == block.rows
        assert max(lengths) <= 1.42 * min(lengths)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_log_probs_and_gradients_are_those_of_every_sample_alone(family: str) -> None:
    model, batch = tiny(family, tied=False).eval(), groups()
    alone = [unpacked(model, one) for one in batch]
    weight = torch.randn(sum(one.response for one in batch), generator=torch.Generator().manual_seed(1))
    (weight * torch.cat([log_probs - 0.5 * entropy for log_probs, entropy in alone])).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    packing = Packing.of(model)
    packed = packing.pack(batch, train=True)
    assert packed.shared is not None
    log_probs, entropy = response_log_probs(model, packed, chunk_tokens=7, with_entropy=True)
    assert entropy is not None
    (weight * (log_probs - 0.5 * entropy)).sum().backward()

    torch.testing.assert_close(log_probs, torch.cat([found for found, _ in alone]), rtol=0, atol=4e-6)
    assert packed.targets.tolist() == [int(t) for one in batch for t in one.tokens[len(one.tokens) - one.response :]]
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().item()
        assert scale > 0
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=2e-5 * scale, msg=name)


def test_a_prompt_is_there_once_and_last_tokens_are_not() -> None:
    packing = Packing.of(tiny("qwen3"))
    prompt = np.arange(1, 31)
    batch = [Sequence(np.append(prompt, n + np.arange(n)).astype(np.int32), n) for n in (4, 1, 9)]
    packed = packing.pack(batch)
    assert packed.num_tokens == packed.input_ids.numel() == 30 + 3 + 0 + 8
    assert packed.responses == (4, 1, 9)
    last_of_prompt = int((packed.input_ids[0] == 30).nonzero())
    first = [int(positions[0]) for positions in packed.positions.split(list(packed.responses))]
    assert first == [last_of_prompt] * 3


def test_a_token_sees_its_own_prompt_and_what_lies_before_it_and_nothing_else() -> None:
    model = tiny("qwen3").eval()
    packing, batch = Packing.of(model), sequences([(20, 8), (20, 8)], seed=3)
    batch.append(Sequence(np.append(batch[0].tokens[:12], batch[1].tokens[12:]).astype(np.int32), 8))

    def log_probs(batch: list[Sequence]) -> list[list[float]]:
        packed = packing.pack(batch)
        with torch.no_grad():
            return [part.tolist() for part in response_log_probs(model, packed)[0].split(list(packed.responses))]

    before = log_probs(batch)
    changed = batch[2].tokens.copy()
    changed[15] = (changed[15] + 1) % 256  # the fourth of its response
    after = log_probs([*batch[:2], Sequence(changed, 8)])
    differs = [[a != b for a, b in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)]
    assert differs == [[False] * 8, [False] * 8, [False] * 3 + [True] * 5]
    prompt = batch[0].tokens.copy()
    prompt[2] = (prompt[2] + 1) % 256  # of the prompt that the first and the third share
    moved = log_probs(
        [Sequence(np.append(prompt[:12], one.tokens[12:]), 8) if i != 1 else one for i, one in enumerate(batch)]
    )
    assert [[a != b for a, b in zip(x, y, strict=True)] for x, y in zip(before, moved, strict=True)] == [
        [True] * 8, [False] * 8, [True] * 8,
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni"])
def test_media_of_a_prompt_are_there_once_and_give_the_log_probs_of_every_sample_alone(family: str) -> None:
    model = multimodal.tiny(family)
    batch = multimodal.ragged(model)
    with torch.no_grad():
        expected = torch.cat([multimodal.alone(model, one) for one in batch])
        packed = Packing.of(model).pack(batch, train=True)
        found, _ = response_log_probs(model, packed)
    assert packed.shared is not None
    dummy = Packing.of(model).dummy
    assert dummy is not None and dummy.media is not None
    expected_keys = {one.media.key for one in batch if one.media is not None} | {dummy.media.key}
    assert sorted(media.key for media in packed.media) == sorted(expected_keys)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def session(rng: np.random.Generator) -> list[tuple[np.ndarray, int]]:
    """(tokens, response) of rows: turns of an episode, a row each, and another sample of it, with branches."""
    draw = lambda length: rng.integers(3, 250, length).astype(np.int32)  # noqa: E731
    prompt, rows = draw(int(rng.integers(9, 20))), []
    for _ in range(2):
        grown = prompt
        for _ in range(3):
            said = draw(int(rng.integers(0, 6)))
            grown = np.concatenate([grown, said, answer := draw(int(rng.integers(1, 12)))])
            rows.append((grown, len(answer)))
            for _ in range(int(rng.integers(0, 3))):
                other = draw(int(rng.integers(1, 20)))
                rows.append((np.concatenate([grown, other]), len(other)))
    return [rows[at] for at in rng.permutation(len(rows))]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "windows", "qwen3_vl", "qwen3_omni"])
def test_rows_of_a_tree_have_the_log_probs_and_gradients_of_each_alone(family: str) -> None:
    media = family in multimodal.FAMILIES
    model: Any = multimodal.tiny(family) if media else tiny(family, tied=False).eval()
    rng = np.random.default_rng(1)
    batch = [Sequence(tokens, response) for tokens, response in session(rng)]
    if media:
        # An image in the prompt of all, and another one that is shown in a turn, in front of which a branch leaves.
        asked, late = multimodal.prompt(model, 1, image=(2, 2)), multimodal.prompt(model, 2, image=(1, 2))
        assert asked.media is not None and late.media is not None
        batch = []
        for tokens, response in session(rng):
            whole = np.concatenate([asked.tokens, tokens])
            batch.append(Sequence(whole, response, asked.media))
            if response > 8:
                turns = with_turns(asked.media, [(len(whole), late.media)])
                whole = np.concatenate([whole, late.tokens, tokens[:9]])
                batch.append(Sequence(whole, 9, turns))
    if family == "qwen3_moe":
        enable_replay(model)
        told = {}  # of each token that all rows have in common the same
        for at, one in enumerate(batch):
            rows = [
                told.setdefault(one.tokens[: end + 1].tobytes(), rng.integers(0, 4))
                for end in range(len(one.tokens) - 1)
            ]
            chosen = np.stack([np.array(rows), (np.array(rows) + 1) % 4], 1)
            batch[at] = replace(one, experts=np.repeat(chosen[:, None], 2, 1).astype(np.uint8))
    packing, weight = Packing.of(model), torch.Generator().manual_seed(1)
    weights = [torch.randn(one.response, generator=weight) for one in batch]
    expected = []
    for one, each in zip(batch, weights, strict=True):
        log_probs, _ = response_log_probs(model, replace(packing, share_prefixes=False).pack([one], train=True))
        (each * log_probs).sum().backward()
        expected.append(log_probs.detach())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    packed = packing.pack(batch, train=True)
    assert packed.shared is not None and 1.7 * packed.num_tokens < sum(len(one.tokens) for one in batch)
    found, _ = response_log_probs(model, packed)
    (torch.cat(weights) * found).sum().backward()
    torch.testing.assert_close(found.detach(), torch.cat(expected), rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        if name in gradients and (norm := gradients[name].norm()) > 0:
            assert (parameter.grad - gradients[name]).norm() <= 1e-5 * norm + 1e-7, name


def test_media_in_an_answer_keep_the_sample_whole() -> None:
    model = multimodal.tiny("qwen3_vl")
    asked = multimodal.prompt(model, 1, image=(1, 2))
    whole = multimodal.sample(asked, 2, 3)
    late = Sequence(
        whole.tokens, len(asked.tokens) - 2, whole.media
    )  # all but two tokens are the answer, the image too
    with torch.no_grad():
        packed = Packing.of(model).pack([late, late])
        found, _ = response_log_probs(model, packed)
        expected = multimodal.alone(model, late)
    assert len(packed.media) == 1
    torch.testing.assert_close(found, expected.repeat(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_computed_again_in_the_backward_share_prefixes_again(dtype: str) -> None:
    batch, found = groups(), []
    for recomputed in (False, True):
        model = tiny("qwen3")
        packing = Packing.of(model)
        model = parallel.compute_in(model, dtype=dtype, activation_checkpointing=recomputed).train()
        response_log_probs(model, packing.pack(batch, train=True))[0].sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=0, msg=name)


def test_a_mask_is_for_prompts_longer_than_their_answers_and_never_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = tiny("qwen3").eval(), np.random.default_rng(4)
    prompts = [rng.integers(0, 256, length) for length in (60, 50, 4)]
    answers = [(prompt, rng.integers(0, 256, length)) for prompt in prompts for length in (13, 14, 15, 30)]
    batch = [Sequence(np.append(prompt, answer).astype(np.int32), len(answer)) for prompt, answer in answers]

    def masks(most_scores: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        monkeypatch.setattr(shared_prefixes, "_MOST_SCORES", most_scores)
        packed = Packing.of(model).pack(batch)
        assert packed.shared is not None
        with torch.no_grad():
            log_probs, _ = response_log_probs(model, packed)
        return [block.mask for block in packed.shared.parts if block.mask is not None], log_probs

    whole, expected = masks(1 << 26)
    assert sorted(mask.shape[0] for mask in whole) == [2, 6]  # those behind a prompt of 4 tokens are causal
    cut, found = masks(2000)
    assert len(cut) > len(whole) and all(mask.numel() <= 2000 for mask in cut)
    none, plain = masks(100)
    assert none == []
    alone = torch.cat([unpacked(model, one)[0] for one in batch]).detach()
    for values in (expected, found, plain):
        torch.testing.assert_close(values, alone, rtol=0, atol=4e-6)


def test_models_with_other_attention_are_left_as_they_are() -> None:
    import transformers as hf

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    eager = tiny("qwen3")
    eager.set_attn_implementation("eager")
    others = [
        eager,
        tiny("gemma2"),
        multimodal.tiny("qwen3_5"),
        hf.MambaForCausalLM(hf.MambaConfig(**small)),
        hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)),
    ]
    before = [model.config.get_text_config()._attn_implementation for model in others]
    assert all(map(why_apart, others))
    assert [model.config.get_text_config()._attn_implementation for model in others] == before


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_a_model_that_shares_prompts_is_as_before_in_every_other_use(family: str) -> None:
    model: Any = tiny(family).eval() if family == "qwen3" else multimodal.tiny(family)
    ids = torch.randint(1, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    kept = torch.ones_like(ids)
    kept[1, :5] = 0  # padded on the left

    def uses() -> list[torch.Tensor]:
        with torch.no_grad():
            first = model(input_ids=ids, attention_mask=kept, use_cache=True)
            following = model(
                input_ids=ids[:, :1],
                attention_mask=torch.cat([kept, kept[:, :1] * 0 + 1], 1),
                past_key_values=first.past_key_values,
            )
            return [first.logits, following.logits, model(input_ids=ids, use_cache=False).logits]

    before = uses()
    was_vision = model.model.visual.config._attn_implementation if family == "qwen3_vl" else None
    assert not why_apart(model)
    assert model.config.get_text_config()._attn_implementation == shared_prefixes.NAME
    if was_vision is not None:
        assert model.model.visual.config._attn_implementation == was_vision
    for now, then in zip(uses(), before, strict=True):
        assert torch.equal(now, then)


def deep(num_layers: int = 28) -> Any:
    """As deep as an 8B model, in bfloat16, with kernels whose last bit depends on how many tokens they are given."""
    import transformers as hf

    def round_otherwise(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        up = output.shape[1] % 3 - 1 if output.dtype == torch.bfloat16 else 0
        return output * (1 + up * torch.finfo(torch.bfloat16).eps)

    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES | {"num_hidden_layers": num_layers})).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(round_otherwise)
    return model


def test_the_noise_of_a_deep_model_in_bfloat16_loses_nothing() -> None:
    model = deep()
    packing = Packing.of(model)
    assert (packing.share_prefixes, packing.share_rows) == (True, True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("num_layers", [2, 28])
def test_what_attends_wrongly_is_found_at_any_depth(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forgets = lambda segments: lay_out([Segment(one.length) for one in segments])  # noqa: E731 - the prompts
    monkeypatch.setattr(shared_prefixes, "lay_out", forgets)
    model = deep(num_layers)
    gap = re.fullmatch(r"logits are ([\d.]+) of their norm off", shared_prefixes.why_apart(model))
    assert gap is not None and float(gap[1]) > 100 * TOLERANCE
    assert model.config._attn_implementation == "sdpa"


def test_values_of_another_size_than_keys_share_prefixes_too() -> None:
    import transformers as hf

    ranks = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 12}
    experts = {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    }
    heads = {"head_dim": 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES | ranks | experts | heads)).eval()
    batch = groups()
    packed = Packing.of(model).pack(batch)
    assert packed.shared is not None and any(block.mask is not None for block in packed.shared.parts)
    with torch.no_grad():
        found, _ = response_log_probs(model, packed)
        expected = torch.cat([unpacked(model, one)[0] for one in batch])
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "phimoe"])
def test_a_window_hides_what_it_hides_alone_whether_layers_or_only_masks_say_so(family: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    sizes = SIZES | {"initializer_range": 0.3, "sliding_window": 6}
    if family == "qwen3":  # in one of its layers
        model: Any = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, use_sliding_window=True, max_window_layers=1))
    elif family == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes))
    else:
        model = hf.PhimoeForCausalLM(hf.PhimoeConfig(**sizes, num_local_experts=4))
    model.eval()
    batch = groups()
    assert max(len(one.tokens) for one in batch) > 6
    packing = Packing.of(model)
    assert shared_prefixes.why_apart(model) == "" and packing.share_prefixes
    assert {call.window for call in shared_prefixes.calls_of(model)} == ({None, 6} if family == "qwen3" else {6})
    with torch.no_grad():
        found, _ = response_log_probs(model, packing.pack(batch))
        expected = torch.cat([unpacked(model, one)[0] for one in batch])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_whatever_a_model_raises_gives_it_rows_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(type(tiny("qwen3"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if "shared_prefixes" in kwargs:
                raise RuntimeError("shape '[4, 2]' is invalid")
            return super().forward(*args, **kwargs)

    odd = Odd(tiny("qwen3").config)
    assert Packing.of(odd).share_prefixes is False
    assert "model=Odd reason=\"RuntimeError: shape '[4, 2]' is invalid\"" in caplog.text
    assert odd.config._attn_implementation == "sdpa"


def test_a_mistake_of_ours_is_no_reason_to_pad(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a block must hold its queries")

    monkeypatch.setattr(shared_prefixes.Block, "attend", broken)
    with pytest.raises(AssertionError, match="must hold its queries"):
        why_apart(tiny("qwen3"))
