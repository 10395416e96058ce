"""`rondo.train`: what is started, what is told, and what an interrupt does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rondo
from rondo.launch import from_python
from rondo.launch.config import load
from rondo.runtime.errors import ConfigError, RondoError
from tests.launch import configs
from tests.strength import LONG

PLAYED = """
import signal, sys, time
def leave(number, frame):
    print("saves", flush=True)
    sys.exit(75)
signal.signal(signal.SIGINT, leave)
print("run directory: runs/demo  admin: http://127.0.0.1:1", flush=True)
{then}
"""


def played(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    monkeypatch.setattr(from_python, "_COMMAND", (sys.executable, "-S", "-c", PLAYED.format(then=then)))


def test_the_face_of_the_package_has_it_and_loads_no_torch() -> None:
    code = "import rondo, sys; rondo.train; print(rondo.Trained.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Trained False\n"


def test_settings_become_a_module_that_makes_them_again(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), ["train.lr=3e-5"])
    (tmp_path / "made").mkdir()
    assert load(from_python.written(config, tmp_path / "made")) == config


def test_a_function_of_a_session_is_refused_with_a_way_to_write_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(configs.write(tmp_path))
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "here", lambda: 1.0, raising=False)
    changed = config.model_copy(update={"reward": config.reward.model_copy(update={"function": "__main__:here"})})
    with pytest.raises(
        ConfigError, match=r"^reward.function must be a function of a file, .* got here of this session"
    ):
        rondo.train(changed)


def test_wrong_settings_are_an_error_with_the_lines_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rondo.train(configs.write(tmp_path), ["train.lrr=1"])
    assert str(caught.value) == "train.lrr must be a field of TrainConfig, got an unknown name. Did you mean 'lr'?"


def test_a_run_that_ends_is_told_with_its_directory_and_one_that_fails_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "print('step=1')")
    assert rondo.train("config.py") == rondo.Trained(Path("runs/demo"), 0, None)
    assert capsys.readouterr().out.splitlines()[2:] == ["step=1"]
    played(monkeypatch, "sys.exit('no room')")
    with pytest.raises(RondoError, match=r"got exit code 1: no room. Look into runs/demo"):
        rondo.train("config.py")


def test_an_interrupt_is_handed_on_and_raised_when_the_run_has_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "time.sleep(60)")

    def interrupts(text: str) -> None:
        sys.stdout.write(text + "\n")
        if text.startswith("run directory"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(from_python, "say", interrupts)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
    try:
        with pytest.raises(KeyboardInterrupt):
            rondo.train("config.py")
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out.endswith("saves\n")


async def test_an_event_loop_goes_on_beside_a_run_and_a_cancelled_run_saves_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, "time.sleep(60)")
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def says(text: str) -> None:
        sys.stdout.write(text + "\n")
        if text.startswith("run directory"):
            loop.call_soon_threadsafe(begun.set)

    monkeypatch.setattr(from_python, "say", says)
    run = asyncio.create_task(rondo.train_async("config.py"))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert capsys.readouterr().out.endswith("saves\n")
    played(monkeypatch, "print('step=1')")
    assert await rondo.train_async("config.py") == rondo.Trained(Path("runs/demo"), 0, None)


@pytest.mark.skipif(not LONG, reason="a whole run")
@pytest.mark.parametrize("how", ["-c", "-i"])
def test_a_whole_run_from_a_session(tmp_path: Path, how: str) -> None:
    configs.write(tmp_path, ("role_groups=fully_async()", "role_groups=colocate()"))
    code = "import rondo\nfrom demo_config import config\nprint(rondo.train(config).summary.steps)\n"
    command = [sys.executable, "-c", code] if how == "-c" else [sys.executable, "-i"]
    given = code if how == "-i" else None
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "4" and "run directory: " in done.stdout
