"""Commands of `rondo` one after another in one process. They share one nursery, so that torch and transformers, which take each
command seconds, are loaded once, and what draws curves; all else of a command is its own. For runs that come to their end by
themselves: one that is to get signals is a process of its own (`runs.py`).

    code, output = rondo("check", "examples/quickstart.py")     # the fixture of tests/conftest.py
    code, output = rondo("tests.e2e.slowed", str(tmp_path))     # or a module of the tests that starts a run itself
    ended = to_the_end(rondo, command(tmp_path), tmp_path / "quickstart")
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rondo.launch import cli
from rondo.runtime.processes import cgroup
from rondo.runtime.processes.cgroup import Cgroup
from rondo.runtime.processes.guard import die_with_parent
from rondo.runtime.supervision import nursery
from rondo.runtime.supervision.nursery import Nursery
from tests.e2e.runs import ROOT, Ended, described

_END = "exit code of this command: "
Rondo = Callable[..., tuple[int, str]]


class Kept(Nursery):
    """It outlives the command that it was opened for."""

    def open(self) -> None:
        if self._process is None or self._process.poll() is not None:
            super().open()

    def close(self) -> None:
        """It leaves the control group of its run, all of which ends with that."""
        if (own := cgroup._own()) is not None:
            for pid in self.pids.values():
                Cgroup(own).add(pid)


def to_the_end(rondo: Rondo, line: Sequence[str], run_dir: Path) -> Ended:
    """The run that `line` starts, behind its end."""
    words = line[line.index("-m") + 1 :]
    code, output = rondo(*words[words[0] == "rondo.launch.cli" :])
    described(run_dir)
    return Ended(code, output, run_dir)


@contextmanager
def shell() -> Iterator[Rondo]:
    """Runs commands in the project's folder; (exit code, all that was written) of each."""
    line = [sys.executable, "-m", "tests.e2e.shell"]
    with subprocess.Popen(
        line, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        asks, tells = process.stdin, process.stdout

        def rondo(*words: str) -> tuple[int, str]:
            asks.write(json.dumps(words) + "\n")
            asks.flush()
            lines: list[str] = []
            for text in tells:
                if text.startswith(_END):
                    return int(text.removeprefix(_END)), "".join(lines)
                lines.append(text)
            raise AssertionError(f"a command must end, got the end of its process behind\n{''.join(lines)}")

        try:
            yield rondo
        finally:
            asks.close()


def main() -> None:
    die_with_parent()
    kept = Kept()
    nursery.Nursery = lambda: kept  # type: ignore[assignment, misc]
    from rondo.launch import train  # which asks for a nursery by its name
    from rondo.launch.report.plot import draw

    train._plot = lambda run: train.say(str(draw(run)))
    for line in sys.stdin:
        words: list[str] = json.loads(line)
        os.chdir(ROOT)  # a run that goes on works where it began
        try:
            if words[0].startswith("tests."):
                sys.argv = words
                runpy.run_module(words[0], run_name="__main__")
            else:
                raise SystemExit(cli.main(words))
        except SystemExit as end:
            code = end.code or 0
        print(f"{_END}{code}", flush=True)
    Nursery.close(kept)


if __name__ == "__main__":
    main()
