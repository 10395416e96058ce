"""The trainer on a GPU: a step, a snapshot and a rest there make what they make on the CPU, where the same tests run."""

from __future__ import annotations

import pytest
import torch

from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.roles.training.objective import open_policy
from tests.comm.memory import MemorySegment
from tests.roles.training.test_backend import Policy, job, model, rows, weights

__all__ = ["model"]
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)]


def opened(model: str, device: str, dtype: str = "float32") -> Policy:
    """With torch's own attention, heads of 8 being too narrow for other kernels."""
    config = job(model)
    its = {
        "model": config.model.model_copy(update={"attn": "sdpa"}),
        "train": config.train.model_copy(update={"dtype": dtype}),
    }
    return open_policy(config.model_copy(update=its), model, world_size=1, device=device)


def stepped(made: Policy, step: int) -> list[float]:
    made.accumulate(step, rows(step), [[step, 0, 0, 6]], last=True)
    metrics, _ = made.finish(step)
    return [metrics["loss"], metrics["grad_norm"]]


def held(made: Policy) -> dict[str, torch.Tensor]:
    """Weights and moments."""
    return {name: each.cpu().clone() for name, each in made.state()[0].items() if not name.startswith("random.")}


@pytest.mark.parametrize("device", DEVICES)
def test_steps_make_the_weights_that_they_make_on_the_cpu(model: str, device: str) -> None:
    plain, made = opened(model, "cpu"), opened(model, device)
    for step in range(2):
        assert stepped(made, step) == pytest.approx(stepped(plain, step), abs=2e-4)
    torch.testing.assert_close(weights(made).cpu(), weights(plain), atol=2e-4, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_trains_as_float32_does_on_a_scaled_loss_and_skips_what_overflows(model: str, device: str) -> None:
    exact, made = opened(model, device), opened(model, device, dtype="float16")
    group = made.optimizer.param_groups[0]
    told = []
    for backend in (exact, made):
        backend.accumulate(0, rows(0), [[0, 0, 0, 6]], last=True)
        told.append(backend.finish(0)[0])
    assert told[1]["grad_norm"] == pytest.approx(told[0]["grad_norm"], rel=0.02)
    assert (told[1]["loss_scale"], told[1]["skipped"]) == (1024.0, 0.0) and "loss_scale" not in told[0]
    before = [parameter.clone() for parameter in made.model.parameters()]
    group["loss_scale"] = 2.0**60
    made.accumulate(1, rows(1), [[0, 0, 0, 6]], last=True)
    metrics, _ = made.finish(1)
    assert (metrics["skipped"], metrics["loss_scale"]) == (1.0, 2.0**59)
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_snapshot_holds_weights_and_moments_exactly_and_gives_them_back(model: str, device: str) -> None:
    made, again = opened(model, device), opened(model, device)
    stepped(made, 0)
    tensors, state = made.state()
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    hot = HotSnapshot(MemorySegment(snapshot_bytes(num_bytes, len(tensors))))
    hot.write(1, tensors, state)
    again.load_state(*hot.read(1))
    before, after = held(made), held(again)
    assert before.keys() == after.keys() and made.checksum() == again.checksum()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_rest_leaves_the_device_and_changes_nothing(model: str, device: str) -> None:
    made = opened(model, device)
    stepped(made, 0)
    before = held(made)
    on_device = torch.cuda.memory_allocated(device) if device != "cpu" else 0
    made.rest()
    if device != "cpu":
        sizes = sum(each.numel() * each.element_size() for each in before.values())
        assert on_device - torch.cuda.memory_allocated(device) >= 0.9 * sizes
    made.wake()
    assert [name for name, each in held(made).items() if not torch.equal(each, before[name])] == []
