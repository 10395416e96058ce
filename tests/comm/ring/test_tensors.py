from __future__ import annotations

import subprocess
import sys

from tests.comm.memory import ROOT


def test_tensors_over_read_only_memory_come_without_a_warning() -> None:
    code = (
        "import numpy as np, torch, rondo.comm.ring.tensors;"
        "print(torch.from_numpy(np.frombuffer(bytes(8), np.float32)).tolist())"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0.0, 0.0]\n", "")
