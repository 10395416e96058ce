"""Jail: a command in namespaces of its own, under limits, below a subreaper.

    python -P -m rondo.runtime.sandbox.jail PARENT_PID SPEC_FD

    subreaper -> this -> first process of the namespaces -> the command, as another user, without capabilities

Owns what the command sees: its own processes, no network, and a file system in memory with its files, and Python and the system's
programs, which are read-only. Does not own when it is to end (`sandbox.py`) or what ends with it (`subreaper.py`). Calls the
kernel itself: batch nodes and containers have no bwrap, and `unshare` sets neither limits nor a root.

Namespaces need Linux 5.12 and leave to make them. Where there is none the jail fails before the command runs, and says why in
the file SPEC_FD; with the isolation "limits" the command has limits alone.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from rondo.runtime.processes.guard import die_with_parent
from rondo.runtime.processes.subreaper import keep
from rondo.runtime.supervision.proxy import end_as

BOX = "/box"
NOT_STARTED = 127
_NEW = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""Users, mounts, processes, network, IPC, names."""
_BIND, _RECURSIVE, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = 4096, 16384, 1 << 18, 2, 4, 8
_DETACH = 2
_MOUNT_SETATTR, _ALL_BELOW, _NO_WRITE, _NO_SETUID, _NO_DEVICES = 442, 0x8000, 1, 2, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NO_NEW_PRIVS, _DUMPABLE = 38, 4
_ME = 1000
"""The command's user in its namespace."""
_STRANGER, _NOBODY = 1 << 30, 65534
"""Its user outside, where this is root: a number that nobody has, by which the kernel counts its processes."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ROOT = "/sys"
"""Where the new root is made: a folder that every machine has, and no interpreter lies in."""
_libc = ctypes.CDLL(None, use_errno=True)


def main(parent: str, spec_fd: str) -> None:
    fd = int(spec_fd)
    _show(False)
    keep(int(parent), ())
    spec = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    os.ftruncate(fd, 0)
    try:
        _in_namespaces(spec, fd) if spec["isolation"] == "namespaces" else _limited(spec)
    except OSError as error:
        _fail(fd, error)


def _fail(fd: int, error: OSError) -> None:
    os.pwrite(fd, json.dumps({"error": str(error)}).encode(), 0)
    os._exit(NOT_STARTED)


def _in_namespaces(spec: dict[str, Any], fd: int) -> None:
    is_root = os.geteuid() == 0
    _enter(is_root)
    if (first := os.fork()) == 0:
        try:
            die_with_parent(0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the first process of a namespace does not hear then
            _mount(spec)
            os.chdir(BOX)
            _write(spec["files"], (_ME, _ME))
            if (command := os.fork()) == 0:
                os.setsid()
                if is_root:
                    os.setgroups([])
                    os.setresgid(_ME, _ME, _ME)
                    os.setresuid(_ME, _ME, _ME)
                _start(spec, spec["num_processes"])
            while (ended := os.wait())[0] != command:
                pass
            os.pwrite(fd, json.dumps({"status": ended[1]}).encode(), 0)
            os._exit(0)  # and with it all of the namespace, before anybody can see it end
        except OSError as error:
            _fail(fd, error)
    _, status = os.waitpid(first, 0)
    said = json.loads(os.pread(fd, 1 << 16, 0) or b"{}")
    end_as(said.get("status", status))


def _limited(spec: dict[str, Any]) -> None:
    """In a folder of the caller's. Root becomes somebody whose processes and files nobody else has."""
    user, own = os.geteuid(), None
    os.chdir(spec["folder"])
    if user == 0:
        user = _STRANGER + os.getpid()
        own = (user, user)
        os.chown(".", user, user)
    _write(spec["files"], own)
    if own is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        die_with_parent(0)  # which a change of the user takes back
    others = 0
    for entry in os.scandir("/proc") if own is None else ():
        try:
            if entry.name.isdecimal() and entry.stat().st_uid == user:
                others += Path(entry.path, "task").stat().st_nlink - 2
        except FileNotFoundError:
            pass
    _start(spec, others + spec["num_processes"])


def _start(spec: dict[str, Any], num_processes: int) -> None:
    """Becomes the command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    for what, most in (
        (resource.RLIMIT_AS, spec["memory_bytes"]), (resource.RLIMIT_FSIZE, spec["disk_bytes"]),
        (resource.RLIMIT_CPU, int(spec["deadline_s"]) + 2), (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_NOFILE, 256), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    here = str(Path.cwd())
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    command = spec["command"]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(NOT_STARTED)


def _show(shown: bool) -> None:
    """Let processes of this user look into this one, or not: it has the command's input and output, and where it is not root also
    the command's user."""
    _check(_libc.prctl(_DUMPABLE, int(shown), 0, 0, 0), "prctl")


