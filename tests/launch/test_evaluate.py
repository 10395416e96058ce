"""`rondo eval`: what is evaluated, under which settings, and what is told of an end before the end. A whole one: tests/e2e."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rondo.launch import evaluate
from rondo.launch.cli import EXIT_USAGE, main
from rondo.launch.config import RunConfig, load, resolve, unresolve
from rondo.launch.evaluate import found_in, settings_of
from rondo.launch.plan import group_specs
from rondo.roles.config import EvalConfig, benchmark
from rondo.roles.config.data import NO_REWARD
from rondo.runtime.errors import ConfigError
from tests.launch import configs

SETS = (
    "evaluation={'every': 2, 'share': 0.5, 'sets': {'math': {'num_prompts': 4, 'samples_per_prompt': 2}, "
    "'own': {'num_prompts': 2}}}",
)


@pytest.mark.parametrize(
    ("groups", "options", "replicas", "devices"),
    [
        ("colocate(processes=2, devices=1)", "sglang=SGLangConfig(python='p', release_memory=True), ", 2, 1),
        ("colocate(devices=1)", "sglang=SGLangConfig(urls=('http://h:1',)), ", 1, 0),
        ("hybrid(rollout_replicas=3, rollout_devices=1, devices=1)", "keep='rewards:keep', spare_groups=1, ", 3, 1),
        ("fully_async(reference_replicas=1, rollout_replicas=2)", "endpoint=EndpointConfig(), ", 2, 0),
    ],
)
def test_the_engines_of_a_run_evaluate_and_nothing_else_is_placed(
    tmp_path: Path, groups: str, options: str, replicas: int, devices: int
) -> None:
    kl = "0.01" if "reference" in groups else "0"
    file = configs.write(
        tmp_path,
        ("role_groups=fully_async()", f"role_groups={groups}, algorithm=AlgorithmConfig(kl_coef={kl})"),
        ("RolloutConfig(prompts", f"RolloutConfig({options}prompts"),
        ("RolloutConfig, TrainConfig", "EndpointConfig, RolloutConfig, SGLangConfig, TrainConfig"),
    )
    found = settings_of(load(file), "hf")
    rollouts = [spec.name for spec in group_specs(found) if spec.role_names == ("rollout",)]
    assert rollouts == [f"rollout-{index}" for index in range(replicas)]
    assert [group.devices for group in found.role_groups] == [devices, 0] and found.model.path == "hf"
    assert found.rollout.endpoint is None and found.rollout.keep is None and not found.train.hot_snapshot
    assert found.rollout.max_new_tokens == 8 and found.reward == load(file).reward


def test_sets_with_names_take_the_place_of_the_settings_own(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), ("evaluation=null", "data.apply_chat_template=True"))
    named = evaluate._named(("HuggingFaceH4/aime_2024", "math500=MATH-500.jsonl"))
    found = settings_of(config, "hf", ["math500"], ["evaluation.sets.math500.num_prompts=3"], named).evaluation
    assert found is not None and found.sets.keys() == {"math500"}
    chosen = found.sets["math500"]
    assert chosen.data is not None and (chosen.data.path, chosen.num_prompts) == (
        str(Path("MATH-500.jsonl").absolute()),
        3,
    )
    assert chosen.reward == "rondo.roles.rewards.hub:math" and chosen.samples_per_prompt == 4
    with pytest.raises(ConfigError, match=r"--benchmark must name each set once, got 'aime24' twice\. Remove one"):
        evaluate._named(("HuggingFaceH4/aime_2024", "aime24"))
    with pytest.raises(ConfigError, match=r"must be given the name of a set, got 'aime'\. Did you mean 'aime2"):
        evaluate._named(("aime",))


EXAMPLES = Path(__file__).parents[2] / "examples"
_TEACHERS = {name: {"model": {"path": "t"}} for name in ("one", "other")}
_SOURCES = {name: {"rows": f"{EXAMPLES}/quickstart.py:puzzles", "teacher": name} for name in _TEACHERS}


@pytest.mark.parametrize(
    ("example", "sets"),
    [
        ("ppo", []),
        ("on_policy_distillation", []),
        (
            "on_policy_distillation",
            ["data.rows=null", f"data.sources={_SOURCES}", f"distillation={{'teachers': {_TEACHERS}, 'source': 'of'}}"],
        ),
    ],
)
def test_what_a_run_learns_from_beside_its_rewards_is_no_part_of_an_evaluation(example: str, sets: list[str]) -> None:
    found = settings_of(load(EXAMPLES / f"{example}.py", sets), "hf")
    assert found.critic is None and found.distillation is None
    assert [group.roles for group in found.role_groups] == [("rollout",), ("actor", "advantages")]


def test_sets_are_chosen_by_name_and_settings_changed_as_everywhere(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), (*SETS, "debug.profile={'first': 1, 'last': 2}", "samples.keep=1"))
    found = settings_of(config, "hf", ["math"], ["evaluation.sets.math.num_prompts=3", "role_groups.0.replicas=2"])
    assert found.debug.profile is None and found.samples.keep == 0  # there is no step
    assert found.evaluation is not None and found.evaluation.every is None and not found.evaluation.at_end
    assert {name: each.num_prompts for name, each in found.evaluation.named_sets().items()} == {"math": 3}
    assert found.role_groups[0].replicas == 2
    with pytest.raises(ConfigError, match=r"--only must name an evaluation set, got 'maths'\. Did you mean 'math'"):
        settings_of(config, "hf", ["maths"])
    with pytest.raises(ConfigError, match="the settings must have evaluation sets, got none"):
        settings_of(load(configs.write(tmp_path), ("evaluation=null",)), "hf")


def test_a_job_without_rollouts_is_evaluated_on_the_processes_that_trained_it(tmp_path: Path) -> None:
    trains = "role_groups=[{'name': 'actor', 'roles': ['actor', 'advantages'], 'processes': 2}]"
    for job in ("sft", "dpo"):
        rows = f"{job}={{'rows': 'json:loads', 'steps': 1, 'batch_size': 2}}"
        settings = load(configs.write(tmp_path), (*SETS, trains, "num_steps=None", f"job={job}", rows))
        assert settings.group_of("rollout") is None
        found = settings_of(settings, "hf")
        assert (found.job, found.own, found.role_groups[0].name, found.role_groups[0].replicas) == (
            "rl",
            None,
            "rollout",
            2,
        )
    rows = "reward_model={'rows': 'json:loads', 'steps': 1, 'batch_size': 2}"
    with pytest.raises(ConfigError, match=r"must be of a model that answers, got a reward model's, which scores"):
        settings_of(load(configs.write(tmp_path), (*SETS, trains, "num_steps=None", "job=reward_model", rows)), "hf")


@pytest.mark.parametrize("job", ["sft", "dpo"])
def test_a_job_without_rollouts_is_evaluated_on_rows_that_it_holds_out_as_it_reads_them(job: str) -> None:
    data = {"path": "a", "prompt": "messages", "label": None, "apply_chat_template": True, "held_out": 4}
    data |= {"rejected": "worse"} if job == "dpo" else {}
    settings = RunConfig.model_validate(
        {
            "name": "demo", "job": job, "model": {"path": "m"}, "reward": {"function": "math"},
            "role_groups": [{"name": "rollout", "roles": ["rollout"]}, {"name": "actor", "roles": ["actor"]}],
            job: {"data": data, "epochs": 2, "batch_size": 2, "evaluate_every": 1},
            "evaluation": {"num_prompts": 4, "every": 2, "max_new_tokens": 300},
        }
    )  # fmt: skip
    assert settings.data == settings.demonstrated() and settings.rollout.max_prompt_tokens == 1024
    found = settings_of(settings, "hf", (), ["rollout.max_prompt_tokens=2000"])
    assert (found.job, found.own, found.data) == (job, settings.own, settings.data)
    assert found.rollout.max_prompt_tokens == 2000 and found.evaluation is not None and found.evaluation.every is None
    groups = [(group.name, group.roles) for group in found.role_groups]
    assert groups == [("rollout", ("rollout",)), ("actor", ("actor",))]
    assert settings_of(unresolve(resolve(settings)), "hf").own == settings.own  # of a run that was started


def test_a_job_that_measured_no_answers_is_evaluated_on_sets_that_have_a_name() -> None:
    settings = RunConfig.model_validate(
        {
            "name": "demo", "job": "sft", "model": {"path": "m"}, "role_groups": [{"name": "actor", "roles": ["actor"]}],
            "sft": {"data": {"path": "a"}, "epochs": 2, "batch_size": 2},
        }
    )  # fmt: skip
    settings, named = unresolve(resolve(settings)), EvalConfig(sets={"math500": benchmark("math500")})
    with pytest.raises(ConfigError, match=r"evaluation.sets.math500.max_new_tokens must be set with job 'sft'"):
        settings_of(settings, "hf", named=named)
    found = settings_of(settings, "hf", sets=["evaluation.sets.math500.max_new_tokens=512"], named=named)
    assert (found.job, found.rollout.max_prompt_tokens, found.rollout.num_slots) == ("sft", 1024, 16)


def test_answers_of_a_job_without_rollouts_are_measured_where_it_has_the_role_and_what_scores_them(
    tmp_path: Path,
) -> None:
    groups = (
        "role_groups=[{'name': 'rollout', 'roles': ['rollout']}, {'name': 'actor', 'roles': ['actor', 'advantages']}]"
    )
    rows = "sft={'data': {'path': 'a', 'held_out': 4}, 'steps': 2, 'batch_size': 2, 'evaluate_every': 1}"
    sets = (groups, "num_steps=None", "job=sft", rows, "evaluation={'num_prompts': 4}")
    module = configs.write(tmp_path)
    measured = load(module, sets)
    assert [(spec.role_names, spec.roles[0].rpartition(":")[2]) for spec in group_specs(measured)] == [
        (("rollout",), "AnswersRole"), (("actor",), "SupervisedRole")
    ]  # fmt: skip
    assert unresolve(resolve(measured)) == measured
    assert [spec.role_names for spec in group_specs(load(module, (*sets, "evaluation=None")))] == [("actor",)]
    for change, told in (
        (
            "sft={'data': {'path': 'a'}, 'steps': 2, 'batch_size': 2}",
            "sft.data.held_out must be at least 1 without evaluation.data, got 0",
        ),
        ("rollout.max_new_tokens=1", "evaluation.max_new_tokens must be set with job 'sft'"),
        (f"reward.function={NO_REWARD}", "reward must be set with evaluation, whose answers it scores, got nothing"),
        ("role_groups.0.replicas=2", "role_groups[rollout] must have one process with job 'sft'"),
        ("rollout.sglang={'python': 'python'}", "rollout.sglang must be None with job 'sft'"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(module, (*sets, change))
        assert str(caught.value).startswith(told)


def test_what_cannot_be_evaluated_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configs.write(tmp_path)
    run = tmp_path / "runs" / "demo"
    torn = run / "checkpoints" / "step_000002"
    torn.mkdir(parents=True)
    (run / "config.resolved.json").write_bytes(orjson.dumps(resolve(load(config))))
    for words, told in (
        ([str(tmp_path / "nowhere")], "MODEL must be a run, a checkpoint or a model's folder, got "),
        ([str(tmp_path)], "--config must be given with a model that is of no run, got "),
        (
            [str(tmp_path), "--config", str(config), "--checkpoint", "best"],
            "--checkpoint must not be given with a model",
        ),
        ([str(torn)], f"MODEL must be a whole checkpoint, got {torn} without its COMPLETE marker. "),
        ([str(run)], "RUN must have a whole checkpoint, got "),
        ([str(run), "--checkpoint", "best"], "--checkpoint must name one of none of "),
    ):
        assert main(["eval", *words]) == EXIT_USAGE
        assert capsys.readouterr().err.startswith(told)


def test_an_end_before_the_end_tells_the_figures_of_whole_prompts(tmp_path: Path) -> None:
    settings = settings_of(load(configs.write(tmp_path), SETS), "hf")
    (tmp_path / "samples").mkdir()
    lines = [
        {"set": "math", "number": 0, "sample": 1, "reward": 1.0},
        {"set": "math", "number": 0, "sample": 0, "reward": 0.0},
        {"set": "math", "number": 2, "sample": 0, "reward": None, "error": "reward of row 2, sample 0: planted"},
        {"set": "math", "number": 2, "sample": 1, "reward": 0.5},
        {"set": "math", "number": 3, "sample": 0, "reward": 1.0},  # the other had no end
    ]
    text = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    (tmp_path / "samples" / "start.0.jsonl").write_bytes(text + b'{"set": "own", "num')  # it was killed
    found = found_in(tmp_path, settings)
    assert (found["finished"], found["num_asked"], found["num_prompts"], found["num_failed"]) == (False, 6, 2, 1)
    assert found["sets"]["math"] == {"mean@2": 0.5, "pass@1": 0.25, "pass@2": 1.0, "num_prompts": 2}
    assert found["sets"]["own"] == {"num_prompts": 0} and found["first_failed"] == "reward of row 2, sample 0: planted"


def test_a_run_that_goes_on_is_asked_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"mean@1": 0.5, "num_prompts": 4}
    states = [
        {"status": "PENDING"}, {"status": "RUNNING"},
        {"status": "COMPLETED", "result": {"version": 7, "num_failed": 0, "sets": {"math": figures}}},
        {"status": "FAILED", "result": {"skipped": "rollout-0, which worked on it, ended"}},
    ]  # fmt: skip
    asked = list[tuple[str, object]]()

    def ask(record: object, path: str, body: object = None) -> dict[str, object]:
        asked.append((path, body))
        return {"id": "a1", **states.pop(0)}

    monkeypatch.setattr(evaluate, "ask", ask)
    monkeypatch.setattr(evaluate, "existing_run", lambda path: path)
    monkeypatch.setattr(evaluate, "_LOOK_S", 0.0)
    monkeypatch.setattr(evaluate, "supervisor_record", lambda run: None)
    assert main(["eval", str(tmp_path), "--live"]) == EXIT_USAGE
    monkeypatch.setattr(evaluate, "supervisor_record", lambda run: object())
    assert main(["eval", str(tmp_path), "--live", "--only", "math"]) == 0
    assert asked == [("/evaluate", {"set": "math"}), ("/evaluate/a1", None), ("/evaluate/a1", None)]
    assert "version 7\nmath  mean@1=0.5" in capsys.readouterr().out
    assert main(["eval", str(tmp_path), "--live"]) == 1
    assert "rollout-0, which worked on it, ended" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--live", "--checkpoint", "best"]) == EXIT_USAGE
