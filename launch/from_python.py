"""`rondo.train`: the run that `rondo train` starts, from a notebook or a script.

    trained = rondo.train(config)              or a config module: rondo.train("quickstart.py", ["train.lr=1e-5"])
    trained.path, trained.summary
    trained = await rondo.train_async(config)  where an event loop runs that has more to do

Owns a process beside the caller's: a notebook has an event loop and handlers of its own, and a script has threads. What that
process prints, the caller prints. Does not own the run.

Invariant: the run does not outlive the caller: an interrupt is Ctrl-C to it, the caller's death SIGTERM; it saves and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat

from rondo.launch.config import RunConfig, resolve
from rondo.launch.report.summary import Summary, read
from rondo.launch.report.view import say
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.processes.guard import die_with_parent, module_command
from rondo.runtime.section import references

_TOLD = "run directory: "
_COMMAND = module_command("rondo.launch.from_python")


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that has ended. `exit_code`: 0 done; 75 stopped and saved, `rondo resume` goes on."""

    path: Path
    """The run directory."""
    exit_code: int
    summary: Summary | None


async def train_async(config: RunConfig | Path | str, sets: Sequence[str] = ()) -> Trained:
    """Do the same as `train`, in a thread, so that the event loop goes on. If it is cancelled, the run saves and ends first."""
    started, cancelled = list[subprocess.Popen[str]](), threading.Event()

    def on_start(process: subprocess.Popen[str]) -> None:
        started.append(process)
        if cancelled.is_set():
            process.send_signal(signal.SIGINT)

    run = asyncio.ensure_future(asyncio.to_thread(train, config, sets, on_start=on_start))
    try:
        return await asyncio.shield(run)
    except asyncio.CancelledError:
        cancelled.set()
        for process in started:
            process.send_signal(signal.SIGINT)
        await asyncio.wait([run])
        raise


def train(
    config: RunConfig | Path | str,
    sets: Sequence[str] = (),
    *,
    on_start: Callable[[subprocess.Popen[str]], object] = lambda _: None,
) -> Trained:
    """Run settings, or a config module with changes as of `--set`, to the end. Raises ConfigError if nothing was started,
    RondoError with the cause if the run failed, and KeyboardInterrupt after an interrupted run has saved. `on_start` is called
    with the run's process. An event loop of the calling thread stands still meanwhile; `train_async` is for those."""
    with tempfile.TemporaryDirectory(prefix="rondo-settings-") as folder, tempfile.TemporaryFile("w+") as errors:
        file = written(config, Path(folder)) if isinstance(config, RunConfig) else Path(config)
        changes = [part for text in sets for part in ("--set", text)]
        say("a process of its own looks at settings, data and model, and trains")
        command = [*_COMMAND, str(os.getpid()), "train", str(file), "--plain", *changes]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        on_start(process)
        path, code, interrupted = _followed(process)
        errors.seek(0)
        told = errors.read().strip()
    if interrupted:
        raise KeyboardInterrupt
    summary = read(path) if path is not None else None
    cause = (summary.first_cause if summary is not None else None) or told or "no cause told"
    if code == 2:
        raise ConfigError(cause)
    if path is None or code not in (0, 75):
        raise RondoError(f"the run must end well, got exit code {code}: {cause}. Look into {path}, and `rondo explain`")
    return Trained(path, code, summary)


def written(config: RunConfig, folder: Path) -> Path:
    """The settings as a config module. ConfigError for a function that no file holds."""
    for setting, reference in references(config):
        if reference.startswith("__main__:"):
            raise ConfigError(
                f"{setting} must be a function of a file, since other processes load it, got {reference.partition(':')[2]} of "
                "this session. Write it into a file (`%%writefile rewards.py` in a notebook) and import it from there"
            )
    file = folder / "settings.py"
    tree = pformat(resolve(config), width=110, sort_dicts=False)
    file.write_text(f"from rondo.launch.config import unresolve\n\nconfig = unresolve(\n{tree}\n)\n")
    return file


def _followed(process: subprocess.Popen[str]) -> tuple[Path | None, int, bool]:
    """(run directory, exit code, whether it was interrupted) at the end; what it prints is printed."""
    path, interrupted = None, False
    with process, contextlib.closing(process.stdout) as output:  # type: ignore[type-var]
        while True:
            try:
                for line in output:  # type: ignore[union-attr]
                    if line.startswith(_TOLD):
                        path = Path(line.removeprefix(_TOLD).partition("  admin: ")[0].strip())
                    say(line.removesuffix("\n"))
                return path, process.wait(), interrupted
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    from rondo.launch.cli import main

    sys.exit(main(sys.argv[2:]))
