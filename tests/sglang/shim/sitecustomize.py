"""Lets SGLang's server start on a machine without a GPU. For tests alone: nothing of the product is on this path.

On PYTHONPATH of the server. Owns one gap: torchvision's wheel is built for CUDA, and its library does not load beside a torch
that is not; its import then misses two operators, which are declared here before it is looked for. `sgl_kernel` beside this file
stands for SGLang's package of CUDA kernels. Both hold for SGLang 0.5.23, and say so when they meet another one.

With RONDO_SHIM_FORK set, a server's processes are forks of its launcher, which has one thread then and has imported all that they
need: a start takes a third of the processor's time. Without, they begin anew, as everywhere else.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import multiprocessing.context
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VERSION = "0.5.23"
_declared: list[Any] = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)
        return None


def _check() -> None:
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return  # a helper process of another environment
    if found != VERSION:
        raise SystemExit(f"the shim must meet SGLang {VERSION}, got {found}. See what {found} needs without a GPU")


_check()
sys.meta_path.insert(0, _BeforeTorchvision())
if os.environ.get("RONDO_SHIM_FORK"):
    ways: Any = multiprocessing.context
    ways._concrete_contexts["spawn"] = ways._concrete_contexts["fork"]
