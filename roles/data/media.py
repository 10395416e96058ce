"""Prompts with media: from a row to tokens and arrays, in workers beside the rollout role or in this process.

Owns how a row, or what is said in a later turn, reaches the model's processor, where relative paths start, and what becomes of
what fails. Does not own
reading, decoding or processing (`models/media/`) or the workers' processes (`runtime/processes/pool.py`).

    async with MediaPool(model_path, MediaConfig(num_workers=2), load_deadline_s=1800) as pool:
        tokens, media = await pool.prepare(row, config.data, max_tokens=1024)      # int32 [T], MediaInputs

Invariant: whatever a medium does to the worker that looks at it, it costs its own row alone: a RowError that names the row. At
most three calls a worker are inside, one under way and two waiting; further ones wait to be let in, so that the media of rows
that are read ahead are not all on their way at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError
from rondo.models.media.inputs import MediaInputs
from rondo.models.media.refs import MediaRef
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.opening import folder_of
from rondo.roles.data.originals import Originals
from rondo.roles.data.prompts import check_length, messages_of, template_args
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.pool import Pool
from rondo.runtime.values import encode

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

Prepared = tuple[np.ndarray, MediaInputs | None]
"""Tokens int32 [T], placeholders expanded; and the media, None for a prompt of text alone."""

_WAITING_PER_WORKER = 2
_BESIDE_BYTES = 16 << 20
"""Tokens, beside what `max_group_bytes` counts."""
_URI = re.compile(r"data:|[a-z][a-z0-9+.-]*://|file:", re.IGNORECASE)


def preparer(path: str, config: MediaConfig) -> Callable[[Row, DataConfig, int, str], Prepared]:
    """`(row, settings of its data, most tokens, what limits them) -> Prepared` in this process; raises like `render_prompt`.

    ConfigError for a model without a processor of media.
    """
    from rondo.models.media.processor import Processor

    processor = Processor.load(path, config)

    def prepare(row: Row, data: DataConfig, max_tokens: int, setting: str) -> Prepared:
        messages, refs = messages_of(row, data), located(row.media, data.of(row.source), config)
        try:
            made = processor.prepare(messages, refs, **template_args(row, data))
        except MediaError as error:
            raise RowError(f"{row.name}: {error}") from error
        check_length(row, len(made.tokens), max_tokens, setting, data)
        return made.tokens, made.media

    return prepare


class MediaPool(Pool):
    """`config.num_workers` processes with the processor of the model at `path`. For one event loop, on the main thread."""

    def __init__(
        self, path: str, config: MediaConfig, *, load_deadline_s: float, originals: tuple[Path, int] | None = None
    ) -> None:
        """originals: (run directory, most bytes) where those of kept samples go."""
        self._config = config
        super().__init__(
            "rondo.roles.data.media:open_processor",
            {"path": path, "limits": config.limits(), "originals": originals and [str(originals[0]), originals[1]]},
            work="media processor",
            source="media processor",
            num_workers=config.num_workers,
            deadline_s=config.deadline_s,
            load_deadline_s=load_deadline_s,
            max_waiting=_WAITING_PER_WORKER * config.num_workers,
            max_bytes=max(config.max_group_bytes, config.max_turn_bytes) + _BESIDE_BYTES,
        )

    async def prepare(
        self,
        row: Row,
        data: DataConfig,
        max_tokens: int,
        *,
        setting: str = "rollout.max_prompt_tokens",
        keep: tuple[int, int] | None = None,
    ) -> Prepared:
        """The prompt of `row`, whose settings are `data`, as engine and trainer take it; also one of text alone. keep: the (step,
        prompt group) for which its media are kept as they came.

        RowError for a row that cannot be used, also when it took longer than `media.deadline_s` or ended its worker twice;
        `setting` names what limits the tokens. Closed after the pool's end, ConfigError when it can have no workers.
        """
        item = {"messages": messages_of(row, data), "template_args": template_args(row, data), "keep": keep}
        try:
            tokens, media = await self._made(item, row.media, data.of(row.source))
        except (TypeError, MediaError) as error:
            raise RowError(f"{row.name}: {error}") from error
        check_length(row, len(tokens), max_tokens, setting, data)
        return tokens, media

    async def behind(self, data: DataConfig, text: str, refs: Sequence[MediaRef], room_bytes: int) -> Prepared:
        """What a template has written of a later turn, with its media, which may take so many bytes. MediaError for what cannot
        be used; else as `prepare`."""
        return await self._made({"text": text, "room_bytes": room_bytes}, refs, data)

    async def _made(self, item: dict[str, Any], refs: Sequence[MediaRef], data: DataConfig) -> Prepared:
        media = [[ref.kind, ref.source, ref.use_audio] for ref in located(refs, data, self._config)]
        [outcome] = await self.run([encode({**item, "media": media}, "prompt")])
        if outcome.kind == ConfigError.__name__:
            raise ConfigError(outcome.error)
        if outcome.error is not None:
            raise MediaError(outcome.error)
        tokens, key, arrays = outcome.value
        return tokens, None if key is None else MediaInputs(key, arrays)


def open_processor(
    path: str, limits: Mapping[str, Any], originals: Sequence[Any] | None = None
) -> Callable[[dict[str, Any]], list[Any]]:
    """What a worker of `MediaPool` runs: an item to [tokens, key of the media or None, arrays by name]."""
    from rondo.models.media.processor import Processor

    processor = Processor.load(path, MediaConfig(**limits))
    kept = None if originals is None else Originals(Path(originals[0]), originals[1])

    def prepare(item: dict[str, Any]) -> list[Any]:
        refs = [MediaRef(*fields) for fields in item["media"]]
        named = list[tuple[str, list[str]]]()
        place: Sequence[int] = item.get("keep") or ()
        if kept is not None:
            processor.on_read = (lambda ref, data: named.append((ref.kind, kept.put(data)))) if place else None
        if "text" in item:
            made = processor.behind(item["text"], refs, item["room_bytes"])
        else:
            made = processor.prepare(item["messages"], refs, **item["template_args"])
        if kept is not None and named:
            kept.keep(place[0], place[1], named)
        if made.media is None:
            return [made.tokens, None, {}]
        return [made.tokens, made.media.key, dict(made.media.arrays)]

    return prepare


def originals_of(row: Row, data: DataConfig, config: MediaConfig | None) -> Sequence[MediaRef]:
    """The media of a row, as they can be read again; none in a run without media."""
    return located(row.media, data.of(row.source), config) if row.media and config is not None else ()


def located(refs: Sequence[MediaRef], data: DataConfig, config: MediaConfig) -> list[MediaRef]:
    """The same media, with relative paths from the folder of the data files, unless `media.root` says where they start."""
    folder = folder_of(data) if config.root is None else None
    return list(refs) if folder is None else [_from(folder, ref) for ref in refs]


def _from(folder: Path, ref: MediaRef) -> MediaRef:
    def placed(source: Any) -> Any:
        if isinstance(source, list):
            return [placed(frame) for frame in source]
        # An absolute path stays itself.
        return str(folder / source) if isinstance(source, str) and not _URI.match(source) else source

    return MediaRef(ref.kind, placed(ref.source), ref.use_audio)
