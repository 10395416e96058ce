"""Which settings of a job that trains on samples contradict each other across sections.

Owns those rules. Does not own the rules inside one section (its class), nor those of a job without rollouts
(`roles/config/supervised.py`). Each function yields one text a contradiction, with both names and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rondo.roles.config.data import NO_REWARD
from rondo.roles.config.genrm import SCORER
from rondo.roles.config.rollout import MIN_FIXED_SLOTS

if TYPE_CHECKING:
    from rondo.roles.config import JobConfig


def media_suit_the_engine(job: JobConfig) -> Iterator[str]:
    sglang = job.rollout.sglang
    if sglang is None:
        return
    if job.media is not None and sglang.urls:
        yield (
            "media must be None with rollout.sglang.urls, whose servers are sent text alone, got settings of media. Remove "
            "them, or set rollout.sglang.python, so that servers are started which take media"
        )
    if job.media is not None and job.media.whole_positions is False:
        yield (
            "media.whole_positions must not be False with rollout.sglang, whose servers cut positions of videos to whole "
            "numbers, got False. Remove it"
        )
    names = ("enable-return-routed-experts", "enable_return_routed_experts")
    if job.train.router_replay == "r3" and False in map(sglang.arguments.get, names):
        yield (
            "rollout.sglang.arguments must not turn enable-return-routed-experts off with train.router_replay 'r3', which "
            "needs what it tells, got False. Remove it: rondo sets it itself"
        )


def halves_suit(job: JobConfig) -> Iterator[str]:
    """Of `debug`."""
    if (window := job.debug.profile) is not None and window.last >= job.num_steps:
        yield f"debug.profile.last must be below num_steps, {job.num_steps}, got {window.last}. Lower it"
    if job.debug.rollout_only and not job.samples.keep:
        yield "samples.keep must be above 0 with debug.rollout_only, whose samples are its result, got 0. Set it to 1"
    if job.debug.rollout_only and job.critic is not None:
        yield "debug.rollout_only must be False with a critic, which would train alone, got True. Take another algorithm"
    if job.debug.train_only is None:
        return
    taught = job.distillation is not None and (job.distillation.teachers or job.distillation.context is not None)
    for name, is_set in (
        ("algorithm.advantage", job.algorithm.by_turn or job.compares_parts), ("distillation", bool(taught)),
        ("media.max_turn_bytes", job.media is not None and job.media.max_turn_bytes > 0),
        ("data.sources", bool(job.data.sources)), ("data.filter or data.curriculum", job.data.leaves_out),
        ("rollout.filter", job.rollout.filter is not None), ("rollout.keep", job.rollout.keep is not None),
    ):  # fmt: skip
        if is_set:
            yield (
                f"debug.train_only must be None with this {name}, which needs more of a sample than is kept, or leaves some out, "
                f"got {job.debug.train_only}. Change {name}"
            )


def sections_agree(job: JobConfig) -> Iterator[str]:
    for rules in (
        halves_suit, _media_of_turns_fit, _rewards_agree, _distillation_agrees, _sources_agree, _updates_agree, _samples_fit,
        _critic_agrees, _evaluations_agree,
    ):  # fmt: skip
        yield from rules(job)


def _media_of_turns_fit(job: JobConfig) -> Iterator[str]:
    rollout = job.rollout
    if job.media is not None and job.media.max_turn_bytes and not rollout.has_turns:
        yield (
            "media.max_turn_bytes must be 0 without rollout.environment or rollout.workflow, which alone show media behind a "
            f"prompt, got {job.media.max_turn_bytes}. Remove it, or set one of them"
        )
    if job.media is not None and job.media.max_turn_bytes and rollout.max_rows > 1:
        yield (
            "rollout.max_rows must be 1 with media.max_turn_bytes, since a sample with media has one row, got "
            f"{rollout.max_rows}. Remove one"
        )


def _rewards_agree(job: JobConfig) -> Iterator[str]:
    algorithm, rollout = job.algorithm, job.rollout
    if rollout.samples_per_prompt < algorithm.min_group_size and job.learns_from_rewards:
        yield (
            f"rollout.samples_per_prompt must be at least {algorithm.min_group_size} with algorithm.name "
            f"{algorithm.name!r}, which compares the samples of a prompt, got {rollout.samples_per_prompt}. "
            "Raise it"
        )
    unread = job.algorithm.by_turn or job.compares_parts or not job.learns_from_rewards
    if job.reward.postprocess is not None and unread:
        why = f"algorithm.advantage {algorithm.advantage!r}" if job.learns_from_rewards else "distillation.task_coef 0"
        yield f"reward.postprocess must be None with {why}, which is not made of a sample's reward, got it. Remove one"
    if job.genrm is not None and (both := sorted(job.reward.components.keys() & job.genrm.components.keys())):
        yield f"genrm.components must have other names than reward.components, got {both[0]!r} in both. Rename one"
    if job.scorer is not None and SCORER in {**job.reward.components, **(job.genrm.components if job.genrm else {})}:
        yield f"components must have other names than {SCORER!r} with scorer, whose number has it, got it. Rename it"
    if job.genrm is not None and job.genrm.per == "pair" and rollout.samples_per_prompt < 2:
        yield "rollout.samples_per_prompt must be at least 2 with genrm.per 'pair', got 1. Raise it"
    for name in job.judges if not job.learns_from_rewards else ():
        yield f"{name} must be left out where distillation.task_coef is 0, since rewards weigh nothing there, got it. Remove it"
    if not job.learns_from_rewards and rollout.filter is not None:
        yield (
            "rollout.filter must be None where distillation.task_coef is 0, since rewards say nothing of what is learnt, got "
            f"{rollout.filter!r}. Remove it"
        )
    if algorithm.needs_dynamic_sampling and rollout.filter != "zero_std":
        yield (
            f"rollout.filter must be 'zero_std' with algorithm.name {algorithm.name!r}, which replaces prompt "
            f"groups of equal rewards, got {rollout.filter!r}. Set it, or set algorithm.name to 'grpo'"
        )
    alone = job.judges and job.reward.function == NO_REWARD
    if algorithm.advantage == "decoupled" and not job.reward.components and not alone:
        yield (
            "reward.components must name what algorithm.advantage 'decoupled' compares, the numbers in the dict that "
            "reward.function returns, with their weights, got none. Set them, or set algorithm.name to 'grpo'"
        )
    if algorithm.advantage == "decoupled" and job.reward.overlong_tokens is not None:
        yield (
            "reward.overlong_tokens must be None with algorithm.advantage 'decoupled', which compares components and no sum "
            f"of them, got {job.reward.overlong_tokens}. Remove it, and let reward.function return it as a component"
        )
    if (job.reward.overlong_tokens or 0) > rollout.max_new_tokens:
        yield (
            f"reward.overlong_tokens must be at most rollout.max_new_tokens, got {job.reward.overlong_tokens} and "
            f"{rollout.max_new_tokens}. Lower it"
        )


def _distillation_agrees(job: JobConfig) -> Iterator[str]:
    distillation = job.distillation
    if distillation is None:
        return
    served = any(each.urls for each in distillation.named().values())
    if served and job.rollout.temperature != 1:
        yield (
            "rollout.temperature must be 1 with a teacher behind urls, whose servers tell log-probs at 1 alone, got "
            f"{job.rollout.temperature}. Remove it, or let the teacher's role hold the model"
        )
    if served and job.media is not None:
        yield (
            "media must be None with a teacher behind urls, whose servers are sent tokens alone, got settings of media. "
            "Remove them, or let the teacher's role hold the model"
        )
    if distillation.context is not None and job.media is not None:
        yield (
            "distillation.context must be left out with media, whose places in a prompt it cannot keep, got both. Remove one"
        )
    if distillation.context is not None and job.rollout.max_rows > 1:
        yield (
            "distillation.context must be left out where samples have several rows, each with a prompt of its own, got "
            f"rollout.max_rows {job.rollout.max_rows}. Remove it, or set rollout.max_rows to 1"
        )
    named = job.data.sources and all(each.teacher or each.metadata for each in job.data.sources.values())
    if distillation.teachers and job.data.metadata is None and not named:
        yield (
            "data.metadata must name the column that says which of distillation.teachers a row has, got None. Set it"
        )


def _updates_agree(job: JobConfig) -> Iterator[str]:
    algorithm, rollout, train = job.algorithm, job.rollout, job.train
    if job.reference.refresh_every is not None and train.lora is not None:
        yield (
            "reference.refresh_every must be None with train.lora, whose reference is the base of the adapters, got "
            f"{job.reference.refresh_every}. Remove it"
        )
    if job.reference.refresh_every is not None and not algorithm.needs_reference:
        yield (
            "algorithm.kl_coef must be above 0 with reference.refresh_every, since no reference is there without a KL, got "
            f"{algorithm.kl_coef:g}. Set it, or remove reference.refresh_every"
        )
    if algorithm.measures_drift and job.num_updates > 1:
        yield (
            "train.num_mini_batches and train.passes must be 1 with algorithm.policy_loss "
            f"{algorithm.policy_loss!r}, whose bounds are those of the weights that a step begins with, and would let later "
            f"updates go anywhere, got {train.num_mini_batches} and {train.passes}. Set them to 1, or "
            "algorithm.name to 'grpo'"
        )
    if train.num_mini_batches > rollout.prompts_per_step:
        yield (
            "train.num_mini_batches must be at most rollout.prompts_per_step, since each trains on prompt groups "
            f"of its own, got {train.num_mini_batches} and {rollout.prompts_per_step}. Lower it"
        )
    if job.num_updates > 1 and not train.hot_snapshot:
        yield (
            "train.hot_snapshot must be True with several optimizer steps a step (train.num_mini_batches x "
            f"train.passes = {job.num_updates}), since a step that is stopped between them is undone from it, got False. "
            "Remove it, or make one optimizer step"
        )
    if train.lora is not None and train.lora.dropout and job.sft is None:
        yield (
            "train.lora.dropout must be 0 without sft: the log-probs of a policy are computed without noise, which would be "
            f"in every ratio of its loss, got {train.lora.dropout:g}. Remove it"
        )
    if job.adapts_engines and rollout.sglang is not None and rollout.sglang.router is not None:
        yield (
            "train.lora.publish must be 'merged' with rollout.sglang.router, behind which no server can be asked whether an "
            "adapter has arrived, got 'adapter'. Set it to 'merged', or remove the router"
        )


def _samples_fit(job: JobConfig) -> Iterator[str]:
    rollout, train = job.rollout, job.train
    for name, data in job.named_data().items():
        if data.balance is not None and name != "data":
            yield (
                f"{name}.balance must be None, since steps of reinforcement alone are balanced, got {data.balance!r}. Remove "
                "it"
            )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    for name, trained in ("train", train), ("critic", job.critic):
        if trained is not None and trained.micro_batch_tokens < longest:
            yield (
                f"{name}.micro_batch_tokens must hold the longest sample, rollout.max_prompt_tokens + "
                f"rollout.max_new_tokens = {longest}, got {trained.micro_batch_tokens}. Raise it to {longest}"
            )
    if job.joins_samples and train.micro_batch_tokens < (joined := rollout.max_rows * longest):
        yield (
            f"train.micro_batch_tokens must hold all rows of a sample, rollout.max_rows x {longest} tokens = {joined}, with "
            f"an algorithm that looks at whole samples, got {train.micro_batch_tokens}. Raise it to {joined}, or set "
            "algorithm.loss_aggregation to 'token'"
        )


def _evaluations_agree(job: JobConfig) -> Iterator[str]:
    train, evaluation = job.train, job.evaluation
    for name, each in evaluation.named_sets().items() if evaluation is not None else ():
        if each.data is None and not job.data.held_out:
            section = f"evaluation.sets.{name}" if evaluation is not None and evaluation.sets else "evaluation"
            yield (
                f"data.held_out must be at least 1 without {section}.data, got 0. Set data.held_out to {each.num_prompts}, or "
                f"name a data set in {section}.data"
            )
    if evaluation is not None and evaluation.every is not None and evaluation.every > job.num_steps:
        yield f"evaluation.every must be at most num_steps, got {evaluation.every} and {job.num_steps}. Lower it"
    if train.best is not None and "@" in train.best.metric:
        yield from _best_has_no_value(job, train.best.metric)


def _sources_agree(job: JobConfig) -> Iterator[str]:
    for name, data in job.named_data().items():
        if data.sources and name != "data":
            yield f"{name}.sources must be left out, since training with rollouts alone mixes sources, got some. Name one path"
    functions = job.reward.function if isinstance(job.reward.function, dict) and job.reward.by is not None else {}
    teachers = job.distillation.teachers if job.distillation is not None else {}
    for name, each in job.data.sources.items():
        for setting, given, known, way in (
            ("reward", each.reward, functions, "name it in reward.function, and set reward.by"),
            ("teacher", each.teacher, teachers, "name it in distillation.teachers"),
        ):
            if given is not None and given not in known:
                yield (
                    f"data.sources.{name}.{setting} must be one of {', '.join(known) or 'several'}, got {given!r}. Correct it, "
                    f"or {way}"
                )
        if (each.max_new_tokens or 0) > job.rollout.max_new_tokens:
            yield (
                f"data.sources.{name}.max_new_tokens must be at most rollout.max_new_tokens, {job.rollout.max_new_tokens}, got "
                f"{each.max_new_tokens}. Lower it"
            )


def _critic_agrees(job: JobConfig) -> Iterator[str]:
    critic = job.critic
    if critic is None:
        return
    if not job.algorithm.needs_critic:
        yield (
            f"critic must be left out with algorithm.name {job.algorithm.name!r}, which has none, got settings of it. "
            "Remove them, or set algorithm.name to 'ppo'"
        )
    if critic.only_steps >= job.num_steps:
        yield f"critic.only_steps must be less than num_steps, got {critic.only_steps} and {job.num_steps}. Lower it"
    if job.distillation is not None and job.distillation.form == "advantage":
        yield (
            "distillation.form must not be 'advantage' with a critic, whose values know nothing of a teacher, got it. Set it "
            "to 'loss'"
        )
    if not job.train.hot_snapshot:
        yield (
            "train.hot_snapshot must be True with a critic, since what one of two roles alone has trained is undone from it, "
            "got False. Remove it"
        )


def _best_has_no_value(job: JobConfig, metric: str) -> Iterator[str]:
    sets = job.evaluation.named_sets() if job.evaluation is not None else {}
    known = [figure for each in sets.values() for figure in each.figures] if len(sets) == 1 else []
    if job.evaluation is not None and job.evaluation.sets:
        known += [f"{name}.{figure}" for name, each in sets.items() for figure in each.figures]
    if metric not in known:
        yield (
            f"train.best.metric must be a figure of the evaluations, {', '.join(known) or 'of which there are none'}, got "
            f"{metric!r}. Name one of them, or a metric of every step"
        )
        return
    assert job.evaluation is not None
    saves, evaluates = job.train.save_every, job.evaluation.every
    together = None if saves is None or evaluates is None else math.lcm(saves, evaluates)
    if together is None or together >= job.num_steps:
        yield (
            f"train.best must find checkpoints that are evaluated, got train.save_every {saves} and evaluation.every "
            f"{evaluates}, which meet in none of {job.num_steps} steps. Set evaluation.every to train.save_every"
        )


def depends_on_time(job: JobConfig) -> Iterator[str]:
    rollout = job.rollout
    if rollout.sglang is not None:
        yield (
            "deterministic must be False with rollout.sglang, whose batches depend on time, got True. "
            "Remove rollout.sglang, or set deterministic=False"
        )
    if job.genrm is not None and (job.genrm.urls or job.genrm.sglang is not None):
        yield (
            "deterministic must be False with genrm.urls and genrm.sglang, whose batches depend on time, got True. Let the "
            "embedded engine judge, or set deterministic=False"
        )
    if job.reference.refresh_every is not None:
        yield (
            "reference.refresh_every must be None with deterministic=True, where no score may depend on when a version "
            f"comes, got {job.reference.refresh_every}. Remove it, or set deterministic=False"
        )
    if job.teacher_follows:
        yield (
            "distillation.teacher.policy must be 'initial' with deterministic=True, where no score may depend on when a version "
            "comes, got a teacher that follows the policy. Change it, or set deterministic=False"
        )
    if rollout.num_slots < MIN_FIXED_SLOTS:
        yield (
            f"rollout.num_slots must be at least {MIN_FIXED_SLOTS} with deterministic=True, since fewer rows are multiplied "
            f"in another order, got {rollout.num_slots}. Raise it"
        )
    if rollout.spare_groups:
        yield (
            "rollout.spare_groups must be 0 with deterministic=True, where no prompt group may win by being quick, "
            f"got {rollout.spare_groups}. Remove it, or set deterministic=False"
        )
    if rollout.straggler_deadline_s is not None:
        yield (
            "rollout.straggler_deadline_s must be None with deterministic=True, where no prompt group may fail by being "
            f"slow, got {rollout.straggler_deadline_s:g}. Remove it, or set deterministic=False"
        )
