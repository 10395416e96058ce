from __future__ import annotations

import subprocess
import sys

import pytest

_HELD = """
import sys
from pathlib import Path
import numpy as np
from rondo.models.host_memory import give_back_freed

def held():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) >> 10

if sys.argv[1] == "given back":
    give_back_freed()
first = np.ones(24 << 20, np.uint8)
del first  # glibc: blocks of up to 24 MiB are no large ones from now on
before = held()
units, kept = zip(*((np.ones(2 << 20, np.uint8), np.ones(1 << 18, np.uint8)) for _ in range(64)))
del units  # behind each lies an activation that lives on
print(held() - before)
"""


@pytest.mark.parametrize("way", ["given back", "kept"])
def test_memory_that_large_tensors_have_left_is_given_back(way: str) -> None:
    told = subprocess.run([sys.executable, "-c", _HELD, way], capture_output=True, text=True, check=True)
    held_mib = int(told.stdout)
    assert held_mib < 24 if way == "given back" else held_mib > 40, held_mib
