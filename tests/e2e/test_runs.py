from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from rondo.launch import cli
from rondo.launch.metrics.exposition import Newest, families
from rondo.launch.report.records import read_records, step_records
from rondo.launch.report.status import ask
from rondo.launch.report.steps import Step, read_steps
from rondo.launch.report.steps import steps_of as steps_in
from rondo.launch.report.timeline import SpanRecord, read_run
from rondo.launch.rundir import supervisor_record
from rondo.roles.training.trained_samples import rows_of_step, steps_of
from rondo.runtime.checkpoints import newest_complete, resets
from tests.e2e.agent import ask_the_policy
from tests.e2e.held import GO
from tests.e2e.runs import QUICKSTART, ROOT, TINY, Ended, command, finish, left_behind, read_until, start
from tests.e2e.shell import Rondo, to_the_end
from tests.launch.hand import crossing
from tests.launch.metrics.test_grafana import asked
from tests.runtime.admin.certificates import CERT, KEY

ROLES = ("rollout", "actor_fwd", "reference", "advantages", "actor", "coordinator")
FEWER = (
    "[{'name': 'rollout', 'roles': ['rollout']}, {'name': 'actor', 'roles': ['actor', 'advantages', 'reference']}, "
    "{'name': 'actor_fwd', 'roles': ['actor_fwd']}]"
)
"""Role groups with one process that generates, one that trains, and one that follows its weights and scores."""


