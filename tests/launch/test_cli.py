"""The command line, through real processes: exit codes, messages, and how light it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.launch.cli import main
from rondo.runtime.supervision.nursery import Nursery
from tests.e2e.shell import Rondo
from tests.launch import configs


def alone(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rondo.launch.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_a_checkout_that_is_called_rondo_does_not_shadow_the_package(tmp_path: Path) -> None:
    (tmp_path / "rondo").symlink_to(Path(__file__).parents[2])
    code = "import rondo, rondo.launch.config, rondo.runtime.errors; print(callable(rondo.train))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_command_line_runs_as_a_module_too(tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "rondo").symlink_to(Path(__file__).parents[2])
    for cwd in (tmp_path, tmp_path / "checkout"):
        command = [sys.executable, "-m", "rondo", "stats"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
        assert done.returncode == 2 and "Did you mean 'status'?" in done.stderr


def test_help_imports_nothing_heavy_and_names_every_verb(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rondo.launch.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as end:\n"
        "    heavy = {'torch', 'transformers', 'pydantic', 'aiohttp', 'rich', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "    print(end.code, sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 []"
    for verb in ("train", "sft", "check", "show", "status", "stop", "resume"):
        assert any(line.split()[:1] == [verb] for line in lines)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("show --schema >&-", 0, ""),
        ("show --schema 2>&-", 0, ""),
        ("show --schema >/dev/full", 1, "stdout must take all that is printed, got No space left on device"),
        ("show --schema | head -1 >/dev/null; exit ${PIPESTATUS[0]}", 1, ""),
        ("status nowhere >&- | cat", 0, "RUN must be a run directory"),
        ("status nowhere 2>&-", 2, ""),
    ],
)
def test_a_command_whose_output_goes_nowhere_ends_with_its_code_and_without_a_traceback(
    tmp_path: Path, line: str, code: int, words: str
) -> None:
    command = ["bash", "-c", f'"$0" -m rondo.launch.cli {line}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert done.stderr.startswith(words) and bool(done.stderr) == bool(words)


def test_reading_a_config_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    configs.write(tmp_path)
    code = (
        "import sys\nfrom rondo.launch.cli import main\nmain(['show', 'demo_config.py'])\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'aiohttp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_every_run_loads_begins_first_and_anew_with_variables_that_the_config_module_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(Nursery, "open", lambda self: opened.append(os.environ["HF_HOME"]))
    monkeypatch.setenv("HF_HOME", "before")
    plain = str(configs.write(tmp_path))
    assert main(["sft", plain]) == 2 and opened == ["before"]
    setting = ("\nconfig = ", "\nimport os\n\nos.environ['HF_HOME'] = 'after'\nconfig = ")
    assert main(["sft", str(configs.write(tmp_path, setting, name="sets.py"))]) == 2
    assert opened == ["before", "before", "after"]


def test_show_prints_all_settings_as_json(tmp_path: Path) -> None:
    configs.write(tmp_path)
    done = alone("show", "demo_config.py", "--set", "train.lr=2e-5", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["train"]["lr"] == 2e-5


@pytest.mark.parametrize("verb", ["train", "check"])
def test_wrong_settings_end_with_2_and_one_line_and_start_nothing(tmp_path: Path, verb: str) -> None:
    configs.write(tmp_path)
    done = alone(verb, "demo_config.py", "--set", "train.lrr=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train.lrr must be a field of TrainConfig, got an unknown name. Did you mean 'lr'?\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"demo_config.py", "__pycache__"}


def test_a_signal_before_anything_is_started_leaves_nothing_and_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    config = tmp_path / "config.py"
    config.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    line = [sys.executable, "-m", "rondo.launch.cli", "train", str(config), "--set", f"run_dir={tmp_path}/runs"]
    ended = subprocess.run(line, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, timeout=60, check=False)
    assert ended.returncode == -signal.SIGTERM
    assert list((tmp_path / "tmp").iterdir()) == [] and not (tmp_path / "runs").exists()


def test_train_tells_every_error_at_once_and_starts_nothing(tmp_path: Path, rondo: Rondo) -> None:
    config = str(configs.write(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "noisy.py").write_text("print('hello')\nraise ImportError('no such thing')\n")
    changes = [
        "model.build=null",
        "model.build_args={}",
        f"model.path={tmp_path}/empty",
        f"reward.function={tmp_path}/noisy.py:reward",
        "data.label=answer",
        "role_groups.1.processes=17",
        f"run_dir={tmp_path}/runs",
    ]
    code, output = rondo("train", config, *(part for text in changes for part in ("--set", text)))
    lines = output.splitlines()
    assert (code, len(lines)) == (2, 4)
    assert lines[2] == (
        f"reward.function must load without errors, got ImportError: no such thing ({tmp_path}/noisy.py:2). Correct it"
    )
    assert lines[0].startswith("model.path must be a folder with a config.json, got ")
    assert "'answer'" in lines[1]
    assert lines[3].startswith("rollout.prompts_per_step * rollout.samples_per_prompt must be at least ")
    assert not (tmp_path / "runs").exists()


def test_check_shows_what_it_found_and_ends_with_0_where_all_is_well(tmp_path: Path, rondo: Rondo) -> None:
    code, output = rondo("check", "examples/quickstart.py", "--set", f"run_dir={tmp_path}/runs")
    assert code == 0 and {line.split()[0] for line in output.splitlines()} <= {"ok", "note"}, output
    assert "5744 rows to train on, 256 held out" in output
    assert "a sample ends at <|im_end|>" in output
    assert "the model has " in output
    assert "shared memory takes " in output
    assert not (tmp_path / "runs").exists()


def test_output_to_a_reader_that_left_is_no_traceback(tmp_path: Path) -> None:
    configs.write(tmp_path)
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        command = [sys.executable, "-m", "rondo.launch.cli", "show", "demo_config.py"]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["tarin", "x.py"],
            "VERB must be one of demo, train, init, sft, check, show, status, stop, scale, restart, resume, explain, "
            "autoscale, timeline, track, alert, compare, export, eval, serve, view, agents, slurm, bench, "
            "sglang, completion, got 'tarin'. ",
        ),
        (["train"], "the following arguments are required: CONFIG.py. Run `rondo train --help`"),
        (["show", "none.py"], "CONFIG must be a file that exists, got none.py."),
        (["status"], "RUN must be a run directory, got runs/latest. There are no runs in runs"),
        (["stop", "runs/x"], "RUN must be a run directory, got runs/x."),
        (["resume", "runs/x"], "RUN must be a run directory, got runs/x."),
        (
            ["train", "demo_config.py", "--kill", "actr@2"],
            "--kill must name a role of this run, got 'actr'. Did you mean 'actor'?",
        ),
        (
            ["train", "demo_config.py", "--kill", "actor@9"],
            "--kill must look like ROLE or ROLE@STEP with STEP up to 4, got 'actor@9'.",
        ),
        (
            ["sft", "demo_config.py"],
            "sft must be set for `rondo sft`, got nothing. Add sft=SftConfig(...) to demo_config.py",
        ),
    ],
)
def test_wrong_usage_is_2_and_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    error: str,
) -> None:
    configs.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    told = capsys.readouterr().err
    assert code == 2
    assert told.startswith(error)
    assert len(told.splitlines()) == 1
