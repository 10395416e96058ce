"""Which role reads and writes which columns, for the roles that a run has.

Owns the table of fields as streams of the bus. Does not own what a column means: the roles do. Light: no torch.

    rollout: tokens loss_mask rollout_log_probs policy_versions, with train.router_replay routed_experts
       |    (media of the prompt: once a group, for all who run a model)
       |--> actor_fwd: log_probs, log_probs_version   (only where old log-probs are not the trainer's own)
       |--> reference: ref_log_probs  (only where the loss has a KL term)
       |--> advantages: advantages
       `--> actor: reads all of them
"""

from __future__ import annotations

from collections.abc import Collection

from rondo.comm.bus.rounds import Stream
from rondo.comm.ring.records import ALIGN_BYTES, worst_case_bytes
from rondo.models.media.inputs import ARRAYS
from rondo.roles.config import JobConfig, RolloutConfig

BASE_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs", "policy_versions")
ROUTED = "routed_experts"
"""uint8 or int16 [T - 1, layers, top_k] of T tokens, or empty where an engine told none."""
ROLLOUT_COLUMNS = (*BASE_COLUMNS, ROUTED)
"""All that rollout may write of a sample."""


def base_columns(config: JobConfig) -> tuple[str, ...]:
    """What rollout writes of every sample."""
    return ROLLOUT_COLUMNS if config.train.router_replay else BASE_COLUMNS


def streams_of(config: JobConfig, roles: Collection[str]) -> tuple[Stream, ...]:
    """The streams of a run with these roles."""
    streams = [Stream("advantages", ("loss_mask",), ("advantages",), whole_groups=True)]
    inputs = [*base_columns(config), "advantages"]
    routed = (ROUTED,) if config.train.router_replay else ()
    sees = {"actor_fwd": ("tokens", "policy_versions", *routed), "reference": ("tokens",)}
    for role, columns in (("actor_fwd", ("log_probs", "log_probs_version")), ("reference", ("ref_log_probs",))):
        if role in roles:
            streams.append(Stream(role, sees[role], columns, media=True, fixed=config.deterministic))
            inputs += columns
    train, whole_step = config.train, config.algorithm.needs_full_step
    actor = Stream(
        "actor", tuple(inputs), kind="train", whole_step=whole_step, media=True, fixed=config.deterministic,
        mini_batches=train.optimizer_steps_per_batch, passes=train.epochs,
    )  # fmt: skip
    streams.append(actor)
    return tuple(streams)


def media_bytes(config: JobConfig) -> int:
    """The most that the media of one prompt group take in a rollout ring, in bytes; 0 where the rows are text."""
    if config.media is None:
        return 0
    return config.media.max_group_bytes + worst_case_bytes(1, [(name, 1, ALIGN_BYTES) for name in ARRAYS])


def row_bytes(rollout: RolloutConfig, routed_bytes: int = 0) -> int:
    """The most that one sample takes in a rollout ring, in bytes; `routed_bytes` of them for the experts of each token."""
    prompt, response = rollout.max_prompt_tokens, rollout.max_new_tokens
    columns = [
        ("tokens", 4, prompt + response),
        ("loss_mask", 1, response),
        ("rollout_log_probs", 4, response),
        ("policy_versions", 4, response),
    ]
    if routed_bytes:
        columns.append((ROUTED, routed_bytes, prompt + response))
    return worst_case_bytes(1, columns)
