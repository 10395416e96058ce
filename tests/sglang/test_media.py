"""Images and videos on a real server, which computes on the arrays that the trainer's processor made."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.media.config import MediaConfig
from rondo.models.media.inputs import MediaInputs
from rondo.models.media.processor import Prepared, Processor
from rondo.models.packing import Packing
from rondo.models.tiny import qwen3_vl
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.sampling.episode import SampleRow
from tests.models.builders import full_tensors
from tests.roles.engines.embedded.test_media_engine import Made, frames, image, sample, trained
from tests.roles.engines.embedded.test_media_turns import opened, part, row_of, text
from tests.sglang.servers import Served, launch, serve

NEAR = 5e-5
"""Nats, in float32."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("vl") / "model"
    qwen3_vl.build(folder, tie_embeddings=False)
    model = load_model(str(folder)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that media, order and position decide the log-probs
    save_file({name: tensor.contiguous().clone() for name, tensor in full_tensors(model)}, folder / "model.safetensors")
    return Made(model, Processor.load(str(folder), MediaConfig(video_min_tokens=4)), folder)


@pytest.fixture(scope="module")
def seeing(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    with asyncio.Runner() as runner, serve(runner, launch(made.films), folder) as served:
        yield served


def gap(made: Made, asked: list[Request], done: list[Completion]) -> float:
    told = {each.request_id: each for each in done}
    expected = trained(made.model, asked, told)
    return max(float(np.abs(expected[each.id] - told[each.id].log_probs).max()) for each in asked)


@pytest.mark.parametrize("what", ["image", "images", "video", "both"])
async def test_log_probs_of_media_are_the_trainers(seeing: Served, made: Made, tmp_path: Path, what: str) -> None:
    prompts: dict[str, list[Prepared]] = {
        "image": [made.ask(image(1)), made.ask(image(2), text="how many?")],
        "images": [made.ask(image(1), image(2), image(1))],
        "video": [made.ask(frames(3, 4))],
        "both": [made.ask(image(4), frames(5, 4), image(6))],
    }
    asked = [sample(f"r{number}", prompt, 24) for number, prompt in enumerate(prompts[what])]
    async with seeing.engine(tmp_path) as engine:
        done = await asyncio.gather(*map(engine.generate, asked))
    found = gap(made, asked, done)
    print(f"log-prob difference to the trainer, {what}: at most {found:.1e} nats")
    assert found < NEAR


async def test_a_sample_with_media_is_continued_behind_its_prefix(seeing: Served, made: Made, tmp_path: Path) -> None:
    asked = sample("r", made.ask(image(1), frames(2, 4)), 30, temperature=0.0)
    async with seeing.engine(tmp_path) as engine:
        whole = await engine.generate(asked)
        part = Completion("r", whole.tokens[:11], whole.log_probs[:11], whole.policy_versions[:11], "interrupted")
        again = await engine.generate(asked.resumed(part))
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.testing.assert_allclose(again.log_probs, whole.log_probs, atol=NEAR)


async def test_log_probs_behind_media_of_later_turns_are_the_trainers(
    seeing: Served, made: Made, tmp_path: Path
) -> None:
    async def play(number: int) -> tuple[SampleRow, MediaInputs | None]:
        episode = opened(made, engine.generate, image(0), number=number)
        for turn in range(2):
            await episode.generate()
            seen = (image(10 * number + turn), frames(number, 4))[: turn + 1]
            await episode.say([{"role": "tool", "content": [text("here:"), *map(part, seen)]}])
            await episode.say("<|image_pad|>")  # spelt, and of no medium
        await episode.generate()
        return episode.made().rows[0], episode._shared.root.media

    async with seeing.engine(tmp_path) as engine:
        played = await asyncio.gather(*(play(number) for number in range(2)))
    for row, prompt in played:
        with torch.no_grad():
            packed = Packing.of(made.model).pack([row_of(row, prompt)])
            told, _ = response_log_probs(made.model, packed, temperature=0.8)
        sampled = row.completion.log_probs != 0  # the server has told of no version
        found = float(np.abs(told.float().numpy() - row.completion.log_probs)[sampled].max())
        print(f"log-prob difference to the trainer, {sampled.sum()} tokens in three turns: at most {found:.1e} nats")
        assert len(row.shown) == 2 and np.diff(sampled.astype(int)).tolist().count(1) == 2 and found < NEAR


async def test_samples_of_one_prompt_share_its_media_and_other_media_are_not_taken_for_them(
    seeing: Served, made: Made, tmp_path: Path
) -> None:
    first, other = made.ask(image(1)), made.ask(image(9))
    np.testing.assert_array_equal(first.tokens, other.tokens)
    asked = [sample("a", first, 12), sample("b", first, 12), sample("c", other, 12)]
    async with seeing.engine(tmp_path) as engine:
        done = [await engine.generate(each) for each in asked]
        assert engine.stats().shared_prompt_tokens >= len(first.tokens) - 1
    assert gap(made, asked, done) < NEAR


async def test_text_goes_on_beside_media(seeing: Served, made: Made, tmp_path: Path) -> None:
    text = made.processor.prepare([{"role": "user", "content": "hello"}], [])
    asked = [sample("m", made.ask(image(1)), 20), replace(sample("t", text, 20), media=None)]
    async with seeing.engine(tmp_path) as engine:
        done = await asyncio.gather(*map(engine.generate, asked))
    assert gap(made, asked, done) < NEAR
    assert seeing.capabilities.media == ("image", "video") and seeing.capabilities.takes_processed_media
