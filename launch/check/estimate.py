"""Estimates of the memory that the roles compute in, from the settings and the model's shape alone.

Owns the formulas, which follow what the roles hold: `models/parallel.py` (weights, gradients, gathered units),
`models/logprobs.py` (logits in chunks), `models/optimizer.py` (moments) and the engine's cache. Weights, gradients, moments and
cache are counted exactly. What a forward keeps is a count of the tensors of a usual layer; what allocators leave between blocks,
kernels' workspace and attention masks are not in it: leave some room. Imports no torch.

    group_estimate(config, shape, config.groups[0])   ->   Estimate({"weights": 8044936192, "key-value cache": ...}, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rondo.launch.groups import RoleGroup
from rondo.roles.config import JobConfig

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT = 4
_PREFILL_TOKENS = 8192
"""Prompt tokens that the engine takes in one step."""
_LOGIT_COPIES = 3
"""The logits in float32, what is made of them, and in a backward their gradient."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Equal layers, one after another: of the decoder, or of an encoder. Widths in numbers a token."""

    num: int
    hidden: int
    queries: int
    """Heads x head_dim."""
    keys: int
    """The same of the key-value heads."""
    feed_forward: int
    """Between the two products; of experts, those that one token visits together."""
    trained: bool = True
    """Whether a backward goes through them. One through frozen encoders has nowhere to go, and keeps nothing."""

    def kept_bytes(self, width: int) -> int:
        """What a layer keeps of one token for its backward: inputs of its products in `width`, of its norms in float32."""
        inputs = 6 * self.hidden + 3 * self.queries + 4 * self.keys + 4 * self.feed_forward
        return width * inputs + _FLOAT * (4 * self.hidden + 2 * (self.queries + self.keys))

    def passing_bytes(self, width: int) -> int:
        """What a layer needs for one token at a time when nothing is kept."""
        inputs = 4 * self.hidden + 2 * self.queries + 2 * self.keys + 3 * self.feed_forward
        return width * inputs + _FLOAT * self.hidden


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, counted in numbers."""

    vocab_size: int
    decoder: Blocks
    encoders: tuple[Blocks, ...]
    num_caching: int
    """Decoder layers that cache keys and values; layers of linear attention do not."""
    decoder_parameters: int
    """Embeddings and output layer with them."""
    encoder_parameters: int
    trained_decoder: int
    trained_encoders: int
    layer_parameters: int
    """Of the largest decoder layer, the unit that is gathered."""
    root_parameters: int
    """Of the decoder outside of its layers: embeddings, output layer."""
    routed_bytes: int = 0
    """Of a mixture of experts: the names of the experts that one token goes to, in all layers."""

    @property
    def parameters(self) -> int:
        return self.decoder_parameters + self.encoder_parameters

    @property
    def trained(self) -> int:
        return self.trained_decoder + self.trained_encoders


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one process, in bytes. While it loads it holds less: its part of the weights, and one tensor more."""

    parts: Mapping[str, int]

    @property
    def needed(self) -> int:
        return sum(self.parts.values())


def group_estimate(config: JobConfig, shape: Shape, group: RoleGroup) -> Estimate:
    """Of one process of `group`: all of its roles beside each other. SGLang's servers are processes of their own."""
    found = []
    if "actor" in group.roles:
        found.append(training_bytes(config, shape, group.processes))
    if "rollout" in group.roles and (config.rollout.sglang is None or config.num_pinned):
        lent = "actor" in group.roles and group.processes == 1 and config.can_lend_weights
        found.append(generating_bytes(config, shape, lent=lent))
    for role in ("actor_fwd", "reference"):
        if role in group.roles:
            found.append(scoring_bytes(config, shape, group.processes))
    parts: dict[str, int] = {}
    for each in found:
        for name, size in each.items():
            parts[name] = parts.get(name, 0) + size
    return Estimate(parts)


