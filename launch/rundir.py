"""RunDir: the folder of one run, what lies where in it, and which process owns it.

Owns the layout, the claim on the folder and the record of who runs in it. Does not own the files' contents: each is
written by the piece that knows it. Invariant: at most one live process owns a run directory; the kernel drops the claim
when that process ends, however it ends, so nothing stale is ever left to clean. Whoever asks who owns it takes no lock.

    runs/latest -> quickstart
    runs/quickstart/
      config.py  code/  config.resolved.json (0600)  environment.json (0600)  format.json  summary.json
      manifest.json (0600)  git.diff (0600)
      supervisor.json (0600, while it runs)  view.json (0600, of a dashboard)
      best -> checkpoints/step_000040  best.json  after_save.json  optimizer_resets.json
      metrics.jsonl  events.jsonl  timeline/  logs/attempt_0/  journal/  samples/  checkpoints/  dumps/
      episodes/ (turns of those that are not whole)
      index/ (what a dashboard has read)

A name that has been used gets the next number (`runs/quickstart-2`); a name whose run is alive is refused.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.machine import machine, said_by
from rondo.runtime import formats
from rondo.runtime.checkpoints import MARKER, complete, newest_whole, set_broken_aside, verify, version_of
from rondo.runtime.closing import Closing
from rondo.runtime.errors import ConfigError, CorruptData, RondoError
from rondo.runtime.records.record import write_whole
from rondo.runtime.records.telling import telling

CONFIG, ENVIRONMENT = "config.resolved.json", "environment.json"
FORMAT = "format.json"
DIFF = "git.diff"
"""What files of the repository that a run was started in had that its commit does not."""
BEST = "best"
"""A link to the best checkpoint, and its name."""
PRIVATE = 0o600
"""Of what may hold secrets: settings hold environments of servers, and command lines hold settings."""
_LOCK = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: type, whence, start, length, pid."""
_DIFF_BYTES = 4 << 20
_FOLDERS = ("logs", "journal", "samples", "checkpoints", "dumps")
_PACKAGES = (
    "rondo-rl",
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "pydantic",
    "aiohttp",
    "uvloop",
    "datasets",
    "pyarrow",
)


@dataclass(frozen=True, slots=True)
class SupervisorRecord:
    """Who runs in a run directory, and how to reach it. Written with mode 0600."""

    pid: int
    rt_dir: str
    admin_host: str
    admin_port: int
    token_path: str
    admin_cert: str | None = None
    """The certificate that it shows; None where it speaks without TLS."""


class RunDir(Closing):
    """A run directory, claimed by this process. Made by `create` or `claim`; a context manager that lets go of it."""

    def __init__(self, path: Path, claim_fd: int) -> None:
        self.path = path
        self._claim_fd: int | None = claim_fd

    @classmethod
    def create(
        cls, parent: Path, name: str, resolved: dict[str, Any], code: Path | None = None,
        around: Mapping[str, Any] | None = None, *, latest: bool = True,
    ) -> RunDir:  # fmt: skip
        """Makes and claims a new run directory under `parent`, the `latest` there, and moves the folder of `code` into it.
        `around`: the `surroundings`, where they are known already. ConfigError when a run of that name is alive."""
        number = 1
        try:
            parent.mkdir(parents=True, exist_ok=True)
            while True:
                path = parent / (name if number == 1 else f"{name}-{number}")
                if (
                    number > 1
                    and (path / CONFIG).is_file()
                    and read_json(path / CONFIG).get("name") != resolved.get("name")
                ):
                    number += 1  # it is of a run that is called so, which may be alive
                    continue
                path.mkdir(exist_ok=True)
                made = cls(path, _claim(path))
                if not made.config_json.exists():
                    break
                made.close()
                number += 1
            made._fill(resolved, code, around)
            if latest:
                point(parent / "latest", made.path.name)
        except OSError as error:
            raise ConfigError(
                f"run_dir must be a folder to write to, got {error.filename or parent}: {error.strerror}. Choose another"
            ) from error
        return made

    @staticmethod
    def surroundings() -> dict[str, Any]:
        """Of an environment, what takes a quarter of a second to find: git states, and all that is installed."""
        told = [each.metadata for each in importlib.metadata.distributions()]
        installed = {each["Name"]: each["Version"] for each in told}
        return {"git": _git(), "rondo": _git(Path(__file__).parent), "installed": installed}

    def _fill(self, resolved: dict[str, Any], code: Path | None, around: Mapping[str, Any] | None) -> None:
        """The settings last: a directory without them is none yet."""
        for folder in _FOLDERS:
            (self.path / folder).mkdir(0o700 if folder == "samples" else 0o777, exist_ok=True)  # prompts and answers
        if code is not None:
            from rondo.launch.code import FOLDER, main_file

            shutil.move(code, self.path / FOLDER)
            (self.path / "config.py").symlink_to(Path(FOLDER, main_file(self.path / FOLDER)))
        write_json(self.path / ENVIRONMENT, environment(self.path, around), PRIVATE)
        if changes := _git_says("diff", "HEAD"):
            write_whole(self.path / DIFF, changes.encode()[:_DIFF_BYTES], PRIVATE)
        write_json(self.path / FORMAT, formats.stamp(formats.RUN))
        self.write_settings(resolved)

    def write_settings(self, resolved: dict[str, Any]) -> None:
        write_json(self.config_json, resolved, PRIVATE)

    @classmethod
    def claim(cls, path: Path) -> RunDir:
        """Claims a run directory that exists, to go on in it. ConfigError when it is none, or its run is alive."""
        path = existing_run(path)
        return cls(path, _claim(path))

    @property
    def config_json(self) -> Path:
        return self.path / CONFIG

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def next_attempt(self) -> int:
        """One more than the newest attempt that left logs; 0 at first."""
        numbers = [int(folder.name.removeprefix("attempt_")) for folder in (self.path / "logs").glob("attempt_*")]
        return max(numbers, default=-1) + 1

    def write_supervisor(
        self, *, rt_dir: Path, admin_host: str, admin_port: int, token_path: Path, admin_cert: Path | None = None
    ) -> None:
        """Tells `status` and `stop` how to reach this process."""
        cert = None if admin_cert is None else str(admin_cert.resolve())
        record = SupervisorRecord(os.getpid(), str(rt_dir), admin_host, admin_port, str(token_path), cert)
        write_json(self.path / "supervisor.json", asdict(record), PRIVATE)

    def close(self) -> None:
        """Lets go of the directory. Safe to call twice."""
        if self._claim_fd is not None:
            (self.path / "supervisor.json").unlink(missing_ok=True)
            os.close(self._claim_fd)
            self._claim_fd = None


