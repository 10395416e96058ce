"""What `rondo train` does around a run. The runs themselves: tests/e2e."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.launch import cli, manifest, train
from rondo.launch.check.findings import Facts
from rondo.launch.config import RunConfig, load, resolve
from rondo.launch.differences import Differences
from rondo.launch.plan import coordinator_config
from rondo.launch.report.summary import Summary, changes, write
from rondo.launch.rundir import RunDir, read_json, write_json
from rondo.launch.train import TrainOptions
from rondo.runtime.admin.endpoint import listen
from rondo.runtime.checkpoints import complete, folder_of, publish, verify
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.supervision.spec import GroupSpec, Outcome
from rondo.runtime.supervision.supervisor import stop_signals

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"

STOPPED = """
import contextlib, sys
from dataclasses import dataclass, field
from pathlib import Path
from rondo.launch import cli, train
from rondo.launch.rundir import RunDir
from rondo.launch.report.view import PlainView
from rondo.runtime.admin.endpoint import listen
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.supervision.spec import Outcome

Nursery.open = lambda self: None  # nothing is started

async def supervise(config, run, options, *_):
    view = PlainView(config.num_steps)
    for number in range(3):
        view.on_event({"kind": "restart", "number": number})
    return Outcome(75, None, {}, {}, 1.0, 0, {}, {}, 0.5, {"rollout-0 samples": 2})

@contextlib.contextmanager
def prepared(config, name, options, nursery, groups):
    with RunDir.create(Path(sys.argv[1]), name, train.resolve(config)) as run, listen(config.admin) as admin:
        yield run, admin

def fails(*_, **__):
    raise TimeoutError("it takes too long")

train._supervise, train.prepared = supervise, prepared
for name in sys.argv[3:]:
    setattr(train, name, fails)
