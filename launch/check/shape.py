"""The sizes of a model from its config.json alone. Imports torch; runs in the check's child process.

Owns counting them on a model on the meta device. Does not own what is made of them (`estimate.py`).

    shape_of(empty_model(path))   ->   Shape(vocab_size=151936, keys=1024, num_caching=36, ...)
"""

from __future__ import annotations

from typing import Any

from rondo.launch.check.estimate import Shape
from rondo.models.families import family_of
from rondo.models.names import ADAPTER, adapter_tensors
from rondo.models.routing import Routing


def shape_of(model: Any) -> Shape:
    """`model` is on the meta device, adapted or with `requires_grad` as the settings freeze it."""
    text, family = model.config.get_text_config(), family_of(model)
    towers = dict.fromkeys(family.towers.values()) if family is not None else {}
    inside = {id(p) for path in towers for p in model.get_submodule(path).parameters()}
    adapters = list(adapter_tensors(model).values())
    own = [p for name, p in model.named_parameters() if not ADAPTER.search(name)]
    encoding = [p for p in own if id(p) in inside]
    decoding = [p for p in own if id(p) not in inside]
    routing = Routing.of(model)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Shape(
        vocab_size=text.vocab_size,
        keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_dim,
        num_caching=sum(kind != "linear_attention" for kind in kinds),
        decoder_parameters=_count(decoding),
        encoder_parameters=_count(encoding),
        trained_decoder=_count(p for p in decoding if p.requires_grad),
        trained_encoders=_count(p for p in encoding if p.requires_grad),
        widths=sum(sum(p.shape[-2:]) for p in model.parameters() if p.ndim >= 2),
        adapters=_count(adapters),
        adapter_tensors=len(adapters),
        routed_bytes=0 if routing is None else routing.token_bytes,
    )


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)