def runs_below(path: Path) -> list[Path]:
    """Return the run directories in a folder that is none itself, and in folders of it, by name; links aside."""
    found = [] if (path / "config.resolved.json").is_file() else [*path.glob("*/config.resolved.json")]
    found += (
        path.glob("*/*/config.resolved.json") if path.is_dir() and not (path / "config.resolved.json").is_file() else ()
    )
    return sorted(file.parent for file in found if not file.parent.is_symlink() and not file.parent.parent.is_symlink())


def existing_run(path: Path) -> Path:
    """The real path of a run directory. ConfigError when there is none, or a newer release made it."""
    if not (path / CONFIG).is_file():
        parent = path.parent
        runs = sorted(found.parent.name for found in parent.glob("*/config.resolved.json")) if parent.is_dir() else []
        known = f"Runs in {parent}: {', '.join(runs)}" if runs else f"There are no runs in {parent}"
        raise ConfigError(f"RUN must be a run directory, got {path}. {known}")
    path = path.resolve()
    if (path / FORMAT).exists():
        formats.check(read_json(path / FORMAT), formats.RUN, path)
    return path


def checkpoint_of(source: Path, name: str | None = None) -> tuple[Path, Path]:
    """(run, checkpoint): of the run `source` the newest whole one, or the one that `name` says, "best" or "step_000050"; or the
    checkpoint that `source` is. Its files are what was written. ConfigError where there is none, or only a newer release can read
    it."""
    if (source / MARKER).is_file():
        if name is not None:
            raise ConfigError(
                f"--checkpoint must not be set beside a checkpoint, got {name!r} and {source}. Name its run"
            )
        found: Path | None = source.resolve()
        run = existing_run(source.resolve().parent.parent)
    else:
        run = existing_run(source)
        checkpoints = run / "checkpoints"
        if name is None:
            broken: list[CorruptData] = []
            found = newest_whole(checkpoints, lambda _, error: broken.append(error))
            lines = [f"passed over: {error}" for error in broken]
            if found is None:
                text = f"RUN must have a whole checkpoint, got {run} without one. Wait for it to save"
                raise ConfigError("\n".join([text, *lines]))
            for line in lines:
                print(line, file=sys.stderr)
            return run, found
        found = next((each for each in complete(checkpoints) if name in (each.name, str(version_of(each)))), None)
        if name == BEST and (run / BEST / MARKER).is_file():
            found = (run / BEST).resolve()
        if found is None:
            known = [each.name for each in complete(checkpoints)] + [BEST] * (run / BEST).exists()
            raise ConfigError(
                f"--checkpoint must name one of {', '.join(known) or 'none'} of {run}, got {name!r}. Name another"
            )
    assert found is not None
    try:
        verify(found)
    except CorruptData as error:
        raise ConfigError(str(error)) from error
    return run, found