sys.exit(cli.main(["train", sys.argv[2], "--plain"]))
"""


def stopped_run(folder: Path, stdout: int, *failing: str) -> int:
    """The exit code of a run that was stopped, in whose end these functions of `train` fail."""
    line = [sys.executable, "-c", STOPPED, str(folder), str(QUICKSTART), *failing]
    return subprocess.run(line, stdout=stdout, check=False).returncode


def test_what_fails_after_a_run_leaves_its_exit_code_and_its_summary(tmp_path: Path) -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        gone.wait()
        assert gone.stdin is not None
        assert stopped_run(tmp_path, gone.stdin.fileno(), "_plot", "Records") == 75
    summary = orjson.loads((tmp_path / "quickstart" / "summary.json").read_bytes())
    assert summary["exit_code"] == 75
    assert summary["untold"] == {"rollout-0 samples": 2, "stdout": 1, "steps": 1}


def test_a_run_without_room_for_its_summary_and_with_a_full_stdout_keeps_its_exit_code(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        assert stopped_run(tmp_path, full.fileno(), "write", "print_table") == 75


async def test_an_error_of_the_supervisor_itself_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[SupervisionConfig] = []
    modules: list[str] = []

    class Broken:
        def __init__(self, config: Any, on_event: Any, *_: object) -> None:
            self.on_event = on_event
            limits.append(config.limits)
            modules.extend(config.modules)

        async def run(self) -> None:
            (tmp_path / "token").write_text("t" * 32)
            self.on_event({"kind": "started", "rt_dir": str(tmp_path)})
            await asyncio.sleep(0)
            raise ExceptionGroup("tasks", [KeyError("actor-0")])

    monkeypatch.setattr(train, "Supervisor", Broken)
    set_limits = ["supervision.start_s=80", "supervision.load_s=90"]
    config, options = load(QUICKSTART, [f"run_dir={tmp_path}", *set_limits]), TrainOptions(QUICKSTART, plain=True)
    groups = (GroupSpec("actor-0", "actor", 1, ()),)
    with RunDir.create(tmp_path, "demo", {}) as run, listen(config.admin) as admin:
        write_json(run.path / train.PREPARED, {"model_path": train.MODEL})  # which the quickstart builds
        (run.path / train.MODEL).mkdir()
        write_json(run.path / train.MODEL / "config.json", {"model_type": "qwen3"})
        outcome = await train._supervise(config, run, options, admin, Nursery(), 3, groups, [])
    assert (outcome.exit_code, outcome.attempt) == (1, 3)
    assert modules == ["transformers.models.qwen3.modeling_qwen3"]
    assert [(each.start_s, each.load_s) for each in limits] == [(80, 90)]
    assert outcome.first_cause == "supervisor: ExceptionGroup('tasks', [KeyError('actor-0')])"
    assert "KeyError: 'actor-0'" in capsys.readouterr().err


def test_a_stop_behind_a_runs_end_is_not_heard_until_all_is_cleared_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Outcome(0, None, {}, {}, 0.0, 0, {}, {}, 0.0)
    monkeypatch.setattr(train, "supervised", lambda *_, **__: over)
    monkeypatch.setattr(train, "_sum_up", lambda *_: None)
    before = {number: signal.getsignal(number) for number in stop_signals()}
    with RunDir.create(tmp_path, "demo", {}) as run, cli._stops_clear_up():
        config: Any = None
        assert train._run(config, run, TrainOptions(QUICKSTART), config, config, (), attempt=0) == 0
        for number in before:
            signal.raise_signal(number)
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_busy_admin_port_is_found_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load(QUICKSTART, [f"run_dir={tmp_path / 'runs'}", f"admin.port={port}"])
        monkeypatch.setattr(train, "require", lambda *_: None)  # which looks, too: another may take it after that
        with pytest.raises(ConfigError) as caught:
            train.main(config, TrainOptions(QUICKSTART))
    assert str(caught.value).startswith(f"admin.port must be free on 127.0.0.1, got {port} (Address already in use")
    assert str(caught.value).endswith("Set admin.port to 0 for a free one, or stop the program that uses it")
    assert not (tmp_path / "runs").exists()


def run_with_checkpoint(folder: Path) -> Path:
    """A run directory with a whole checkpoint and nothing to go on with."""
    with RunDir.create(folder, "demo", resolve(load(QUICKSTART, [f"run_dir={folder}", "name=demo"]))) as run:
        (run.checkpoints / "step_000002").mkdir()
        (run.checkpoints / "step_000002" / "COMPLETE").write_text("2\n")
        (run.path / "model").mkdir()
        write_json(run.path / "model" / "config.json", {"model_type": "qwen3"})
        write_json(run.path / "prepared.json", {"model_path": "model", "first_devices": {}})
        write_json(run.path / "coordinator.json", coordinator_config(load(QUICKSTART), 40))
        return run.path


@pytest.mark.parametrize("name", ["config.resolved.json", "environment.json", "prepared.json", "coordinator.json"])
@pytest.mark.parametrize("text", ["", '{"name": "quick', "[1]"])
def test_a_torn_file_of_a_run_that_is_to_go_on_is_told_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    path = run_with_checkpoint(tmp_path) / name
    path.write_text(text)
    rule = "(whole JSON|a JSON object|as the run wrote it)"
    with pytest.raises(ConfigError, match=rf"^{path} must be {rule}.*, got .*\. Start another run") as caught:
        train.resume(path.parent)
    assert "\n" not in str(caught.value)


def test_a_run_whose_folder_of_work_is_gone_says_so(tmp_path: Path) -> None:
    run, gone = run_with_checkpoint(tmp_path), tmp_path / "gone"
    write_json(run / "environment.json", read_json(run / "environment.json") | {"cwd": str(gone)})
    with pytest.raises(ConfigError) as caught:
        train.resume(run)
    assert str(caught.value) == (
        f"the folder that the run was started in must be there, got {gone}: No such file or directory. Its settings may name "
        f'files from there: make it again, or set "cwd" in {run}/environment.json to where they lie now'
    )


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `rondo train --resume-or-start` did, instead of a run."""
    done: list[str] = []

    def start(config: Any, options: TrainOptions, nursery: Nursery) -> int:
        done.append(f"started {config.name}")
        return 0

    def go_on(path: Path, *, options: TrainOptions) -> int:
        with RunDir.claim(path):
            done.append(f"went on with {path.name}")
        return 75

    monkeypatch.setattr(train, "main", start)
    monkeypatch.setattr(train, "resume", go_on)
    return done


