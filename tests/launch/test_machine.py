"""What this machine offers: cores, memory under control groups, ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rondo.launch.machine import folder_problem, memory_limit_bytes, port_problem, show_bytes

GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {16 * GIB // 1024} kB\nMemFree: 1 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, (16 * GIB, "the machine")),
        ("0::/\n", {"memory.max": str(4 * GIB)}, (4 * GIB, "the cgroup")),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(2 * GIB)}, (2 * GIB, "the cgroup")),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(3 * GIB)}, (3 * GIB, "the cgroup")),
        ("4:cpu,memory:/x\n", {"memory/memory.limit_in_bytes": str(5 * GIB)}, (5 * GIB, "the cgroup")),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, (16 * GIB, "the machine")),
    ],
)
def test_the_smallest_limit_of_version_1_and_2_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: tuple[int, str]
) -> None:
    assert memory_limit_bytes(machine(tmp_path, cgroup, files)) == expected


def test_a_port_that_is_listened_on_is_a_problem_and_0_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert port_problem("127.0.0.1", server.getsockname()[1]) == "Address already in use"
    assert port_problem("127.0.0.1", 0) is None
    assert port_problem("192.0.2.1", 0) == "Cannot assign requested address"


def test_a_file_in_the_way_of_a_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert folder_problem(tmp_path / "runs" / "demo") == f"{tmp_path / 'runs'} is a file"
    assert folder_problem(tmp_path / "new" / "demo") is None


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "512 bytes"), (11 << 10, "11 KiB"), (64 << 20, "64 MiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_bytes_are_shown_in_round_units(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
