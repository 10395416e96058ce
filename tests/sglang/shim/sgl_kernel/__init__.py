"""Stands for SGLang's package of CUDA kernels, where there is no GPU: every name is there, and raises when it is called.

SGLang's layers have ways of plain torch for all that the tiny models of the tests need; no function of here is called for them.
Memory that it asks to be pinned, for routed experts and for adapters, is ordinary memory: only a GPU copies from pinned memory.
`sgl_kernel.scalar_type` cannot be imported, so that SGLang takes its own. Operators that SGLang only looks up are declared.
"""

from __future__ import annotations

import importlib.abc
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"
_DECLARED = (
    "fused_sigmoid_mul_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qk_gemma_rmsnorm_cpu(Tensor a) -> Tensor",
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor a) -> Tensor",
    "fused_linear_sigmoid_mul(Tensor a) -> Tensor",
    "fused_qkvzba_split_reshape_cat_cpu(Tensor a) -> Tensor",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor a) -> Tensor",
    "fused_gdn_gating_cpu(Tensor a) -> Tensor",
    "fused_moe_router_cpu(Tensor a) -> Tensor",
)


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def function(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} needs a GPU")

    return function


def __getattr__(name: str) -> Any:
    return _absent(name)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _absent(name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.scalar_type":
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


class _NoCudaRuntime:
    """Routed experts go through memory that is registered with it."""

    class cudaError:
        success = 0

    @staticmethod
    def cudaHostRegister(*_: object) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(*_: object) -> int:
        return 0


def _unpinned(make: Any) -> Any:
    def made(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        return make(*args, **more)

    return made


sys.meta_path.append(_Submodules())
if not torch.cuda.is_available():
    torch.cuda.cudart = lambda: _NoCudaRuntime  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment,method-assign]
    for _make in ("empty", "full", "tensor", "zeros"):
        setattr(torch, _make, _unpinned(getattr(torch, _make)))
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _schema in _DECLARED:
    _library.define(_schema)
_library.impl("fused_sigmoid_mul_cpu", lambda a, b: torch.sigmoid(a) * b, "CPU")
