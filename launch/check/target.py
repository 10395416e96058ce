"""Judges a run for other machines than this one: which role group goes where, and whether memory suffices there.

Owns placement on equal nodes, and what each node and device would hold. Does not own the formulas (`estimate.py`) nor
the rules of the settings among themselves (`check.py`). Starts and asks nothing: a full-size run is judged on a laptop.

    target = Target(num_nodes=2, num_devices=8, device_bytes=80 << 30, memory_bytes=1000 << 30)
    placed = place(config.role_groups, target)   # [Placed("actor-0", group, {0: 8}), Placed("rollout-0", group, {1: 1}), ...]

Placement: replicas with the most devices first, in the order of the groups where equal. One that a node can hold goes to the
first node with enough free devices; a larger one takes whole free nodes. What needs no device goes to node 0. Every process that
asks for a device has one of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rondo.launch.check.engines import at_rest, moments, no_room
from rondo.launch.check.estimate import OFFLOADED, WIDTHS, Shape, Sizes, held_by, routed_bytes
from rondo.launch.check.findings import Facts, Finding, error, note, ok
from rondo.launch.config import RunConfig
from rondo.launch.groups import TRAINED, RoleGroup
from rondo.launch.machine import show_bytes
from rondo.roles.streams import media_bytes, row_bytes, sampled_bytes
from rondo.runtime.errors import ConfigError

_SNAPSHOTS = 2
_WRITERS = frozenset({"actor_fwd", "reference", "teacher", "advantages", "critic"})
"""Roles that put columns on the bus."""
_RUNS_A_MODEL = frozenset({"rollout", "actor", "actor_fwd", "reference", "teacher", "critic", "genrm", "scorer"})
_TAKES_WEIGHTS = frozenset({"rollout", "actor", "actor_fwd"})
_LIGHT, _HEAVY = 300 << 20, 2500 << 20
"""Memory of a process without and with torch, transformers and, where it computes on a device, CUDA's libraries."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """Equal machines. `num_devices`: accelerators of a node; `device_bytes`: memory of one, `memory_bytes`: of a node."""

    num_nodes: int
    num_devices: int
    device_bytes: int
    memory_bytes: int


def described(*, nodes: int | None, devices: int | None, device_gib: float | None, memory_gib: float | None) -> Target:
    """The machines that the options describe. ConfigError for half a description."""
    given = {"nodes": nodes, "devices": devices, "device-gib": device_gib, "memory-gib": memory_gib}
    missing = [f"--{name}" for name in ("devices", "memory-gib") if given[name] is None]
    missing += ["--device-gib"] * bool(devices and device_gib is None)
    if devices is None or memory_gib is None or missing:
        raise ConfigError(f"a check for other machines must be told their {', '.join(missing)}, got none. Add it")
    sizes = [size for size in (memory_gib, device_gib) if size is not None]
    num_nodes = 1 if nodes is None else nodes
    if num_nodes < 1 or devices < 0 or min(sizes) <= 0:
        shown = ", ".join(f"{name} {value:g}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"--nodes and memory must be greater than 0 and --devices at least 0, got {shown}. Correct them"
        )
    return Target(num_nodes, devices, int((device_gib or 0) * _GIB), int(memory_gib * _GIB))


@dataclass(frozen=True, slots=True)
class Placed:
    """One replica of a role group, and its processes by node."""

    name: str
    group: RoleGroup
    processes: Mapping[int, int]


