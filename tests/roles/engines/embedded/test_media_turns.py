"""Media in later turns: what was sampled behind them is what the trainer computes, in every turn, to the token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.comm.bus.group import NO_VERSION
from rondo.models.families import family_of
from rondo.models.load import load_tokenizer
from rondo.models.logprobs import response_log_probs
from rondo.models.media.errors import MediaError
from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.models.media.processor import Prepared
from rondo.models.media.refs import MediaRef
from rondo.models.packing import Packing, Sequence
from rondo.models.tiny.tokenizer import END_OF_TURN
from rondo.roles.data.chat import Chat
from rondo.roles.engines.embedded.embedded import EmbeddedEngine
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.sampling.columns import loss_mask
from rondo.roles.sampling.episode import Ask, Episode, Limits, Made, SampleRow, Unseen
from rondo.roles.shown import read, written
from tests.roles.engines.embedded.test_media_engine import (
    CLOSE,
    WAYS_TO_CACHE,
    Make,
    at_once,
    engine_for,
    frames,
    image,
    make,
    seen_by_towers,
    spoken,
)  # fmt: skip
from tests.roles.engines.embedded.test_media_engine import Made as Tiny

__all__ = ["make"]  # the fixture
LIMITS = Limits(700, 1000, max_turn_bytes=1 << 20)


def part(ref: MediaRef) -> dict[str, Any]:
    return {"type": ref.kind, ref.kind: ref.source}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def opened(tiny: Tiny, ask: Ask, *refs: MediaRef, number: int = 0, limits: Limits = LIMITS) -> Episode:
    """An episode whose prompt has these media, and which can be shown more."""
    tokenizer = load_tokenizer(str(tiny.films))
    begin = [{"role": "user", "content": [*({"type": ref.kind} for ref in refs), text("sum?")]}]
    first = tiny.processor.prepare(begin, refs)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    params = SamplingParams(limits.max_new_tokens, temperature=0.8, stop_token_ids=(end, *range(24)))
    request = Request(f"g/{number}", first.tokens, params, seed=number, media=first.media)

    async def look(said: str, shown: Ordered[MediaRef], room_bytes: int) -> tuple[np.ndarray, MediaInputs | None]:
        made: Prepared = tiny.processor.behind(said, shown, room_bytes)
        return made.tokens, made.media

    chat = Chat(tokenizer, "row 9", begin, {"add_generation_prompt": True})
    return Episode.opened(number, request, ask, limits, tokenizer, chat, lambda: None, look)


def row_of(row: SampleRow, prompt: MediaInputs | None) -> Sequence:
    """As a trainer has it of the bus."""
    shown = read(written(row.shown))
    tokens = np.concatenate([row.prompt, row.completion.tokens])
    return Sequence(tokens, len(row.completion.tokens), with_turns(prompt, shown))


@pytest.mark.parametrize("has_first", [True, False])
@pytest.mark.parametrize("name", WAYS_TO_CACHE)
async def test_log_probs_of_every_turn_are_the_trainers_whatever_each_sample_was_shown(
    make: Make, name: str, has_first: bool
) -> None:
    tiny = make(name)
    slots = engine_for(tiny.model, num_slots=4, max_length=1000)
    engine = EmbeddedEngine(slots, at_once)
    first = [image(0)] if has_first else []

    async def play(number: int) -> tuple[Made, MediaInputs | None]:
        episode = opened(tiny, engine.generate, *first, number=number)
        prompt = episode._shared.root.media
        for turn in range(3):
            await episode.generate()
            seen = [image(10 * number + turn), *([spoken(number + turn)] if tiny.hears else []), frames(number, 4)]
            shown = [part(each) for each in (seen[:1], seen[1:], seen[:2])[turn]]
            await episode.say([{"role": "tool", "content": [text("here:"), *shown, text("more?")]}])
            if turn == 1:
                await episode.say("<|image_pad|>")  # spelt, and of no medium
        await episode.generate()
        return episode.made(), prompt

    played = await asyncio.gather(*(play(number) for number in range(3)))
    await engine.close()
    rows = [row_of(made.rows[0], prompt) for made, prompt in played]
    with torch.no_grad(), seen_by_towers(tiny.model) as calls:
        packed = Packing.of(tiny.model).pack(rows)
        flat, _ = response_log_probs(tiny.model, packed, temperature=0.8)
    parts = np.split(flat.float().numpy(), np.cumsum([row.response for row in rows])[:-1])
    for (made, _), found in zip(played, parts, strict=True):
        done = made.rows[0].completion
        sampled = loss_mask(done) == 1
        assert len(made.rows[0].shown) == 3 and np.diff(sampled.astype(int)).tolist().count(1) == 3  # four turns
        assert np.abs(found - done.log_probs)[sampled].max() < CLOSE
        assert (done.policy_versions[~sampled] == NO_VERSION).all()
    blank = [
        (at, MediaInputs("blank", {**media.arrays, "pixel_values": 0 * media.arrays["pixel_values"]}))
        for at, media in played[0][0].rows[0].shown[:1]
    ]
    other = replace(rows[0], media=with_turns(played[0][1], [*blank, *played[0][0].rows[0].shown[1:]]))
    with torch.no_grad():
        seen, _ = response_log_probs(tiny.model, Packing.of(tiny.model).pack([other]), temperature=0.8)
    assert np.abs(seen.float().numpy() - parts[0]).max() > 1e-2  # so the media do decide them
    if has_first:  # the prompt's picture once, for all samples
        assert sum(size for tower, size in calls if tower == "vision") < sum(
            row.media.encoder_positions for row in rows if row.media is not None
        )


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("name", WAYS_TO_CACHE)
async def test_positions_are_the_models_own_of_the_whole_conversation(make: Make, name: str, closes: bool) -> None:
    tiny = make(name)
    family, asked = family_of(tiny.model), list[Request]()
    assert family is not None

    async def ask(request: Request) -> Completion:
        """Some bytes, and with `closes` the end of the turn."""
        asked.append(request)
        said = np.array([40, 41, *([request.params.stop_token_ids[0]] if closes else [])], np.int32)
        had = request.prefix.tokens if request.prefix is not None else said[:0]
        tokens, nothing = np.concatenate([had, said]), np.zeros(len(had) + len(said), np.float32)
        return Completion(request.id, tokens, nothing, nothing.astype(np.int32), "stop")

    episode = opened(tiny, ask, image(0))
    for shown in (2, 1):
        await episode.generate()
        await episode.say([{"role": "tool", "content": [text("a"), *(part(image(i)) for i in range(shown))]}])
    await episode.generate()
    for request, num_images in zip(asked, (1, 3, 4), strict=True):
        media = request.media
        assert media is not None
        grid = np.concatenate([each.arrays["image_grid_thw"] for _, each in media.placed])
        assert len(grid) == num_images and media.encoder_positions == int(grid.prod(1).sum())
        tokens = request.sequence[: media.positions.shape[1]].astype(np.int64)
        pixels = np.concatenate([each.arrays["pixel_values"] for _, each in media.placed])
        whole = family.positions(tiny.model, tokens, {"pixel_values": pixels, "image_grid_thw": grid})
        np.testing.assert_array_equal(media.positions, whole)
    [row] = episode.made().rows
    assert [at for at, _ in row.shown] == [at for at, _ in asked[-1].media.placed[1:]]  # type: ignore[union-attr]


async def test_what_cannot_be_shown_is_refused_by_name_and_by_its_size_before_it_is_decoded(make: Make) -> None:
    tiny = make("vl")

    async def ask(request: Request) -> Completion:
        had = request.prefix.tokens if request.prefix is not None else np.zeros(0, np.int32)
        tokens = np.concatenate([had, np.array([40], np.int32)])
        return Completion(
            request.id, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop"
        )

    async def shown(ref: MediaRef, **limits: Any) -> None:
        episode = opened(tiny, ask, limits=replace(LIMITS, **limits))
        await episode.generate()
        await episode.say([{"role": "tool", "content": [part(ref)]}])

    with pytest.raises(Unseen, match=r"media must be shown .* media.max_turn_bytes above 0, got image of \d+ bytes"):
        await shown(image(0), max_turn_bytes=0)
    with pytest.raises(
        Unseen, match=r"must take at most what is left of media.max_turn_bytes, 976 bytes once processed.* or show less"
    ):
        await shown(image(0), max_turn_bytes=2000)
    with pytest.raises(Unseen, match="must be of a kind that the model takes"):
        await shown(spoken(0))
    with pytest.raises(Unseen, match="image of 4 bytes"):
        await shown(MediaRef("image", b"none"))
    with pytest.raises(MediaError, match=r"must write '<\|image_pad\|>' once for each image, got 2 for 1"):
        tiny.processor.behind("<|image_pad|><|image_pad|>", [image(0)], 1 << 20)


def test_media_of_turns_come_back_from_the_bus_as_they_were_put(make: Make) -> None:
    tiny = make("omni")
    prepared = [tiny.everything(seed).media for seed in range(2)]
    shown = [(7 * at, media) for at, media in enumerate(prepared) if media is not None]
    column = written(shown)
    assert column.dtype == np.uint8 and len(written([])) == 0 and read(written([])) == []
    assert len(column) < sum(media.num_bytes + 1024 for _, media in shown)  # as episodes count them
    for (at, media), (again, found) in zip(shown, read(column), strict=True):
        assert (again, found.key) == (at, media.key) and found.arrays.keys() == media.arrays.keys()
        for name, array in media.arrays.items():
            assert found.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(found.arrays[name], array)
