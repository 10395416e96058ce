"""Prompts with media: from a row to tokens and arrays, in workers beside the rollout role or in this process.

Owns how a row is handed to the model's processor, and the length limit. Does not own reading, decoding or processing
(`models/media/`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError
from rondo.models.media.inputs import MediaInputs
from rondo.roles.datasets import Row, RowError

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

Prepared = tuple[np.ndarray, MediaInputs | None]


def preparer(path: str, config: MediaConfig) -> Callable[[Row, DataConfig, int], Prepared]:
    """`(row, settings of its data, most tokens) -> (tokens int32 [T], media)` in this process; RowError where it cannot."""
    from rondo.models.media.processor import Processor

    processor = Processor.load(path, config)

    def prepare(row: Row, data: DataConfig, max_tokens: int) -> Prepared:
        return _prepare(processor, row, data, max_tokens)

    return prepare


def _prepare(processor: Any, row: Row, data: DataConfig, max_tokens: int) -> Prepared:
    try:
        made = processor.prepare(row.prompt, row.media, **data.chat_template_args)
    except MediaError as error:
        raise RowError(f"{row.name}: {error}") from error
    if len(made.tokens) > max_tokens:
        raise RowError(
            f"{row.name}: prompt must have 1 to {max_tokens} tokens with its media, got {len(made.tokens)}. "
            "Raise rollout.max_prompt_tokens, lower the limits of media, or remove the row"
        )
    return made.tokens, made.media


class MediaPool:
    def __init__(self, path: str, config: MediaConfig) -> None:
        self._path, self._config = path, config
        self._thread = ThreadPoolExecutor(1)

    async def prepare(self, row: Row, data: DataConfig, max_tokens: int) -> Prepared:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, row, data, max_tokens)

    def _run(self, row: Row, data: DataConfig, max_tokens: int) -> Prepared:
        return self._one(row, data, max_tokens)

    async def __aenter__(self) -> MediaPool:
        self._one = await asyncio.get_running_loop().run_in_executor(self._thread, preparer, self._path, self._config)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
