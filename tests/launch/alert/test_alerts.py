"""What is told of a run at once: by which rules, how often, and that a message outlives whatever dies."""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rondo.launch.alert import follow, settings
from rondo.launch.alert.follow import Alerts, through_apprise
from rondo.launch.alert.rules import Recent
from rondo.launch.alert.settings import VARIABLE, AlertsConfig, addresses, why_not
from rondo.launch.check.check import _host
from rondo.launch.check.findings import Report
from rondo.launch.check.own import look_at_own
from rondo.launch.cli import main
from rondo.launch.config import load, override, resolve, unresolve
from rondo.launch.rundir import read_json
from rondo.runtime.errors import ConfigError
from tests.launch.configs import write

QUIET = AlertsConfig(stall_s=None, reward_drop=None, disk_free_gib=None)
STARTED = {"kind": "started", "source": "supervisor"}


def slow_steps(recent: Recent) -> str | None:
    """A rule of a user's own."""
    return f"takes {recent.new[-1]['step_s']} s a step" if recent.new and recent.new[-1]["step_s"] > 60 else None


def broken(recent: Recent) -> str | None:
    follow._RULE_S = 0.05  # of the next one, which does not end
    raise KeyError("nothing")


def number(recent: Recent) -> int:
    return 3


def endless(recent: Recent) -> str | None:
    while True:
        time.sleep(0.01)


class Desk:
    """A run's folder with its alerts, a clock, and addresses of which those in `down` take nothing."""

    def __init__(self, run: Path, config: AlertsConfig, num_addresses: int = 1) -> None:
        self.run, self.config, self.num, self.now = run, config, num_addresses, 1000.0
        self.down = set[int]()
        self.taken: list[str] = []
        run.mkdir(parents=True, exist_ok=True)
        self.restart()

    def restart(self) -> None:
        file = self.run / "alerts.json"
        kept = read_json(file) if file.exists() else {}
        self.alerts = Alerts(self.run, self.config, file, kept, self.num, self._send, lambda: self.now)

    def _send(self, to: int, kind: str, title: str, text: str) -> str | None:
        if to in self.down:
            return "no answer"
        rule, said = title.removeprefix("rondo: demo: "), text.removeprefix("demo ").rpartition(" (")[0]
        self.taken.append(f"{to}: " * (self.num > 1) + f"{rule}: {said}")
        return None

    def say(self, *records: dict[str, Any]) -> None:
        for each in records:
            with (self.run / ("metrics.jsonl" if "step" in each else "events.jsonl")).open("a") as file:
                file.write(json.dumps({"time": self.now, **each}) + "\n")

    def told(self, *records: dict[str, Any], after_s: float = 1.0, is_over: bool = False) -> list[str]:
        self.say(*records)
        self.now += after_s
        self.alerts.look(is_over=is_over)
        taken, self.taken = self.taken, []
        return taken


def step(number: int, **figures: object) -> dict[str, Any]:
    return {"kind": "metrics", "step": number, "reward_mean": 0.5, "step_s": 1.0, **figures}


def finished(code: int) -> dict[str, Any]:
    return {"kind": "finished", "source": "supervisor", "exit_code": code, "wall_s": 90.0}


