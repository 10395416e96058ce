"""The sizes of a model from its config.json alone, for estimates. Imports torch; runs in the check's child process.

Owns reading them off a model on the meta device. Does not own what is made of them (`estimate.py`).

    shape_of(empty_model(path))   ->   Shape(vocab_size=151936, decoder=Blocks(num=36, hidden=2560, ...), ...)
"""

from __future__ import annotations

from typing import Any

from rondo.launch.check.estimate import Blocks, Shape
from rondo.models.families import family_of
from rondo.models.media.inputs import Modality
from rondo.models.routing import Routing
from rondo.models.units import decoder_layers


def shape_of(model: Any) -> Shape:
    """`model` is on the meta device, with `requires_grad` as the settings freeze it."""
    config = model.config
    text = config.get_text_config()
    family = family_of(config)
    towers = dict.fromkeys(family.towers.values()) if family is not None else {}
    inside = {id(p) for path in towers for p in model.get_submodule(path).parameters()}
    encoding = [p for p in model.parameters() if id(p) in inside]
    decoding = [p for p in model.parameters() if id(p) not in inside]
    layers = [
        _count(layer.parameters()) for layer in decoder_layers(model) if id(next(layer.parameters())) not in inside
    ]
    routing = Routing.of(model)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return Shape(
        vocab_size=text.vocab_size,
        decoder=_decoder(text),
        encoders=tuple(_encoders(model)),
        num_caching=sum(kind != "linear_attention" for kind in kinds),
        decoder_parameters=_count(decoding),
        encoder_parameters=_count(encoding),
        trained_decoder=_count(p for p in decoding if p.requires_grad),
        trained_encoders=_count(p for p in encoding if p.requires_grad),
        layer_parameters=max(layers, default=0),
        root_parameters=_count(decoding) - sum(layers),
        routed_bytes=0 if routing is None else routing.token_bytes,
    )


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _decoder(text: Any) -> Blocks:
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    feed_forward = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if getattr(text, "num_experts", 0):
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        feed_forward = text.num_experts_per_tok * text.moe_intermediate_size + shared
    return Blocks(
        text.num_hidden_layers,
        text.hidden_size,
        text.num_attention_heads * head_dim,
        key_heads * head_dim,
        feed_forward,
    )


def _encoders(model: Any) -> list[Blocks]:
    config, family = model.config, family_of(model)
    if family is None:
        return []

    def trained(modality: Modality) -> bool:
        tower = model.get_submodule(family.towers[modality])
        layers = {id(layer) for layer in decoder_layers(model)}
        return any(p.requires_grad for m in tower.modules() if id(m) in layers for p in m.parameters())

    vision, size = config.vision_config, config.vision_config.hidden_size
    found = [Blocks(vision.depth, size, size, size, vision.intermediate_size, trained("image"))]
    if "audio" in family.modalities:
        audio, size = config.audio_config, config.audio_config.d_model
        found.append(Blocks(audio.encoder_layers, size, size, size, audio.encoder_ffn_dim, trained("audio")))
    return found
