"""Weights into a model that is cut before it has any: each process reads of the files what it holds.

Owns when a model is cut (built on the meta device, before a byte of its weights is read) and the reading, or the drawing where a
folder says that its weights are random (`random_weights.py`). All else of loading is transformers' own: which files, their names
and conversions, what is tied, buffers that no file has, the report. Does not own how a model is cut (`parallel/`), nor what is
refused (`load.py`).

    build on meta -> cut -> read slices of tensors -> tie, make buffers

Invariant: beside its own part a process holds its part of one tensor at a time, the experts of a layer included, or the tensors
of one conversion that mixes rows. A model in one process is filled by the same code, straight on its device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import set_param_for_module
from transformers.distributed import DistributedConfig
from transformers.modeling_utils import PreTrainedModel, load_state_dict
from transformers.utils.loading_report import LoadStateDictInfo

from rondo.models import random_weights
from rondo.models.names import kept_in_float32, parts
from rondo.models.units import sharded_units
from rondo.models.value_head import head_parts

Cut = Callable[[Any], object]
"""Called with the model on the meta device, before it is filled."""


def from_folder(model_class: Any, path: str, cut: Cut, device: str, **how: Any) -> tuple[Any, dict[str, Any]]:
    """(model, report) of `model_class.from_pretrained(path, **how, output_loading_info=True)`, cut and filled on `device`."""

    def distribute(model: Any, *_: Any) -> Any:
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module._can_set_attn_implementation()  # found out in a class's own source, which FSDP2's in front of it hides
        model.tie_weights()  # so that one shard is cut of what is one
        cut(model)
        return model

    own: dict[str, Any] = {
        "__module__": model_class.__module__,
        "maybe_distribute_model": staticmethod(distribute),
        "_load_pretrained_model": staticmethod(functools.partial(_read, device)),
    }
    how |= {"distributed_config": DistributedConfig(), "output_loading_info": True}
    source: str | None = path
    if (Path(path) / random_weights.FILE).is_file():
        own["_load_pretrained_model"] = staticmethod(functools.partial(_draw, device, Path(path)))
        how["state_dict"], source = {}, None
    cutting: Any = type(model_class.__name__, (model_class,), own)
    model, report = cutting.from_pretrained(source, **how)
    del model.config.distributed_config
    for unit in sharded_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for held in group.fsdp_params:
                held.reset_sharded_param()
    if type(model) is cutting:
        model.__class__ = model_class
    return model.to(device), report  # what no file has is made on the CPU


def _read(device: str, model: Any, state_dict: None, files: Sequence[str], how: Any) -> tuple[LoadStateDictInfo, None]:
    """In the place of transformers' own: fills `model` from `files`."""
    places, report, dtype_of = _asked(model, how)
    with ExitStack() as opened:
        sources: dict[str, Any] = {}
        for file in files:
            if file.endswith(".safetensors"):
                reader = opened.enter_context(safe_open(file, framework="pt"))
                sources |= {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  # no dictionary
            else:
                sources |= load_state_dict(file)
        for name, part in parts(model, sources, how.weight_mapping, places, report.unexpected_keys, dtype_of):
            set_param_for_module(model, name, part.to(device), report, None)
        for name, part in head_parts(model, sources, report.unexpected_keys):
            set_param_for_module(model, name, part.to(device), report, None)
    model._weight_conversions = [each for each in how.weight_mapping if each.was_used()]
    return report, None


def _draw(
    device: str, folder: Path, model: Any, state_dict: object, files: None, how: Any
) -> tuple[LoadStateDictInfo, None]:
    """The same of a folder that has no files, but says how to draw them."""
    _, report, dtype_of = _asked(model, how)
    for name, part in random_weights.drawn(model, folder, dtype_of):
        set_param_for_module(model, name, part.to(device), report, None)
    return report, None


def _asked(model: Any, how: Any) -> tuple[dict[str, torch.Tensor], LoadStateDictInfo, Callable[[str], torch.dtype]]:
    """Where weights go, by their names in memory; the report, in which all are missing yet; in which dtype each goes there."""
    places = model.state_dict()
    report = LoadStateDictInfo(set(places), set(), set(), error_msgs=[], conversion_errors={}, skipped_pp_keys=set())
    kept = kept_in_float32(model) if how.dtype_plan else frozenset[str]()
    return places, report, lambda name: torch.float32 if name in kept else places[name].dtype
