"""Messages and their media to tokens and arrays: one call of the model's own processor for a prompt.

Owns the limits in tokens, and the checks that what the processor made fits together. Does not own decoding (`decode.py`) or
where workers run. With a working torchvision the library's processor does all; without it the same class is assembled from the
folder's tokenizer, Pillow image processor, feature extractor, and `frames.py`.

    processor = Processor.load("models/qwen3-vl", config)
    prepared = processor.prepare([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
                                 [MediaRef("image", "cats/7.png")])
    prepared.tokens, prepared.media     # int32 [T] with placeholders expanded, MediaInputs

Invariant: every placeholder among the tokens stands for one feature vector of a tower, or MediaError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rondo.models.chat_template import left_out
from rondo.models.control_tokens import MARK, encoded, unmarked
from rondo.models.media import decode, fetch
from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError
from rondo.models.media.frames import fitted
from rondo.models.media.inputs import ARRAYS, MediaInputs, contents_key
from rondo.models.media.library import has_torchvision, load_library
from rondo.models.media.positions import positions_of
from rondo.models.media.refs import Kind, MediaRef
from rondo.runtime.errors import ConfigError

_KINDS: tuple[Kind, ...] = ("image", "audio", "video")
_CHANNELS = 3
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as engine and trainer take it."""

    tokens: np.ndarray
    """int32 [T], placeholders expanded"""
    media: MediaInputs | None
    """None for a prompt of text alone."""


@dataclass(frozen=True, slots=True)
class _Decoded:
    images: list[Any]
    videos: list[decode.Video]
    sounds: list[np.ndarray]
    """In the order of their placeholders."""
    video_of_sound: list[int | None]
    """Of each sound: the video that it belongs to, or None for an audio."""


@dataclass(frozen=True, slots=True)
class _Room:
    """What the processed media of a prompt, or of a turn, may take."""

    num_bytes: int
    of: Literal["group", "turn"]

    def check(self, num_bytes: int, refs: Sequence[MediaRef]) -> None:
        if num_bytes > self.num_bytes:
            limit = {"group": "media.max_group_bytes =", "turn": "what is left of media.max_turn_bytes,"}[self.of]
            less = {"group": "remove the row", "turn": "show less"}[self.of]
            raise MediaError(
                f"{_named(refs)} must take at most {limit} {self.num_bytes} bytes once processed, got {num_bytes} or more. "
                f"Raise it, lower the token or frame limits, or {less}"
            )


