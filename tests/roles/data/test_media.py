"""Prompts with media, in workers: what arrives, and that what goes wrong costs one row and names it."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from rondo.models.media.config import MediaConfig
from rondo.models.media.refs import MediaRef
from rondo.models.tiny import qwen3_vl
from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.media import MediaPool, located, preparer
from rondo.roles.data.originals import FOLDER, of_group
from rondo.runtime.errors import Closed, ConfigError
from rondo.runtime.processes import pool as processes

HANGING = (
    "{% if hang %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if explode %}{{ 1 // 0 }}{% endif %}"
)
DATA = DataConfig(path="unused", apply_chat_template=True)
LIMITS = MediaConfig(image_max_tokens=64, max_group_bytes=1 << 20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose chat template can hang or fail."""
    folder = tmp_path_factory.mktemp("model")
    qwen3_vl.build(folder)
    for file in folder.glob("chat_template*"):
        assert file.suffix == ".jinja"
        file.write_text(HANGING + file.read_text())
    return str(folder)


def png(width: int = 64, height: int = 48) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3)).save(file, "PNG")
    return file.getvalue()


def row(*sources: Any, name: str = "a.jsonl:7") -> Row:
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in sources]
    content = [*parts, {"type": "text", "text": "What?"}]
    return Row(
        name, [{"role": "user", "content": content}], None, {}, tuple(MediaRef("image", source) for source in sources)
    )


def asking(**template_args: Any) -> DataConfig:
    return DataConfig(path="unused", apply_chat_template=True, chat_template_args=template_args)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model: str) -> AsyncIterator[MediaPool]:
    """A worker takes seconds to import what it needs, so tests that leave it alive share one."""
    async with MediaPool(model, LIMITS, load_deadline_s=600, originals=(Path(model), 1 << 20)) as shared:
        yield shared
        assert shared.stats().num_restarts == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_prepares_what_this_process_would(model: str, pool: MediaPool, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    uri = "data:image/png;base64," + base64.b64encode(png()).decode()
    prepared = [await pool.prepare(row(source), DATA, 512) for source in (png(), str(tmp_path / "a.png"), uri)]
    expected_tokens, expected = preparer(model, LIMITS)(row(png()), DATA, 512, "sft.micro_batch_tokens")
    assert expected is not None
    for tokens, media in prepared:
        assert media is not None and media.key == expected.key
        assert tokens.dtype == np.int32 and tokens.tolist() == expected_tokens.tolist()
        assert media.arrays.keys() == expected.arrays.keys()
        for name, array in media.arrays.items():
            assert array.dtype == expected.arrays[name].dtype
            np.testing.assert_array_equal(array, expected.arrays[name])
    assert not (Path(model) / FOLDER).exists()  # nothing is kept of what nobody asked to keep
    for group, source in ((5, uri), (6, str(tmp_path / "a.png"))):
        _, media = await pool.prepare(row(source), DATA, 512, keep=(3, group))
        assert media is not None and media.key == expected.key
        (told,) = of_group(Path(model), 3, group)
        assert told["kind"] == "image" and (Path(model) / FOLDER / told["name"]).read_bytes() == png()
    assert len(list((Path(model) / FOLDER).iterdir())) == 2  # one picture, and what says whose it is


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_has_as_many_media_as_its_row_names(pool: MediaPool) -> None:
    tokens, media = await pool.prepare(Row("a.jsonl:8", "hello", None, {}), DATA, 512)
    assert (tokens.dtype, media) == (np.int32, None)
    _, media = await pool.prepare(row(png(), png(96, 96)), DATA, 512)
    assert media is not None and len(media.arrays["image_grid_thw"]) == 2


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("bad", "data", "most", "text"),
    [
        (row(b"no image"), DATA, 512, "image of 8 bytes must be an image that can be read"),
        (row(png()[:-40]), DATA, 512, r"image of \d+ bytes must be an image that can be read"),
        (row("https://example.org/a.png"), DATA, 512, "must come from a host in media.allowed_hosts"),
        (row("/nowhere/a.png"), DATA, 512, "image /nowhere/a.png must be a file that can be read"),
        (
            row(png()),
            DATA,
            8,
            r"must have 1 to 8 tokens with its media, got \d+. Raise rollout.max_prompt_tokens, or lower",
        ),
        (row(*[png(256, 256)] * 24), DATA, 4096, "must take at most media.max_group_bytes = 1048576 bytes"),
        (
            row(png()),
            DataConfig(path="unused"),
            512,
            "without data.apply_chat_template, got a list of messages with media",
        ),
        (row(png()), asking(explode=True), 512, "Traceback.*ZeroDivisionError"),
        (
            Row("a.jsonl:7", [{"role": "user", "content": print}], None, {}),
            DATA,
            512,
            "prompt.* must be of a type that travels",
        ),
    ],
)
async def test_whatever_is_wrong_with_a_row_costs_it_alone_and_names_it(
    pool: MediaPool, bad: Row, data: DataConfig, most: int, text: str
) -> None:
    done = pool.stats().num_done
    with pytest.raises(RowError, match=rf"(?s)^a.jsonl:7: .*{text}"):
        await pool.prepare(bad, data, most)
    _, media = await pool.prepare(row(png()), DATA, 512)
    assert media is not None and pool.stats().num_done > done