def _enter(is_root: bool) -> None:
    """Leaves the machine's namespaces. Root writes from outside who is who in them; anybody may write down himself."""
    user, group = os.geteuid(), os.getegid()
    if not is_root:
        _check(_libc.unshare(_NEW), "unshare")
        _show(True)  # else its own maps are not its to write
        _write_maps("self", f"{_ME} {user} 1", f"{_ME} {group} 1", "deny")
        _show(False)
        return
    me, (heard, told) = os.getpid(), os.pipe()
    if (helper := os.fork()) == 0:
        os.close(told)
        os.read(heard, 1)
        for stranger in (_STRANGER + me, _NOBODY):
            try:
                both = f"0 0 1\n{_ME} {stranger} 1"
                _write_maps(str(me), both, both, "allow")
                os._exit(0)
            except OSError:  # a container's own map may not have this one
                continue
        os._exit(1)
    _check(_libc.unshare(_NEW), "unshare")
    os.close(told)
    if os.waitpid(helper, 0)[1]:
        raise PermissionError("user namespaces must have a user for the command, got none")


def _write_maps(pid: str, users: str, groups: str, others: str) -> None:
    for name, text in (("setgroups", others), ("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:  # noqa: PTH123 - one write
            file.write(text)


def _mount(spec: dict[str, Any]) -> None:
    """Makes the new root, and leaves the old one."""
    _mount_one("none", "/", None, _RECURSIVE | _PRIVATE)
    size = f"mode=755,size={spec['disk_bytes']},nr_inodes=16384"
    _mount_one("sandbox", _ROOT, "tmpfs", _NOSUID | _NODEV, size)
    seen: list[Path] = []
    for path in map(Path, (*_SYSTEM, sys.base_prefix, sys.prefix, *spec["paths"])):
        if not path.exists() or any(path.is_relative_to(above) for above in seen):
            continue
        if path.is_symlink():
            target = _made(path.parent) / path.name
            target.symlink_to(path.readlink())
        else:
            _bind(path, _NO_WRITE | _NO_SETUID | _NO_DEVICES)
            seen.append(path)
    for device in _DEVICES:
        _bind(Path("/dev", device), _NO_WRITE | _NO_SETUID)
    Path(f"{_ROOT}/dev/fd").symlink_to("/proc/self/fd")
    for name, mode in (("/proc", 0o555), (BOX, 0o700), ("/tmp", 0o1777), ("/dev/shm", 0o1777)):
        _made(Path(name)).chmod(mode)
    os.chown(_ROOT + BOX, _ME, _ME)
    with contextlib.suppress(
        PermissionError
    ):  # a container that hides parts of its own may not show all of another one
        _mount_one("proc", f"{_ROOT}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    os.chdir(_ROOT)
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise PermissionError(f"namespaces must be on x86_64 or aarch64, got {platform.machine()}")
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount2")


def _made(folder: Path) -> Path:
    """That of the new root."""
    found = Path(_ROOT + str(folder))
    found.mkdir(parents=True, exist_ok=True)
    return found


def _bind(path: Path, attributes: int) -> None:
    """Shows a file or folder of the machine in the same place, as it is but for these."""
    if path.is_dir():
        target = _made(path)
    else:
        target = _made(path.parent) / path.name
        target.touch()
    _mount_one(str(path), str(target), None, _BIND | _RECURSIVE)
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    number, size = _MOUNT_SETATTR, ctypes.sizeof(wanted)
    _check(_libc.syscall(number, -1, str(target).encode(), _ALL_BELOW, ctypes.byref(wanted), size), "mount_setattr")


def _mount_one(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = None if kind is None else kind.encode()
    found = _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), data.encode())
    _check(found, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _write(files: dict[str, str], owner: tuple[int, int] | None) -> None:
    """Below the working folder, which is new: nothing in it leads elsewhere."""
    for name, content in files.items():
        for above in reversed(Path(name).parents[:-1]):
            if not above.exists():
                above.mkdir()
                if owner is not None:
                    os.chown(above, *owner)
        Path(name).write_bytes(base64.b64decode(content))
        if owner is not None:
            os.chown(name, *owner)


if __name__ == "__main__":
    main(*sys.argv[1:])
