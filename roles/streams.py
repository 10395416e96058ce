"""Which role reads and writes which columns, for the roles that a run has.

Owns the table of fields as streams of the bus. Does not own what a column means: the roles do. Light: no torch.

    rollout: tokens loss_mask rollout_log_probs policy_versions
       |--> actor_fwd: log_probs      (only where old log-probs are not the trainer's own)
       |--> reference: ref_log_probs  (only where the loss has a KL term)
       |--> advantages: advantages
       `--> actor: reads all of them
"""

from __future__ import annotations

from collections.abc import Collection

from rondo.comm.records import worst_case_bytes
from rondo.comm.rounds import Stream
from rondo.roles.config import JobConfig, RolloutConfig

BASE_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs", "policy_versions")


def streams_of(config: JobConfig, roles: Collection[str]) -> tuple[Stream, ...]:
    """The streams of a run with these roles."""
    streams = [Stream("advantages", ("loss_mask",), ("advantages",), whole_groups=True)]
    inputs = [*BASE_COLUMNS, "advantages"]
    for role, column in (("actor_fwd", "log_probs"), ("reference", "ref_log_probs")):
        if role in roles:
            streams.append(Stream(role, ("tokens",), (column,)))
            inputs.append(column)
    whole_step = config.algorithm.resolved().needs_full_step
    streams.append(Stream("actor", tuple(inputs), kind="train", whole_step=whole_step))
    return tuple(streams)


def row_bytes(rollout: RolloutConfig) -> int:
    """The most that one sample takes in a rollout ring, in bytes."""
    prompt, response = rollout.max_prompt_tokens, rollout.max_new_tokens
    columns = [
        ("tokens", 4, prompt + response),
        ("loss_mask", 1, response),
        ("rollout_log_probs", 4, response),
        ("policy_versions", 4, response),
    ]
    return worst_case_bytes(1, columns)
