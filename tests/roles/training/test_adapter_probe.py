"""What a trainer tells of a version, and what a server that leaves it out is found by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rondo.models.config import LoraConfig
from rondo.models.lora import adapt, adapted
from rondo.roles.training.adapter_probe import AdapterProbe, Prober, write
from rondo.runtime.errors import CorruptData
from tests.roles.engines.engines import qwen3

PROMPTS = [[3, 9, 27, 81], [5, 25, 50, 60]]


def test_a_trainer_tells_the_log_probs_of_the_version_that_it_has_and_of_its_base(tmp_path: Path) -> None:
    model = qwen3()
    plain = torch.log_softmax(model(torch.tensor(PROMPTS)).logits[:, :-1], -1)
    expected = plain.gather(2, torch.tensor(PROMPTS)[:, 1:, None])[..., 0].detach().numpy()
    adapt(model, LoraConfig(rank=2))
    prober = Prober(model, PROMPTS)
    np.testing.assert_allclose(prober.base, expected, atol=1e-6)
    np.testing.assert_array_equal(prober.measure(), prober.base)  # a fresh adapter changes nothing
    for product in adapted(model).values():
        torch.nn.init.normal_(product.lora_B.weight)
    moved = prober.measure()
    for number in range(10):
        write(tmp_path, f"0.{number}", prober.prompts, prober.base, moved + number)
    probe = AdapterProbe.read(tmp_path, "0.9")
    np.testing.assert_allclose(probe.adapter, moved + 9, rtol=1e-6)
    np.testing.assert_array_equal(probe.prompts, PROMPTS)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_probe.json"]
    with pytest.raises(CorruptData, match=r"must tell of version 0.1 before it is published, got 0.2, 0.3"):
        AdapterProbe.read(tmp_path, "0.1")


def test_a_version_is_shown_once_it_is_further_from_the_base_than_noise_is() -> None:
    base = np.full((2, 3), -2.0, np.float32)
    noisy = base + 1e-3
    near, far = (AdapterProbe(np.zeros((2, 4)), base, base - moved) for moved in (3e-3, 1e-2))
    assert not near.check(noisy, noisy)  # nothing can be told of it
    assert far.check(noisy, far.adapter + 4e-3)
    for told in (noisy, far.adapter + 6e-3, np.full((2, 3), np.nan), base[:1]):
        with pytest.raises(CorruptData, match="must be nearer to the trainer's with it than to those without"):
            far.check(noisy, told)
