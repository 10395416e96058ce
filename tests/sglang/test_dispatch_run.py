"""A whole run whose rollout spreads its requests over two servers, of which one is killed, and then both."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil

from tests.e2e.runs import finish, left_behind, read_until, start
from tests.sglang.test_run import events, line, run_dir_of


def launchers(folder: Path) -> list[psutil.Process]:
    """Of this run's servers."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if "sglang.launch_server" in text and "guard.py" not in text and str(folder) in run_dir_of(process):
            found.append(process)
    return sorted((each for each in found if each.parent() not in found), key=lambda each: each.pid)


def test_a_run_goes_on_over_the_other_server_and_through_the_end_of_both(tmp_path: Path) -> None:
    running = start(line(tmp_path, "--set", "rollout.sglang.num_servers=2"), tmp_path)
    read_until(running, "step=2/8")
    first, second = launchers(tmp_path)
    first.send_signal(signal.SIGKILL)
    read_until(running, "step=4/8")  # one is enough to go on
    second.send_signal(signal.SIGKILL)  # and without any, the run waits for the first one's successor
    ended = finish(running, tmp_path / "small", limit_s=900)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == summary["samples_admitted"] == 8 * 4 * 4
    assert summary["restarts"] == {}
    assert {event["why"] for event in events(ended.run_dir, "sglang_gone")} == {"killed by SIGKILL"}
    print("servers back after", [event["after_s"] for event in events(ended.run_dir, "sglang_back")])
    assert left_behind(tmp_path) == []