def place(groups: Sequence[RoleGroup], target: Target) -> list[Placed] | str:
    """Where each replica goes; or why they do not all find a place."""
    replicas = [(group, name) for group in groups for name in group.replica_names()]
    replicas.sort(key=lambda replica: -replica[0].processes * replica[0].devices)
    free = [target.num_devices] * target.num_nodes
    placed = []
    for group, name in replicas:
        wanted, size = group.processes * group.devices, target.num_devices
        if not wanted:
            placed.append(Placed(name, group, {0: group.processes}))
        elif wanted <= size or group.devices > size:
            node = next((node for node, number in enumerate(free) if number >= wanted), None)
            if node is None:
                return f"{name} finds no node with {wanted} free"
            free[node] -= wanted
            placed.append(Placed(name, group, {node: group.processes}))
        else:
            whole = [node for node, number in enumerate(free) if number == size][: -(-wanted // size)] if size else []
            if not whole or wanted % size or len(whole) * size < wanted:
                return f"{name} with {wanted} takes whole nodes, of which {len(whole)} are free"
            for node in whole:
                free[node] = 0
            placed.append(Placed(name, group, dict.fromkeys(whole, size // group.devices)))
    return placed


def processes_on(placed: Sequence[Placed], node: int) -> Counter[str]:
    """Processes of each group on a node."""
    counts = Counter[str]()
    for replica in placed:
        if node in replica.processes:
            counts[replica.group.name] += replica.processes[node]
    return counts


def judge_target(config: RunConfig, target: Target, facts: Facts) -> Iterator[Finding]:
    """Without sizes and shape of the model among the `facts` only placement is judged."""
    wanted = Counter({group.name: group.replicas * group.processes * group.devices for group in config.role_groups})
    shown = " + ".join(f"{name} {number}" for name, number in wanted.items() if number)
    placed = place(config.role_groups, target)
    if isinstance(placed, str):
        yield error(
            f"role_groups must find their devices on {_nodes(target)}, got {shown} = {wanted.total()}: {placed}. "
            "Lower processes or replicas, or use more nodes"
        )
        return
    for node in range(target.num_nodes):
        counts = processes_on(placed, node)
        listed = ", ".join(f"{name} {number}" for name, number in counts.items())
        used = sum(p.processes.get(node, 0) * p.group.devices for p in placed)
        yield ok(f"node {node} takes the processes {listed or 'none'}, on {used} of {target.num_devices} devices")
    if target.num_nodes > 1:
        yield note(
            "`rondo train` starts all groups on one machine: a run on several nodes is judged, but cannot be started"
        )
    if facts.shape is not None:
        yield from judge_devices(config, facts, target.device_bytes)
        for node in range(target.num_nodes):
            yield _judge_node(config, target, facts, facts.shape, placed, node)


def judge_devices(config: RunConfig, facts: Facts, device_bytes: int) -> Iterator[Finding]:
    """Of each group that computes on devices: whether it fits, and what a process that trains sends and takes at most."""
    assert facts.shape is not None
    for group in config.role_groups:
        held_at = moments(config, facts.shape, facts.traced, group, device_bytes) if group.devices else {}
        for when, held in held_at.items():
            needed = sum(each.needed for each in held)
            if needed > device_bytes:
                yield error(
                    f"a process of {group.name} must fit into the memory of its device{when}, {show_bytes(device_bytes)}, got "
                    f"{show_bytes(needed)}: {_told(held)}. {_way_out(held, group)}"
                )
            else:
                yield ok(
                    f"{group.name} takes {show_bytes(needed)} of {show_bytes(device_bytes)} on each device{when}: {_told(held)}"
                )
        if held_at and (lack := no_room(config, facts.shape, group, device_bytes)):
            yield error(lack)
        if held_at and "actor" in group.roles:
            trains, *_ = held_at.values()
            yield from _training(config, facts, group, device_bytes - sum(each.needed for each in trains))


def tell_hosts(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """What a process of each group holds that computes on the CPU."""
    if facts.shape is None:
        return
    for group in config.role_groups:
        if not group.devices and (held := held_by(config, facts.shape, facts.traced, group)):
            yield ok(f"{group.name} takes {show_bytes(sum(each.needed for each in held))} a process: {_told(held)}")


def _training(config: RunConfig, facts: Facts, group: RoleGroup, room: int) -> Iterator[Finding]:
    """What is known of a step. `room`: bytes that a rank has left."""
    traced, prompt = facts.traced["actor"], config.rollout.max_prompt_tokens
    if traced.token_bytes:
        most = int(traced.tokens + room / traced.token_bytes)
        most = min(most, facts.max_positions or most)
        yield ok(
            f"{group.name} has room for micro-batches, and so for samples, of up to {max(most, 0):,} tokens, responses of "
            f"{max(most - prompt, 0):,} to a prompt of {prompt:,}: {show_bytes(int(traced.token_bytes))} a token, traced"
        )
    if traced.sent:
        yield ok(
            f"a rank of {group.name} sends {show_bytes(sum(traced.sent.values()))} in a step of {traced.num_micro_batches} "
            f"micro-batches, and receives as much, traced: {_show(traced.sent)}"
        )


def segment_bytes(
    config: RunConfig,
    num_parameters: int,
    num_tensors: int,
    shape: Shape | None = None,
    processes: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Shared memory by kind, in bytes, all of it reserved at the start; and beside it one step of the longest samples, and the
    copy of a checkpoint while it is written. Of the whole run, or of a node with so many `processes` of each group. Without a
    `shape` every parameter is taken to be trained."""
    if processes is None:
        processes = {group.name: group.replicas * group.processes for group in config.role_groups}
    groups = [(group, processes.get(group.name, 0)) for group in config.role_groups]
    width = WIDTHS[config.model.dtype]
    if config.adapts_engines and shape is not None:
        num_parameters, num_tensors = shape.adapters, shape.adapter_tensors
    takers = _TAKES_WEIGHTS | ({"teacher"} if config.teacher_follows else set())
    takes_weights = config.job == "rl" and any(number and takers & set(group.roles) for group, number in groups)
    rings = sum(n for group, n in groups if "rollout" in group.roles)
    found = {
        "rollout rings": rings * config.bus.ring_bytes,
        "column rings": sum(n for group, n in groups if _WRITERS & set(group.roles) and "rollout" not in group.roles)
        * config.bus.column_ring_bytes,
        # Every tensor starts at a multiple of 64 bytes.
        "weight slab": config.num_weight_slots * (num_parameters * width + num_tensors * 64) if takes_weights else 0,
    }
    versions = version_bytes(config, num_parameters, shape, processes)
    if config.train.hot_snapshot:
        found["hot snapshots"] = _SNAPSHOTS * sum(versions.values())
        if scorers := _lasting_bytes(config, num_parameters, processes):
            found["averaged teachers, refreshed references"] = _SNAPSHOTS * scorers
    if config.train.save_every is not None:
        found["checkpoint being written"] = sum(versions.values())
    trains = config.group_of("actor")
    turns = trains is not None and trains is config.group_of("rollout") and config.max_staleness == 0
    if trains is not None and turns and config.trainer_rests(on_device=trains.devices > 0):
        found["trainer at rest"] = versions["actor"] + sum(
            n * _base_at_rest(config, shape, trains.processes) for g, n in groups if g is trains
        )
    if rings:
        longest = group_bytes(config, sampled_bytes(config, routed_bytes(config, shape)))
        found["one step of the longest samples"] = config.rollout.prompts_per_step * longest
    return found


def _lasting_bytes(config: RunConfig, num_parameters: int, processes: Mapping[str, int]) -> int:
    """Of the weights of all scorers that no newer version of the policy gives back (`roles/training/scorer_state.py`)."""

    def replicas(role: str) -> int:
        return sum(
            processes.get(group.name, 0) // group.processes for group in config.role_groups if role in group.roles
        )

    teachers = {} if config.distillation is None else config.distillation.named()
    averages = sum(teacher.decay is not None for teacher in teachers.values())
    refreshed = config.reference.refresh_every is not None
    return num_parameters * (
        4 * averages * replicas("teacher") + WIDTHS[config.train.dtype] * refreshed * replicas("reference")
    )


def version_bytes(
    config: RunConfig, num_parameters: int, shape: Shape | None, processes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Of a version with its moments, as a checkpoint has it, by the role that trains it; arguments as of `segment_bytes`."""
    counts = processes or {group.name: group.replicas * group.processes for group in config.role_groups}
    return {
        role: sum(
            counts.get(group.name, 0) * _snapshot(config, num_parameters, shape, group.processes, role)
            for group in config.role_groups
            if role in group.roles
        )
        for role in TRAINED
    }


def group_bytes(config: RunConfig, routed: int) -> int:
    """Of a prompt group of the greatest length, with its media. `routed`: of each token's experts."""
    return config.rollout.samples_per_prompt * row_bytes(config, routed) + media_bytes(config)


def _snapshot(config: RunConfig, num_parameters: int, shape: Shape | None, num_ranks: int, role: str = "actor") -> int:
    """Of one rank: float32 weights, and Adam's two moments of what is trained. Encoders that are not cut lie in each, and
    adapters, beside which nothing else is there; a critic without them trains all of its decoder."""
    critic = config.critic if role == "critic" else None
    _, num_shards = (config.train.mesh if critic is None else critic.mesh).shape(num_ranks)
    if shape is None:
        return -(-12 * num_parameters // num_shards)
    if config.train.lora is not None and critic is None:
        return 12 * shape.adapters
    if critic is not None and critic.lora is not None:
        return 12 * shape.critic_adapters
    trained = shape.trained_decoder if critic is None else shape.decoder_parameters
    decoder = 4 * shape.decoder_parameters + 8 * trained
    encoders = 4 * shape.encoder_parameters + 8 * shape.trained_encoders
    whole = config.train.encoders == "replicate"
    return -(-decoder // num_shards) + (encoders if whole else -(-encoders // num_shards))


def _base_at_rest(config: RunConfig, shape: Shape | None, num_ranks: int) -> int:
    """Of one rank: what adapters are trained beside, unless the engine generates with it."""
    if config.train.lora is None or shape is None or (num_ranks == 1 and config.can_lend_weights):
        return 0
    _, num_shards = config.train.mesh.shape(num_ranks)
    return -(-WIDTHS[config.train.dtype] * shape.parameters // num_shards)


def node_parts(config: RunConfig, facts: Facts, shape: Shape, counts: Mapping[str, int]) -> dict[str, int]:
    """Host memory of a node with so many processes of each group, in bytes: shared segments, and what processes take."""
    assert facts.num_parameters is not None and facts.num_tensors is not None  # seen before the shape
    parts = segment_bytes(config, facts.num_parameters, facts.num_tensors, shape, counts)
    workers = config.reward.num_workers * _LIGHT
    if config.media is not None:
        workers += config.media.num_workers * (
            _HEAVY + 2 * max(config.media.max_group_bytes, config.media.max_turn_bytes)
        )
    computing = programs = asleep = 0
    for group in config.role_groups:
        number = counts.get(group.name, 0)
        heavy = bool(_RUNS_A_MODEL & set(group.roles))
        programs += number * ((_HEAVY if heavy else _LIGHT) + (workers if "rollout" in group.roles else 0))
        for role in TRAINED if group.devices and config.train.offload_optimizer else ():
            if role in group.roles and role in facts.traced:
                computing += number * facts.traced[role].parts[OFFLOADED]
        if not group.devices:
            computing += number * sum(each.needed for each in held_by(config, shape, facts.traced, group) or ())
        else:
            asleep += number * at_rest(config, shape, group)
    return parts | {"processes": programs, "computing on the CPU": computing, "SGLang's weights at rest": asleep}


def _judge_node(
    config: RunConfig, target: Target, facts: Facts, shape: Shape, placed: Sequence[Placed], node: int
) -> Finding:
    """Whether host memory of one node suffices."""
    parts = node_parts(config, facts, shape, processes_on(placed, node))
    needed = sum(parts.values())
    if needed > target.memory_bytes:
        return error(
            f"what runs on node {node} must fit into its memory, {show_bytes(target.memory_bytes)}, got about "
            f"{show_bytes(needed)} by estimate ({_show(parts)}). Lower bus.ring_bytes or replicas, set train.hot_snapshot=False, "
            "or use more memory"
        )
    return ok(
        f"node {node} takes about {show_bytes(needed)} of {show_bytes(target.memory_bytes)} of its memory ({_show(parts)})"
    )


def _way_out(held: Sequence[Sizes], group: RoleGroup) -> str:
    parts = Counter[str]()
    for each in held:
        parts.update(each.parts)
    [(largest, _)] = parts.most_common(1)
    ways = {
        "activations": "Set train.activation_checkpointing=True, or lower train.micro_batch_tokens",
        "temporaries": "Lower train.micro_batch_tokens",
        "logits": "Lower train.log_prob_chunk_tokens, or rollout.num_slots",
        "SGLang's cache": "Lower mem-fraction-static of rollout.sglang.arguments, or remove evaluation.every",
        "key-value cache": "Lower rollout.num_slots or rollout.max_new_tokens",
        "gradients": "Train fewer parameters (train.freeze, train.train_parameters), or use devices with more memory",
    }
    more = f"Raise the processes of {group.name}" if "actor" in group.roles else "Use devices with more memory"
    return ways.get(largest, more)


def _nodes(target: Target) -> str:
    return f"{target.num_nodes} node{'s' if target.num_nodes > 1 else ''} with {target.num_devices} devices each"


def _show(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)


def _told(held: Sequence[Sizes]) -> str:
    """What is there, by how it is known."""
    return "; ".join(f"{each.how} ({_show(each.parts)})" for each in held)
