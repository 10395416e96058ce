"""Log-probs through packed batches and chunks against plain Hugging Face forwards of one sequence each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rondo.models import logprobs
from rondo.models.logprobs import response_log_probs, response_scores
from rondo.models.media.batch import collate
from rondo.models.packing import Packing, Sequence, pack
from rondo.runtime.errors import ConfigError
from tests.models import multimodal
from tests.models.builders import RAGGED, VOCABULARY, sequences, tiny, unpacked

FAMILIES = [("qwen3", True), ("qwen3", False), ("qwen3_moe", False), ("llama", True), ("gpt2", True)]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def weights_of(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, generator=generator), torch.randn(num_tokens, generator=generator)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("chunk_tokens", [7, 2048])
def test_values_and_gradients_are_those_of_unpacked_forwards(family: str, tied: bool, chunk_tokens: int) -> None:
    model, batch = tiny(family, tied=tied).eval(), sequences(RAGGED)
    packed = pack(batch)
    assert packed.position_ids is not None
    by_log_prob, by_entropy = weights_of(len(packed.targets))

    log_probs, entropy = response_log_probs(
        model, packed, temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True
    )
    assert entropy is not None
    ((by_log_prob * log_probs).sum() + (by_entropy * entropy).sum()).backward()
    ours = gradients(model)

    alone = [unpacked(model, one, 0.7) for one in batch]
    expected = torch.cat([pair[0] for pair in alone])
    expected_entropy = torch.cat([pair[1] for pair in alone])
    ((by_log_prob * expected).sum() + (by_entropy * expected_entropy).sum()).backward()
    theirs = gradients(model)

    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=4e-6)
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item(), msg=name)


@pytest.mark.parametrize("chunk_tokens", [7, 2048])
def test_other_tokens_at_each_place_are_scored_and_differentiated_as_the_sampled_ones(chunk_tokens: int) -> None:
    model, packed = tiny("qwen3"), pack(sequences(RAGGED))
    ids = torch.randint(VOCABULARY, (len(packed.targets), 3), generator=torch.Generator().manual_seed(2))
    ids[:, 2] = packed.targets
    options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": chunk_tokens}
    found = response_scores(model, packed, ids=ids, **options)
    assert found.others is not None and torch.equal(found.others[:, 2], found.log_probs)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(3))
    (found.others * weights).sum().backward()
    ours = gradients(model)
    for column in range(3):  # as if each had been sampled
        log_probs, _ = response_log_probs(model, replace(packed, targets=ids[:, column]), **options)
        torch.testing.assert_close(found.others[:, column], log_probs, rtol=0, atol=1e-6)
        (log_probs * weights[:, column]).sum().backward()
    theirs = gradients(model)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=2e-5 * gradient.abs().max().item(), msg=name)

    with torch.no_grad():
        likeliest = response_scores(model, packed, top_k=4, **options)
        every = torch.arange(VOCABULARY).expand(len(packed.targets), -1)
        whole = response_scores(model, packed, ids=every, **options).others
    assert whole is not None and likeliest.top_log_probs is not None and likeliest.top_ids is not None
    torch.testing.assert_close(likeliest.top_log_probs, whole.topk(4).values, rtol=0, atol=1e-6)
    torch.testing.assert_close(whole.gather(1, likeliest.top_ids), likeliest.top_log_probs, rtol=0, atol=1e-6)


def test_scoring_without_gradients_gives_the_same_values() -> None:
    model, packed = tiny("qwen3"), pack(sequences(RAGGED))
    expected, none = response_log_probs(model, packed)
    assert none is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            log_probs, _ = response_log_probs(model, packed, chunk_tokens=5)
        assert not log_probs.requires_grad
        torch.testing.assert_close(log_probs, expected.detach(), rtol=0, atol=2e-6)


def test_entropy_alone_may_be_differentiated() -> None:
    model, packed = tiny("qwen3"), pack(sequences(RAGGED))
    _, entropy = response_log_probs(model, packed, with_entropy=True)
    assert entropy is not None
    entropy.sum().backward()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())


def test_a_frozen_output_layer_gets_no_gradient_and_the_rest_does() -> None:
    model, packed = tiny("qwen3", tied=False), pack(sequences(RAGGED))
    model.lm_head.weight.requires_grad_(False)
    response_log_probs(model, packed)[0].sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys() - {"lm_head.weight"}


class Sizes(TorchDispatchMode):
    """The sizes of every tensor that any operation makes whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                self.rows.append(tensor.numel() // VOCABULARY)
        return made


def test_logits_exist_for_one_chunk_at_a_time_in_forward_and_backward() -> None:
    model, packed = tiny("qwen3"), pack(sequences([(40, 30)] * 10))
    hidden_size = model.config.hidden_size
    with Sizes() as forward:
        log_probs, entropy = response_log_probs(model, packed, chunk_tokens=16, with_entropy=True)
    with Sizes() as backward:
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert len(log_probs) == 300
    for seen in (forward.rows, backward.rows):
        assert 16 in seen
        # The transposed weight ends in the vocabulary too.
        assert {rows for rows in seen if rows > 16} <= {hidden_size}


def test_a_temperature_without_log_probs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"temperature and chunk_tokens must be greater than 0, got 0 and 2048\."):
        response_log_probs(tiny("qwen3"), pack(sequences(RAGGED)), temperature=0)


