"""The processor that transformers has for a model folder: whole where torchvision works, else assembled from its parts.

Owns finding and putting together its parts. Does not own what is asked of it (`processor.py`). transformers cannot load these
processors without torchvision, although only their video part needs it; `frames.py` stands in for that part.

    library = load_library("models/qwen3-vl", whole=has_torchvision())
    library(text=["<|vision_start|><|image_pad|><|vision_end|>What?"], images=[picture], return_tensors="np")

Invariant: tokenizer, template, picture and sound features come from the library's own code in both cases.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rondo.models.control_tokens import unmarked
from rondo.models.media.frames import FrameProcessor, read_json
from rondo.runtime.errors import ConfigError


def has_torchvision() -> bool:
    """Whether torchvision can be imported. One that is installed but broken is hidden from this process from now on.

    transformers only looks whether it is installed, and then fails to import its models: so this comes before transformers.
    """
    if sys.modules.get("torchvision", sys) is None:
        return False
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return False
    except (RuntimeError, OSError, AttributeError):  # built for another torch: operators or libraries are missing
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # Python's own sign for "not there"
        return False
    return True


def load_library(path: str, *, whole: bool) -> Any:
    """A transformers processor with tokenizer, image_processor, video_processor and, for audio, feature_extractor.

    Raises ConfigError for a folder without processor files, or with those of a processor that transformers does not know.
    """
    import transformers

    name = _class_name(path)
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ConfigError(
            f"the processor of {path!r} must be one that transformers {transformers.__version__} has, got {name!r}. "
            "Update transformers, or check preprocessor_config.json"
        )
    try:
        return _timed(kind).from_pretrained(path) if whole else _assembled(kind, path)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model.path must hold a processor that transformers can load, got {path!r} ({type(error).__name__}: {error}). "
            "Copy preprocessor_config.json and its like beside config.json"
        ) from error


def _class_name(path: str) -> str:
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if name := read_json(path, file).get("processor_class"):
            return str(name)
    raise ConfigError(
        f"model.path must be a folder whose processor files name a processor_class, got {path!r} without. "
        "Copy preprocessor_config.json and its like beside config.json"
    )


def _timed(kind: Any) -> Any:
    """The same processor, with each video's own rate where the library takes one rate for all (Qwen3-Omni), and without
    counting marked tokens as places of media, as the library does for the same one."""

    class Timed(kind):
        def validate_inputs(self, text: list[str], **given: Any) -> None:
            super().validate_inputs(text=[unmarked(each) for each in text], **given)

        def replace_video_token(self, video_inputs: dict[str, Any], video_idx: int, **options: Any) -> str:
            if "video_second_per_grid" in video_inputs:
                metadata = options["videos_kwargs"]["video_metadata"][video_idx]
                frame_s = metadata.duration / metadata.total_num_frames
                video_inputs["video_second_per_grid"][video_idx] = self.video_processor.temporal_patch_size * frame_s
            written: str = super().replace_video_token(video_inputs, video_idx, **options)
            return written

    Timed.__name__ = kind.__name__
    return Timed


def _assembled(kind: Any, path: str) -> Any:
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    from rondo.models.load import load_tokenizer

    class Assembled(_timed(kind)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            # The class that the library would compare with cannot be imported.
            if argument_name == "video_processor":
                return FrameProcessor
            return super().check_argument_for_proper_class(argument_name, argument)

    Assembled.__name__ = kind.__name__
    loaders = {
        "tokenizer": load_tokenizer,
        "image_processor": AutoImageProcessor.from_pretrained,
        "video_processor": FrameProcessor.load,
        "feature_extractor": AutoFeatureExtractor.from_pretrained,
    }
    settings, _ = kind.get_processor_dict(path)
    parts = {name: loaders[name](path) for name in kind.get_attributes()}
    return Assembled(**parts, chat_template=settings.get("chat_template"))
