"""What a server of SGLang takes of its device, awake and asleep. In bytes, computed.

Owns these formulas, and at which moments a device holds what, where a server lives beside the trainer. Does not own what else its
processes hold (`estimate.py`) nor the judgement (`target.py`). Imports no torch.

    mem-fraction-static of the device:   weights | adapters | cache, the rest of it
    beside that:                         context, CUDA graphs                       stays, as adapters do, while it sleeps

    server = Server.of(config, shape, device_bytes)
    server.awake, server.asleep          ->   {"SGLang's weights": ..., "SGLang's cache": ...}, {"SGLang asleep": ...}

From SGLang 0.5.23: `arg_groups/memory_hook.py` (what is static, 2 MiB a captured sequence), `mem_cache/kv_cache_configurator.py`
(the cache is what weights and adapters leave of it), `lora/mem_pool.py` (every slot has room for an adapter of the greatest rank,
made outside of what a sleeping server gives back).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rondo.launch.check.estimate import COMPUTED, WIDTHS, Shape, Sizes, Traced, held_by
from rondo.launch.groups import RoleGroup
from rondo.roles.config import JobConfig

ON_DEVICE = 1 << 30
"""What a process has on its device before the first tensor: context, kernels, communicators."""
_STATIC = 0.88
"""Of a device, about, that a server chooses where its mem-fraction-static is not given."""
_GRAPH_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """Of one of its devices."""

    weights: int
    adapters: int
    cache: int
    """Negative where weights and adapters leave none."""
    graphs: int
    token_bytes: int
    """Of its cache."""

    @classmethod
    def of(cls, config: JobConfig, shape: Shape, device_bytes: int) -> Server:
        settings = config.rollout.sglang
        assert settings is not None
        width, parts = WIDTHS[config.model.dtype], settings.tensor_parallel
        weights = -(-width * shape.parameters // parts)
        slots = config.adapter_room + 1 if config.adapts_engines else 0
        adapters = -(-slots * shape.adapters * width // parts)
        given = {name.replace("_", "-"): value for name, value in settings.arguments.items()}.get("mem-fraction-static")
        cache = int(float(given or _STATIC) * device_bytes) - weights - adapters
        token = -(-shape.num_caching * 2 * shape.keys * width // parts)
        return cls(weights, adapters, cache, config.rollout.num_slots * _GRAPH_BYTES, token)

    @property
    def awake(self) -> dict[str, int]:
        found = {"weights": self.weights, "adapters": self.adapters, "cache": max(0, self.cache), "graphs": self.graphs}
        return {"SGLang's context": ON_DEVICE} | {f"SGLang's {part}": size for part, size in found.items() if size}

    @property
    def asleep(self) -> dict[str, int]:
        """Weights and cache are given back."""
        return {"SGLang asleep": ON_DEVICE + self.adapters + self.graphs}


def moments(
    config: JobConfig, shape: Shape, traced: Mapping[str, Traced], group: RoleGroup, device_bytes: int
) -> dict[str, tuple[Sizes, ...]]:
    """What a device of `group` holds at each moment that differs, by its words; one without a server on it. Empty where a trace
    is missing."""
    held = held_by(config, shape, traced, group)
    if held is None:
        return {}
    own = (*held, Sizes(COMPUTED, {"context": ON_DEVICE})) if held else ()
    if not _starts_servers(config, group):
        return {"": own} if own else {}
    server, turns = Server.of(config, shape, device_bytes), config.max_staleness == 0
    awake = Sizes(COMPUTED, server.awake)
    if "actor" not in group.roles or not turns:
        return {"": (*own, awake)}
    trains = (*own, Sizes(COMPUTED, server.asleep) if _sleeps(config, group) else awake)
    if config.trainer_rests(on_device=group.devices > 0):
        others = group.model_copy(update={"roles": tuple(role for role in group.roles if role != "actor")})
        own = (*(held_by(config, shape, traced, others) or ()), own[-1])
    return {" while it trains": trains, " while SGLang generates": (*own, awake)}


def at_rest(config: JobConfig, shape: Shape, group: RoleGroup) -> int:
    """Of the host's memory, a process's servers: where they are given adapters alone, the weights of those that sleep come back
    from there."""
    if not (_sleeps(config, group) and config.adapts_engines):
        return 0
    assert config.rollout.sglang is not None
    return config.rollout.sglang.num_servers * WIDTHS[config.model.dtype] * shape.parameters


def no_room(config: JobConfig, shape: Shape, group: RoleGroup, device_bytes: int) -> str | None:
    """Why a server of `group` would not start, or take the run's longest sample."""
    if not _starts_servers(config, group):
        return None
    server = Server.of(config, shape, device_bytes)
    longest = config.longest_sample
    if server.cache >= longest * server.token_bytes:
        return None
    return (
        f"SGLang's cache must hold a sample of {longest:,} tokens, {longest * server.token_bytes / 2**30:.1f} GiB, got "
        f"{max(0, server.cache) / 2**30:.1f} GiB, which its weights leave of mem-fraction-static. Raise it in "
        "rollout.sglang.arguments, or rollout.sglang.tensor_parallel"
    )


def _starts_servers(config: JobConfig, group: RoleGroup) -> bool:
    return config.rollout.sglang is not None and config.rollout.sglang.python is not None and "rollout" in group.roles


def _sleeps(config: JobConfig, group: RoleGroup) -> bool:
    """Whether its servers give their memory to a trainer in turn with them."""
    turns = _starts_servers(config, group) and "actor" in group.roles and config.max_staleness == 0
    return turns and config.rollout.sglang is not None and config.rollout.sglang.release_memory is not False