@pytest.fixture
def resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resumed:
    """A run with two checkpoints, what it is told to go on with, and the settings that its processes would find."""
    config = load(QUICKSTART, [f"run_dir={tmp_path}", "name=demo", "num_steps=4", "train.warmup_steps=1"])
    with RunDir.create(tmp_path, "demo", resolve(config)) as run:
        for version in (2, 4):
            (tmp_path / "aside").mkdir()
            (tmp_path / "aside" / "weights").write_bytes(bytes(range(100)))
            publish(tmp_path / "aside", folder_of(run.checkpoints, version))
        write_json(run.path / "prepared.json", {"model_path": "model", "first_devices": {}})
        (run.path / "model").mkdir()
        write_json(run.path / "model" / "config.json", {})
        write_json(run.path / "coordinator.json", coordinator_config(config, 40))
        write_json(run.path / "data.json", {})
        manifest.write(run.path)
    done = Resumed(run.path)
    monkeypatch.setattr(train, "differences", lambda run, config: Differences((), (), None))
    monkeypatch.setattr(train, "require", lambda *_: Facts(num_rows=40, fingerprints={}))

    def go_on(config: RunConfig, *_: Any, **__: Any) -> int:
        done.settings.append(config)
        return 0

    monkeypatch.setattr(train, "_run", go_on)
    return done


@dataclass
class Resumed:
    run: Path
    settings: list[RunConfig] = field(default_factory=list)

    def refused(self, *sets: str, **options: Any) -> str:
        before = {path: path.read_bytes() for path in self.run.rglob("*") if path.is_file() and path.name != ".owner"}
        with pytest.raises(ConfigError) as caught:
            train.resume(self.run, sets, **options)
        found = {path: path.read_bytes() for path in self.run.rglob("*") if path.is_file() and path.name != ".owner"}
        assert self.settings == [] and found == before
        return str(caught.value)


def test_a_run_goes_on_from_the_next_older_checkpoint_where_the_newest_is_broken_and_nothing_is_removed(
    resumed: Resumed, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = resumed.run / "checkpoints" / "step_000004"
    (newest / "weights").write_bytes(bytes(100))
    broken = f"{newest} must be a checkpoint as it was written, got weights with other bytes. Choose a whole one"
    assert resumed.refused(checkpoint="4") == broken
    assert train.resume(resumed.run) == 0 and len(resumed.settings) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"set aside as checkpoints/set_aside/step_000004.broken: {broken}",
        "run demo goes on from step_000002",
    ]
    assert (resumed.run / "checkpoints" / "set_aside" / "step_000004.broken" / "weights").read_bytes() == bytes(100)
    assert '"goes_on_from":2' in (resumed.run / "metrics.jsonl").read_text()
    (resumed.run / "checkpoints" / "step_000002" / "COMPLETE").unlink()
    with pytest.raises(ConfigError, match="RUN must have a whole checkpoint to go on from, got none in "):
        train.resume(resumed.run)


def test_a_run_that_restarts_as_a_whole_takes_the_newest_whole_checkpoint_and_ends_without_one(
    resumed: Resumed,
) -> None:
    for version, is_left in ((4, True), (2, False)):
        (resumed.run / "checkpoints" / f"step_00000{version}" / "weights").write_bytes(b"short")
        assert train._falls_back(resumed.run) is is_left
    told = [orjson.loads(line) for line in (resumed.run / "events.jsonl").read_bytes().splitlines()]
    assert [each["kind"] for each in told] == ["checkpoint_set_aside"] * 2
    assert "step_000004.broken: " in told[0]["why"] and "weights of 5 bytes for 100" in told[0]["why"]
    assert (resumed.run / "metrics.jsonl").read_text().count('"goes_on_from":2') == 1


def test_a_run_goes_on_from_a_checkpoint_by_its_name_and_newer_ones_are_set_aside(resumed: Resumed) -> None:
    checkpoints = resumed.run / "checkpoints"
    assert train.resume(resumed.run, checkpoint="step_000002") == 0
    assert [each.name for each in complete(checkpoints)] == ["step_000002"]
    assert verify(checkpoints / "set_aside" / "step_000004")
    assert '"goes_on_from":2' in (resumed.run / "metrics.jsonl").read_text()