def training_bytes(config: JobConfig, shape: Shape, num_ranks: int) -> dict[str, int]:
    """Of one of `num_ranks` processes that train."""
    train, width = config.train, WIDTHS[config.train.dtype]
    alone, whole_encoders = num_ranks == 1, config.train.encoders == "replicate"
    _, num_shards = train.mesh.shape(num_ranks)
    parts = 1 if whole_encoders else num_shards
    held = -(-shape.decoder_parameters // num_shards) + -(-shape.encoder_parameters // parts)
    trained = -(-shape.trained_decoder // num_shards) + -(-shape.trained_encoders // parts)
    found = {
        "weights": _FLOAT * held,
        "gradients": _FLOAT * trained,
        "moments": 0 if train.offload_optimizer else 2 * _FLOAT * trained,
    }
    if not alone:
        # Two units at a time, the next one coming while one computes, and the root's from forward to backward; in the backward
        # the gradients of one unit, and of the root.
        units = shape.root_parameters + 2 * shape.layer_parameters
        found["gathered units"] = width * units + _FLOAT * (shape.root_parameters + shape.layer_parameters)
        if whole_encoders and width != _FLOAT:
            found["gathered units"] += width * shape.encoder_parameters
    elif width != _FLOAT:
        lent = shape.root_parameters + shape.layer_parameters if train.activation_checkpointing else shape.parameters
        found["bfloat16 copies"] = width * lent
    found["activations"] = train.micro_batch_tokens * _kept(shape, width, checkpointing=train.activation_checkpointing)
    found["log-prob chunk"] = _chunk(config, shape)
    if replayed := routed_bytes(config, shape):
        found["routed experts"] = replayed * train.micro_batch_tokens
    return found


def scoring_bytes(config: JobConfig, shape: Shape, num_shards: int) -> dict[str, int]:
    """Of a process that computes log-probs of finished samples, with one of `num_shards` of the weights."""
    width = WIDTHS[config.train.dtype]
    gathered = shape.root_parameters + 2 * shape.layer_parameters if num_shards > 1 else 0
    return {
        "weights": width * (-(-shape.parameters // num_shards) + gathered),
        "activations": config.train.micro_batch_tokens * _passing(shape, width),
        "log-prob chunk": _chunk(config, shape),
    }


def generating_bytes(config: JobConfig, shape: Shape, *, lent: bool = False) -> dict[str, int]:
    """Of a process with the embedded engine, whose cache is there in full from the start. `lent`: its weights are the trainer's
    own; only the engine of evaluations beside the training has a copy. Beside SGLang's servers there is only that one."""
    rollout, width = config.rollout, WIDTHS[config.model.dtype]
    num_slots = rollout.num_slots if rollout.sglang is None else 0
    evaluation, most, beside = config.evaluation, rollout.max_new_tokens, 0
    if evaluation is not None:
        longest = max(each.max_new_tokens or most for each in evaluation.named_sets().values())
        beside = (rollout.max_prompt_tokens + max(most, longest)) * evaluation.num_slots if evaluation.every else 0
        most = max(most, longest) if evaluation.at_start or evaluation.at_end else most
    recorded = routed_bytes(config, shape) * num_slots * (rollout.max_prompt_tokens + most)
    cached = num_slots * (rollout.max_prompt_tokens + most) + beside
    if evaluation is not None and evaluation.every:
        num_slots = max(num_slots, evaluation.num_slots)
    found = {
        "weights": width * shape.parameters * ((0 if lent or rollout.sglang else 1) + (1 if beside else 0)),
        "key-value cache": cached * shape.num_caching * 2 * shape.decoder.keys * width,
        "activations": max(_PREFILL_TOKENS, rollout.max_prompt_tokens) * _passing(shape, width),
        "logits": _LOGIT_COPIES * _FLOAT * num_slots * shape.vocab_size,
    }
    return found | ({"routed experts": recorded} if recorded else {})


def routed_bytes(config: JobConfig, shape: Shape | None) -> int:
    """What each token's experts take in a rollout ring; 0 where they are not replayed."""
    return shape.routed_bytes if shape is not None and config.train.router_replay else 0


def _chunk(config: JobConfig, shape: Shape) -> int:
    return _LOGIT_COPIES * _FLOAT * config.train.log_prob_chunk_tokens * shape.vocab_size


def _kept(shape: Shape, width: int, *, checkpointing: bool) -> int:
    """Of one token of a micro-batch for the backward. A patch or frame counts as a token: the dearer of the two is taken."""
    costs = []
    for blocks in (shape.decoder, *(encoder for encoder in shape.encoders if encoder.trained)):
        layer = blocks.kept_bytes(width)
        costs.append(blocks.num * width * blocks.hidden + layer if checkpointing else blocks.num * layer)
    return max(costs)


def _passing(shape: Shape, width: int) -> int:
    return max(blocks.passing_bytes(width) for blocks in (shape.decoder, *shape.encoders))