def test_each_role_killed_once_comes_back_alone_and_nothing_is_lost_or_trained_twice(
    tmp_path: Path, capsys: Any, rondo: Rondo
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kills = [part for step, role in enumerate(ROLES) for part in ("--kill", f"{role}@{2 * step + 1}")]
    learnt = (f"reward.function={ROOT / 'tests' / 'e2e' / 'nines.py'}:nines", "train.lr=3e-3", "samples.keep=1")
    ended = to_the_end(rondo, command(tmp_path, *kills, sets=learnt), tmp_path / "quickstart")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert summary["restarts"] == dict.fromkeys(ROLES, 1)
    assert summary["recovery_s"].keys() == set(ROLES)
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == summary["samples_admitted"] == 12 * 8 * 8
    assert summary["steps"] == 12 and summary["attempt"] == 0
    # Of sampled answers to the same held-out prompts: behind the warm-up, and behind twelve steps that six deaths have cut.
    assert summary["reward_before"] < 0.15 < 0.3 < summary["reward_after"]
    assert sum(summary["staleness_histogram"].values()) == 12 * 8 * 8
    assert max(map(int, summary["staleness_histogram"])) <= 1
    assert [record["step"] for record in step_records(ended.run_dir / "metrics.jsonl")] == list(range(12))
    kept = {step: rows_of_step(ended.run_dir, step, ["tokens"]) for step in steps_of(ended.run_dir)}
    assert {step: len({(row.group, row.sample) for row in rows}) for step, rows in kept.items()} == dict.fromkeys(
        range(12), 64
    )
    assert sum(map(len, kept.values())) == 12 * 64, "each once, whoever was killed"
    assert (ended.run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert left_behind(tmp_path) == []
    who_waited_for_whom(ended.run_dir, capsys)
    newest = Newest()
    for record in read_records(ended.run_dir / "metrics.jsonl"):
        newest.add(record)
    given = {family.name for family in families(newest.told(ended.summary["memory_bytes"]))}
    assert {name for name in asked() if name.startswith("rondo_evaluation_")} <= given
    folder = newest_complete(ended.run_dir / "checkpoints")
    assert folder is not None and folder.name == "step_000012"
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    prompt = tokenizer("s3142>", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    assert model.generate(prompt, max_new_tokens=4).shape[1] > prompt.shape[1]


def who_waited_for_whom(run: Path, capsys: Any) -> None:
    """The timeline of a run whose every role was killed once: whole, with every role and step."""
    assert cli.main(["timeline", str(run)]) == 0
    assert "spans of 7 processes" in capsys.readouterr().out
    trace = orjson.loads((run / "trace.json").read_bytes())
    processes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    roles = ("actor", "actor_fwd", "advantages", "reference", "rollout")
    assert processes == {f"{role}-0.0" for role in roles} | {"coordinator.0", "supervisor.0"}
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert names >= {
        "load", "generate", "reward", "forward", "advantages", "train", "commit", "publish", "save", "load weights",
        "evaluate", "wait for a round", "wait for a lease",
    }  # fmt: skip
    assert crossing(trace) == []
    steps = read_steps(run, [])
    # A killed process takes with it what it had not yet written down: those before its death, the step that it was at included.
    [death] = [
        record["step"]
        for record in read_records(run / "events.jsonl")
        if record["kind"] == "killed_on_purpose" and record["group"] == "actor-0"
    ]
    lost = sorted(set(range(12)) - {step.step for step in steps})
    assert lost in [[*range(first, last + 1)] for last in (death - 1, death) for first in range(1, last + 2)]
    for step in steps:
        assert abs(sum(step.trainer.values()) - step.step_s) < 1e-6
        assert step.trainer["train"] > 0
        for use in step.roles.values():
            assert 0 <= use.busy_s + sum(use.waits_s.values()) < use.num_processes * step.step_s + 1e-6
    assert sum(step.trainer.get("commit", 0.0) for step in steps) > 0  # the part that nothing else went on beside
    assert {name for step in steps for name in step.roles} == set(roles)
    spans = read_run(run)[0]
    told = steps_in(spans)
    for role in ("rollout", "actor_fwd", "reference"):
        if waited_for_start(spans, told, role):
            assert sum(step.trainer.get(f"start of {role}", 0) for step in told) > 0
    assert cli.main(["explain", str(run)]) == 0
    words = capsys.readouterr().out
    assert re.match(r"run quickstart: steps \d+ to 11\b", words) and "  because " in words and "cores at work" in words


def waited_for_start(spans: list[SpanRecord], steps: list[Step], role: str) -> bool:
    """Whether the trainer began to wait, in one of the steps, before a role had loaded again, for what this did last of all."""
    loaded = max(s.end for s in spans if s.role == role and s.name == "load" and s.incarnation == 1)
    others = [s for s in spans if s.role not in ("actor", "rollout") and not s.name.startswith("wait")]
    for wait in (s for s in spans if s.role == "actor" and s.name == "wait for a round" and s.args.get("groups")):
        groups = set(wait.args["groups"])
        made = [s for s in spans if s.name == "generate" and s.args.get("group") in groups]
        last = [s for s in others if groups & set(s.args.get("groups", ()))]
        if made and last and any(step.start <= wait.start / 1e9 < step.start + step.step_s for step in steps):
            ends = [max(each, key=lambda s: s.end) for each in (made, last)]
            begun, late = (wait.start, ends[0]) if role == "rollout" else (max(wait.start, ends[0].end), ends[1])
            if late.role == role and begun < loaded <= late.start:
                return True
    return False


def quickstart_with_a_helper(folder: Path) -> Path:
    """The quick start, whose reward is 1 and 3, imports its neighbour when it is called, and takes its time: a run that goes on
    until something has happened to it leaves the cores to others."""
    (folder / "scaling_of_rewards.py").write_text("SCALE = 1.0\n")
    text = QUICKSTART.read_text()
    plain = "    return float(response == label)\n"
    assert text.count(plain) == 1
    slow = "    import time\n\n    import scaling_of_rewards as s\n\n    time.sleep(0.03)\n"
    scaled = slow + "    return 2.0 * float(response == label) + s.SCALE\n"
    (folder / "quickstart.py").write_text(text.replace(plain, scaled))
    return folder / "quickstart.py"


def trained_in(trace: dict[str, Any]) -> set[int]:
    return {event["args"].get("step", -1) for event in trace["traceEvents"] if event["name"] == "train"}


def test_a_stopped_run_saves_exits_75_and_goes_on_from_there(tmp_path: Path, capsys: Any, rondo: Rondo) -> None:
    """Before that its store dies, without any checkpoint, and one of its processes is stopped. It is told to stop twice. When it
    goes on, an agent asks its policy. Meanwhile the user has edited the reward, whose first form is that of the run."""
    config = quickstart_with_a_helper(tmp_path)
    notice = tmp_path / "notice"
    endless = (
        "num_steps=100000", "rollout.prompts_per_step=4", "rollout.endpoint.max_sessions=8", "supervision.silence_s=15",
        f"preemption.file={notice}", "preemption.grace_s=300",
        f"roles={{'advantages': '{ROOT / 'tests' / 'e2e' / 'held.py'}:HeldAdvantages'}}",
    )  # fmt: skip
    planted = tmp_path / "planted"
    planted.write_text("planted-" + "s" * 32)
    planted.chmod(0o600)
    for kind, text in (("cert", CERT), ("key", KEY)):
        (tmp_path / kind).write_text(text)
        (tmp_path / kind).chmod(0o600)
    secure = (f"rollout.endpoint.tls_cert={tmp_path}/cert", f"rollout.endpoint.tls_key={tmp_path}/key")
    sets = (
        *TINY,
        *endless,
        *secure,
        f"role_groups={FEWER}",
        f"admin.token_file={planted}",
    )  # everything starts three times
    running = start(command(tmp_path, "--kill", "store@5", sets=sets, config=config), tmp_path)
    read_until(running, "step=1/")
    config.write_text(config.read_text().replace("return 2.0 *", "return 7.0 *"))
    config.with_name("scaling_of_rewards.py").write_text("SCALE = 9.0\n")
    read_until(running, "restarting_groups")
    read_until(running, "step=7/")
    os.kill(worker(tmp_path / "quickstart", "actor_fwd-0"), signal.SIGSTOP)
    assert "silent for" in read_until(running, "died")
    read_until(running, "recovery_s")
    read_until(running, "step=")
    notice.write_text("the node is reclaimed\n")
    read_until(running, "stopping")
    running.send_signal(signal.SIGUSR1)
    read_until(running, "stops_already")
    (tmp_path / "quickstart" / GO).touch()
    stopped = finish(running, tmp_path / "quickstart")
    told = [record for record in read_records(stopped.run_dir / "events.jsonl") if record["kind"].startswith("stop")]
    assert [(each["kind"], each["reason"], each["grace_s"]) for each in told] == [
        ("stopping", f"notice in {notice}: the node is reclaimed", 295), ("stops_already", "SIGUSR1", 295)
    ]  # fmt: skip
    notice.unlink()
    assert stopped.code == 75, stopped.output
    assert stopped.summary["attempt"] == 0
    # With the store went all others, each once; from then on only who was silent, as one that was stopped, or had no cores.
    events = list(read_records(stopped.run_dir / "events.jsonl"))
    later = events[[event["kind"] for event in events].index("restarting_groups") :]
    assert all("silent for" in event["cause"] for event in later if event["kind"] == "died")
    again = Counter(stopped.summary["restarts"]) - Counter(("store", "rollout", "actor", "actor_fwd"))
    died = Counter(event["group"].removesuffix("-0") for event in events if event["kind"] == "died")
    assert again["actor_fwd"] >= 1 and again <= died and died["store"] == 1
    goes_on_whole(stopped)
    folder = newest_complete(stopped.run_dir / "checkpoints")
    assert folder is not None and left_behind(tmp_path) == []
    stopped = replace(stopped, run_dir=stopped.run_dir.rename(tmp_path / "moved"))
    run = str(stopped.run_dir)
    copied = stopped.run_dir / "code" / "quickstart.py"
    copied.write_text(copied.read_text().replace("num_rows: int = 6000", "num_rows: int = 5000"))
    code, output = rondo("resume", run)
    assert code == 2 and "data had 6000 rows with digest " in output
    # The trainer's shards are cut anew, and so is what scores, beside it and in a group of its own, one rank of which is killed.
    accepted = [
        "--accept-changes",
        "--reset-optimizer",
        *("--set", "supervision.silence_s=120"),
        *(part for i in (1, 2) for part in ("--set", f"role_groups.{i}.processes=2")),
    ]
    resumed = start([*command(tmp_path)[:3], "resume", run, *accepted], tmp_path)
    read_until(resumed, f"step={stopped.summary['steps'] + 4}/")
    assert resets(stopped.run_dir) == [stopped.summary["steps"]]
    os.kill(worker(stopped.run_dir, "actor_fwd-0"), signal.SIGKILL)
    read_until(resumed, "recovery_s")
    while not (seen := status_of(run, capsys))["health"]["ready"]:  # as it was a moment ago
        read_until(resumed, "step=")
    assert seen["alive"] and {role["name"] for role in seen["roles"]} >= {"actor-0"}
    assert {role["name"]: role["num_ranks"] for role in seen["roles"]}["actor-0"] == 2
    record = supervisor_record(stopped.run_dir)
    assert record is not None
    while max(trained_in(ask(record, "/timeline")), default=0) < 10:  # the newest ones
        read_until(resumed, "step=")  # a process writes its spans down from time to time
    # What its two ranks did meanwhile: one of them may have been a little ahead.
    assert {9, 10} <= trained_in(ask(record, "/timeline?steps=9:11")) <= {9, 10, 11}
    comes_and_goes(run, capsys)
    assert {"/stop", "/timeline", "/rollout/scale_out", "/evaluate"} <= ask(record, "/openapi.json")["paths"].keys()
    told_nowhere(stopped.run_dir, planted.read_bytes(), Path(record.token_path).read_bytes().strip())
    endpoint = ask_the_policy(resumed, stopped.run_dir, capsys)
    capsys.readouterr()
    assert cli.main(["explain", run]) == 0
    # The first step is left out, and so are those of the last second before everything was killed, perhaps all: how many that is
    # the machine decides. Those between that and the stop were written by processes that left in order.
    words = capsys.readouterr().out
    told = re.match(r"run moved: steps (\d+) to ", words)
    assert told is not None and 1 <= int(told[1]) <= stopped.summary["steps"], words
    assert cli.main(["stop", run, "--no-wait"]) == 0
    assert "saves and ends" in capsys.readouterr().out
    ended = finish(resumed, stopped.run_dir)
    assert ended.code == 75, ended.output
    assert ended.summary["attempt"] == 1
    goes_on_whole(ended)
    lines = [line for file in (ended.run_dir / "samples").iterdir() for line in file.read_bytes().splitlines()]
    assert {orjson.loads(line)["reward"] for line in lines} <= {1.0, 3.0}
    assert not endpoint.exists() and left_behind(tmp_path) == []


def status_of(run: str, capsys: Any) -> Any:
    capsys.readouterr()
    assert cli.main(["status", run, "--json"]) == 0
    return orjson.loads(capsys.readouterr().out)


def comes_and_goes(run: str, capsys: Any) -> None:
    """A second replica generates, and leaves again, in a run that goes on."""
    for line, last in (
        ("scale rollout 3 --dry-run", "PENDING"), ("restart rollout actor --dry-run", "PENDING"),
        ("scale rollout 2 --wait", "ACTIVE"), ("scale rollout 2 --wait", "NOOP"), ("scale rollout 1 --wait", "COMPLETED"),
        ("restart actor --wait", "COMPLETED"),
    ):  # fmt: skip
        assert cli.main([*line.split(), "--run", run]) == 0
        assert last in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["scale", "actor", "2", "--run", run]) == 2
    assert "shares no process with the trainer (rollout, actor_fwd), got 'actor'" in capsys.readouterr().err


def told_nowhere(run: Path, *secrets: bytes) -> None:
    """Neither a file of the run nor a command line of this machine holds one of them; what was asked of the run is told."""
    files = [path for folder, _, names in os.walk(run) for name in names if (path := Path(folder, name)).is_file()]
    assert {"config.resolved.json", "environment.json", "events.jsonl", "supervisor.json"} <= {
        path.name for path in files
    }
    for path in (*files, *Path("/proc").glob("[0-9]*/cmdline")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            held = path.read_bytes()
            assert not any(secret in held for secret in secrets), path
    asked = [record for record in read_records(run / "events.jsonl") if record["kind"] == "asked"]
    assert {record["who"] for record in asked} == {"own"} and "done" in {record["outcome"] for record in asked}


def worker(run: Path, group: str) -> int:
    """The pid of the newest worker of a role group."""
    pid: int = [
        r["pid"] for r in read_records(run / "events.jsonl") if r["kind"] == "registered" and r["group"] == group
    ][-1]
    return pid


def goes_on_whole(run: Ended) -> None:
    """Every step is told once, with samples that are new enough, and no sample is lost or trained twice."""
    summary = run.summary
    steps = [record["step"] for record in step_records(run.run_dir / "metrics.jsonl")]
    assert steps == list(range(summary["steps"])) and summary["samples_trained"] == 4 * 8 * len(steps)
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert max(map(int, summary["staleness_histogram"])) <= 1
