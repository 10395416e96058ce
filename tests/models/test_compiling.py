"""Layers that torch.compile makes give what they gave, whatever is around them. Quick runs trace the graphs and run them as they
are; RONDO_TEST_LONG=1 compiles them to C++."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch

from rondo.models import parallel
from rondo.models.compiling import check_compiler
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing, pack
from rondo.runtime.errors import ConfigError
from tests.models.builders import RAGGED, sequences, tiny
from tests.strength import LONG


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    if LONG and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("no C++ compiler is here")
    if not LONG:
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()


def gradients(model: Any, batches: list[Any]) -> list[torch.Tensor]:
    model.train()
    for batch in batches:
        response_log_probs(model, batch)[0].sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [("bfloat16", True), *([("float32", True), ("bfloat16", False)] if LONG else [])]
)
def test_compiled_layers_give_the_gradients_of_plain_ones_for_batches_of_any_lengths(
    dtype: str, checkpointing: bool
) -> None:
    plain, compiled = tiny("qwen3"), tiny("qwen3")
    packing = Packing.of(plain)
    Packing.of(compiled)
    batches = [packing.pack(sequences(RAGGED[2:])), *([pack(sequences(RAGGED))] if LONG else [])]
    parallel.compute_in(plain, dtype)
    parallel.compute_in(compiled, dtype, activation_checkpointing=checkpointing, compiled=True)
    expected = gradients(plain, batches)
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    found = gradients(compiled, batches)
    assert graphs["unique_graphs"] > 0
    atol = 1e-4 if dtype == "float32" else 0.05
    for grad, other in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=atol, atol=atol * float(other.abs().max()))
    again = dict(graphs)
    gradients(compiled, [packing.pack(sequences(RAGGED[1:7], seed=3))])
    assert graphs["unique_graphs"] == again["unique_graphs"]  # other lengths are no other code


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin a long text")

    monkeypatch.setattr(torch, "compile", none)
    with pytest.raises(
        ConfigError,
        match=r"train\.compile must be False .* no working compiler for cpu, got True \(RuntimeError: No working C\+\+ compiler",
    ):
        check_compiler("cpu")