def whole_to_go_on_from(run: Path, say: Callable[[str], object]) -> Path | None:
    """The newest checkpoint of `run` whose files are what was written; newer ones are set aside, a line each. For the owner of
    the run directory."""

    def set_aside(folder: Path, error: CorruptData) -> None:
        say(f"set aside as {set_broken_aside(folder).relative_to(run)}: {error}")

    return newest_whole(run / "checkpoints", set_aside)


def newest_run(parent: Path, name: str) -> Path | None:
    """The run directory of the run `name` that was started last: of `demo` and `demo-2` the second, where that is another start
    of `demo` by the name in its settings, and no run that is called demo-2. None where there is none."""
    numbered = re.compile(rf"{re.escape(name)}(-[1-9]\d*)?", re.ASCII)
    runs = [path for path in parent.glob("*/") if numbered.fullmatch(path.name) and not path.is_symlink()]
    runs = [path for path in runs if (path / CONFIG).is_file() and read_json(path / CONFIG).get("name") == name]
    return max(runs, key=lambda path: read_json(path / ENVIRONMENT).get("time", 0.0), default=None)


def owner(path: Path) -> int | None:
    """The pid of the live process that owns a run directory, or None; 0 of one that has not said it yet."""
    try:
        fd = os.open(path / ".owner", os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        held = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0)))
        return _read_pid(fd) if held[0] != fcntl.F_UNLCK else None
    finally:
        os.close(fd)


def supervisor_record(path: Path) -> SupervisorRecord | None:
    """How to reach the run that is alive in a run directory; None when none is, while it starts, and while it ends: its token
    goes with its roles."""
    try:
        record = SupervisorRecord(**read_json(path / "supervisor.json"))
    except (ConfigError, TypeError):
        return None
    return record if record.pid == owner(path) and Path(record.token_path).exists() else None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """ConfigError for a file of a run directory that cannot be read, or is not what the run wrote, in the place of whatever
    reading it in the body raises."""
    try:
        yield
    except RondoError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} must be as the run wrote it, got {type(error).__name__}: {error}. Start another run, or put a copy of the "
            "file there"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run directory. ConfigError where there is none, or not a whole one."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{path.stat().st_size} bytes that are not: {error}"
        raise ConfigError(
            f"{path} must be whole JSON, got {why}. Start another run, or put a copy of the file there"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must be a JSON object, got {type(found).__name__}. Start another run")
    return found


def changed_settings(environment: Mapping[str, Any]) -> dict[str, str]:
    """What resumes changed, as an environment.json says: "train.lr (step 40)" -> "0.001 -> 0.0005"."""
    return {
        f"{name} (step {each['version']})": f"{was} -> {now}"
        for each in environment.get("changes", ())
        for name, (was, now) in each["settings"].items()
    }


def write_json(path: Path, data: Any, mode: int = 0o644) -> None:
    """Writes a whole file or none, also where the power fails."""
    write_whole(path, orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS) + b"\n", mode)


def environment(run: Path, around: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a reader of the run needs to know about where it ran: command, versions, machine, the `surroundings`, `around`;
    also the versions of what its code imports."""
    from rondo.launch.code import imported  # not for whoever only reads a run directory

    versions = {name: version for name in _PACKAGES if (version := formats.version_of(name)) is not None}
    return {
        "time": time.time(),
        "command": sys.argv,
        "cwd": str(Path.cwd()),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "num_cores": len(os.sched_getaffinity(0)),
        "machine": machine(),
        **(RunDir.surroundings() if around is None else around),
        **imported(run, versions),
    }


def _claim(path: Path) -> int:
    fd = os.open(path / ".owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
    except (BlockingIOError, PermissionError):
        pid = _read_pid(fd)
        os.close(fd)
        raise ConfigError(
            f"the run directory {path} must have no other owner, got a live run with pid {pid}. "
            f"Stop it with `rondo stop {path}`, or choose another name with --set name=..."
        ) from None
    with telling(".owner"):  # on a full disk there is an owner whose pid nobody knows
        os.pwrite(fd, b"%-20d\n" % os.getpid(), 0)
    return fd


def _read_pid(fd: int) -> int:
    # Between its claim and its pid a process is alive but has not said which it is.
    return int(os.pread(fd, 32, 0) or 0)


def point(link: Path, target: str) -> None:
    """Makes `link` point to `target`, at once: never missing in between."""
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)


def _git(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit and whether files differ from it, of the working directory or `folder`; None outside a repository."""
    commit = _git_says("rev-parse", "HEAD", folder=folder)
    if commit is None:
        return None
    return {
        "commit": commit.strip(),
        "changed": bool((_git_says("status", "--porcelain", folder=folder) or "").strip()),
    }


def _git_says(*arguments: str, folder: Path | None = None) -> str | None:
    return said_by(["git", *arguments], 5.0, folder)
