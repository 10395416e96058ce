"""Which role reads and writes which columns, for the roles that a run has.

Owns the table of fields as streams of the bus. Does not own what a column means: the roles do. Light: no torch.

    rollout: tokens loss_mask rollout_log_probs policy_versions, with train.router_replay "r3" routed_experts
       |    (media of the prompt: once a group, for all who run a model; those of later turns with the sample: turn_media)
       |--> actor_fwd: log_probs, log_probs_version, with "r2" routed_experts  (only where it gives old log-probs)
       |--> reference: ref_log_probs  (only where loss or reward has a KL term)
       |--> teacher: teacher_log_probs, or with distillation.top_k compared_ids compared_log_probs  (only with distillation)
       |--> critic: values, values_version, value_behind   (only where advantages are made of them)
       |--> advantages: advantages, with a critic returns  (with what a teacher says where it is a part of them)
       |--> actor: reads all of them
       `--> critic again: trains on values and returns
"""

from __future__ import annotations

from collections.abc import Collection

from rondo.comm.bus.rounds import Stream
from rondo.comm.ring.records import ALIGN_BYTES, worst_case_bytes
from rondo.models.media.inputs import ARRAYS
from rondo.roles.config import JobConfig

BASE_COLUMNS = ("tokens", "loss_mask", "rollout_log_probs", "policy_versions")
REFERENCE_COLUMN = "ref_log_probs"
ROUTED = "routed_experts"
"""uint8 or int16 [T - 1, layers, top_k] of T tokens, or empty where an engine told none."""
VALUES = "values"
"""The stream that a critic scores, and float32 [R]; `values_version` int32 [1] is that of the weights that they are of."""
BEHIND = "value_behind"
"""float32 [1]: the value behind the last token, where truncated samples are worth that."""
PARTS = "reward_parts"
"""float32 [C]: the components of a sample's reward, where they are compared by themselves; 0 where it has none."""
TURNS = "turn_rewards"
"""float32 [R]: what a turn is worth at its last token, and NaN elsewhere, where turns are compared by themselves."""
TEACHER = "teacher"
"""uint8 [1]: which of several teachers a sample has, by its place in `distillation.teachers`."""
SOURCE = "data_source"
"""uint8 [1]: which of several sources a sample's row is of, by its place in `data.sources`."""
LIKELIEST = "likeliest"
"""int32 [R, K]: the policy's likeliest tokens, for a teacher to tell of."""
COMPARED = ("compared_ids", "compared_log_probs")
"""int32 and float32 [R, K]: tokens whose log-probs a teacher tells, and these; NONE for no token."""
SHOWN = "turn_media"
"""uint8 [bytes]: the media of turns behind the prompt, where samples may be shown some (`shown.py`)."""
CONTEXT = "teacher_prompt"
"""int32 [T]: what a sample's teacher sees in the place of its prompt; of no token where that is the same."""
WORDS = "words"
"""uint8 [bytes]: what people read beside a sample that is kept, as JSON (`sampling/columns.py`); of no byte for another."""
ROLLOUT_COLUMNS = (*BASE_COLUMNS, ROUTED, PARTS, TURNS, TEACHER, CONTEXT, SHOWN, WORDS, SOURCE)
"""All that rollout may write of a sample."""


def base_columns(config: JobConfig) -> tuple[str, ...]:
    """What rollout writes of every sample."""
    taught = config.distillation
    more = {
        ROUTED: config.train.router_replay == "r3",
        PARTS: config.num_parts > 0,
        TURNS: config.algorithm.by_turn,
        TEACHER: taught is not None and bool(taught.teachers),
        CONTEXT: taught is not None and taught.context is not None,
        SHOWN: turn_bytes(config) > 0,
        WORDS: config.samples.keep > 0,
        SOURCE: bool(config.data.sources),
    }
    return (*BASE_COLUMNS, *(name for name, there in more.items() if there))


