"""How much memory is free, under control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.runtime.memory.free import free_memory_bytes

GIB = 1 << 30


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable:   {16 * GIB // 1024} kB\n")
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
        ("0::/\n", {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB)}, (GIB, "the cgroup")),
        ("0::/\n", {"memory.max": str(4 * GIB), "memory.current": str(5 * GIB)}, (0, "the cgroup")),
        ("0::/\n", {"memory.max": str(20 * GIB), "memory.current": str(GIB)}, (16 * GIB, "the machine")),
        (
            "0::/\n",
            {
                "memory.max": str(4 * GIB), "memory.current": str(4 * GIB),
                "memory.stat": f"anon {GIB}\nshmem {GIB}\nactive_file {GIB}\ninactive_file {GIB // 2}\nslab_reclaimable 0",
            },
            (3 * GIB // 2, "the cgroup"),
        ),
        # The parent allows less than its child, or has less left.
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(2 * GIB)}, (2 * GIB, "the cgroup")),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": str(4 * GIB), "a/b/memory.current": str(GIB),
                "a/memory.max": str(8 * GIB), "a/memory.current": str(7 * GIB),
            },
            (GIB, "the cgroup"),
        ),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(3 * GIB)}, (3 * GIB, "the cgroup")),
        ("4:cpu,memory:/x\n", {"memory/memory.limit_in_bytes": str(5 * GIB)}, (5 * GIB, "the cgroup")),
        (
            "4:memory:/x\n",
            {
                "memory/memory.limit_in_bytes": str(5 * GIB), "memory/memory.usage_in_bytes": str(4 * GIB),
                "memory/memory.stat": f"cache {GIB}\ninactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
            },
            (3 * GIB, "the cgroup"),
        ),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, (16 * GIB, "the machine")),
    ],
)  # fmt: skip
def test_the_least_that_is_left_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: tuple[int, str]
) -> None:
    assert free_memory_bytes(machine(tmp_path, cgroup, files)) == expected


def test_this_machine_has_some() -> None:
    assert free_memory_bytes()[0] > 0