async def test_media_that_take_too_long_cost_their_worker_and_their_row_and_closing_wakes_who_waits(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MediaPool(model, LIMITS.model_copy(update={"deadline_s": 1.0}), load_deadline_s=600) as own:
        begun = time.monotonic_ns()

        def clock() -> int:
            """Goes on while the first row is worked on, so that no other is ever late."""
            hangs = own.stats().num_restarts == 0 and any(worker._read_note()[0] == 1 for worker in own._workers)
            return time.monotonic_ns() if hangs else begun

        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic_ns=clock))
        hanging = asyncio.create_task(own.prepare(row(png()), asking(hang=True), 512))
        await asyncio.sleep(0)
        behind = asyncio.create_task(own.prepare(row(png()), DATA, 512))
        with pytest.raises(RowError, match=r"^a.jsonl:7: media processor must return within 1 s, got no end"):
            await hanging
        _, media = await behind
        assert media is not None
        stats = own.stats()
        assert (stats.num_done, stats.num_timed_out, stats.num_restarts) == (1, 1, 1)
        calls = [asyncio.create_task(own.prepare(row(png()), asking(hang=True), 512)) for _ in range(8)]
        await asyncio.sleep(0)
        assert own.stats().num_at_door == 5  # one with the worker, two behind it
        await own.close()
        assert all(isinstance(error, Closed) for error in await asyncio.gather(*calls, return_exceptions=True))
        assert not [pid for pid in stats.pids if Path(f"/proc/{pid}").exists()]  # noqa: ASYNC240


def test_limits_that_the_model_cannot_meet_are_refused_before_the_first_row(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^media.use_audio_in_video must be False for a model without audio"):
        preparer(model, MediaConfig(use_audio_in_video=True))


def test_relative_paths_start_at_the_data_file_or_at_the_root_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    frames = MediaRef("video", ["1.png", b"2"], True)  # type: ignore[list-item]
    refs = [MediaRef("image", source) for source in ("a.png", "/b.png", "https://h/c.png", "data:,", "file:///d", b"e")]
    expected = [f"{tmp_path}/a.png", "/b.png", "https://h/c.png", "data:,", "file:///d", b"e"]
    for path in ("rows.jsonl", "", "*.jsonl"):
        data = DataConfig(path=str(tmp_path / path))
        assert [ref.source for ref in located(refs, data, MediaConfig())] == expected
        assert located([frames], data, MediaConfig()) == [MediaRef("video", [f"{tmp_path}/1.png", b"2"], True)]  # type: ignore[list-item]
        assert located(refs, data, MediaConfig(root=Path("pictures"))) == refs
    for data in (DataConfig(path="hub:a/b/train"), DataConfig(rows="m:f")):
        assert located(refs, data, MediaConfig()) == refs