def streams_of(config: JobConfig, roles: Collection[str], routed_bytes: int = 0) -> tuple[Stream, ...]:
    """The streams of a run with these roles. routed_bytes: of the experts of a token."""
    algorithm, taught, base = config.algorithm, config.distillation, base_columns(config)
    asks = (LIKELIEST,) if taught is not None and taught.asks_policy else ()
    num_compared = taught.num_compared if taught is not None else 0
    whose = tuple(name for name in base if name in (TEACHER, CONTEXT))
    counts = algorithm.needs_reference and algorithm.kl_in == "reward"
    judges = taught is not None and taught.form == "advantage"
    processed, together = config.reward.postprocess is not None, config.reward.postprocess_per == "step"
    seen = {
        PARTS: config.compares_parts or (processed and PARTS in base), SOURCE: processed and SOURCE in base,
        TURNS: algorithm.by_turn, "rollout_log_probs": counts or judges, REFERENCE_COLUMN: counts, "teacher_log_probs": judges,
        VALUES: "critic" in roles, BEHIND: algorithm.bootstrap_truncated,
    }  # fmt: skip
    valued = tuple(name for name in (VALUES, BEHIND) if seen[name])
    made = ("advantages", "returns") if valued else ("advantages",)
    scored = ("loss_mask", *(name for name in seen if seen[name]))
    streams = [Stream("advantages", scored, made, whole_groups=True, whole_step=together)]
    inputs = [*(name for name in base if name not in (TURNS, *whose)), "advantages"]
    shown = tuple(name for name in base if name == SHOWN)
    told = (ROUTED,) if config.train.router_replay == "r3" else ()
    tells = (ROUTED,) if config.train.router_replay == "r2" else ()
    for role, sees, columns in (
        ("actor_fwd", ("tokens", "policy_versions", *shown, *told), ("log_probs", "log_probs_version", *tells, *asks)),
        ("reference", ("tokens", *shown), (REFERENCE_COLUMN,)),
        ("teacher", ("tokens", *shown, *whose, *asks), COMPARED if num_compared else ("teacher_log_probs",)),
    ):
        if role in roles:
            wide = {name: routed_bytes for name in tells if name in columns}
            width = 4 * max(1, num_compared if role == "teacher" or LIKELIEST in columns else 1)
            streams.append(
                Stream(
                    role, sees, columns, media=True, fixed=config.deterministic, sample_bytes=wide,
                    output_bytes_per_token=width,
                )
            )  # fmt: skip
            inputs += [name for name in columns if name != LIKELIEST]
    train, whole_step = config.train, algorithm.needs_full_step
    actor = Stream(
        "actor", tuple(inputs), kind="train", whole_step=whole_step, media=True, fixed=config.deterministic,
        mini_batches=train.num_mini_batches, passes=train.passes,
        first_step=config.critic.only_steps if config.critic is not None else 0, whole_samples=config.joins_samples,
    )  # fmt: skip
    streams.append(actor)
    if "critic" in roles:
        columns = (*valued, "values_version")
        streams.append(Stream(VALUES, ("tokens", *shown), columns, media=True, fixed=config.deterministic))
        # Values are of committed weights alone: all of a step must have theirs before its first update. Where generation and
        # training take turns, neither begins before the other's end.
        whole_step = train.num_mini_batches * config.critic_passes > 1 or config.max_staleness == 0
        critic = Stream(
            "critic", ("tokens", VALUES, "returns", "policy_versions", *shown), kind="train", whole_step=whole_step,
            media=True, fixed=config.deterministic, mini_batches=train.num_mini_batches, passes=config.critic_passes,
        )  # fmt: skip
        streams.append(critic)
    return tuple(streams)


def sampled_bytes(config: JobConfig, routed_bytes: int) -> int:
    """What a token has for its experts where it is sampled, of the `routed_bytes` that these take."""
    return routed_bytes if config.train.router_replay == "r3" else 0


def media_bytes(config: JobConfig) -> int:
    """The most that the media of one prompt group take in a rollout ring, in bytes; 0 where the rows are text."""
    if config.media is None:
        return 0
    return config.media.max_group_bytes + worst_case_bytes(1, [(name, 1, ALIGN_BYTES) for name in ARRAYS])


def turn_bytes(config: JobConfig) -> int:
    """The most that the media of one sample's later turns take, in bytes; 0 where these are text."""
    return 0 if config.media is None else config.media.max_turn_bytes


def row_bytes(config: JobConfig, routed_bytes: int = 0) -> int:
    """The most that one sample takes in a rollout ring, in bytes, with all of its rows; `routed_bytes` of them for the experts of
    each token."""
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    columns = [
        ("tokens", 4, prompt + response),
        ("loss_mask", 1, response),
        ("rollout_log_probs", 4, response),
        ("policy_versions", 4, response),
    ]
    columns += [(name, 1, 1) for name in (TEACHER, SOURCE) if name in base_columns(config)]
    if CONTEXT in base_columns(config):
        columns.append((CONTEXT, 4, (config.distillation and config.distillation.max_context_tokens) or 0))
    if routed_bytes:
        columns.append((ROUTED, routed_bytes, prompt + response))
    if config.algorithm.by_turn:
        columns.append((TURNS, 4, response))
    if turn_bytes(config):
        columns.append((SHOWN, 1, turn_bytes(config)))
    if config.samples.keep:
        columns.append((WORDS, 1, config.samples.text_bytes))
    if config.num_parts:
        columns.append((PARTS, 4, config.num_parts))
    return worst_case_bytes(config.rollout.max_rows, columns)