def test_settings_that_do_not_say_what_is_learnt_change_with_a_resume_and_extend_a_run_that_is_over(
    resumed: Resumed, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [
        "num_steps=6",
        "train.save_every=1",
        "evaluation.every=2",
        "role_groups.0.threads=2",
        "supervision.grace_s=9",
    ]
    assert train.resume(resumed.run, sets) == 0
    (config,) = resumed.settings
    assert (config.num_steps, config.train.save_every, config.supervision.grace_s) == (6, 1, 9)
    assert train.settings_of(resumed.run) == config
    rules = read_json(resumed.run / "coordinator.json")
    assert (rules["rules"]["num_steps"], rules["evaluate_every"]) == (6, 2)
    assert "changed from step 4 on: num_steps was 4, and is 6" in capsys.readouterr().out
    (told,) = read_json(resumed.run / "environment.json")["changes"]
    assert told["version"] == 4 and told["settings"]["num_steps"] == [4, 6]
    assert changes(resumed.run)["num_steps (step 4)"] == "4 -> 6"
    assert manifest.gathered(resumed.run) == read_json(resumed.run / "manifest.json")
    assert manifest.gathered(resumed.run)["changes"]["train.save_every (step 4)"] == "- -> 1"
    before = (resumed.run / "config.resolved.json").read_bytes()
    assert train.resume(resumed.run, ["num_steps=6"]) == 0  # which it is already
    assert len(read_json(resumed.run / "environment.json")["changes"]) == 1
    assert (resumed.run / "config.resolved.json").read_bytes() == before and resumed.settings[1] == config


def test_settings_that_change_what_is_learnt_are_accepted_or_refused_and_others_stay_with_both_ways_out(
    resumed: Resumed,
) -> None:
    text = resumed.refused("train.lr=0.001", "num_steps=6")
    assert text == (
        "settings must not change what a run learns without being accepted, got 1:\n"
        "  train.lr was 0.0002, and is 0.001\n"
        f"Go on with them: `rondo resume {resumed.run} --set train.lr=0.001 --set num_steps=6 --accept-changes`; or leave them "
        "out, or start another run with `rondo train`, from its weights by model.path and `rondo export`"
    )
    for setting, now, why in (
        ("seed", "7", "the order of the data and every draw follow from it"),
        ("model.build_args.num_layers", "3", "its checkpoint holds the tensors of that model"),
        ("rollout.samples_per_prompt", "9", "its ledger counts prompt groups of so many samples"),
        ("data.shuffle", "False", "its position in the data counts in the order that follows from it"),
        ("run_dir", "'elsewhere'", "the run is known by it"),
    ):
        text = resumed.refused(f"{setting}={now}", accept_changes=True)
        assert text.startswith(f"{setting} must stay ") and f"since {why}, got " in text
        assert "Leave it out, or start another run" in text
    assert resumed.refused("num_steps=3").startswith("num_steps must be at least the 4 steps that are trained, got 3.")
    own = resumed.refused("reward.function=/nowhere/mine.py:f", accept_changes=True)
    assert own.startswith(
        f"reward.function must be a function of the run's own code, {resumed.run}/code, or of a package"
    )
    assert resumed.refused("num_step=6").startswith("num_step must be a field of RunConfig")
    assert train.resume(resumed.run, ["train.lr=0.001", "train.schedule=cosine"], accept_changes=True) == 0
    assert resumed.settings.pop().train.lr == 0.001
    text = resumed.refused("num_steps=6")  # the schedule, which ends with the run, is another one with it
    assert "got 1 (the learning rate of train falls until the last step):\n  num_steps was 4, and is 6\n" in text


def test_resume_or_start_goes_on_where_there_is_something_to_go_on_from_and_says_so(
    tmp_path: Path, decided: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", str(QUICKSTART), "--resume-or-start", "--set", f"run_dir={tmp_path}", "--set", "name=demo"]

    def said(code: int) -> str:
        assert cli.main(command) == code
        (line,) = capsys.readouterr().out.splitlines()
        return str(line)

    assert said(0) == f"run demo starts: there is none of that name in {tmp_path}"
    RunDir.create(tmp_path, "demo", {"name": "demo"}).close()
    RunDir.create(tmp_path, "demo-large", {"name": "demo-large"}).close()
    assert said(0) == "run demo starts anew: demo has no whole checkpoint to go on from"
    run_with_checkpoint(tmp_path)
    assert (cli.main(command), decided) == (75, ["started demo", "started demo", "went on with demo-2"])
    write(tmp_path / "demo-2", Summary(name="demo-2", exit_code=75, attempt=0, steps=2, wall_s=1.0))
    assert cli.main(command) == 75
    with RunDir.claim(tmp_path / "demo-2"):
        assert cli.main(command) == 2
    assert "must have no other owner, got a live run" in capsys.readouterr().err
    write(tmp_path / "demo-2", Summary(name="demo-2", exit_code=0, attempt=1, steps=4, wall_s=1.0))
    assert said(0).startswith("run demo-2 is done after step 4: there is nothing to go on with.")
    assert decided[3:] == ["went on with demo-2"]
