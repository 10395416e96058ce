"""Settings: a job that means what it says; what contradicts itself is refused with both names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rondo.comm.bus.config import BusConfig
from rondo.roles.config import JobConfig
from rondo.roles.config.rollout import SGLangConfig
from rondo.roles.config.supervised import unread
from rondo.runtime.section import explain


def changed(*changes: tuple[str, Any]) -> dict[str, Any]:
    """A small valid job with some settings replaced; "data.path" names one inside a section."""
    tree: dict[str, Any] = {
        "name": "test",
        "num_steps": 10,
        "model": {"path": "model"},
        "data": {"path": "train.jsonl", "held_out": 300},
        "evaluation": {},
        "reward": {"function": "rewards:exact"},
        "algorithm": {},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_prompt_tokens": 16, "max_new_tokens": 16},
        "train": {},
        "sft": {"rows": "rows:demonstrations", "steps": 5, "batch_size": 8},
    }
    for path, value in changes:
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    if tree.get("job") in ("sft", "dpo", "reward_model") and "num_steps" not in dict(changes):
        del tree["num_steps"]
    return tree


def test_a_job_survives_json() -> None:
    job = JobConfig.model_validate(changed())
    assert JobConfig.model_validate_json(job.model_dump_json()) == job


def test_a_job_is_found_in_a_whole_runs_settings() -> None:
    job = JobConfig.model_validate(changed())
    resolved = json.loads(job.model_dump_json()) | {"role_groups": [{"name": "actor"}], "run_dir": "runs"}
    assert JobConfig.from_resolved(resolved) == job


def test_a_function_is_kept_by_name() -> None:
    job = JobConfig.model_validate(changed(("reward.function", json.dumps)))
    assert job.reward.function == "json:dumps"


def test_demonstrations_are_a_data_set_with_the_answer_as_label_and_prompts_written_like_the_runs() -> None:
    job = JobConfig.model_validate(changed())
    source = job.demonstrated()
    assert (source.rows, source.prompt, source.label) == ("rows:demonstrations", "prompt", "answer")
    args = {"enable_thinking": False}
    changes = [("data.apply_chat_template", True), ("data.chat_template_args", args), ("data.too_long", "error")]
    source = JobConfig.model_validate(changed(*changes)).demonstrated()
    assert (source.apply_chat_template, source.chat_template_args, source.too_long) == (True, args, "error")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("name", "../x")], "name must"),
        (
            [
                ("distillation", {"teacher": {"policy": "current"}, "context": "m:f", "max_context_tokens": 8}),
                ("rollout.max_rows", 2),
            ],
            "distillation.context must be left out where samples have several rows, each with a prompt of its own, got rollout",
        ),
        ([("data.rows", "m:f")], "data.path and data.rows must be set one without the other, got both"),
        ([("data.path", None)], "data.path and data.rows must be set one without the other, got neither"),
        (
            [("data.chat_template_args", {"a": 1})],
            "data.chat_template_args must not be set without data.apply_chat_template",
        ),
        ([("rollout.stop", ("a", ""))], "rollout.stop must hold texts of one character or more, got an empty one"),
        ([("data.limit", 300)], "data.held_out must leave rows to train on, got 300 of data.limit 300"),
        (
            [("data.held_out", 0)],
            "data.held_out must be at least 1 without evaluation.data, got 0. Set data.held_out to 256",
        ),
        (
            [("evaluation.at_start", False), ("evaluation.at_end", False)],
            "evaluation.at_start or evaluation.at_end must be True, or evaluation.every be set",
        ),
        (
            [("evaluation.temperature", 0), ("evaluation.samples_per_prompt", 2)],
            "evaluation.samples_per_prompt must be 1 with evaluation.temperature 0",
        ),
        ([("evaluation.data", {"path": "a", "held_out": 3})], "evaluation.data.held_out must be 0"),
        ([("evaluation.every", 11)], "evaluation.every must be at most num_steps, got 11 and 10"),
        ([("evaluation.share", 0.5)], "evaluation.share must not be set without evaluation.every"),
        (
            [("evaluation.pass_at", (2,))],
            "evaluation.pass_at must hold numbers from 1 to evaluation.samples_per_prompt, 1",
        ),
        (
            [("evaluation.sets", {"a": {}}), ("evaluation.num_prompts", 3)],
            "evaluation.num_prompts must not be set beside evaluation.sets.*Set evaluation.sets.NAME.num_prompts",
        ),
        ([("evaluation.sets", {"a b": {}})], "evaluation.sets must have names of letters"),
        (
            [("evaluation.sets", {"a": {"num_prompts": 301}}), ("data.held_out", 0)],
            "data.held_out must be at least 1 without evaluation.sets.a.data, got 0. Set data.held_out to 301",
        ),
        (
            [("rollout.samples_per_prompt", 1)],
            "rollout.samples_per_prompt must be at least 2 with algorithm.name 'grpo'",
        ),
        (
            [("train.num_mini_batches", 5)],
            "train.num_mini_batches must be at most rollout.prompts_per_step, .*got 5 and 4",
        ),
        (
            [("train.passes", 2), ("train.hot_snapshot", False)],
            "train.hot_snapshot must be True with several optimizer steps",
        ),
        ([("rollout.top_k", 0)], r"rollout.top_k must be -1 \(all tokens\) or from 1 to 2147483647, got 0"),
        ([("rollout.temperature", 1e-50)], r"rollout.temperature must be from 1e-06 to 1e\+06, got 1e-50"),
        ([("evaluation.top_p", 1e-46)], "evaluation.top_p must be from 1e-06 to 1, got 1e-46"),
        ([("rollout.top_k", 1)], "rollout.top_k must leave more than one token to draw from"),
        (
            [("rollout.straggler_deadline_s", 60)],
            "rollout.straggler_deadline_s must be at least rollout.lease_deadline_s",
        ),
        ([("algorithm.name", "dapo")], "rollout.filter must be 'zero_std' with algorithm.name 'dapo'"),
        ([("critic", {})], "critic must be left out with algorithm.name 'grpo', which has none"),
        (
            [("algorithm.name", "ppo"), ("critic", {"micro_batch_tokens": 31})],
            "critic.micro_batch_tokens must hold the longest sample, .* = 32, got 31",
        ),
        (
            [("algorithm.name", "ppo"), ("critic", {"only_steps": 10})],
            "critic.only_steps must be less than num_steps, got 10 and 10",
        ),
        (
            [("algorithm.name", "ppo"), ("train.hot_snapshot", False)],
            "train.hot_snapshot must be True with a critic",
        ),
        ([("train.micro_batch_tokens", 31)], "train.micro_batch_tokens must hold the longest sample, .* = 32, got 31"),
        ([("train.min_lr_fraction", 0.1)], "train.min_lr_fraction must be 0 with train.schedule 'constant'"),
        (
            [("sft.data", {"path": "a"})],
            "exactly one of sft.rows, sft.data and sft.demonstrate must be set, got rows and data",
        ),
        ([("sft.rows", None)], "exactly one of sft.rows, sft.data and sft.demonstrate must be set, got none"),
        (
            [("sft.rows", None), ("sft.data", {"path": "a", "label": None})],
            "sft.data.label must name the answer, or be None where sft.data.apply_chat_template is True",
        ),
        (
            [("sft.rows", None), ("sft.data", {"path": "a", "rows": "m:f"})],
            "sft.data.path and sft.data.rows must be set one without the other, got both. Remove one",
        ),
        (
            [("sft.rows", None), ("sft.data", {"path": "a", "held_out": 2})],
            "sft.data.held_out and sft.evaluate_every must be set together.*got 2 and None",
        ),
        ([("sft.turns", "all")], "sft.turns must be 'last' unless sft.data.label is None.*got 'all'"),
        (
            [("sft.rows", None), ("sft.data", {"path": "a", "held_out": 2}), ("sft.evaluate_every", 1)],
            "sft.evaluate_every must be None with job 'rl'",
        ),
        ([("dpo", {"rows": "m:f", "steps": 1, "batch_size": 1})], "dpo must be None with job 'rl'"),
        ([("reward_model", {"rows": "m:f", "steps": 1, "batch_size": 1})], "reward_model must be None with job 'rl'"),
        (
            [("algorithm.name", "ppo"), ("critic", {"lora": {"dropout": 0.1}})],
            "critic.lora.dropout must be left out, since values are neither published nor computed with noise, got 0.1",
        ),
        ([("data.rejected", "bad")], "data.rejected must be None with job 'rl', which has no pairs, got 'bad'"),
        ([("data.margin", "by")], "data.margin must be None with job 'rl', which has no pairs, got 'by'. Remove it"),
        (
            [("job", "sft"), ("sft.rows", None), ("sft.data", {"path": "a", "margin": "by"})],
            "sft.data.margin must be None, for only a reward model has such, got 'by'. Remove it",
        ),
        (
            [
                ("job", "dpo"),
                ("dpo", {"data": {"path": "a", "rejected": "b", "margin": "by"}, "steps": 1, "batch_size": 1}),
            ],
            "dpo.data.margin must be None, for only a reward model has such, got 'by'. Remove it",
        ),
        (
            [("scorer", {"model": {"path": "rm"}}), ("reward.components", {"scorer": 1.0})],
            "components must have other names than 'scorer' with scorer, whose number has it, got it. Rename it",
        ),
        (
            [("job", "dpo"), ("dpo", {"data": {"path": "a"}, "steps": 1, "batch_size": 1})],
            "dpo.data.rejected must name the column with the worse answer, got None. Set it",
        ),
        (
            [("job", "sft"), ("sft.rows", None), ("sft.data", {"path": "a", "rejected": "b"})],
            "sft.data.rejected must be None, for no pairs are learnt, got 'b'. Remove it",
        ),
        (
            [("job", "dpo"), ("dpo", {"rows": "m:f", "steps": 1, "batch_size": 1, "loss": "ipo", "margin": 1.0})],
            "dpo.margin must be 0 with dpo.loss 'ipo', which has none, got 1.0",
        ),
        (
            [("job", "sft"), ("train.router_bias_update_rate", 0.01)],
            "train.router_bias_update_rate must be 0 with job 'sft', which evens out no experts so, got 0.01. Remove it",
        ),
        ([("job", "sft"), ("sft", None)], "sft must be set with job 'sft', got nothing"),
        ([("job", "sft"), ("sft", 3)], r"sft must be a SftConfig, got 3. Set its fields: sft=SftConfig\("),
        ([("job", [])], "job must be 'rl', 'sft', 'dpo' or 'reward_model', got "),
        ([("job", "name")], "job must be 'rl', 'sft', 'dpo' or 'reward_model', got 'name'"),
        (
            [("job", "sft"), ("train.best", {"metric": "reward_mean"}), ("train.save_every", 2)],
            "train.best.metric must be one of loss, eval_loss, eval_token_accuracy with job 'sft', got 'reward_mean'",
        ),
        (
            [("job", "sft"), ("train.best", {"metric": "eval_loss"}), ("train.save_every", 2)],
            "train.save_every must be a multiple of sft.evaluate_every with train.best.*got 2 and None",
        ),
        (
            [("job", "sft"), ("num_steps", 10)],
            "^num_steps must be None with job 'sft', whose sft.steps says how long it is, got 10. Remove it",
        ),
        ([("sft.epochs", 2)], "exactly one of sft.steps and sft.epochs must be set, got both"),
        ([("sft.steps", None)], "exactly one of sft.steps and sft.epochs must be set, got none"),
        (
            [("sft.rows", None), ("sft.data", {"path": "a", "num_passes": 2})],
            "sft.data.num_passes must be None, since sft.epochs says how often the rows are gone through, got 2",
        ),
        (
            [
                ("job", "sft"),
                ("sft", {"epochs": 2, "batch_size": 1, "data": {"sources": {"a": {"path": "a", "weight": 1}}}}),
            ],
            "sft.epochs must be None with weights of sft.data.sources, by which each has passes of its own, got 2",
        ),
        (
            [
                ("job", "sft"),
                ("sft", {"steps": 2, "batch_size": 1, "data": {"sources": {"a": {"path": "a", "top_p": 1}}}}),
            ],
            "sft.data.sources.a.top_p must be None, since nothing is sampled for its rows, got 1.0",
        ),
        ([("num_steps", 0)], "num_steps must be at least 1 with job 'rl', got 0"),
        ([("rollout.num_slot", 5)], "rollout.num_slot must be a field of RolloutConfig.*Did you mean 'num_slots'"),
        ([("reward.deadline_s", 0)], "reward.deadline_s must be greater than 0, got 0"),
        (
            [("rollout.sglang", {"python": "python"}), ("rollout.on_new_weights", "recompute")],
            "rollout.sglang.pause must be 'retract' with rollout.on_new_weights 'recompute'.*got 'in_place'",
        ),
        (
            [
                ("rollout.sglang", {"python": "python", "pause": "abort"}),
                ("rollout.on_new_weights", "interrupt"),
                ("rollout.max_interruptions", 2),
            ],
            "rollout.max_interruptions must be None with rollout.sglang",
        ),
        (
            [("rollout.sglang", {"python": "python"}), ("deterministic", True)],
            "deterministic must be False with rollout.sglang",
        ),
        (
            [("rollout.sglang", {"urls": ("http://h:1",), "release_memory": True})],
            "rollout.sglang.release_memory must not be True with rollout.sglang.urls",
        ),
        (
            [("rollout.sglang", {"python": "python"}), ("media", {"whole_positions": False})],
            "media.whole_positions must not be False with rollout.sglang",
        ),
        (
            [("rollout.sglang", {"urls": ("http://h:1",)}), ("media", {})],
            "media must be None with rollout.sglang.urls, whose servers are sent text alone",
        ),
        (
            [("train.lora", {"dropout": 0.1}), ("sft", None)],
            "train.lora.dropout must be 0 without sft: .* got 0.1. Remove it",
        ),
        (
            [("train.lora", {"targets": "q_proj"})],
            r"train.lora.targets must be 'all-linear' or a list of names, got 'q_proj'",
        ),
        ([("train.lora", {"targets": ()})], "train.lora.targets must name modules, got none"),
        ([("train.lora", {"rank": 0})], "train.lora.rank must be greater than or equal to 1, got 0"),
        ([("train.lora", {"r": 8})], "train.lora.r must be a field of LoraConfig"),
        (
            [("train.lora", {}), ("train.freeze", ("vision",))],
            "train.freeze must be empty with train.lora, which trains adapters alone",
        ),
        (
            [
                ("train.lora", {}),
                ("rollout.sglang", {"urls": ("http://a:1",), "router": "http://b:1", "checksums": False}),
            ],
            "train.lora.publish must be 'merged' with rollout.sglang.router",
        ),
        ([("train.best", {"metric": "reward_mean"})], "train.save_every must be set with train.best"),
        (
            [("train.best", {"metric": "pass@2"}), ("train.save_every", 2)],
            "train.best.metric must be a figure of the evaluations, mean@1, pass@1, got 'pass@2'",
        ),
        (
            [("train.best", {"metric": "a.pass@1"}), ("train.save_every", 2), ("evaluation", None)],
            "train.best.metric must be a figure of the evaluations, of which there are none, got 'a.pass@1'",
        ),
        (
            [
                ("train.best", {"metric": "tset.mean@1"}),
                ("train.save_every", 2),
                ("evaluation.every", 2),
                ("evaluation.sets", {"test": {}}),
            ],
            "figure of the evaluations, mean@1, pass@1, test.mean@1, test.pass@1, got 'tset.mean@1'",
        ),
        (
            [("train.best", {"metric": "pass@1"}), ("train.save_every", 4), ("evaluation.every", 3)],
            "train.best must find checkpoints that are evaluated, got train.save_every 4 and evaluation.every 3, which meet in "
            "none of 10 steps",
        ),
        (
            [("rollout.sglang", {})],
            "rollout.sglang.python and rollout.sglang.urls must be set one without the other, got neither",
        ),
    ],
)
def test_contradictions_and_mistakes_are_told_in_one_sentence(changes: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        JobConfig.model_validate(changed(*changes))
    [text, *_] = str(explain(raised.value, "train.py")).split("\n")  # others may follow from it
    with pytest.raises(ValueError, match=message):
        raise ValueError(text)


def test_a_job_without_rollouts_needs_its_own_section_alone_and_takes_its_steps_from_there() -> None:
    rows = {
        "data": {"path": "a", "held_out": 2},
        "steps": 7,
        "batch_size": 8,
        "evaluate_every": 3,
        "micro_batch_tokens": 64,
    }
    job = JobConfig.model_validate({"name": "test", "job": "sft", "model": {"path": "m"}, "sft": rows})
    assert (job.num_steps, job.data.path, list(job.named_data())) == (7, "a", ["sft.data"])
    assert (job.train.micro_batch_tokens, job.rollout.max_prompt_tokens, job.train.hot_snapshot) == (64, 64, False)
    assert JobConfig.model_validate_json(job.model_dump_json()) == job
    assert JobConfig.model_validate(changed(("job", "sft"))).num_steps == 5  # of a whole run its warm-up
    others = ("genrm", JUDGE), ("distillation", {"teacher": {"model": {"path": "t"}}})
    warm_up = JobConfig.model_validate(changed(("job", "sft"), *others))
    assert warm_up.genrm is None and warm_up.distillation is None  # no process has their models
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate({"name": "test", "job": "dpo", "model": {"path": "m"}})
    assert str(explain(caught.value, "train.py")) == "dpo must be set with job 'dpo', got nothing. Add dpo=..."
    wrong = {"name": "test", "job": "sft", "model": {"path": "m"}, "sft": {"rows": "m:f"}}
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate(wrong)
    assert {".".join(map(str, item["loc"])) for item in caught.value.errors()} == {"sft.batch_size"}


def test_epochs_make_steps_once_the_rows_are_counted_and_a_job_keeps_what_was_counted() -> None:
    own = {"data": {"path": "a"}, "epochs": 3, "batch_size": 8, "warmup_steps": 7}
    job = JobConfig.model_validate({"name": "test", "job": "sft", "model": {"path": "m"}, "sft": own})
    assert job.own is not None and (job.num_steps, job.own.num_steps(20)) == (0, 8)
    assert JobConfig.model_validate_json(job.model_dump_json()) == job  # as another process opens its rows
    counted = job.model_copy(update={"num_steps": 8})
    assert JobConfig.model_validate_json(counted.model_dump_json()).num_steps == 8


def test_a_job_without_rollouts_tells_what_it_does_not_go_by() -> None:
    alone = {"name": "test", "job": "sft", "model": {"path": "m"}}
    rows = {"data": {"path": "a"}, "steps": 7, "batch_size": 8}
    assert unread(JobConfig.model_validate(alone | {"sft": rows, "train": {"dtype": "float32", "save_every": 2}})) == []
    train = {"lr": 0.1, "passes": 2, "dtype": "float32"}
    others = {
        "evaluation": None,
        "genrm": JUDGE,
        "critic": {},
        "dpo": rows | {"data": None, "rows": "m:f"},
        "rollout": changed()["rollout"],
        "bus": {"ring_bytes": 1 << 24},
        "data": {"path": "b"},
    }
    job = JobConfig.model_validate(alone | {"sft": rows, "train": train} | others)
    assert unread(job) == ["data", "rollout", "bus", "genrm", "critic", "dpo", "train.lr", "train.passes"]
    resolved = JobConfig.model_validate(job.model_dump(mode="json"))  # of a run that goes on elsewhere
    assert unread(resolved) == ["data", "rollout"]
    assert unread(JobConfig.model_validate(changed(("job", "sft")))) == ["rollout", "evaluation", "reward", "algorithm"]
    answered = {"demonstrate": "m:f", "steps": 5, "batch_size": 8}
    answers = JobConfig.model_validate(changed(("job", "sft"), ("sft", answered)))
    assert unread(answers) == ["evaluation", "reward", "algorithm"]


def test_positions_of_media_are_whole_where_sglang_generates_and_what_they_are_elsewhere() -> None:
    for sglang, whole in ((None, None), ({"python": "python"}, True)):
        job = JobConfig.model_validate(changed(("media", {}), ("rollout.sglang", sglang)))
        assert job.media is not None and job.media.whole_positions is whole
        assert "whole_positions" not in job.media.model_dump(exclude_unset=True)


def test_the_base_of_adapters_is_the_reference_of_a_loss_that_nothing_warmed_up() -> None:
    def computed(*changes: tuple[str, Any]) -> bool:
        adapters = [("train.lora", {}), ("sft", None), ("algorithm.kl_coef", 0.1)]
        return JobConfig.model_validate(changed(*adapters, *changes)).computes_reference

    assert computed()
    warm_up = {"rows": "m:f", "steps": 2, "batch_size": 2}
    others = [("algorithm.kl_coef", 0.0), ("train.lora", None), ("sft", warm_up), ("algorithm.kl_in", "reward")]
    assert not any(computed(each) for each in others)


def test_evaluation_without_held_out_rows_needs_data_of_its_own() -> None:
    tree = changed(("data.held_out", 0), ("evaluation.data", {"path": "test.jsonl"}))
    assert JobConfig.model_validate(tree).evaluation is not None
    assert JobConfig.model_validate(changed(("data.held_out", 0), ("evaluation", None))).evaluation is None


def test_dapo_with_its_filter_is_a_job() -> None:
    job = JobConfig.model_validate(changed(("algorithm.name", "dapo"), ("rollout.filter", "zero_std")))
    assert job.algorithm.needs_dynamic_sampling


def test_a_column_ring_larger_than_a_rollout_ring_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"bus.column_ring_bytes must be at most bus.ring_bytes"):
        BusConfig(ring_bytes=1 << 20, column_ring_bytes=1 << 21)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"python": "p", "environment": {"HF_TOKEN": "hunter22"}}, "must hold no secret, .* got HF_TOKEN"),
        ({"python": "p", "environment": {"wandb_api_key": "hunter22"}}, "must hold no secret, .* got wandb_api_key"),
        ({"python": "p", "arguments": {"admin-api-key": "hunter22"}}, "must hold no secret, .* got admin-api-key"),
        ({"urls": ("http://me:hunter22@server:1",)}, "urls must hold no password"),
        ({"urls": ("http://server:1?key=hunter22",)}, "urls must hold no password and no query"),
    ],
)
def test_secrets_stand_in_no_settings_which_are_saved_and_shown(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        SGLangConfig(**settings)
    assert "hunter22" not in str(explain(caught.value, "a test"))


JUDGE = {"urls": ("http://judge",), "prompt": "{response}"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"path": "m"}}, "exactly one of genrm.model and genrm.urls must be set, got both"),
        ({"urls": ()}, "exactly one of genrm.model and genrm.urls must be set, got neither"),
        ({"template": "m:f"}, "exactly one of genrm.prompt and genrm.template must be set, got both"),
        ({"tag": "n", "parse": "m:f"}, "at most one of .* must be set, got tag and parse"),
        ({"urls": ("http://me:hunter22@judge",)}, "genrm.urls must hold no password"),
        ({"num_slots": 4}, "genrm.num_slots must be left out with genrm.urls, got 4"),
        ({"urls": (), "model": {"path": "m"}, "served_model": "x"}, "served_model must be left out without genrm.urls"),
        (
            {"urls": (), "model": {"path": "m"}, "sglang": {"python": "p", "num_servers": 2}},
            "genrm.sglang must set nothing but .* got num_servers",
        ),
        ({"prompt": "{answer} {response}"}, r"none but the places label, .*, got \{answer\}"),
        ({"prompt": "{prompt}"}, r"must have the place \{response\} with genrm.per 'response'"),
        ({"prompt": "{"}, "genrm.prompt must be a format, got"),
        ({"bounds": (0, 1)}, "genrm.bounds must be two rising numbers, with genrm.tag"),
        ({"components": {"a": 1}}, "genrm.components must come with genrm.parse"),
        ({"per": "group", "prompt": "{responses}"}, "genrm.tag or genrm.parse must be set with genrm.per 'group'"),
        ({"per": "pair", "prompt": "{first}{second}", "choices": {"A": 2}}, "worth 0 to 1 with genrm.per 'pair'"),
        ({"per": "pair", "prompt": "{first}{second}", "tag": "n"}, "genrm.bounds must be .0, 1. with genrm.per 'pair'"),
    ],
)
def test_a_judge_that_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        JobConfig.model_validate(changed(("genrm", JUDGE | changes)))


def test_a_judge_may_be_the_only_reward_and_is_a_component_of_its_own() -> None:
    tree = changed(("genrm", JUDGE | {"weight": 0.5}), ("algorithm.name", "gdpo"))
    with pytest.raises(ValidationError, match=r"reward.components must name what algorithm.advantage 'decoupled'"):
        JobConfig.model_validate(tree)  # the function's own reward would be in none
    del tree["reward"]
    job = JobConfig.model_validate(tree)
    assert (job.components, job.num_parts) == ({"genrm": 0.5}, 1) and job.genrm is not None
    assert job.genrm.words == {"yes": 1.0, "no": 0.0} and job.genrm.longest_s == 3 * job.genrm.deadline_s
    assert JobConfig.model_validate_json(job.model_dump_json()) == job


def test_names_that_only_look_like_those_of_secrets_are_taken() -> None:
    names = {"TOKENIZERS_PARALLELISM": "0", "KEYS": "1", "MONKEY": "2"}
    assert SGLangConfig(python="p", environment=names).environment == names