class Processor:
    """The processor of one model folder under one set of limits. Blocks its thread; keeps no state between prompts."""

    def __init__(self, library: Any, family: Any, model: Any, config: MediaConfig, *, whole: bool) -> None:
        """Use `load`. `model` is the model's modules on the meta device; `whole`: the library's own video processor is there."""
        self._library = library
        self._family = family
        self._model = model
        self._config = config
        self._whole = whole
        self.on_read: Callable[[MediaRef, bytes | list[bytes]], None] | None = None
        """Gets each medium as it came, once it could be decoded."""
        tokenizer = library.tokenizer
        names = [f"{kind}_token" for kind in _KINDS]
        names += [f"{kind}_{end}_token" for kind in ("vision", "audio") for end in ("start", "end", "bos", "eos")]
        tokens = {getattr(library, name, None) for name in names}
        self._reserved = sorted(token for token in tokens if token)
        self._template = getattr(library, "chat_template", None) or tokenizer.chat_template

    @staticmethod
    def load(path: str, config: MediaConfig) -> Processor:
        """The processor of the Hugging Face folder at `path`. Raises ConfigError for a folder or limits that cannot work."""
        whole = has_torchvision()
        from rondo.models.families import family_of
        from rondo.models.load import empty_model

        model = empty_model(path)
        family = family_of(model)
        if family is None:
            raise ConfigError(
                f"model.path must name a model of images, audio or video for media, got {path!r} of model type "
                f"{model.config.model_type!r}. Remove the media, or change the model"
            )
        if config.use_audio_in_video and "audio" not in family.modalities:
            raise ConfigError(
                f"media.use_audio_in_video must be False for a model without audio, got True for {path!r}. Change one"
            )
        library = load_library(path, whole=whole)
        if not (getattr(library, "chat_template", None) or library.tokenizer.chat_template):
            raise ConfigError(
                f"the processor of {path!r} must have a chat template, got none. Put a chat_template.jinja in the folder"
            )
        extractor = getattr(library, "feature_extractor", None)
        if extractor is not None and extractor.sampling_rate != config.audio_sample_rate:
            raise ConfigError(
                f"media.audio_sample_rate must be what the model's feature extractor expects, {extractor.sampling_rate}, "
                f"got {config.audio_sample_rate}. Change it"
            )
        return Processor(library, family, model, config, whole=whole)

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], refs: Sequence[MediaRef] = (), **template_args: Any
    ) -> Prepared:
        """Render the messages through the chat template, with their media in place.

        The content of a message is text, or a list of parts {"type": "text", "text": ...}, {"type": "image"},
        {"type": "audio"}, {"type": "video"}; `refs` are the media of those parts in order. Raises MediaError for media or
        messages that break a rule.
        """
        self._check_messages(messages, refs)
        return self._prepared(self._render(messages, template_args), refs, _Room(self._config.max_group_bytes, "group"))

    def behind(self, text: str, refs: Sequence[MediaRef], room_bytes: int) -> Prepared:
        """What a template has written of a later turn, with its media in place, which may take so many bytes. Raises MediaError
        as `prepare`."""
        self._check_kinds(refs)
        return self._prepared(text, refs, _Room(room_bytes, "turn"))

    def _prepared(self, text: str, refs: Sequence[MediaRef], room: _Room) -> Prepared:
        self._check_places(text, refs)
        if not refs:
            return Prepared(encoded(self._library.tokenizer, text), None)
        decoded = self._decode(refs, room)
        made = self._call(text, decoded, refs)
        tokens = np.asarray(made.pop("input_ids"))[0].astype(np.int32)
        arrays = {
            name: np.ascontiguousarray(made[name], dtype)
            for name, dtype in ARRAYS.items()
            if made.get(name) is not None
        }
        self._check_counts(tokens, arrays, refs)
        depth = self._model.config.vision_config.temporal_patch_size
        arrays["positions"] = positions_of(
            self._family,
            self._model,
            tokens,
            arrays,
            grid_s=[depth * video.frame_s for video in decoded.videos],
            with_sound=[video.sound is not None for video in decoded.videos],
        )
        if self._config.whole_positions:
            arrays["positions"] = np.floor(arrays["positions"])
        media = MediaInputs(contents_key(arrays), arrays)
        room.check(media.num_bytes, refs)
        return Prepared(tokens, media)

    def _check_messages(self, messages: Sequence[Mapping[str, Any]], refs: Sequence[MediaRef]) -> None:
        kinds: list[str] = []
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
                if part["type"] != "text":
                    kinds.append(part["type"])
                    continue
                for token in self._reserved:
                    if token in part["text"]:
                        raise MediaError(
                            f"the text of a prompt must not contain {token!r}, a token that stands for media, got it in a "
                            f"{message.get('role')} message. Remove the row"
                        )
        if kinds != [ref.kind for ref in refs]:
            raise MediaError(
                f"the parts of a prompt must name its media in order, got parts {kinds} and media "
                f"{[ref.kind for ref in refs]}. Correct the row"
            )
        self._check_kinds(refs)

    def _check_kinds(self, refs: Sequence[MediaRef]) -> None:
        for ref in refs:
            if ref.kind not in self._family.modalities:
                raise MediaError(
                    f"{ref} must be of a kind that the model takes ({', '.join(self._family.modalities)}), got {ref.kind}. "
                    "Remove the row, or change the model"
                )
            if ref.kind == "video" and ref.use_audio and "audio" not in self._family.modalities:
                raise MediaError(
                    f"{ref} must go without its sound for a model without audio, got use_audio_in_video. Change the row"
                )

    def _render(self, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        arguments = {"add_generation_prompt": True, "chat_template": self._template, **template_args}
        tokenizer = self._library.tokenizer
        try:
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, **arguments
            )
        except TemplateError as error:
            raise MediaError(f"the messages must suit the chat template, got {error}. Correct the row") from error
        if (words := left_out(tokenizer, messages, **arguments)) is not None:
            raise MediaError(
                f"the chat template must write all messages, got one that leaves out {words}. Correct the row"
            )
        return text

    def _check_places(self, text: str, refs: Sequence[MediaRef]) -> None:
        for kind in _KINDS:
            token = getattr(self._library, f"{kind}_token", None)
            expected = sum(ref.kind == kind for ref in refs)
            found = unmarked(text).count(token) if token else 0
            if found != expected:
                raise MediaError(
                    f"the chat template must write {token!r} once for each {kind}, got {found} for {expected}. "
                    "Correct the template"
                )

    def _decode(self, refs: Sequence[MediaRef], room: _Room) -> _Decoded:
        decoded = _Decoded([], [], [], [])
        config = self._config
        for index, ref in enumerate(refs):
            fit = self._fit(refs[: index + 1], decoded, room)
            source: bytes | list[bytes]
            if ref.kind == "image":
                source = fetch.read(ref, config)
                decoded.images.append(decode.image(source, config, str(ref), fit=fit))
            elif ref.kind == "audio":
                source = fetch.read(ref, config)
                sound = decode.audio(source, config, str(ref))
                decoded.sounds.append(self._long_enough(sound, ref))
                decoded.video_of_sound.append(None)
            else:
                use_audio = config.use_audio_in_video if ref.use_audio is None else ref.use_audio
                source = fetch.read_video(ref, config)
                video = decode.video(source, config, str(ref), use_audio=use_audio, fit=fit)
                if video.sound is not None:
                    decoded.sounds.append(self._long_enough(video.sound, ref))
                    decoded.video_of_sound.append(len(decoded.videos))
                decoded.videos.append(video)
            if self.on_read is not None:
                self.on_read(ref, source)
        return decoded

    def _fit(self, refs: Sequence[MediaRef], before: _Decoded, room: _Room) -> decode.Fit:
        """For the last ref: sizes within the token limits, as long as the patches of all so far fit the room."""
        config, ref = self._config, refs[-1]
        if ref.kind == "image":
            part, low, high = self._library.image_processor, config.image_min_tokens, config.image_max_tokens
        else:
            part, low, high = self._library.video_processor, config.video_min_tokens, config.video_max_tokens
        depth = part.temporal_patch_size
        held = depth * sum(picture.width * picture.height for picture in before.images)
        held += sum(video.frames.size // _CHANNELS for video in before.videos)

        def fit(num_frames: int, height: int, width: int) -> tuple[int, int]:
            try:
                tall, wide = fitted(
                    height, width, unit=part.patch_size * part.merge_size, min_tokens=low, max_tokens=high
                )
            except ValueError as error:
                raise MediaError(f"{ref}: its {error}") from error
            room.check((held + max(num_frames, depth) * tall * wide) * _CHANNELS * _FLOAT_BYTES, refs)
            return tall, wide

        return fit

    def _long_enough(self, sound: np.ndarray, ref: MediaRef) -> np.ndarray:
        window = self._library.feature_extractor.n_fft
        if len(sound) < window:
            raise MediaError(
                f"the sound of {ref} must have at least {window} samples at {self._config.audio_sample_rate} Hz, "
                f"got {len(sound)}. Remove the row"
            )
        # The audio tower's convolutions look beyond the end of a sound shorter than its window, at whatever padding its batch
        # brings: with silence up to the window, a sound's features are its own.
        least = 2 * self._model.config.audio_config.n_window * self._library.feature_extractor.hop_length
        return np.pad(sound, (0, max(0, least - len(sound))))

    def _call(self, text: str, decoded: _Decoded, refs: Sequence[MediaRef]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"text_kwargs": {"add_special_tokens": False}}
        if MARK in text:
            arguments["sanitize_control_tokens"] = True
        # Pictures are scaled as they are decoded, so that a prompt never holds several of full size.
        if decoded.images:
            arguments["images"] = decoded.images
            arguments["images_kwargs"] = {"do_resize": False}
        if decoded.videos:
            from transformers.video_utils import VideoMetadata

            # A rate of 1 makes the indices seconds. The frames are chosen and scaled already, so no limit is left to apply.
            metadata = [
                VideoMetadata(
                    total_num_frames=len(video.frames),
                    fps=1.0,
                    duration=video.frame_s * len(video.frames),
                    frames_indices=list(video.times_s),
                )
                for video in decoded.videos
            ]
            arguments["videos"] = [
                video.frames.transpose(0, 3, 1, 2) if self._whole else video.frames for video in decoded.videos
            ]
            arguments["videos_kwargs"] = {
                "video_metadata": metadata,
                "do_sample_frames": False,
                "do_resize": False,
                "return_metadata": True,
            }
            if hasattr(self._library.video_processor, "cap_pixels_per_frame"):
                arguments["videos_kwargs"]["cap_pixels_per_frame"] = False
        if decoded.sounds:
            arguments["audio"] = decoded.sounds
            arguments["n_window"] = self._model.config.audio_config.n_window
            if any(video is not None for video in decoded.video_of_sound):
                arguments["load_audio_from_video"] = True
                arguments["audio_from_video_indices"] = decoded.video_of_sound
        try:
            return dict(self._library(text=[text], return_tensors="np", **arguments))
        except ValueError as error:
            raise MediaError(f"{_named(refs)} must suit the model's processor, got: {error}. Remove the row") from error

    def _check_counts(self, tokens: np.ndarray, arrays: Mapping[str, np.ndarray], refs: Sequence[MediaRef]) -> None:
        """Placeholders among the tokens against feature vectors that the towers will give, by grids and lengths."""
        config = self._model.config
        merged = config.vision_config.spatial_merge_size**2
        features = {"image": 0, "video": 0, "audio": 0}
        for kind, grid, patches in (
            ("image", "image_grid_thw", "pixel_values"),
            ("video", "video_grid_thw", "pixel_values_videos"),
        ):
            if grid in arrays:
                num_patches = int(arrays[grid].prod(axis=1).sum())
                if num_patches != len(arrays[patches]):
                    raise MediaError(
                        f"{_named(refs)} must have as many {kind} patches as their grids say, got {len(arrays[patches])} and "
                        f"{num_patches}. Check the processor files of the model"
                    )
                features[kind] = num_patches // merged
        if "feature_attention_mask" in arrays:
            lengths = arrays["feature_attention_mask"].sum(axis=1)
            features["audio"] = int(self._family.sound_tokens(config, lengths).sum())
        for kind, attribute in self._family.placeholders.items():
            found = int((tokens == getattr(config, attribute)).sum())
            if found != features[kind]:
                raise MediaError(
                    f"{_named(refs)} must have one {kind} placeholder for each feature, got {found} and {features[kind]}. "
                    "Check the processor files of the model"
                )


def _named(refs: Sequence[MediaRef]) -> str:
    return ", ".join(str(ref) for ref in refs[:3]) + (f" and {len(refs) - 3} more" if len(refs) > 3 else "")
