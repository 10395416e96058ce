"""A whole run under faults from outside: the quick start made small, its processes by what they are, and what it says.

Owns the run's process, who its victims are, and the faults that are done to them from here: signals, a control group whose memory
ends, a disk that is full. Does not own what is measured (`chaos.py`).

    with ChaosRun(folder, sets=["num_steps=1000000"]) as run:
        run.until(lambda line: line.kind == "committed step")
        run.hit(run.victim("actor"), "sigkill")

What the run says comes from its stdout, which is a pipe: it can say it when its disk is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.chaos_faults import EAT, HANG, RAISE

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.py"
SITE = Path(__file__).with_name("chaos_site")
PATIENCE_S, SGLANG_S = 300.0, 1200.0
"""For what a run says next; SGLang alone takes minutes to start on a busy processor."""
SIGNALS = {
    "sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "exception": RAISE, "hang": HANG, "oom": EAT,
    "disk_full": signal.SIGKILL,
}  # fmt: skip
ENGINES = {"engine": "sglang.launch_server", "scheduler": "sglang::scheduler"}
"""Processes of a server by a word of their command line."""
_ROOM_BYTES = 64 << 20
"""Of new memory for a process that is to run out of it."""
_SITE = """
scopes = []  # what they hold lasts as long as this does
for path in {paths!r}:
    scopes.append({{"__name__": "sitecustomize"}})
    exec(compile(open(path).read(), path, "exec"), scopes[-1])
scopes[-1]["install"]()
"""
_SERVER = """
import json, os, sys, tempfile
from pathlib import Path
from rondo.launch.serve import ServeOptions, main

settings = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
key = Path(tempfile.mkdtemp()) / "key"
key.touch(mode=0o600)
key.write_text(settings["api-key"])
sys.exit(main(ServeOptions(settings["model-path"], port=settings["port"], token_file=key, num_slots=64)))
"""
"""Stands where `sglang.launch_server` does: this house's own server, which speaks SGLang's dialect."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that the run said. `at`: seconds since the epoch, when it was read."""

    at: float
    kind: str
    told: dict[str, str]
    step: int = -1

    @property
    def group(self) -> str:
        return self.told.get("group", "")

    def is_of(self, kind: str, group: str) -> bool:
        return self.kind == kind and self.group == group


def parsed(at: float, text: str) -> Line:
    words = text.split(" ", 2)
    if len(words) > 1 and (found := re.match(r"step=(\d+)/", words[1])):
        return Line(at, "step", {}, int(found[1]))
    kind, rest = (words[1], words[2]) if len(words) > 2 else ("", text)
    with contextlib.suppress(ValueError):  # a quotation mark in a cause
        pairs = (word.split("=", 1) for word in shlex.split(rest) if "=" in word)
        return Line(at, kind, dict(pairs))
    return Line(at, kind, dict(re.findall(r"(\w+)=(\S+)", rest)))


