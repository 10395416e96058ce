"""Which parameters are trained: by the part of the model that they belong to, and by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from rondo.models.families import family_of
from rondo.models.logprobs import response_log_probs
from rondo.models.optimizer import make_optimizer
from rondo.models.packing import Packing
from rondo.models.parts import freeze, part_of
from rondo.runtime.errors import ConfigError
from tests.models import builders
from tests.models.multimodal import tiny


def trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen3_vl", {"vision", "projector", "language"}),
        ("qwen3_5", {"vision", "projector", "language"}),
        ("qwen3_omni", {"vision", "audio", "projector", "language"}),
    ],
)
def test_every_parameter_belongs_to_one_part(family: str, parts: set[str]) -> None:
    model = tiny(family)
    found = {name: part_of(family_of(model), name) for name, _ in model.named_parameters()}
    assert set(found.values()) == parts
    assert {part for name, part in found.items() if "visual.blocks" in name} == {"vision"}
    assert {part for name, part in found.items() if "merger" in name} == {"projector"}
    assert {part for name, part in found.items() if "language_model" in name or "lm_head" in name} == {"language"}
    if family == "qwen3_omni":
        assert {part for name, part in found.items() if "audio_tower.layers" in name} == {"audio"}
        assert (
            Counter(found.values())["projector"]
            > Counter(part for name, part in found.items() if "merger" in name).total()
        )


def test_all_is_trained_unless_something_is_frozen() -> None:
    model = tiny("qwen3_vl").requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    assert freeze(model) == names
    assert trained(model) == set(names)


def test_a_frozen_part_leaves_the_others() -> None:
    model = tiny("qwen3_omni")
    left = freeze(model, ("vision", "audio", "language"))
    assert {part_of(family_of(model), name) for name in left} == {"projector"}
    assert trained(model) == set(left)


def test_names_are_frozen_and_chosen_by_patterns_and_frozen_wins() -> None:
    model = tiny("qwen3_omni")
    left = freeze(
        model,
        ("vision",),
        freeze_parameters=(r"\.mlp\.gate\.", r"embed_tokens"),
        train_parameters=(r"language_model\.layers\.0\.", r"visual"),
    )
    assert all("layers.0." in name or "visual" in name for name in left)
    assert not any(".mlp.gate." in name or "visual.blocks" in name for name in left)
    assert any("merger" in name for name in left)
    assert any("layers.0.self_attn" in name for name in left)


def test_a_text_model_is_language_alone() -> None:
    model = builders.tiny("qwen3")
    assert freeze(model, freeze_parameters=("norm",)) == [n for n, _ in model.named_parameters() if "norm" not in n]
    with pytest.raises(ConfigError, match=r"must name parts of Qwen3ForCausalLM, language, got vision\."):
        freeze(model, ("vision",))


def test_what_freezes_nothing_or_everything_is_refused_and_changes_nothing() -> None:
    model = tiny("qwen3_vl")
    with pytest.raises(
        ConfigError, match=r"parts of Qwen3VLForConditionalGeneration, language, projector, vision, got audio\."
    ):
        freeze(model, ("vision", "audio"))
    with pytest.raises(ConfigError, match=r"train\.freeze_parameters must match names .* got 'visual\.bloks'"):
        freeze(model, freeze_parameters=("visual.bloks",))
    with pytest.raises(ConfigError, match=r"train\.train_parameters must match names .* got 'nothing'"):
        freeze(model, train_parameters=("nothing",))
    with pytest.raises(ConfigError, match=r"must leave parameters to train, got none left\."):
        freeze(model, ("vision", "projector", "language"))
    with pytest.raises(ConfigError, match=r"must leave parameters to train, got none left\."):
        freeze(model, ("vision",), train_parameters=(r"visual\.blocks",))
    assert trained(model) == {name for name, _ in model.named_parameters()}


def test_only_what_is_trained_gets_gradients_and_moments() -> None:
    model = tiny("qwen3_omni")
    left = set(freeze(model, ("vision", "audio")))
    optimizer = make_optimizer(model, lr=1e-3, weight_decay=0.1)
    packed = Packing.of(model).pack(builders.sequences([(9, 4)]), train=True)
    response_log_probs(model, packed)[0].sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == left
    assert {name for name, p in model.named_parameters() if p in optimizer.state} == left
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed <= left
    assert "lm_head.weight" in changed
