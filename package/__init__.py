"""rondo: an asynchronous engine of reinforcement learning for language models.

import rondo

trained = rondo.train("examples/quickstart.py", ["num_steps=20"])
trained.path, trained.summary.reward_after

A checkout has links to this file and to `__main__.py` at its top: where it is a folder named `rondo` and Python is started
beside it, `import rondo` means that folder, whichever way rondo is installed.
"""

from __future__ import annotations

import sys

# Of `python -m rondo...`: the working directory comes after what is installed.
if sys.argv[0] == "-m" and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

from rondo.runtime.face import lazy

_FACE = dict.fromkeys(("train", "train_async", "Trained"), "rondo.launch.from_python")
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