class ChaosRun(subprocess.Popen[str]):
    """`rondo train` of the quick start, or another run, with these settings, in a session of its own. It is over behind the body,
    in any case."""

    def __init__(
        self, folder: Path, sets: Sequence[str], *, engine: str | None = None, config: Path = QUICKSTART
    ) -> None:
        """engine: the Python of SGLang for an `engine` that is a server, or "" for this house's own server in its place.
        config: the settings of another run of that name."""
        self._patience_s = SGLANG_S if engine else PATIENCE_S
        self.folder, self.run_dir = folder, folder / "quickstart"
        self.lines: list[Line] = []
        self._news: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._seen = 0
        chosen = [f"run_dir={folder}", *sets]
        if engine is not None:
            chosen += _served(folder, engine)
        command = [sys.executable, "-m", "rondo.launch.cli", "train", str(config), "--plain"]
        paths = os.pathsep.join([str(SITE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(
            [*command, *(part for text in chosen for part in ("--set", text))],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.stdout is not None
        with self.stdout:
            for text in self.stdout:
                self._news.put(parsed(time.time(), text.rstrip()))
        self._news.put(None)

    # ---- what it says -----------------------------------------------------------------------------------------------

    def until(self, wanted: Callable[[Line], bool], limit_s: float | None = None) -> Line:
        """The next line that is wanted. RuntimeError where the run ends before, TimeoutError where it does not come."""
        limit_s = self._patience_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while True:
            while self._seen < len(self.lines):
                self._seen += 1
                if wanted(self.lines[self._seen - 1]):
                    return self.lines[self._seen - 1]
            try:
                line = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                last = "\n".join(f"{line.kind} {line.told}" for line in self.lines[-8:])
                raise TimeoutError(f"a run must say what is waited for within {limit_s:g} s, got:\n{last}") from None
            if line is None:
                self._news.put(None)
                last = "\n".join(f"{line.kind} {line.told}" for line in self.lines[-8:])
                raise RuntimeError(f"a run must go on, got its end with {self.wait(PATIENCE_S)}:\n{last}")
            self.lines.append(line)

    def steps(self, number: int, limit_s: float | None = None) -> None:
        """Until so many more steps were told."""
        for _ in range(number):
            self.until(lambda line: line.kind == "step", limit_s)

    def skip(self) -> None:
        """What was said until now is not waited for."""
        while not self._news.empty():
            line = self._news.get()
            if line is None:
                self._news.put(None)
                break
            self.lines.append(line)
        self._seen = len(self.lines)

    # ---- its processes ----------------------------------------------------------------------------------------------

    def victim(self, role: str) -> psutil.Process:
        """The process of a role, of a service, or of what they have started, that lives now."""
        if role == "nursery":
            return self._nursery()
        if role == "reward_worker":
            leaves = self._below_rollout("pool_worker")
            parents = {above for _, above in leaves}
            return next(each for each, _ in leaves if each.pid not in parents)
        if role in ENGINES:
            return self._below_rollout(ENGINES[role])[0][0]
        return self._newest(role if role in ("coordinator", "store") else f"{role}-0")

    def _below_rollout(self, word: str) -> list[tuple[psutil.Process, int]]:
        """(process, its parent) of those with `word` in their command line that live: others end while they are listed."""
        found = []
        for each in self._newest("rollout-0").children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(word in part for part in each.cmdline()):
                    found.append((each, each.ppid()))
        return found

    def _newest(self, group: str) -> psutil.Process:
        """The last registered process of a group: of several ranks the last one's."""
        if not any(line.is_of("registered", group) for line in self.lines):
            self.until(lambda line: line.is_of("registered", group))
        self.pump()
        found = [line.told for line in self.lines if line.is_of("registered", group)]
        return psutil.Process(int(found[-1]["pid"]))

    def _nursery(self) -> psutil.Process:
        """What has loaded for all, and not what was forked of it."""
        self.pump()
        started = {int(line.told["pid"]) for line in self.lines if line.kind == "starting"}
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid not in started and any(
                    word.endswith("supervision/nursery.py") for word in child.cmdline()
                ):
                    return child
        raise LookupError("a run must have a nursery, got none that lives")

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All that live, by what they are."""
        self.pump()
        known = {self.pid: "supervisor"}
        for line in self.lines:
            if line.kind == "started" and "janitor_pid" in line.told:
                known[int(line.told["janitor_pid"])] = "janitor"
            elif line.kind in ("starting", "registered"):
                of = (
                    ""
                    if line.group in ("coordinator", "store")
                    else "root of "
                    if line.kind == "starting"
                    else "worker of "
                )
                known[int(line.told["pid"])] = f"{of}{line.group}"
        found: dict[str, list[psutil.Process]] = {}
        above = [psutil.Process(self.pid)]
        for process in above:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(known[process.pid], []).append(process)
                    for child in process.children():
                        known.setdefault(child.pid, _below(known[process.pid]))
                        above.append(child)
        return found

    def pump(self) -> None:
        """Takes in what was said, and waits for none of it."""
        seen = self._seen
        self.skip()
        self._seen = seen

    # ---- faults -----------------------------------------------------------------------------------------------------

    def hit(self, victim: psutil.Process, fault: str) -> tuple[float, str]:
        """(when, how)."""
        how = ""
        if fault == "oom":
            how = starve(victim.pid)
        at = time.time()
        victim.send_signal(SIGNALS[fault])
        return at, how

    # ---- its end ----------------------------------------------------------------------------------------------------

    def stop(self) -> dict[str, Any]:
        """Asks it to save and leave; its summary."""
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(RuntimeError):
            self.until(lambda line: False)
        summary: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_bytes())
        return summary | {"code": self.wait(PATIENCE_S)}

    def end(self) -> None:
        """SIGKILL for it and all that it has started, where it is still there."""
        if self.poll() is None:
            tree = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.wait(PATIENCE_S)
            psutil.wait_procs(tree[1:], PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _below(kind: str) -> str:
    """What a process is that has not told, by what is above it."""
    if kind == "supervisor":
        return "nursery"
    for above, below in (
        ("root of", "torchrun of"),
        ("torchrun of", "proxy of"),
        ("worker of", "pool of"),
        ("pool of", "pool worker of"),
    ):
        if kind.startswith(above):
            return kind.replace(above, below)
    return f"below {kind}"


def left_behind(folder: Path) -> list[str]:
    """What was started for a run in `folder` and is still there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RONDO_RUN_DIR", "").startswith(str(folder)):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def _served(folder: Path, python: str) -> Iterator[str]:
    """The settings of a run whose engine is a server that it starts."""
    if not python:
        package = folder / "served" / "sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "launch_server.py").write_text(_SERVER)
        script = folder / "served" / "python"
        # Asked with -I which SGLang it has, it has the one whose dialect is spoken.
        script.write_text(f'#!/bin/sh\n[ "$1" = -I ] && echo 0.5.23 && exit\nexec {sys.executable} "$@"\n')
        script.chmod(0o755)
        python = str(script)
        paths = os.pathsep.join([str(package.parent), str(SITE), str(ROOT)])
        yield f"rollout.sglang.environment={json.dumps({'PYTHONPATH': paths})}"
        yield "rollout.sglang.checksums=False"
    else:
        shim, site = ROOT / "tests" / "sglang" / "shim", folder / "site"
        site.mkdir()
        loaded = (str(shim / "sitecustomize.py"), str(SITE.with_name("chaos_faults.py")))
        (site / "sitecustomize.py").write_text(_SITE.format(paths=loaded))
        yield f"rollout.sglang.environment={json.dumps({'PYTHONPATH': f'{site}{os.pathsep}{shim}'})}"
    yield f"rollout.sglang.python={python}"


# ---- memory and disk ------------------------------------------------------------------------------------------------------


def starve(pid: int) -> str:
    """Gives a process no more than a little new memory, by the kernel where it lets us; how, in words."""
    for folder, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = folder / f"rondo-chaos-{pid}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / file).write_text(str(_ROOM_BYTES))
            (group / "cgroup.procs").write_text(str(pid))
            return "killed by the kernel, in a control group without more memory"
        with contextlib.suppress(OSError):
            group.rmdir()
    held = psutil.Process(pid).memory_info().vms
    resource.prlimit(pid, resource.RLIMIT_AS, (held + _ROOM_BYTES, held + _ROOM_BYTES))
    return "MemoryError, under a limit of its address space"


def forget_groups() -> None:
    """Control groups of processes that are gone."""
    for folder in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        for group in folder.glob("rondo-chaos-*"):
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A folder on a disk of so many bytes. PermissionError where this machine lets us mount none."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(prefix="rondo-chaos-disk-") as name:
        if libc.mount(b"rondo-chaos", name.encode(), b"tmpfs", 0, f"size={num_bytes}".encode()) != 0:
            raise PermissionError(ctypes.get_errno(), "a disk of its own must be mounted, as root can")
        try:
            yield Path(name)
        finally:
            libc.umount2(name.encode(), 2)


def fill_for(disk: Path, seconds: float) -> None:
    """No byte is free on it for so long, whatever others free meanwhile; returns once that has begun."""
    path, begun, until = disk / "ballast", threading.Event(), time.monotonic() + seconds

    def fill() -> None:
        with path.open("ab", buffering=0) as file:
            while time.monotonic() < until:
                with contextlib.suppress(OSError):
                    while file.write(b"\1" * (1 << 16)):
                        pass
                begun.set()
                time.sleep(0.02)
        path.unlink()

    threading.Thread(target=fill).start()
    begun.wait(seconds)
