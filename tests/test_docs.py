"""Every command that README and docs show is run here, or in the test named beside it, and is taken with its values."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import rondo.roles.config as roles_config
from rondo.launch.bench import benchmarks
from rondo.launch.cli import _parser
from rondo.launch.config import RunConfig, load
from rondo.launch.report.timeline import parse_steps
from rondo.models.tiny import qwen3
from rondo.runtime.section import sections
from tests.e2e.shell import Rondo
from tests.strength import LONG

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMPORT = re.compile(r"^(?:from rondo|import rondo).*$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")
CODE = re.compile(r"`((?:launch|roles|models|comm|runtime|tests|examples|benchmarks|docs)/[\w/.]+)`")

_SHORT = (
    "num_steps=2", "rollout.prompts_per_step=4", "sft.steps=4", "sft.warmup_steps=1", "sft.batch_size=8",
    "evaluation.num_prompts=8", "train.warmup_steps=1",
)  # fmt: skip
_TWO_GROUPS = (
    "role_groups=[{'name': 'rollout', 'roles': ['rollout']}, "
    "{'name': 'actor', 'roles': ['actor', 'advantages', 'reference', 'actor_fwd']}]"
)
"""In the place of five as the quick start has them, which tests/e2e runs."""
_ONE_GROUP = "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages', 'critic']}]"
_GSM8K = (*_SHORT, "data.held_out=8", _TWO_GROUPS)
RUN_HERE = {
    "rondo show examples/quickstart.py --set train.lr=1e-5": (),
    "rondo show examples/quickstart.py --set algorithm.kl_coef=0.05 --changed": (),
    "rondo train examples/sft.py": (
        "evaluation.num_prompts=8",
        "evaluation.every=2",
        "sft.steps=4",
        "sft.warmup_steps=1",
        "sft.batch_size=8",
        "train.save_every=2",
    ),
    "rondo train examples/dpo.py": (
        "dpo.steps=4",
        "dpo.warmup_steps=1",
        "dpo.batch_size=8",
        "evaluation.num_prompts=8",
        "model.build_args={'steps': 6}",
    ),
    "rondo train examples/reward_model.py": (
        "reward_model.steps=4",
        "reward_model.warmup_steps=1",
        "reward_model.batch_size=8",
        "model.build_args={'steps': 6}",
    ),
    "rondo sft examples/quickstart.py": ("sft.steps=4", "sft.warmup_steps=1", "sft.batch_size=8"),
    "rondo train examples/gsm8k_arithmetic.py --set data.path=PATH/TO/gsm8k/train.jsonl": _GSM8K,
    "rondo train examples/pretrained_sums.py --set model.path=FOLDER": (
        "num_steps=1",
        "data.held_out=8",
        "evaluation.num_prompts=8",
        "role_groups.1.threads=1",
    ),
    "rondo train examples/quickstart_lora.py": (
        "num_steps=2",
        "rollout.prompts_per_step=4",
        "evaluation.num_prompts=8",
        "train.warmup_steps=1",
        "model.build_args={'steps': 6}",
        "role_groups=[{'name': 'rollout', 'roles': ['rollout']}, "
        "{'name': 'actor', 'roles': ['actor', 'advantages', 'actor_fwd']}]",
    ),
    "rondo train examples/on_policy_distillation.py": (
        *_SHORT,
        "data.held_out=8",
        "distillation.teacher.model.build_args={'hidden_size': 32, 'steps': 2}",
        "distillation.form=loss",
        "distillation.support=union",
        "distillation.top_k=4",
        "distillation.divergence=jsd",
        "role_groups=[{'name': 'rollout', 'roles': ['rollout']}, "
        "{'name': 'actor', 'roles': ['actor', 'advantages', 'teacher', 'actor_fwd']}]",
    ),
    "rondo train examples/curriculum.py": (*_SHORT, _TWO_GROUPS),
    "rondo train examples/scored.py": (
        *_SHORT,
        "scorer.model.build_args={'steps': 2, 'base_steps': 6}",
        "role_groups=[{'name': 'rollout', 'roles': ['rollout']}, "
        "{'name': 'actor', 'roles': ['actor', 'advantages', 'reference', 'actor_fwd', 'scorer']}]",
    ),
    "rondo train examples/omni_digits.py": _SHORT,
    "rondo train examples/moe_r3.py": _SHORT,
    "rondo train examples/ppo.py": (
        *_SHORT,
        "critic.only_steps=1",
        "critic.warmup_steps=0",
        "max_staleness=0",
        _ONE_GROUP,
    ),
    "rondo train examples/calculator.py": (
        *_SHORT,
        "max_staleness=0",
        "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]",
    ),
    "rondo train examples/self_play.py": (
        *_SHORT,
        "max_staleness=0",
        "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]",
    ),
    "rondo train examples/external_agent.py": (
        *_SHORT,
        "max_staleness=0",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]",
    ),
    "rondo train examples/zoom_digits.py": (*_SHORT, _TWO_GROUPS),
    "rondo train examples/memory_agent.py": (*_SHORT, _TWO_GROUPS),
    "rondo train examples/video_digits.py": (*_SHORT, "role_groups.1.processes=2"),  # on policy, on two ranks
}
STOPPED = "tests/e2e/test_runs.py::test_a_stopped_run_saves_exits_75_and_goes_on_from_there"
MAKE = "tests/test_make.py::test_make_runs_what_the_readme_says"
EVALUATED = (
    "tests/e2e/test_evaluated.py::"
    "test_versions_are_evaluated_while_new_weights_interrupt_samples_rewards_raise_and_hang_and_both_replicas_die"
)
AUTOSCALED = (
    "tests/launch/autoscale/test_watch.py::"
    "test_the_same_decisions_are_made_again_from_the_events_also_over_several_starts"
)
ADAPTERS = "tests/launch/test_export.py::test_of_a_run_of_adapters_these_become_a_folder_or_the_whole_model_does"
ELSEWHERE = {
    "rondo check examples/quickstart.py": "tests/launch/test_cli.py::"
    "test_check_shows_what_it_found_and_ends_with_0_where_all_is_well",
    "rondo check runs/quickstart": "tests/launch/test_export.py::"
    "test_weights_that_are_not_what_was_written_are_never_exported",
    "rondo check examples/quickstart.py --probe": "tests/launch/check/test_probe.py::"
    "test_all_that_a_run_stands_on_is_tried_and_nothing_is_left",
    "make demo": MAKE,  # and `.ci/run`, in a clean clone, as it is
    "make test": MAKE,
    "make demo KILL=actor": MAKE,
    "make demo ENGINE=sglang": MAKE,
    "make demo MODEL=smollm2": MAKE,
    "make test-sglang": MAKE,
    "rondo train examples/reasoning_gym_mixture.py": "tests/environments/test_reasoning_gym.py::"
    "test_the_example_trains_on_a_mixture",
    "rondo train examples/text_game.py": "tests/environments/test_text_games.py::test_the_example_plays_its_games",
    "make gpu": MAKE,
    'make gpu PARTS="training gap"': MAKE,
    "rondo init mine.py": "tests/launch/test_init.py::test_on_a_terminal_it_asks_again_where_an_answer_cannot_be",
    "rondo status": STOPPED,
    "rondo stop": STOPPED,
    "rondo compare runs/quickstart runs/quickstart-2": "tests/launch/report/test_compare.py::"
    "test_two_runs_are_compared_by_what_they_were_made_of_where_they_part_and_how_they_ended",
    "rondo show --metrics": "tests/launch/metrics/test_metrics.py::"
    "test_the_page_is_what_the_command_prints_and_the_docs_hold",
    "rondo show --grafana": "tests/launch/metrics/test_grafana.py::"
    "test_the_command_prints_it_and_every_query_is_of_a_metric_that_is_described",
    "rondo explain": STOPPED,
    "rondo explain runs/quickstart": STOPPED,
    "rondo scale rollout 3 --wait": STOPPED,
    "rondo scale rollout 1 --wait": STOPPED,
    "rondo restart rollout actor --dry-run": STOPPED,
    "rondo resume runs/quickstart": STOPPED,
    "rondo resume runs/quickstart --accept-changes": STOPPED,
    "rondo train examples/quickstart.py --resume-or-start": "tests/launch/test_train.py::"
    "test_resume_or_start_goes_on_where_there_is_something_to_go_on_from_and_says_so",
    "rondo autoscale runs/quickstart": AUTOSCALED,
    "rondo autoscale runs/quickstart --set autoscale.max_replicas=2": AUTOSCALED,
    "rondo slurm examples/quickstart.py --time 24:00:00 --submit": "tests/launch/test_slurm.py::"
    "test_the_command_prints_the_script_or_hands_it_to_sbatch",
    "rondo slurm examples/quickstart.py --time 24:00:00 --set train.save_every=50": "tests/launch/test_slurm.py::"
    "test_the_command_prints_the_script_or_hands_it_to_sbatch",
    "rondo resume runs/quickstart --reset-optimizer": STOPPED,
    "rondo resume runs/quickstart --checkpoint best": "tests/launch/test_train.py::"
    "test_a_run_goes_on_from_the_next_older_checkpoint_where_the_newest_is_broken_and_nothing_is_removed",
    "rondo resume runs/quickstart --set num_steps=300 --set train.save_every=50": "tests/parity/test_parity.py::"
    "test_a_run_killed_stopped_and_resumed_at_random_steps_ends_in_the_same_bits",
    "rondo eval runs/quickstart --checkpoint best": EVALUATED,
    "rondo eval runs/quickstart": EVALUATED,
    "rondo eval runs/quickstart --live": "tests/launch/test_evaluate.py::"
    "test_a_run_that_goes_on_is_asked_and_waited_for",
    "rondo eval quickstart-hf --config examples/quickstart.py": EVALUATED,
    "rondo resume runs/quickstart --set role_groups.1.processes=2": STOPPED,
    "rondo timeline --steps 20:25 --out trace.json": "tests/launch/report/test_timeline.py::"
    "test_the_command_writes_a_trace_and_says_what_is_missing",
    "rondo track runs/quickstart --to tensorboard": "tests/launch/track/test_follow.py::test_by_hand_of_a_finished_run",
    "rondo alert runs/quickstart --test": "tests/launch/alert/test_alerts.py::test_by_hand_a_test_and_what_is_left_of_a_run",
    "rondo export runs/quickstart quickstart-hf": "tests/launch/test_export.py::"
    "test_the_newest_checkpoint_of_a_run_or_the_one_that_is_named_becomes_a_folder",
    "rondo export runs/quickstart_lora OUT": ADAPTERS,
    "rondo export runs/quickstart_lora OUT --merged": ADAPTERS,
    "rondo bench table": "tests/benchmarks/test_table.py::test_the_command_writes_the_figures_of_the_last_runs_into_the_page",
    "rondo bench": "tests/launch/test_bench.py::test_without_a_name_every_benchmark_is_listed_with_what_it_measures",
    "rondo check examples/full_size/qwen3_8b_text.py --nodes 1 --devices 8 --device-gib 80 --memory-gib 1000 "
    "--set model.path=FOLDER": "tests/launch/check/test_full_size.py::test_an_example_fits_the_machines_of_its_first_line",
    "rondo check examples/full_size/dapo_math_qwen3_4b.py --devices 8 --device-gib 80 --memory-gib 1000 "
    "--set model.path=FOLDER": "tests/launch/check/test_full_size.py::test_an_example_fits_the_machines_of_its_first_line",
    "rondo slurm examples/full_size/dapo_math_qwen3_4b.py --mem 900G --time 24:00:00": "tests/roles/data/test_recipes.py::"
    "test_a_recipe_of_one_machine_is_a_batch_job_of_eight_gpus",
    "rondo eval runs/quickstart --benchmark math500=MATH-500.jsonl": "tests/launch/test_evaluate.py::"
    "test_sets_with_names_take_the_place_of_the_settings_own",
    "rondo sglang install .venv-sglang": "tests/launch/test_sglang.py::"
    "test_an_environment_for_sglang_is_built_in_these_steps",
    "rondo serve runs/quickstart --port 30000": "tests/launch/test_serve.py::"
    "test_a_model_is_served_and_a_signal_lets_what_is_in_flight_be_answered",
    "rondo agents --url http://10.0.0.7:8300 --token-file token -- python agent.py": "tests/roles/sampling/test_agents.py::"
    "test_the_command_makes_samples_by_programs_as_the_run_itself_would_and_a_stop_finishes_them",
    "rondo train examples/external_agent.py --set 'rollout.agent.command=[]' --set "
    '\'rollout.agent.elsewhere={"port": 8300, "token_file": "token"}\'': "tests/environments/test_verifiers.py::"
    "test_a_run_trains_on_what_an_environment_of_verifiers_made",
    'python examples/verifiers_driver.py \'{"taskset": {"id": "verifiers_sums"}}\' --url http://127.0.0.1:8300 '
    "--token-file token": "tests/environments/test_verifiers.py::test_a_run_trains_on_what_an_environment_of_verifiers_made",
    "rondo serve runs/quickstart --port 30000 --served-model-name quickstart --token-file token": "tests/environments/"
    "test_inspect.py::test_a_task_of_inspect_measures_a_served_model",
    "inspect eval sums.py --model openai-api/rondo/quickstart --model-base-url http://127.0.0.1:30000/v1": "tests/"
    "environments/test_inspect.py::"
    "test_a_task_of_inspect_measures_a_served_model",
    "rondo view runs/quickstart": "tests/launch/dashboard/test_server.py::test_the_command_serves_until_it_is_told_to_end",
    'curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:30000/rondo/trajectories/task-7': "tests/roles/serve/"
    "test_sessions.py::test_a_second_turn_begins_with_the_tokens_that_were_sampled_and_not_with_those_of_their_text",
}
"""The test that shows what a command does, with other folders and ports."""
BY_HAND = {
    "rondo bench algorithms docs/algorithms",
    "rondo bench autoscale",
    "rondo bench bus --peers-python PEERS_VENV/bin/python",
    "rondo bench calls",
    "rondo bench chaos",
    "rondo bench curriculum",
    "rondo bench distill",
    "rondo bench examples",
    "rondo bench faults",
    "rondo bench fit",
    "rondo bench generation",
    "rondo bench gpu",
    "rondo bench gpu copies",
    "rondo bench lora",
    "rondo bench media",
    "rondo bench omni",
    "rondo bench paper",
    "rondo bench recipes",
    "rondo bench pretrained --model SmolLM2-135M-Instruct.Q4_1.gguf",
    "rondo bench ring",
    "rondo bench scale",
    "rondo bench experts",
    "rondo bench shared_prompts",
    "rondo bench tree",
    "rondo bench soak",
    "rondo bench start",
    "rondo bench staleness docs/staleness --steps 100",
    "rondo bench strangers",
    "rondo bench trl --peers-python PEERS_VENV/bin/python",
    "rondo bench trl --as trl_pretrained --cases pretrained --pretrained MODEL --lr 2e-5 --peers-python "
    "PEERS_VENV/bin/python",
    "rondo bench weights",
}
"""They time a machine, and take up to an hour: only that they are there and take these options is tested."""


def shown() -> set[str]:
    return {command.strip() for page in PAGES for command in COMMAND.findall(page.read_text())}


def test_every_command_in_the_docs_is_tested_somewhere() -> None:
    assert shown() == set(RUN_HERE) | set(ELSEWHERE) | BY_HAND


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_named_beside_a_command_is_there_and_names_what_it_runs(command: str) -> None:
    file, _, name = ELSEWHERE[command].partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    program, what = command.split()[:2] if " " in command else (command, "")
    verb = {"curl": "/rondo/trajectories/"}.get(program, what)
    measured = "table" if command.endswith("bench table") else "Counts what it is given."
    looked = next((option for option in ("--probe", "--device-gib") if option in command), verb)
    called = {"bench": measured, "check": looked, "sglang": "pip install"}.get(verb, verb)
    assert any(called in text for text in texts)


@pytest.mark.parametrize("command", sorted(each for each in {*RUN_HERE, *ELSEWHERE, *BY_HAND} if each[:6] == "rondo "))
def test_the_parser_takes_every_command_and_its_values(command: str) -> None:
    words = shlex.split(command)[1:]
    options = _parser()[0].parse_args(words)
    if getattr(options, "sets", None):
        load(getattr(options, "config", ROOT / "examples" / "quickstart.py"), options.sets)
    if words[0] == "timeline":
        assert parse_steps(options.steps) == (20, 25)
    if words[:1] == ["bench"] and len(words) > 1:
        assert options.name in benchmarks(ROOT)
        tree = ast.parse((ROOT / "benchmarks" / f"{options.name}.py").read_text())
        known = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert {word for word in options.options if word.startswith("--")} <= {"--as", *known}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    missing = [target for target in LINK.findall(text) if not (page.parent / target).exists()]
    missing += [path for path in CODE.findall(text) if not (ROOT / path).exists()]
    assert missing == []


SELDOM = {
    "curriculum",
    "dpo",
    "external_agent",
    "gsm8k_arithmetic",
    "memory_agent",
    "moe_r3",
    "omni_digits",
    "on_policy_distillation",
    "pretrained_sums",
    "reward_model",
    "scored",
    "self_play",
    "sft",
    "video_digits",
    "zoom_digits",
}
"""Examples that run with RONDO_TEST_LONG=1 alone: tests/e2e/ trains on every kind of media, replays routes, and
learns from teachers; tests/roles/sampling/ runs the agent and the game of their examples; tests/roles/test_reward_model.py asks a
reward model; tests/comm/bus/test_lookahead.py lets rows rest; and whichever model is built is loaded from its folder as a
pretrained one is."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_the_docs_imports_what_it_uses_of_rondo(page: Path) -> None:
    settings = {section.__name__ for _, section in sections(RunConfig)} | {*roles_config.__all__}
    settings |= {"colocate", "fully_async", "hybrid", "trainer"}
    for code in BLOCK.findall(page.read_text()):
        lines = IMPORT.findall(code)
        for line in lines:
            exec(line, {})
        imported = {name for line in lines for name in re.findall(r"\w+", line.partition(" import ")[2])}
        used = set(re.findall(r"(?<![\w.`])(\w+)\(", re.sub("#.*", "", code))) - set(
            re.findall(r"(?:def|class) (\w+)", code)
        )
        assert used & settings <= imported, code


@pytest.mark.parametrize(
    "command",
    [each for each in RUN_HERE if LONG or Path(each.split()[2]).stem not in SELDOM],
    ids=lambda command: command.split()[1] + " " + command.split()[2][9:],
)
def test_a_command_of_the_docs_does_what_it_says(command: str, tmp_path: Path, rondo: Rondo) -> None:
    rows = [{"question": "?", "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}"} for a in range(8) for b in range(8)]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = command.replace("PATH/TO/gsm8k/train.jsonl", str(data)).replace("=FOLDER", f"={tmp_path}/model").split()
    if "model.path" in command:
        (tmp_path / "model").mkdir()
        qwen3.build(tmp_path / "model")
    sets = [part for text in (*RUN_HERE[command], f"run_dir={tmp_path}/runs") for part in ("--set", text)]
    code, output = rondo(*words[1:], *sets)
    assert code == 0, output
    if words[1] in ("train", "sft"):
        weights = (tmp_path / "runs" / "latest" / "checkpoints").glob("step_*/*/*model.safetensors")
        assert [path.stat().st_size > 0 for path in weights] == [True]
