"""A run that is signalled at any moment leaves nothing: no process, folder, name in shared memory, claim, or half of a file.

Its leader gets every signal that asks for a stop, and SIGKILL, from its first moment on: while it looks at the settings, loads,
warms up, steps, saves, and writes its summary. In full with RONDO_TEST_LONG=1.
"""

from __future__ import annotations

import contextlib
import getpass
import signal
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pytest

from rondo.launch.rundir import RunDir, owner
from rondo.runtime.checkpoints import complete, is_named
from rondo.runtime.errors import ConfigError
from tests.e2e.runs import PATIENCE_S, Running, command, finish, left_behind, read_until, start
from tests.strength import LONG

SHARED = Path("/dev/shm")
GROUPS = "[{'name': 'all', 'roles': ['rollout', 'actor', 'advantages', 'reference', 'actor_fwd']}]"
SETS = (f"role_groups={GROUPS}", "train.save_every=2", "num_steps=8", "sft.steps=4")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL)


def after(seconds: float) -> Callable[[Running], None]:
    """A moment before the run says anything."""

    def moment(run: Running) -> None:
        with contextlib.suppress(Exception):
            run.wait(seconds)

    return moment


def line(text: str) -> Callable[[Running], None]:
    def moment(run: Running) -> None:
        read_until(run, text)

    return moment


MOMENTS: dict[str, Callable[[Running], None]] = {
    "first": after(0.02),
    "imports": after(0.4),
    "checks": after(2.0),
    "directory": line("run directory:"),
    "nothing registered": line(" starting "),
    "loads": line(" registered "),
    "warms up": line(" sft "),
    "first step": line(" step=1/"),
    "saves": line(" checkpoint "),
    "a step": line(" step=5/"),
    "last step": line(" step=8/"),
    "leaves": line(" done "),
    "finished": line(" finished "),
    "told": line("samples_trained"),
}
CASES = [(moment, number) for moment in MOMENTS for number in SIGNALS]


def gone(pids: list[psutil.Process]) -> list[psutil.Process]:
    """What of a killed leader's processes is still there in the end: the last ones go after it."""
    _, left = psutil.wait_procs(pids, PATIENCE_S)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def halves(run_dir: Path) -> list[str]:
    """Files of a run that somebody could take for whole, and are not."""
    found = []
    for path in run_dir.rglob("*.json"):
        if not any(part.startswith(".") for part in path.relative_to(run_dir).parts) and path.is_file():
            try:
                orjson.loads(path.read_bytes())
            except orjson.JSONDecodeError:
                found.append(str(path))
    checkpoints = run_dir / "checkpoints"
    whole = set(complete(checkpoints))
    return found + [str(path) for path in checkpoints.glob("*") if is_named(path) and path not in whole]


@pytest.mark.skipif(not LONG, reason="a run for each moment and signal: RONDO_TEST_LONG=1")
@pytest.mark.parametrize(("moment", "number"), CASES, ids=lambda value: str(getattr(value, "name", value)))
def test_a_signal_at_any_moment_leaves_nothing(
    moment: str, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has no ears for it
    run = start(command(tmp_path, sets=SETS), tmp_path)
    signal.signal(signal.SIGINT, heard)
    MOMENTS[moment](run)
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(number)
    run_dir = tmp_path / "quickstart"
    ended = finish(run, run_dir)
    codes = {signal.SIGKILL: {-9, 0}, signal.SIGINT: {0, 1, 75, 130, -2}}
    assert ended.code in codes.get(number, {0, 1, 75, -number}), ended.output
    assert gone(below) == []
    deadline = time.monotonic() + PATIENCE_S
    while number == signal.SIGKILL and left_behind(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)  # what the janitor and pdeathsigs end
    assert left_behind(tmp_path) == []
    if number != signal.SIGKILL:
        kept = {f"torchinductor_{getpass.getuser()}"}  # torch's own cache, from one run to the next
        assert {path.name for path in temporary.iterdir()} <= kept, ended.output
    own = {str(run.pid), *(str(process.pid) for process in below)}
    assert [each for each in SHARED.iterdir() if own & set(each.name.split("_"))] == []
    if run_dir.exists():
        assert halves(run_dir) == [] and owner(run_dir) is None
        if (run_dir / "config.resolved.json").exists():
            with contextlib.suppress(ConfigError), RunDir.claim(run_dir):
                pass
        assert (ended.code == 75) <= bool(complete(run_dir / "checkpoints"))
