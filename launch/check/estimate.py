"""What a process of a run would hold: what was traced of it, and what is computed beside that. In bytes.

Owns what is computed: of the engine its copy of the weights, its cache and its logits, and what routes take, all counted as the
engine holds it. What trains, scores and takes prompts in is traced (`trace.py`), and comes here as numbers. What allocators leave
between blocks, and kernels' workspace, is in neither: leave some room. Imports no torch.

    held_by(config, facts.shape, facts.traced, config.role_groups[0]) -> (Sizes("traced at ...", {"parameters": ...}), Sizes(...))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rondo.launch.groups import RoleGroup
from rondo.roles.config import JobConfig
from rondo.roles.config.genrm import SCORER
from rondo.roles.streams import sampled_bytes

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPUTED = "computed"
PREFILL = "prefill"
"""A trace that is no role's: of prompts on their way into an embedded engine."""
JUDGE = "genrm"
"""Of a judge: no trace at all, but computed (`judging`)."""
STAGING = "gloo's staging"
"""What gloo holds of a collective beside its tensors: all that is gathered, or scattered, once more."""
WORKSPACE = "attention's workspace"
"""Of a GPU's kernel, in the backward of a decoder's layer (`workspace.py`)."""
FORMULAS = (STAGING, WORKSPACE)
"""Parts of a trace that are computed, at the moment at which they are there."""
LENT = "parameters"
"""The part of a trace that an engine in the trainer's own process may generate with."""
OFFLOADED = "optimizer"
"""The part of a trace that `train.offload_optimizer` leaves in host memory."""
_PREFILL_TOKENS = 8192
"""Prompt tokens that the engine takes in one step."""
_FLOAT, _LOGIT_COPIES = 4, 3
"""The engine's logits in float32, and what is made of them."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, counted in numbers."""

    vocab_size: int
    keys: int
    """Key-value heads x head_dim."""
    num_caching: int
    """Decoder layers that cache keys and values; layers of linear attention do not."""
    decoder_parameters: int
    """Embeddings and output layer with them."""
    encoder_parameters: int
    trained_decoder: int
    trained_encoders: int
    widths: int
    """What goes into and comes out of all matrices, for one token."""
    adapters: int = 0
    """With `train.lora`: of all adapters, which every process that trains holds whole."""
    adapter_tensors: int = 0
    """How many tensors these are."""
    critic_adapters: int = 0
    """With `critic.lora`: of all of them, and of the head."""
    routed_bytes: int = 0
    """Of a mixture of experts: the names of the experts that one token goes to, in all layers."""

    @property
    def parameters(self) -> int:
        return self.decoder_parameters + self.encoder_parameters


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one role in a process."""

    how: str
    parts: Mapping[str, int]

    @property
    def needed(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Traced(Sizes):
    """What a trace found of one role, of the rank that holds most, at the moment at which it does; `how` tells it, and of which
    depths."""

    sent: Mapping[str, int] = field(default_factory=dict)
    """Collective -> what a rank sends or receives in a step."""
    num_micro_batches: int = 1
    """Of a rank in a step of the longest samples."""
    tokens: int = 0
    """Of the micro-batch."""
    token_bytes: float | None = None
    """What a token more would take; None where it was not asked for."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """When the forward of a step has ended: what it keeps for its backward, and its logits, among what is there."""


def traces(config: JobConfig, group: RoleGroup) -> list[str]:
    """What must be traced to know what `group` holds."""
    found: list[str] = [role for role in ("actor", "actor_fwd", "reference", "critic", SCORER) if role in group.roles]
    if "teacher" in group.roles and config.distillation is not None:
        found += [teaching(name) for name, teacher in config.distillation.named().items() if not teacher.urls]
    found += [JUDGE] if "genrm" in group.roles else []
    return [*found, PREFILL] if "rollout" in group.roles and _generates(config) else found


def teaching(name: str) -> str:
    """The trace of a teacher."""
    return f"teacher {name}"


def held_by(
    config: JobConfig, shape: Shape, traced: Mapping[str, Traced], group: RoleGroup
) -> tuple[Sizes, ...] | None:
    """Of one process of `group`: all of its roles beside each other, but of a trainer that rests and the engine in turn with it
    the one that takes more. A trainer at rest leaves nothing there but weights that it lends. The engine of evaluations takes
    turns with nobody. SGLang's servers are processes of their own. None where a trace is missing."""
    wanted = traces(config, group)
    if not set(wanted) <= traced.keys():
        return None
    on_host = {OFFLOADED} if group.devices and config.train.offload_optimizer else set()

    def of(role: str) -> list[Sizes]:
        parts = {part: n for part, n in traced[role].parts.items() if part not in on_host}
        computed = {part: parts.pop(part) for part in FORMULAS if parts.get(part)}
        return [Sizes(traced[role].how, parts), *([Sizes(COMPUTED, computed)] if computed else [])]

    trains = of("actor") if "actor" in wanted else []
    if trains and (routed := routed_bytes(config, shape)):
        trains.append(Sizes(COMPUTED, {"routed experts": routed * config.train.micro_batch_tokens}))
    scores = [sizes for role in wanted if role not in ("actor", PREFILL) for sizes in of(role)]
    if PREFILL not in wanted:
        return (*trains, *scores)
    lent = "actor" in group.roles and group.processes == 1 and config.can_lend_weights
    prefill = Sizes(traced[PREFILL].how, traced[PREFILL].parts)
    generates = [generating(config, shape, lent=lent)] if config.rollout.sglang is None else []
    beside = [prefill, evaluating(config, shape)] if config.num_pinned else []
    generates = generates if beside else [prefill, *generates]
    if trains and config.max_staleness == 0 and config.trainer_rests(on_device=group.devices > 0):
        if lent:
            generates.insert(0, Sizes(trains[0].how, {LENT: trains[0].parts[LENT]}))
        return (*max(trains, generates, key=lambda sizes: sum(each.needed for each in sizes)), *scores, *beside)
    return (*trains, *scores, *generates, *beside)