def test_start_end_crash_and_requeue_are_told_each_time(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", QUIET)
    assert desk.told() == []
    assert desk.told(STARTED, step(0)) == ["start: started"]
    assert desk.told(finished(75)) == ["requeue: stopped before the end; `rondo resume` goes on"]
    assert desk.told(STARTED) == ["start: started"]
    assert desk.told({"kind": "failed", "cause": "actor-0 died"}) == []
    assert desk.told(finished(1)) == ["crash: has failed: actor-0 died"]
    assert desk.told(STARTED, finished(1)) == ["start: started", "crash: has failed: exit code 1"]
    assert desk.told(STARTED, finished(0)) == ["start: started", "end: is done after 1.5 min"]
    assert desk.told(is_over=True) == []


def test_an_end_that_nobody_wrote_down_is_told_once_at_the_next_start_or_when_nobody_is_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", QUIET)
    gone = "crash: has failed: its supervisor died without a word"
    assert desk.told(STARTED) == ["start: started"]
    desk.restart()
    assert desk.told(STARTED) == ["start: started", gone]
    assert desk.told(is_over=True) == [gone]
    assert desk.told(STARTED) == ["start: started"]


def test_what_was_before_the_life_that_is_told_of_first_is_nobodys_news(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", AlertsConfig(stall_s=None, disk_free_gib=None, max_gap=0.05))
    desk.say(STARTED, step(0, log_prob_gap=0.5), finished(1))
    desk.now += 1000
    assert desk.told(STARTED, step(1, log_prob_gap=0.01)) == ["start: started"]
    assert len(desk.alerts._steps) == 2


def test_a_run_that_starts_again_and_again_is_told_of_twenty_times_in_an_hour_and_then_how_often(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path / "demo", QUIET)
    assert sum(len(desk.told(STARTED, finished(75))) for _ in range(25)) == 40
    desk.restart()
    assert desk.told(STARTED, after_s=3600) == ["start: started (5 more of start were not told)"]


def test_a_stall_is_told_once_in_a_while_until_a_step_comes_and_not_of_a_run_that_is_over(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", QUIET.model_copy(update={"stall_s": 60.0, "every_s": 600.0}))
    assert desk.told(STARTED, after_s=50) == ["start: started"]
    assert desk.told(after_s=5) == []
    desk.restart()
    assert desk.told(after_s=20) == ["stall: has had no step for 1.2 min"]
    assert desk.told(after_s=500) == []
    assert desk.told(after_s=200) == ["stall: has had no step for 12.9 min"]
    assert desk.told(step(1), after_s=50) == []
    assert desk.told(finished(0), after_s=10) == ["end: is done after 1.5 min"]
    assert desk.told(after_s=5000) == []


def test_rewards_that_collapse_and_figures_beyond_their_bounds_are_told(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", AlertsConfig(stall_s=None, disk_free_gib=None, max_gap=0.05, max_staleness=2.0))
    assert desk.told(STARTED, *(step(number, reward_mean=0.8) for number in range(10))) == ["start: started"]
    assert desk.told(*(step(number, reward_mean=0.45) for number in range(10, 20))) == []
    desk.restart()
    assert desk.told(*(step(number, reward_mean=0.2) for number in range(20, 30))) == [
        "reward_collapse: has a mean reward of 0.200 over 10 steps, after 0.800"
    ]
    assert desk.told(step(30, log_prob_gap=0.07, staleness_mean=2.5), step(31)) == [
        "gap: has log_prob_gap 0.07 in step 30, above 0.05", "staleness: has staleness_mean 2.5 in step 30, above 2",
    ]  # fmt: skip
    assert desk.told(step(32, log_prob_gap=0.09, staleness_mean=2.5)) == []


def test_a_disk_that_is_nearly_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path / "demo", AlertsConfig(stall_s=None, reward_drop=None))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4 << 30))
    assert desk.told() == [f"disk: has 4.0 GiB left on the disk of {tmp_path / 'demo'}"]


def test_a_users_rule_is_asked_too_and_one_that_fails_or_hangs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_RULE_S", 60.0)
    desk = Desk(tmp_path / "demo", AlertsConfig(**QUIET.model_dump() | {"rules": (slow_steps, broken, endless)}))
    assert desk.told(STARTED, step(0, step_s=61.5)) == [
        "start: started", "slow_steps: takes 61.5 s a step", "broken: has a rule that failed, broken: KeyError: 'nothing'",
        "endless: has a rule that failed, endless: TimeoutError: a rule must answer within 0.05 s, got none",
    ]  # fmt: skip


def test_an_address_that_is_down_holds_no_other_up_and_gets_all_in_order_later(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", QUIET, 2)
    desk.down = {1}
    assert desk.told(STARTED, step(0)) == ["0: start: started"]
    assert desk.told(finished(0), after_s=5) == ["0: end: is done after 1.5 min"]
    desk.restart()
    desk.down = set()
    assert desk.told() == ["1: start: started", "1: end: is done after 1.5 min"]
    desk.down = {0}
    assert desk.told(STARTED) == ["1: start: started"]
    desk.down = set()
    assert desk.told(after_s=8) == []
    assert desk.told(after_s=3) == ["0: start: started"]
    desk.restart()
    assert desk.told() == [] and desk.alerts.queue == []


class Killed(BaseException):
    pass


def test_killed_before_and_behind_every_write_and_every_send_nothing_is_lost_and_one_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, kill_at, count = follow.write_json, 0, 0

    def may_die(work: Any) -> Any:
        def done(*arguments: Any) -> Any:
            nonlocal count
            count += 2
            if count - 1 == kill_at:
                raise Killed
            found = work(*arguments)
            if count == kill_at:
                raise Killed
            return found

        return done

    monkeypatch.setattr(follow, "write_json", may_die(real))
    died = True
    while died:
        kill_at, count, died = kill_at + 1, 0, False
        desk = Desk(tmp_path / str(kill_at) / "demo", QUIET)
        monkeypatch.setattr(desk.alerts, "_send", may_die(desk._send))
        try:
            desk.told(STARTED, {"kind": "failed", "cause": "x"}, finished(1))
            found = [] if (died := False) else ["start: started", "crash: has failed: x"]
        except Killed:
            died, count = True, -1000
            found, desk.taken = desk.taken, []
            desk.restart()
            found += desk.told()
        assert set(found) == {"start: started", "crash: has failed: x"} and len(found) <= 3
    assert kill_at > 8


def test_on_a_full_disk_a_message_is_sent_once_from_memory_and_kept_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, real = Desk(tmp_path / "demo", QUIET), follow.write_json

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(follow, "write_json", full)
    assert desk.told(STARTED) == ["start: started"]
    desk.down = {0}
    assert desk.told(finished(0)) == []
    monkeypatch.setattr(follow, "write_json", real)
    assert desk.told() == []
    desk.restart()
    desk.down = set()
    assert desk.told() == ["end: is done after 1.5 min"]


def test_addresses_are_secrets_that_no_setting_and_no_error_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "urls"
    file.write_text("# mine\njson://me:hunter2@host\n\nmailto://x:hunter2@example.com\nnosuch://hunter2\n")
    file.chmod(0o644)
    given = AlertsConfig(urls_file=file)
    with pytest.raises(ConfigError, match=r"alerts.urls_file must have mode 0600, got 0644"):
        addresses(given)
    file.chmod(0o600)
    assert addresses(given)[:2] == ["json://me:hunter2@host", "mailto://x:hunter2@example.com"]
    line = f"alerts.urls_file {file} must hold addresses of services that Apprise knows (https://appriseit.com), "
    module, sets = write(tmp_path), [f"alerts.urls_file={file}"]
    config = override(load(module), sets)
    assert [f.text for f in _host(config) if f.text.startswith("alerts")] == [
        line + "got others as number 3 of 3. Correct them"
    ]
    monkeypatch.setenv(VARIABLE, "json://a json://b")
    assert addresses(AlertsConfig()) == ["json://a", "json://b"]
    monkeypatch.delenv(VARIABLE)
    assert str(why_not(AlertsConfig())).startswith("alerts must know whom to tell, got no address")
    assert main(["show", str(module), "--set", sets[0]]) == 0
    assert "hunter2" not in capsys.readouterr().out
    assert unresolve(resolve(config)) == config


def test_what_is_missing_and_rules_that_cannot_be_asked_are_refused_before_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = override(load(write(tmp_path)), ["alerts={}"])
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    line = "alerts must have the package apprise, which is not installed. Install it: pip install 'rondo-rl[alerts]'"
    assert line in [finding.text for finding in _host(config)]
    with pytest.raises(ValueError, match=r"alerts.rules must have names of their own, got 'stall' twice"):
        AlertsConfig(rules=("my.module:stall",))
    rules = AlertsConfig(rules=(slow_steps, broken, "os:getcwd", number))
    report = Report()
    look_at_own(config.model_copy(update={"alerts": rules}), report)
    said = {each.text for each in report.findings if "alerts" in each.text}
    assert any("alerts.rules.0 works" in each for each in said) and any("alerts.rules.1" in each for each in said)
    assert any("alerts.rules.2 must take (recent), got os:getcwd" in each for each in said)
    assert any("alerts.rules.3 must return a message or None, got 3 before" in each for each in said)


@contextlib.contextmanager
def service(answer: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on this machine that takes Apprise's json://; (its address, what it was told)."""
    told: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answer)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"json://me:hunter2@127.0.0.1:{server.server_port}/key-hunter2?rto=60&cto=60", told
        finally:
            server.shutdown()
            thread.join()


def test_a_service_is_told_and_one_that_refuses_is_told_of_by_its_status_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with service() as (url, told), service(500) as (bad, _), caplog.at_level(logging.DEBUG):
        send = through_apprise([url, bad, "json://me:hunter2@127.0.0.1:1/key-hunter2"])
        said = [send(to, "failure", "rondo: demo: crash", "demo has failed") for to in range(3)]
    assert said == [None, "status 500", "no answer"] and "hunter2" not in caplog.text
    (only,) = told
    assert (only["title"], only["message"], only["type"]) == ("rondo: demo: crash", "demo has failed", "failure")


def test_by_hand_a_test_and_what_is_left_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write(tmp_path, ("    num_steps=4,\n", "    num_steps=4,\n    alerts={'disk_free_gib': None},\n"))
    with service() as (url, told):
        monkeypatch.setenv(VARIABLE, url)
        assert main(["alert", str(module), "--test"]) == 0
        assert capsys.readouterr().out == "address 1 of 1 (json): taken\n"
        desk = Desk(tmp_path / "demo", QUIET)
        desk.say(STARTED)
        (desk.run / "config.resolved.json").write_text(json.dumps({"alerts": {"disk_free_gib": None, "stall_s": None}}))
        assert main(["alert", str(desk.run)]) == main(["alert", str(desk.run)]) == 0
    assert [each["title"].rpartition(" ")[2] for each in told] == ["test", "start", "crash"]
    files = [path.read_text() for path in desk.run.rglob("*") if path.is_file()]
    assert files and not any("hunter2" in text for text in files)
    monkeypatch.setenv(VARIABLE, url)
    assert main(["alert", str(module), "--test"]) == 1
    assert capsys.readouterr().out.endswith("address 1 of 1 (json): not taken: no answer\n")


def test_its_process_beside_a_run_ends_when_the_run_has_and_all_is_told(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "demo", QUIET)
    (desk.run / "config.resolved.json").write_text(json.dumps({"alerts": QUIET.model_dump(mode="json")}))
    desk.say(STARTED, finished(0))
    with service() as (url, told):
        done = subprocess.run(
            [sys.executable, "-m", "rondo.launch.alert.follow", str(desk.run), "alerts"], stdin=subprocess.DEVNULL,
            env={**os.environ, VARIABLE: url}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr, len(told)) == (0, "", 2)
