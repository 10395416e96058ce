"""Attention of packed sequences on a GPU's kernels, written out here: equal to every sequence alone, proved, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rondo.models import attention, parallel
from rondo.models.acceptance import accept
from rondo.models.attention import candidates, choose, prove
from rondo.models.kernels import FLASH, FLEX
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing, Sequence, why_alone
from rondo.models.shared_prefixes import Call
from rondo.runtime.errors import ConfigError
from tests.models import emulated, multimodal
from tests.models.builders import SIZES, sequences, tiny, unpacked
from tests.models.test_shared_prefixes import groups

CALLS = {Call(4, 2, 16, 16, None), Call(4, 2, 16, 16, None, window=50), Call(2, 2, 24, 24, None, causal=False)}
CPU = torch.device("cpu")


def gradients(model: Any, log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a weighted sum; the model's are empty after."""
    weight = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(1))
    (weight.to(log_probs.device) * log_probs).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("attn", ["sdpa", FLASH, FLEX])
@pytest.mark.parametrize(
    "case", ["qwen3", "qwen3 apart", "qwen3_moe", "windows", "windows apart", "qwen3_vl", "qwen3_omni"]
)
def test_log_probs_and_whole_gradients_are_those_of_every_sequence_alone(
    case: str, attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the rounding of float32, and no further. Of largest gradients of 12 to 24 the packed ones are 0.7e-5 to 2e-5 off those
    alone; but those alone are themselves 1.3e-5 to 2.4e-5 off what float64 gives, and the packed ones are as near to that (1.1e-5
    to 2.7e-5). Relative to the largest gradient, which is what a sum's rounding goes by, all of it is 0.3e-6 to 1.6e-6."""
    emulated.install(monkeypatch, attn)
    family, _, apart = case.partition(" ")
    if family in multimodal.FAMILIES:
        model = multimodal.tiny(family)
        batch, alone = multimodal.ragged(model), multimodal.alone
    else:
        model = tiny(family, tied=False).eval()
        batch = sequences([(13, 5), (4, 3), (300, 100), (7, 1), (2, 1), (9, 0)]) if apart else groups()
        alone = lambda model, one: unpacked(model, one)[0]  # noqa: E731
    log_probs = torch.cat([alone(model, one) for one in batch])
    expected = gradients(model, log_probs)
    packing = accept(model, attn=attn)
    assert packing.attn == attn
    found, _ = response_log_probs(model, packing.pack(batch).to("cpu"), chunk_tokens=7)
    torch.testing.assert_close(found, log_probs, rtol=0, atol=1e-5)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    made = gradients(model, found)
    assert made.keys() == expected.keys()
    gaps = {name: float((made[name] - gradient).abs().max()) / scale for name, gradient in expected.items()}
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= 3e-6, (worst, gaps[worst])


# ---- the proof ----------------------------------------------------------------------------------------------------------


def one_row(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def one_more(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


def without_lengths(*args: torch.Tensor, **how: Any) -> torch.Tensor:
    """What a kernel gives that takes the batch for one sequence."""
    q, k, v, *_ = args
    ends = [torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k)]
    return emulated.flash()(q, k, v, *ends, len(q), len(k), **how)


def keys_without_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: Any, **how: Any) -> torch.Tensor:
    half = torch.cat([k[: len(k) // 2], k[len(k) // 2 :].detach()])
    return emulated.flash()(q, half, v, *lengths, **how)


def without_window(*args: torch.Tensor, **how: Any) -> torch.Tensor:
    return emulated.flash()(*args, **how | {"window_size": (-1, -1)})


def one_key_more(*args: torch.Tensor, **how: Any) -> torch.Tensor:
    """What a kernel gives that is told of a window and takes it for the distance."""
    left, right = how["window_size"]
    return emulated.flash()(*args, **how | {"window_size": (left + (left >= 0), right)})


def only_causal(mask: BlockMask) -> torch.Tensor:
    return torch.ones(mask.seq_lengths, dtype=torch.bool).tril()


def blocks_alone(mask: BlockMask) -> torch.Tensor:
    """What a kernel sees that looks into no block."""
    length = mask.seq_lengths[0]
    return mask.to_dense()[0, 0].bool().repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length]


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("FlashAttention only supports\nAmpere GPUs or newer.")


FAULTS: list[tuple[str, Callable[..., Any], str]] = [
    (FLASH, without_lengths, "outcome"),
    (FLASH, emulated.flash(one_row), "outcome"),  # flash-attn before 2.1
    (FLASH, emulated.flash(one_more), "outcome"),
    (FLASH, keys_without_gradient, "gradient of keys"),
    (FLASH, without_window, "outcome"),
    (FLASH, one_key_more, "outcome"),
    (FLEX, emulated.flex(only_causal), "outcome"),
    (FLEX, emulated.flex(blocks_alone), "outcome"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attn", [FLASH, FLEX])
def test_a_kernel_that_keeps_sequences_apart_is_proved_in_every_precision(
    attn: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.install(monkeypatch, attn)
    assert prove(attn, CALLS, CPU, dtype) == ""


@pytest.mark.parametrize(("attn", "kernel", "what"), FAULTS)
def test_a_kernel_that_does_not_is_found_far_beyond_what_rounding_makes(
    attn: str, kernel: Callable[..., Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.install(monkeypatch, attn, kernel)
    told = prove(attn, CALLS, CPU, torch.bfloat16)
    found = re.search(rf"the {what} of a token in a packed batch is ([\d.]+) of its norm", told)
    assert found is not None and float(found[1]) > 4 * attention.TOLERANCE[torch.bfloat16]


def test_a_model_is_refused_whose_kernel_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch, FLASH, without_lengths)
    with pytest.raises(
        ConfigError,
        match=r"model.attn must be an attention that keeps the packed sequences of Qwen3ForCausalLM apart, got "
        r'"flash_attention_2": flash_attention_2 with 4 heads of 16 in bfloat16: the outcome of a token in a packed batch is \S+ '
        r'of its norm off that alone\. Set it to "auto"',
    ):
        accept(tiny("qwen3"), attn=FLASH, dtype="bfloat16")


def test_auto_takes_the_next_best_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    emulated.install(monkeypatch, FLASH, fails)
    emulated.install(monkeypatch, FLEX)
    assert accept(tiny("qwen3"), attn="auto", dtype="bfloat16").attn == FLEX
    assert "RuntimeError: FlashAttention only supports Ampere GPUs or newer." in caplog.text
    monkeypatch.undo()
    assert choose(tiny("qwen3"), "auto", "bfloat16").name == "sdpa"


@pytest.mark.parametrize("attn", [FLASH, FLEX])
def test_what_has_chunks_or_a_state_is_refused_a_kernel_and_auto_gives_it_sdpa(
    attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.install(monkeypatch, attn)
    chunks = hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, intermediate_size_mlp=96, attention_chunk_size=4))
    cases = (
        (chunks, "its layers are chunked_attention"),
        (multimodal.tiny("qwen3_5"), "its layers are linear_attention"),
    )
    for model, reason in cases:
        with pytest.raises(ConfigError, match=rf'got "{attn}": {reason}\. Set it to "auto"'):
            choose(model, attn, "bfloat16")
    packing = accept(cases[1][0], attn="auto", dtype="bfloat16")
    assert (packing.attn, packing.share_prefixes) == ("sdpa", False)


# ---- what a device has --------------------------------------------------------------------------------------------------


def names(attn: str, device: str, dtype: str) -> list[str]:
    return [choice.name for choice in candidates(attn, device, dtype)]


def test_auto_is_the_best_that_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = True
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda _: installed or None)
    assert names("auto", "cuda:3", "bfloat16") == [FLASH, FLEX, "sdpa"]
    assert names("auto", "cuda:3", "float32") == [FLEX, "sdpa"]
    assert names("auto", "cpu", "bfloat16") == ["sdpa"]
    assert names("eager", "cuda:3", "bfloat16") == ["eager"]
    installed = False
    assert names("auto", "cuda:3", "bfloat16") == [FLEX, "sdpa"]


@pytest.mark.parametrize(
    ("attn", "device", "dtype", "lack"),
    [
        (FLASH, "cpu", "bfloat16", "on cpu: it runs on GPUs alone"),
        (FLASH, "cuda:0", "float32", "on cuda:0: it computes in half precision alone, and train.dtype is float32"),
        (FLASH, "cuda:0", "bfloat16", "on cuda:0: the package flash-attn is not installed"),
        (FLEX, "cpu", "float32", "on cpu: it has no backward on a CPU"),
    ],
)
def test_what_a_device_has_not_is_refused_with_the_reason(attn: str, device: str, dtype: str, lack: str) -> None:
    with pytest.raises(ConfigError, match=rf'got "{attn}" {lack}\. Set it to "auto"'):
        candidates(attn, device, dtype)


def test_rows_are_kept_apart_in_batches_of_several_or_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row_apart(module: Any, query: Any, key: Any, value: Any, mask: Any, **how: Any) -> Any:
        """As transformers' own flash_attention_2 has it: positions tell the sequences of a single row, and of several nothing."""
        positions = how["position_ids"]
        mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        if len(query) == 1:
            of = (positions[0] == 0).cumsum(0)
            mask = mask & (of[:, None] == of)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask[None, None], scaling=how["scaling"])

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLASH, one_row_apart)
    model = tiny("qwen3").eval()
    model.config._attn_implementation = FLASH
    assert why_alone(model)
    batch = sequences([(13, 5), (4, 3), (7, 1), (16, 8), (5, 2)])
    packed = Packing.of(model).pack(batch)
    assert len(packed.input_ids) == len(batch)


class Made(TorchDispatchMode):
    """The most elements of a tensor that any operation makes, and how often the host waits for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        self.waits += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return found


@pytest.mark.parametrize("attn", [FLASH, FLEX])
def test_no_mask_is_as_large_as_tokens_times_tokens_and_the_host_waits_for_no_value(
    attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 8192
    model = tiny("qwen3").eval()
    emulated.install(monkeypatch, attn)
    packing = accept(model, attn=attn)
    stubs = {FLASH: lambda q, *_, **__: q, FLEX: lambda module, q, *_, **__: (q.transpose(1, 2), None)}
    emulated.install(monkeypatch, attn, stubs[attn])
    shared = sequences([(length // 2, 1)])[0].tokens
    batch = [Sequence(shared, 1000), Sequence(shared[::-1].copy(), 1000), Sequence(shared, 1001)]
    with Made() as made, torch.no_grad():
        packed = packing.pack(batch)
        assert packed.shared is not None
        moved = replace(packed, shared=packed.shared.to("cpu"))
        assert made.elements < length * length // 8
        made.waits = 0  # a batch is laid out on the host
        response_log_probs(model, moved, chunk_tokens=16)
    assert length * 64 <= made.elements < length * length // 8
    assert made.waits == 0


# ---- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("attn", [FLASH, FLEX])
def test_kernels_of_this_gpu_are_proved_and_the_host_waits_for_no_layer(attn: str) -> None:
    if attn == FLASH:
        pytest.importorskip("flash_attn")
    calls = {Call(4, 2, 64, 64, None), Call(40, 8, 128, 128, 0.1), Call(28, 4, 128, 128, None, window=4096)}
    calls.add(Call(16, 16, 72, 72, None, causal=False))  # of a vision tower
    for dtype in (torch.bfloat16, torch.float16, *([torch.float32] if attn == FLEX else [])):
        assert prove(attn, calls, torch.device("cuda"), dtype) == ""
    model = tiny("qwen3").eval().cuda()
    packing = accept(model, attn=attn, dtype="bfloat16")
    parallel.compute_in(model, "bfloat16")
    response_log_probs(model, packing.pack(groups()).to("cuda"))[0].sum().backward()  # compiles
    packed = packing.pack(groups(seed=1)).to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        response_log_probs(model, packed)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "windows"])
def test_whole_gradients_on_a_gpu_are_those_of_every_sequence_alone(family: str) -> None:
    model, batch = tiny(family, tied=False).eval(), groups()
    log_probs = torch.cat([unpacked(model, one)[0] for one in batch])
    expected = gradients(model, log_probs)
    model.cuda()
    packing = accept(model, attn="auto")
    assert packing.attn == FLEX
    found, _ = response_log_probs(model, packing.pack(batch).to("cuda"), chunk_tokens=7)
    torch.testing.assert_close(found.cpu(), log_probs, rtol=0, atol=1e-4)
    made = gradients(model, found)
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert max(float((made[name].cpu() - g).abs().max()) for name, g in expected.items()) <= 1e-4 * scale