def prefill_tokens(config: JobConfig) -> int:
    return max(_PREFILL_TOKENS, config.rollout.max_prompt_tokens)


def _generates(config: JobConfig) -> bool:
    """Whether a process of the rollout generates itself; beside SGLang's servers only for evaluations."""
    return config.rollout.sglang is None or bool(config.num_pinned)


def generating(config: JobConfig, shape: Shape, *, lent: bool = False) -> Sizes:
    """Of a process with the embedded engine, whose cache is there in full from the start. `lent`: its weights are the trainer's
    own."""
    rollout, evaluation = config.rollout, config.evaluation
    most = rollout.max_new_tokens
    if evaluation is not None and (evaluation.at_start or evaluation.at_end):
        most = max(most, _longest_of(config))
    length = rollout.max_prompt_tokens + most
    found = _engine(config.model.dtype, shape, rollout.num_slots, length, num_weights=0 if lent else shape.parameters)
    recorded = sampled_bytes(config, routed_bytes(config, shape)) * rollout.num_slots * length
    return Sizes(COMPUTED, found | ({"routed experts": recorded} if recorded else {}))


def evaluating(config: JobConfig, shape: Shape) -> Sizes:
    """Of the embedded engine that measures versions beside the training, in the first replica; with SGLang, too."""
    assert config.evaluation is not None
    length = config.rollout.max_prompt_tokens + max(config.rollout.max_new_tokens, _longest_of(config))
    found = _engine(config.model.dtype, shape, config.evaluation.num_slots, length, num_weights=shape.parameters)
    return Sizes(COMPUTED, {f"{part} of evaluations": size for part, size in found.items()})


def judging(config: JobConfig, shape: Shape) -> Traced:
    """Of a judge with this `shape`: the embedded engine, or on each device a server of SGLang with room for one question, whose
    cache is the rest."""
    judge = config.genrm
    assert judge is not None and judge.model is not None
    parts = 1 if judge.sglang is None else judge.sglang.tensor_parallel
    length = judge.max_prompt_tokens + judge.max_new_tokens
    slots = judge.num_slots if judge.sglang is None else 1
    found = _engine(judge.model.dtype, shape, slots, length, num_weights=shape.parameters)
    return Traced(COMPUTED, {f"{part} of the judge": -(-size // parts) for part, size in found.items()})


def _longest_of(config: JobConfig) -> int:
    """The longest response of an evaluation."""
    assert config.evaluation is not None
    sets = config.evaluation.named_sets().values()
    return max(each.max_new_tokens or config.rollout.max_new_tokens for each in sets)


def _engine(dtype: str, shape: Shape, num_slots: int, length: int, *, num_weights: int) -> dict[str, int]:
    width = WIDTHS[dtype]
    return {
        "weights": width * num_weights,
        "key-value cache": num_slots * length * shape.num_caching * 2 * shape.keys * width,
        "logits": _LOGIT_COPIES * _FLOAT * num_slots * shape.vocab_size,
    }


def routed_bytes(config: JobConfig, shape: Shape | None) -> int:
    """What each token's experts take; 0 where they are not replayed."""
    return shape.routed_bytes if shape is not None and config.train.router_replay != "off" else 0


def at_most(config: JobConfig, shape: Shape) -> int:
    """About the most that a process could take whatever it does, without a trace: nothing is cut or computed again, every product
    keeps what goes in and comes out."""
    tokens = config.train.micro_batch_tokens
    logits = _LOGIT_COPIES * min(config.train.log_prob_chunk_tokens, tokens) * shape.vocab_size
    return _FLOAT * (6 * shape.parameters + 2 * tokens * shape.widths + logits)
