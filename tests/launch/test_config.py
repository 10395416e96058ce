"""Config modules: how one becomes a run's settings, and the words for what is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rondo.launch.config import RunConfig, changed, load, resolve, unresolve
from rondo.launch.groups import RoleGroup
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.launch.plan import coordinator_config
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import sections
from tests.launch import configs

JUDGED = "genrm=dict(model=dict(path='judge'), prompt='{response}'"
TAUGHT = "distillation=dict(teacher=dict(model=dict(path='teacher'))"


def told(folder: Path, *changes: tuple[str, str], sets: tuple[str, ...] = ()) -> str:
    """The error of a changed module, with the folder cut away."""
    with pytest.raises(ConfigError) as caught:
        load(configs.write(folder, *changes), sets)
    return str(caught.value).replace(f"{folder}/", "")


def groups_of(*groups: RoleGroup) -> list[tuple[str, tuple[str, ...], int, int]]:
    return [(group.name, group.roles, group.replicas, group.processes) for group in groups]


def test_settings_come_back_from_their_json_form_unchanged(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path))
    tree = json.loads(json.dumps(resolve(config)))
    again = unresolve(tree)
    assert resolve(again) == resolve(config)
    assert again.role_groups == config.role_groups and again.train == config.train


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("config = config.model_copy(update={'run_dir': 3})", "run_dir must "),
        (
            "config = config.model_copy(update={'rollout': config.rollout.model_copy(update={'samples_per_prompt': 1})})",
            "rollout.samples_per_prompt must be at least 2 with algorithm.name 'grpo'",
        ),
        ("config = config.model_copy(update={'num_stepz': 3})", "Did you mean 'num_steps'?"),
        ("config = config.model_copy(update={'data': reward})", "data must be a DataConfig"),
        (
            "config.run_dir = 'there'",
            "RunConfig.run_dir must not be assigned, since settings do not change, got 'there' (demo_config.py:",
        ),
    ],
)
def test_a_config_that_its_module_has_varied_is_validated_again(tmp_path: Path, line: str, error: str) -> None:
    path = configs.write(tmp_path)
    path.write_text(f"{path.read_text()}\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert error in str(caught.value).replace(f"{tmp_path}/", "")


def test_a_config_that_its_module_has_varied_has_the_types_of_its_settings(tmp_path: Path) -> None:
    path = configs.write(tmp_path)
    path.write_text(f"{path.read_text()}\nconfig = config.model_copy(update={{'run_dir': 'there'}})\n")
    assert load(path).run_dir == Path("there")


def test_functions_of_a_config_module_are_named_by_its_file(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path))
    assert config.reward.function == f"{tmp_path}/demo_config.py:reward"
    assert config.data.rows == f"{tmp_path}/demo_config.py:rows"


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.lr=2e-6", "train.lr", 2e-6),
        ("role_groups.0.replicas=3", "role_groups.0.replicas", 3),
        ("evaluation.at_start=false", "evaluation.at_start", False),
        ("evaluation.at_start=False", "evaluation.at_start", False),
        ("rollout.stop=['\\n', '<end>']", "rollout.stop", ("\n", "<end>")),
        ('model.build_args={"hidden_size": 64}', "model.build_args", {"hidden_size": 64}),
        ("name=2024", "name", "2024"),
        ("name=second-try", "name", "second-try"),
        ("data.metadata=extra=1", "data.metadata", "extra=1"),
        ('data.metadata="extra"', "data.metadata", "extra"),
        ("data.metadata= 'a \"b\"' ", "data.metadata", 'a "b"'),
        ('data.metadata="extra', "data.metadata", '"extra'),
        ('data.metadata="7"', "data.metadata", "7"),
        ("rollout.filter='zero_std'", "rollout.filter", "zero_std"),
        ("train.clip_grad_norm=2", "train.clip_grad_norm", 2.0),
        ("model.build_args.rope.theta=1e4", "model.build_args", {"hidden_size": 32, "rope": {"theta": 1e4}}),
    ],
)
def test_a_setting_can_be_changed_from_the_command_line(tmp_path: Path, text: str, path: str, value: object) -> None:
    assert dict(changed(load(configs.write(tmp_path), [text])))[path] == value


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        # Earlier names.
        (
            "groups",
            "Did you mean 'role_groups'? For example fully_async(rollout_devices=1, actor_processes=7, actor_devices=1), or "
            "colocate().",
        ),
        (
            "train.epochs",
            "Did you mean 'passes'? They are over the prompt groups of a step; data.num_passes are over the data.",
        ),
        (
            "critic.epochs",
            "Did you mean 'passes'? They are over the prompt groups of a step; data.num_passes are over the data.",
        ),
        (
            "train.optimizer_steps_per_batch",
            "Did you mean 'num_mini_batches'? It is the number of mini-batches of a step, not their size.",
        ),
        ("algorithm.normalizer", "Did you mean 'loss_aggregation'?"),
        # TRL, verl, slime, prime-rl; in any section.
        ("train.learning_rate", "Did you mean 'lr'?"),
        ("sft.learning_rate", "Did you mean 'lr'?"),
        ("learning_rate", "Did you mean 'train.lr'?"),
        ("sft.num_train_epochs", "Did you mean 'epochs'?"),
        (
            "ppo_mini_batch_size",
            "Did you mean 'train.num_mini_batches'? It is the number of mini-batches of a step, not their size.",
        ),
        (
            "num_iterations",
            "Did you mean 'train.passes'? They are over the prompt groups of a step; data.num_passes are over the data.",
        ),
        ("num_generations", "Did you mean 'rollout.samples_per_prompt'?"),
        ("rollout.n", "Did you mean 'samples_per_prompt'?"),
        (
            "train.gradient_accumulation_steps",
            "Did you mean 'micro_batch_tokens'? "
            "It is the size of a micro-batch, in tokens; a step's is rollout.prompts_per_step.",
        ),
        (
            "train.per_device_train_batch_size",
            "Did you mean 'micro_batch_tokens'? "
            "It is the size of a micro-batch, in tokens; a step's is rollout.prompts_per_step.",
        ),
        (
            "per_device_train_batch_size",
            "Did you mean 'rollout.prompts_per_step' or 'train.micro_batch_tokens'? It counts prompts, each of which gives "
            "rollout.samples_per_prompt samples."
            " It is the size of a micro-batch, in tokens; a step's is rollout.prompts_per_step.",
        ),
        ("algorithm.loss_type", "Did you mean 'name'? It is a recipe, such as 'grpo', 'dapo' or 'dr_grpo'."),
        ("logging_steps", "`rondo show --schema` lists all settings."),
        ("beta", "Did you mean 'algorithm.kl_coef'?"),
        ("train.beta", "Did you mean 'algorithm.kl_coef'?"),
        ("algorithm.epsilon", "Did you mean 'clip_low'?"),
        ("algorithm.epsilon_high", "Did you mean 'clip_high'?"),
        ("rollout.max_completion_length", "Did you mean 'max_new_tokens'?"),
        ("max_response_length", "Did you mean 'rollout.max_new_tokens'?"),
        ("algorithm.loss_agg_mode", "Did you mean 'loss_aggregation'?"),
        ("reward_funcs", "Did you mean 'reward.function'?"),
        ("max_steps", "Did you mean 'num_steps'?"),
        ("max_async_level", "Did you mean 'max_staleness'?"),
        # A part of a name, a name of another section, a misspelt one, and one of nobody.
        ("train.keep", "Did you mean 'keep_checkpoints' or 'rollout.keep' or 'samples.keep'?"),
        ("prompts_per_stp", "Did you mean 'rollout.prompts_per_step'?"),
        ("train.learnin_rate", "Did you mean 'lr'?"),
        ("train.zzz", "`rondo show --schema` lists all settings."),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_is_meant(tmp_path: Path, name: str, advice: str) -> None:
    assert told(tmp_path, sets=(f"{name}=1",)).endswith(f", got an unknown name. {advice}")


def test_a_module_with_a_name_of_another_library_is_answered_alike(tmp_path: Path) -> None:
    assert told(tmp_path, ("TrainConfig(lr=", "TrainConfig(num_steps=3, learning_rate=")) == (
        "train.num_steps must be a field of TrainConfig, got an unknown name. Did you mean 'warmup_steps' or 'num_steps'?\n"
        "train.learning_rate must be a field of TrainConfig, got an unknown name. Did you mean 'lr'?"
    )


def test_every_alias_means_settings_that_exist() -> None:
    known = {f"{path}.{name}".lstrip(".") for path, section in sections(RunConfig) for name in section.model_fields}
    meant = {path for paths in RunConfig.aliases.values() for path in paths}
    assert sorted((meant | RunConfig.remarks.keys()) - known) == []


def test_a_key_of_a_dict_that_is_not_set_can_be_set(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), ["rollout.sglang.python=p", "rollout.sglang.arguments.log-level=info"])
    assert config.rollout.sglang is not None
    assert config.rollout.sglang.arguments == {"log-level": "info"}


def test_later_changes_win_and_a_missing_section_is_made(tmp_path: Path) -> None:
    sets = ["sft.rows=demos.py:rows", "sft.steps=3", "sft.batch_size=4", "sft.steps=5"]
    config = load(configs.write(tmp_path), sets)
    assert config.sft is not None
    assert (config.sft.steps, config.sft.batch_size) == (5, 4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("train.lr=-1", "train.lr must be greater than 0, got -1. Change it in the --set options."),
        (
            "train.learning_rte=1",
            "train.learning_rte must be a field of TrainConfig, got an unknown name. Did you mean 'lr'?",
        ),
        ("tain.lr=1", "tain must be a field of RunConfig, got an unknown name. Did you mean 'train'?"),
        (
            "role_groups.3.replicas=1",
            "--set role_groups.3 must end in an index below 3, got '3'. Count from 0: 0 is rollout, 1 is actor, 2 is",
        ),
        ("train.lr.x=1", "train.lr must be a section to have fields, got 1e-05. Set train.lr itself"),
        ("train.lr", "--set must look like path=value, got 'train.lr'. For example: --set train.lr=1e-6"),
        ("num_steps=many", "num_steps must be a valid integer, got 'many'. Change it in the --set options."),
        ("num_steps=4.5", "num_steps must be a valid integer, got 4.5. Change it in the --set options."),
        ("name=my run", "name must match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', got 'my run'. Change it in the --set"),
        ("role_groups=[]", "role_groups must have at least 1 item, got []. Change it in the --set options."),
        ("rollout.stop=###", "rollout.stop must be a list, got '###'. Write ['###']."),
        ("train=5", "train must be a TrainConfig, got 5. Set its fields: train=TrainConfig(...)."),
        ("train.lr=True", "train.lr must be a number, got True. Write the number."),
        ("num_steps=true", "num_steps must be a number, got True. Write the number."),
        ("evaluation.pass_at=[1, True]", "evaluation.pass_at must be a number, got [1, True]. Write the number."),
        (
            "lr=1e-6",
            "lr must be a field of RunConfig, got an unknown name. Did you mean 'train.lr' or 'critic.lr' or 'sft.lr'?",
        ),
        (
            "train.kl_coef=0",
            "train.kl_coef must be a field of TrainConfig, got an unknown name. Did you mean 'algorithm.kl_coef'?",
        ),
        ("seed.x=1", "seed must be a section to have fields, got none in it. Set seed itself"),
        ("rollout.stop.0=x", "rollout.stop must be a section to have fields, got none in it. Set rollout.stop itself"),
        (
            "sft.data.limit=3",
            "sft.data.path and sft.data.rows must be set one without the other, got neither. Set sft.data.path",
        ),
        (
            "rollout.sglang.arguments.log-level=info",
            "rollout.sglang.python and rollout.sglang.urls must be set one without",
        ),
    ],
)
def test_a_change_that_does_not_fit_is_told(tmp_path: Path, text: str, error: str) -> None:
    assert told(tmp_path, sets=(text,)).startswith(error)


@pytest.mark.parametrize(("setting", "group"), [("train.mesh", "actor's"), ("critic.mesh", "critic's")])
def test_a_mesh_that_is_wrong_is_told_with_whose_it_is(tmp_path: Path, setting: str, group: str) -> None:
    changes = (
        (
            "role_groups=fully_async()",
            "role_groups=fully_async(critic_processes=1), algorithm=AlgorithmConfig(name='ppo')",
        ),
        ("lr=1e-5", "lr=1e-5), critic=dict("),
    )
    error = told(tmp_path, *changes, sets=(f"{setting}.dp_shard=3",))
    assert error.startswith(f"{setting} must be of the 1 processes") and f"of the {group} group" in error


def test_a_section_that_may_stand_in_several_places_is_told_by_its_line(tmp_path: Path) -> None:
    for mistake, error in (
        ('path="a", rows=rows', "data.path and data.rows must be set one without the other, got both. Remove one."),
        ('promt="a"', "data.promt must be a field of DataConfig, got an unknown name. Did you mean 'prompt'?"),
    ):
        file = configs.write(tmp_path, ("num_prompts=8", f"data=DataConfig({mistake})"), name=f"{len(mistake)}.py")
        with pytest.raises(ConfigError) as raised:
            load(file)
        line = next(i for i, text in enumerate(file.read_text().split("\n"), 1) if mistake in text)
        assert str(raised.value) == f"{error} ({file}:{line})"


def test_a_path_that_lies_beside_the_module_and_not_where_it_is_started_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    file = configs.write(
        tmp_path, ('build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32}', 'path="models/small"')
    )
    with pytest.raises(ConfigError) as raised:
        load(file)
    assert str(raised.value) == (
        f"model.path must be a path from the folder that the run is started in, {Path.cwd()}, got 'models/small', which lies "
        f"beside {file}. Start it there, or name {tmp_path}/models/small"
    )
    monkeypatch.chdir(tmp_path)
    assert load(file).model.path == "models/small"


def test_the_mistakes_of_all_sections_of_a_module_are_told_at_once(tmp_path: Path) -> None:
    assert told(
        tmp_path,
        ("rows=rows, held_out=8", "rows=rows, path='a', promt='b'"),
        ("lr=1e-5", "lr=0, best={'metric': 'loss'}, warmup_steps='x'"),
        ("prompts_per_step=4, samples_per_prompt=4", "prompts_per_step=0, top_p=2, samples_per_prompt=4"),
        ("num_steps=4", "num_step=4"),
    ).split("\n") == [
        "data.promt must be a field of DataConfig, got an unknown name. Did you mean 'prompt'? (demo_config.py:21)",
        "rollout.prompts_per_step must be greater than or equal to 1, got 0. Change it in demo_config.py:24.",
        "rollout.top_p must be from 1e-06 to 1, got 2.0. Choose one of these.",
        "train.lr must be greater than 0, got 0. Change it in demo_config.py:25.",
        "train.warmup_steps must be a valid integer, got 'x'. Change it in demo_config.py:25.",
        "num_step must be a field of RunConfig, got an unknown name. Did you mean 'num_steps'?",
    ]


def test_all_rules_between_settings_that_are_broken_are_told_at_once(tmp_path: Path) -> None:
    sets = ("train.lora={}", "train.freeze=['vision']", "train.min_lr_fraction=0.5", "train.best={'metric': 'loss'}")
    assert [line.split(" must ")[0] for line in told(tmp_path, sets=sets).split("\n")] == [
        "train.save_every", "train.freeze", "train.min_lr_fraction",
    ]  # fmt: skip
    sets = ("train.num_mini_batches=9", "rollout.max_new_tokens=5000", "data.held_out=0")
    assert [line.split(" must ")[0] for line in told(tmp_path, sets=sets).split("\n")] == [
        "train.num_mini_batches", "train.micro_batch_tokens", "data.held_out",
    ]  # fmt: skip


def test_a_mistake_in_the_module_is_told_with_path_file_and_line(tmp_path: Path) -> None:
    line = configs.WHOLE.splitlines().index("    train=TrainConfig(lr=1e-5),") + 1
    assert told(tmp_path, ("lr=1e-5", "lr=0")) == (
        f"train.lr must be greater than 0, got 0. Change it in demo_config.py:{line}."
    )
    assert told(tmp_path, ("lr=1e-5", "lrr=1e-5")) == (
        "train.lrr must be a field of TrainConfig, got an unknown name. Did you mean 'lr'?"
    )


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("    name=", "    nam=", "nam must be a field of RunConfig, got an unknown name. Did you mean 'name'?"),
        (
            "config = RunConfig(",
            "cfg = RunConfig(",
            "demo_config.py must define `config = RunConfig(...)`, got no such name",
        ),
        (
            "role_groups=fully_async()",
            "role_groups=fully_async",
            "role_groups must be a list, got fully_async. Call it: fully_async().",
        ),
        (
            "RolloutConfig(",
            "RolloutConfig(environment=dict(tools=rows),",
            "rollout.environment.tools must be a list, got rows. Write (rows,).",
        ),
        (
            "RolloutConfig(",
            "RolloutConfig(environment=dict(tools=('pyton',)),",
            "rollout.environment.tools.0 must be a function, its reference 'module:function', or a tool with a name, got "
            "'pyton'. Did you mean 'python'?",
        ),
        (
            "reward=RewardConfig(function=reward)",
            "reward=reward",
            "reward must be a RewardConfig, got reward. Set its fields: reward=RewardConfig(...).",
        ),
        (
            "from rondo.launch.modes",
            "from rondo.launch.mods",
            "CONFIG must import without errors, got ModuleNotFoundError: No module named",
        ),
        (
            "lr=1e-5",
            "lr=1 / 0",
            "CONFIG must import without errors, got ZeroDivisionError: division by zero (demo_config.py:",
        ),
        ("def rows():", "def rows(:", "CONFIG must be valid Python, got invalid syntax (demo_config.py:8). Correct it"),
    ],
)
def test_a_module_that_gives_no_config_is_told_with_file_and_line(
    tmp_path: Path, old: str, new: str, error: str
) -> None:
    text = told(tmp_path, (old, new))
    assert text.startswith(error)
    assert "Traceback" not in text


def test_an_error_below_the_module_is_told_with_both_places(tmp_path: Path) -> None:
    (tmp_path / "tasks_of_demo.py").write_text("def make():\n    raise KeyError('gone')\n")
    text = told(tmp_path, ("\n\ndef rows():", "import tasks_of_demo\n\ntasks_of_demo.make()\n\n\ndef rows():"))
    assert text == (
        "CONFIG must import without errors, got KeyError: 'gone' (tasks_of_demo.py:2, called from demo_config.py:8). "
        "Correct the module"
    )


def test_a_module_that_ends_the_process_is_told(tmp_path: Path) -> None:
    assert "SystemExit: 3" in told(tmp_path, ("lr=1e-5", "lr=exit(3)"))


def test_a_path_that_is_no_python_file_is_told(tmp_path: Path) -> None:
    configs.write(tmp_path)
    for path, error in [
        (tmp_path, f"CONFIG must be a Python file, got {tmp_path}."),
        (tmp_path / "demo_confg.py", "Did you mean 'demo_config.py'?"),
        (tmp_path / "none" / "x.py", f"There is no folder {tmp_path / 'none'}"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert error in str(caught.value)


def test_modes_are_lists_of_role_groups() -> None:
    assert groups_of(*colocate()) == [("actor", ("rollout", "actor", "advantages"), 1, 1)]
    assert groups_of(*hybrid(rollout_replicas=2, reference=True)) == [
        ("rollout", ("rollout",), 2, 1),
        ("actor", ("actor", "advantages", "reference"), 1, 1),
    ]
    assert groups_of(*fully_async(reference_replicas=1, actor_fwd_replicas=2, actor_processes=4)) == [
        ("rollout", ("rollout",), 1, 1),
        ("actor", ("actor",), 1, 4),
        ("advantages", ("advantages",), 1, 1),
        ("reference", ("reference",), 1, 1),
        ("actor_fwd", ("actor_fwd",), 2, 1),
    ]
    assert fully_async(rollout_replicas=2)[0].replica_names() == ("rollout-0", "rollout-1")


def test_staleness_is_0_where_roles_take_turns_and_1_elsewhere_unless_set(tmp_path: Path) -> None:
    def staleness(groups: str, *sets: str) -> int:
        file = configs.write(tmp_path, ("role_groups=fully_async()", f"role_groups={groups}"), name=f"{groups[:3]}.py")
        return load(file, sets).max_staleness

    assert staleness("fully_async()") == 1
    assert staleness("hybrid()") == 1
    assert staleness("colocate()") == 0
    assert staleness("colocate()", "train.lr=1e-6") == 0
    assert staleness("colocate()", "max_staleness=2") == 2


def test_the_staleness_of_the_mode_is_in_the_resolved_settings(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path, ("fully_async()", "colocate()")))
    assert resolve(config)["max_staleness"] == 0


@pytest.mark.parametrize(
    ("groups", "error"),
    [
        ("fully_async()[:1]", "role_groups must hold the role 'actor', got rollout without it."),
        ("fully_async()[1:]", "role_groups must hold the role 'rollout', got actor, advantages without it."),
        ("fully_async() * 2", "role_groups must have different names, got 'rollout' twice. Rename one of them."),
        (
            "fully_async(reference_replicas=1)",
            "role_groups must not hold the role 'reference' when algorithm.kl_coef is 0",
        ),
        (
            "fully_async(), algorithm=AlgorithmConfig(kl_coef=0.1)",
            "role_groups must hold the role 'reference' when algorithm.kl_coef is not 0, got kl_coef 0.1 without it.",
        ),
        ("colocate(actor_fwd=True)", "role_groups must not hold the role 'actor_fwd' when max_staleness is 0"),
        (
            "fully_async(teacher_replicas=1)",
            "role_groups must hold the role 'teacher' with distillation, and without it must not, got it",
        ),
        (
            f"fully_async(), {TAUGHT})",
            "role_groups must hold the role 'teacher' with distillation, and without it must not, got dist",
        ),
        (
            f"fully_async(teacher_replicas=1), {TAUGHT}, form='loss', support='union', top_k=2)",
            "role_groups must hold the role 'actor_fwd' with distillation.support 'student' or 'union'",
        ),
        (
            "fully_async(genrm_replicas=1)",
            "role_groups must hold the role 'genrm' with genrm.model, which it serves, and without it",
        ),
        (
            f"fully_async(), {JUDGED})",
            "role_groups must hold the role 'genrm' with genrm.model, which it serves, and without it",
        ),
        (
            f"colocate(genrm=True), {JUDGED}, sglang=dict(python='p'))",
            "genrm.sglang must have python, and the role 'genrm' in a group of its own",
        ),
        (
            f"hybrid(genrm_replicas=1, genrm_devices=2), {JUDGED})",
            "role_groups[genrm].devices must be 0, or the 1 that a process",
        ),
        ("fully_async(actor_processes=0)", "role_groups.processes must be greater than or equal to 1, got 0."),
    ],
)
def test_groups_that_make_no_run_are_told(tmp_path: Path, groups: str, error: str) -> None:
    assert told(tmp_path, ("role_groups=fully_async()", f"role_groups={groups}")).startswith(error)


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (
            ("max_staleness=0", "rollout.on_new_weights=interrupt"),
            "rollout.on_new_weights must not be set with max_staleness 0",
        ),
        (
            ("max_staleness=0", "rollout.mask_old_tokens=True"),
            "rollout.mask_old_tokens must not be set with max_staleness 0",
        ),
        (
            ("max_staleness=2", "rollout.on_new_weights=recompute", "rollout.max_interruptions=2"),
            "rollout.max_interruptions must be less than max_staleness, since a sample sees",
        ),
        (
            ("rollout.max_interruptions=1",),
            "rollout.max_interruptions must not be set with rollout.on_new_weights 'continue'",
        ),
    ],
)
def test_ways_through_new_weights_that_could_have_no_effect_are_told(
    tmp_path: Path, sets: tuple[str, ...], error: str
) -> None:
    assert told(tmp_path, sets=sets).startswith(error)


def test_an_evaluated_set_is_changed_by_its_path(tmp_path: Path) -> None:
    whole = configs.write(
        tmp_path, ("EvalConfig(num_prompts=8)", "EvalConfig(sets={'a': {'num_prompts': 8}}, every=2)")
    )
    config = load(whole, ["evaluation.sets.a.samples_per_prompt=4", "evaluation.sets.a.num_prompts=4"])
    assert config.evaluation is not None
    assert config.evaluation.sets["a"].samples_per_prompt == 4
    with pytest.raises(ConfigError, match=r"^evaluation.sets.a.num_prompts must be greater than or equal to 1, got 0"):
        load(whole, ["evaluation.sets.a.num_prompts=0"])
    with pytest.raises(ConfigError, match=r"^evaluation.sets.a.temprature must be a field of EvalSet.*'temperature'"):
        load(whole, ["evaluation.sets.a.temprature=0"])
    with pytest.raises(
        ConfigError, match=r"^evaluation.sets.a.samples_per_prompt must be 1 with evaluation.sets.a.temp"
    ):
        load(whole, ["evaluation.sets.a.samples_per_prompt=4", "evaluation.sets.a.temperature=0"])
    assert config.num_weight_slots == config.bus.weight_slots + 1
    assert coordinator_config(config, 10).evaluate_every == 2
    assert unresolve(resolve(config)) == config


def test_a_group_that_trains_cannot_be_replicated(tmp_path: Path) -> None:
    assert told(tmp_path, sets=("role_groups.1.replicas=2",)) == (
        "role_groups[actor].replicas must be 1 for the group that holds the actor, got 2. "
        "Use processes=2 to train on more ranks."
    )


def test_a_group_that_only_generates_has_one_process(tmp_path: Path) -> None:
    assert told(tmp_path, sets=("role_groups.0.processes=2",)) == (
        "role_groups[rollout].processes must be 1 for a group that generates and does not train, got 2. "
        "Use replicas=2, which come and go alone."
    )


def test_changes_from_the_defaults_are_listed_by_path(tmp_path: Path) -> None:
    found = dict(changed(load(configs.write(tmp_path))))
    assert found["train.lr"] == 1e-5
    assert "train.warmup_steps" not in found
    assert isinstance(load(configs.write(tmp_path)), RunConfig)


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (("rollout.num_slots=3",), "rollout.num_slots must be at least 4 with deterministic=True, since fewer rows"),
        (("rollout.spare_groups=1",), "rollout.spare_groups must be 0 with deterministic=True, where no prompt group"),
        (
            ("rollout.straggler_deadline_s=200",),
            "rollout.straggler_deadline_s must be None with deterministic=True, where no prompt group",
        ),
        (
            ("role_groups.1.threads=2",),
            "role_groups[actor].threads must be 1 with deterministic=True, since threads share sums",
        ),
        (
            ("role_groups.1.devices=1",),
            "role_groups[actor].devices must be 0 with deterministic=True, which is proved on the CPU",
        ),
        (
            ("rollout.filter=zero_std",),
            "rollout.filter must be None with deterministic=True and max_staleness above 0, where which prompt",
        ),
    ],
)
def test_what_depends_on_time_or_on_the_number_of_threads_is_refused_with_determinism(
    tmp_path: Path, sets: tuple[str, ...], error: str
) -> None:
    assert told(tmp_path, sets=("deterministic=True", *sets)).startswith(error)
    load(configs.write(tmp_path), sets)


def test_filtered_groups_go_with_determinism_where_the_data_are_on_policy(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), ("deterministic=True", "rollout.filter=zero_std", "max_staleness=0"))
    assert config.deterministic


def on_servers(folder: Path, groups: str, sglang: str) -> Path:
    """A config whose rollouts have `sglang`, a keyword argument or nothing, in these groups."""
    return configs.write(
        folder,
        ("role_groups=fully_async()", f"role_groups={groups}"),
        ("RolloutConfig(prompts", f"RolloutConfig({sglang} prompts"),
        ("RolloutConfig, TrainConfig", "RolloutConfig, SGLangConfig, TrainConfig"),
    )


@pytest.mark.parametrize(
    ("groups", "sglang", "problem"),
    [
        ("colocate(devices=1)", "python='p', release_memory=True", None),
        ("colocate(processes=2, devices=1)", "python='p', release_memory=True", None),
        (
            "colocate(processes=2)",
            "urls=('http://h:1',)",
            "processes must be 1.* generates with rollout.sglang.urls, got 2",
        ),
        (
            "fully_async(rollout_replicas=2)",
            "urls=('http://h:1',)",
            "replicas must be 1.* generates with rollout.sglang.urls, got 2",
        ),
        (
            "colocate(devices=1)",
            "python='p', tensor_parallel=2",
            "tensor_parallel must be 1 where the server shares.*got 2",
        ),
        (
            "fully_async()",
            "python='p', release_memory=True",
            "release_memory must not be True where servers generate while",
        ),
        ("hybrid()", "python='p', release_memory=True", "release_memory must not be True where servers generate while"),
        (
            "colocate(), max_staleness=1",
            "python='p', release_memory=True",
            "release_memory must not be True where servers",
        ),
    ],
)
def test_servers_give_memory_back_only_where_they_take_turns_with_the_trainer(
    tmp_path: Path, groups: str, sglang: str, problem: str | None
) -> None:
    file = on_servers(tmp_path, groups, f"sglang=SGLangConfig({sglang}),")
    if problem is None:
        assert load(file).rollout.sglang is not None
    else:
        with pytest.raises(ConfigError, match=problem):
            load(file)


@pytest.mark.parametrize(
    ("groups", "rollout", "problem"),
    [
        ("colocate()", "", None),
        (
            "colocate(), max_staleness=1",
            "",
            "train.release_memory must not be True where the trainer and what generates work",
        ),
        ("hybrid(), max_staleness=0", "", "train.release_memory must not be True where the trainer and what generates"),
        ("colocate()", "endpoint=EndpointConfig(), ", "train.release_memory must not be True with rollout.endpoint"),
    ],
)
def test_a_trainer_gives_its_memory_only_to_what_generates_in_turn_with_it(
    tmp_path: Path, groups: str, rollout: str, problem: str | None
) -> None:
    file = configs.write(
        tmp_path,
        ("role_groups=fully_async()", f"role_groups={groups}"),
        ("RolloutConfig(prompts", f"RolloutConfig({rollout}prompts"),
        ("RolloutConfig, TrainConfig", "EndpointConfig, RolloutConfig, TrainConfig"),
    )
    sets = ["train.release_memory=True"]
    if problem is None:
        assert load(file, sets).train.release_memory
    else:
        with pytest.raises(ConfigError, match=problem):
            load(file, sets)


@pytest.mark.parametrize(
    ("devices", "sglang", "problem"),
    [
        (2, "", r"groups\[rollout\].devices must be 0 or 1 without rollout.sglang, got 2"),
        (
            2,
            "sglang=SGLangConfig(python='p', tensor_parallel=4),",
            "the 4 that the SGLang servers of a replica take.*got 2",
        ),
        (1, "sglang=SGLangConfig(urls=('http://h:1',)),", "the 0 that the SGLang servers of a replica take.*got 1"),
        (1, "sglang=SGLangConfig(urls=('http://h:1',), weights='distributed'),", None),
        (
            1,
            "sglang=SGLangConfig(python='p', weights='distributed'),",
            "weights must be 'tensor' or 'disk' for servers that are started on devices.*got 'distributed'",
        ),
        (8, "sglang=SGLangConfig(python='p', tensor_parallel=4, num_servers=2),", None),
        (0, "sglang=SGLangConfig(python='p', tensor_parallel=4),", None),
    ],
)
def test_a_rollout_group_has_the_devices_that_its_servers_take(
    tmp_path: Path, devices: int, sglang: str, problem: str | None
) -> None:
    file = on_servers(tmp_path, f"fully_async(rollout_devices={devices})", sglang)
    if problem is None:
        assert load(file).group_of("rollout").devices == devices
    else:
        with pytest.raises(ConfigError, match=problem):
            load(file)


@pytest.mark.parametrize(
    ("devices", "sets", "dtypes"),
    [
        ("", [], ("float32", "float32")),
        ("rollout_devices=1, actor_devices=1", [], ("bfloat16", "bfloat16")),
        ("actor_devices=1", [], ("float32", "bfloat16")),
        ("actor_devices=1", ["train.dtype=float32"], ("float32", "float32")),
        ("actor_devices=1", ["role_groups.1.devices=0", "model.dtype=bfloat16"], ("bfloat16", "float32")),
        ("", ["role_groups.1.devices=1", "train.dtype=auto", "train.lr=1"], ("float32", "bfloat16")),
    ],
)
def test_roles_compute_in_bfloat16_where_they_have_devices_unless_told_otherwise(
    tmp_path: Path, devices: str, sets: list[str], dtypes: tuple[str, str]
) -> None:
    found = load(configs.write(tmp_path, ("role_groups=fully_async()", f"role_groups=fully_async({devices})")), sets)
    assert (found.model.dtype, found.train.dtype) == dtypes
    recorded = resolve(found)
    assert (recorded["model"]["dtype"], recorded["train"]["dtype"]) == dtypes
    assert unresolve(recorded) == found


def test_a_function_that_is_defined_anew_behind_the_settings_is_refused(tmp_path: Path) -> None:
    again = "\n\ndef reward(response, label, *, prompt, metadata):\n    return 0.0\n"
    file = configs.write(tmp_path, ("train=TrainConfig(lr=1e-5),\n)\n", f"train=TrainConfig(lr=1e-5),\n){again}"))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value) == (
        "reward.function must be what its name finds, got reward, which is defined anew behind the settings. "
        "Other processes load it by name: rename one of the two"
    )