def test_models_that_cap_their_logits_are_refused_and_left_as_they_were() -> None:
    model, packed = tiny("gemma2").eval(), pack(sequences(RAGGED))
    before = model(input_ids=packed.input_ids, use_cache=False).logits
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM must return what its output layer gives, got logits"):
        response_log_probs(model, packed)
    assert torch.equal(model(input_ids=packed.input_ids, use_cache=False).logits, before)


def test_models_that_mix_rows_are_refused_unless_each_sequence_has_its_own() -> None:
    import transformers as hf

    torch.manual_seed(0)
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)).eval()
    batch = sequences(RAGGED)
    with pytest.raises(ConfigError, match=r"must hold one sequence each for MambaForCausalLM, which mixes"):
        response_log_probs(model, pack(batch))
    log_probs, _ = response_log_probs(model, pack(batch, share_rows=False))
    expected = torch.cat([unpacked(model, one)[0] for one in batch])
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=4e-6)


# ---- media --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", multimodal.FAMILIES)
@pytest.mark.parametrize("train", [False, True])
def test_prompts_with_media_score_together_as_each_alone(family: str, train: bool) -> None:
    model, chunk = multimodal.tiny(family), 11
    batch = multimodal.ragged(model)
    packed = Packing.of(model).pack(batch, train=train)
    by_log_prob, _ = weights_of(len(packed.targets))
    log_probs, _ = response_log_probs(model, packed, temperature=0.7, chunk_tokens=chunk)
    (by_log_prob * log_probs).sum().backward()
    ours = gradients(model)
    expected = torch.cat([multimodal.alone(model, one, 0.7) for one in batch])
    (by_log_prob * expected).sum().backward()
    theirs = gradients(model)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=4e-6)
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    for name, gradient in theirs.items():
        atol = 2e-5 * max(gradient.abs().max().item(), 1e-2)
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=atol, msg=name)


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_the_dummy_gives_every_encoder_a_gradient_of_zero_and_the_rest_its_own(family: str) -> None:
    model, packing = multimodal.tiny(family), Packing.of(multimodal.tiny(family))
    batch = sequences(RAGGED)
    plain, _ = response_log_probs(model, packing.pack(batch))
    plain.sum().backward()
    expected = gradients(model)
    with_dummy, _ = response_log_probs(model, packing.pack(batch, train=True))
    with_dummy.sum().backward()
    found = gradients(model)
    torch.testing.assert_close(with_dummy, plain, rtol=0, atol=2e-6)
    assert found.keys() == dict(model.named_parameters()).keys()
    encoders = found.keys() - expected.keys()
    assert encoders == {name for name in found if "visual" in name or "audio_tower" in name}
    assert not any(found[name].any() for name in encoders)
    for name, gradient in expected.items():
        atol = 2e-5 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=atol, msg=name)


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_a_sampled_placeholder_is_a_word_like_any_other(family: str) -> None:
    model = multimodal.tiny(family)
    words = np.array([5, 9, multimodal.VIDEO, 4, multimodal.IMAGE, 7, multimodal.IMAGE], np.int32)
    picture = multimodal.prompt(model, 1, image=(2, 2))
    with_picture = replace(picture, tokens=np.concatenate([picture.tokens, words]), response=7)
    for one in (Sequence(words, 5), with_picture):
        packing = Packing.of(model)
        log_probs, _ = response_log_probs(model, packing.pack([one]))
        packed = replace(packing, share_prefixes=False).pack([one])
        # transformers finds placeholders among embeddings by equality, so those of the words are moved by nearly nothing.
        ids = torch.from_numpy(one.tokens.astype(np.int64))[None]
        embedded = model.get_input_embeddings()(ids).detach()
        embedded[:, -7:] *= 1 + 1e-6
        found = collate(model, packed.media).arguments
        logits = model(inputs_embeds=embedded, position_ids=packed.position_ids, use_cache=False, **found).logits[0]
        last = len(one.tokens) - 1
        every = torch.log_softmax(logits[last - one.response : last], -1)
        expected = every.gather(1, packed.targets[:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("chunk_tokens", "num_computed"), [(2048, 1), (7, 8)])
def test_logits_that_fit_one_chunk_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, num_computed: int
) -> None:
    computed: list[int] = []
    compute = logprobs._all_log_probs

    def counted(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(hidden))
        return compute(hidden, *rest)

    monkeypatch.setattr(logprobs, "_all_log_probs", counted)
    batch = [Sequence(np.arange(1, 31, dtype=np.int32) % VOCABULARY, 28)]
    found, _ = response_log_probs(tiny("qwen3"), pack(batch), chunk_tokens=chunk_tokens)
    found.sum().backward()
    assert len(computed) == num_computed
