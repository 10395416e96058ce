"""Layers that torch.compile makes give what they gave, whatever is around them. Two processes: test_fsdp.py."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from rondo.models import parallel
from rondo.models.acceptance import accept
from rondo.models.compiling import check_compiler
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import pack
from rondo.runtime.errors import ConfigError
from tests.models.builders import RAGGED, sequences, tiny
from tests.strength import LONG


def gradients(model: Any, batches: list[Any]) -> list[torch.Tensor]:
    model.train()
    for batch in batches:
        response_log_probs(model, batch)[0].sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def compare(device: str, dtype: str, checkpointing: bool, atol: float) -> None:
    """Compiled and plain layers on batches of other lengths; from the third on nothing is compiled any more."""
    torch._dynamo.reset()
    plain, compiled = tiny("qwen3").to(device), tiny("qwen3").to(device)
    packing = accept(plain, attn="auto", dtype=dtype)
    assert accept(compiled, attn="auto", dtype=dtype) == packing
    parallel.compute_in(plain, dtype)
    parallel.compute_in(compiled, dtype, activation_checkpointing=checkpointing, compiled=True)
    graphs = torch._dynamo.utils.counters["stats"]
    flat = [packing.pack(sequences(RAGGED[first:], seed=first)).to(device) for first in range(4)]
    rows = [pack(sequences(RAGGED[first:], seed=first)).to(device) for first in range(4)]
    for batches in (flat, rows):
        graphs.clear()
        for grad, other in zip(gradients(compiled, batches[:2]), gradients(plain, batches[:2]), strict=True):
            torch.testing.assert_close(grad, other, rtol=atol, atol=atol * float(other.abs().max()))
        made = graphs["unique_graphs"]
        gradients(compiled, batches[2:])
        assert graphs["unique_graphs"] == made > 0


@pytest.mark.skipif(not LONG or not any(map(shutil.which, ("g++", "clang++"))), reason="compiles C++ for minutes")
@pytest.mark.parametrize(("dtype", "checkpointing"), [("bfloat16", True), ("float32", True), ("bfloat16", False)])
def test_compiled_layers_give_the_gradients_of_plain_ones_for_batches_of_any_lengths(
    dtype: str, checkpointing: bool
) -> None:
    compare("cpu", dtype, checkpointing, 1e-4 if dtype == "float32" else 0.05)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "checkpointing"), [("bfloat16", True), ("float16", True), ("float32", False)])
def test_layers_that_are_compiled_for_a_gpu_give_the_gradients_of_plain_ones_there(
    dtype: str, checkpointing: bool
) -> None:
    check_compiler("cuda")
    compare("cuda", dtype, checkpointing, 5e-3 if dtype == "float32" else 0.05)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin a long text")

    monkeypatch.setattr(torch, "compile", none)
    with pytest.raises(
        ConfigError,
        match=r"train\.compile must be False .* no working compiler for cpu, got True \(RuntimeError: No working C\+\+ compiler",
    ):
        check_compiler("cpu")
