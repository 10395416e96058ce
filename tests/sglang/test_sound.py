"""Sound on real SGLang: a tiny Qwen3-Omni that hears, sees and reads. Its log-probs are those that training computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rondo.models.load import load_model
from rondo.models.media.config import MediaConfig
from rondo.models.media.processor import Prepared, Processor
from rondo.models.media.refs import MediaRef
from rondo.models.tiny import qwen3_omni
from rondo.roles.engines.engine import Completion
from tests.models.builders import full_tensors
from tests.models.media.builders import video_bytes
from tests.roles.engines.embedded.test_media_engine import Made, image, sample, spoken, trained
from tests.sglang.servers import Served, launch, serve
from tests.sglang.test_media import NEAR, gap

SIZES: dict[str, Any] = {
    "tie_embeddings": False, "whole": True, "num_deepstack": 3, "vision_layers": 3, "num_layers": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("omni") / "model"
    qwen3_omni.build(folder, **SIZES)
    model = load_model(str(folder)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # so that media, order and position decide the log-probs
    save_file({name: tensor.contiguous().clone() for name, tensor in full_tensors(model)}, folder / "model.safetensors")
    return Made(model, Processor.load(str(folder), MediaConfig(video_min_tokens=4, whole_positions=True)), folder)


@pytest.fixture(scope="module")
def hearing(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    with asyncio.Runner() as runner, serve(runner, launch(made.films), folder) as served:
        yield served


def film(made: Made) -> MediaRef:
    """A video with its sound."""
    data = video_bytes(made.films, num_frames=8, fps=8, width=64, height=32, sound=True, noise=True)
    return MediaRef("video", data, use_audio=True)


@pytest.mark.parametrize("what", ["sound", "sounds", "with images", "with frames", "of a video", "text"])
async def test_log_probs_of_what_is_heard_are_the_trainers(
    hearing: Served, made: Made, tmp_path: Path, what: str
) -> None:
    prompts: dict[str, list[Prepared]] = {
        "sound": [made.ask(spoken(1)), made.ask(spoken(2, 1.3), text="what?")],
        "sounds": [made.ask(spoken(1), spoken(2, 2.2), spoken(1), spoken(3, 3.3))],
        "with images": [made.ask(image(1), spoken(3), image(2))],
        "with frames": [made.everything(4)],
        "of a video": [made.ask(film(made))],
        "text": [replace(made.ask(text="only words"))],
    }
    asked = [sample(f"r{number}", prompt, 24) for number, prompt in enumerate(prompts[what])]
    async with hearing.engine(tmp_path) as engine:
        done = await asyncio.gather(*map(engine.generate, asked))
    found = gap(made, asked, done)
    print(f"log-prob difference to the trainer, {what}: at most {found:.1e} nats")
    assert found < NEAR


async def test_sounds_of_any_lengths_are_heard_in_one_batch(hearing: Served, made: Made, tmp_path: Path) -> None:
    most = hearing.capabilities.max_running
    words, heard = made.ask(text="words"), [made.ask(spoken(10 + n, 0.3 + 0.4 * n)) for n in range(6)]
    first = [sample(f"text {n}", words, 150, seed=n) for n in range(most)]
    later = [sample(f"sound {n}", prompt, 8) for n, prompt in enumerate(heard)]
    async with hearing.engine(tmp_path) as engine:
        running = [asyncio.create_task(engine.generate(each)) for each in first]
        # They wait until the others end together, and are begun together.
        done = await asyncio.gather(*map(engine.generate, later))
        await asyncio.gather(*running)
    assert gap(made, later, done) < NEAR


async def test_places_of_media_that_were_sampled_are_tokens_like_any_other(
    hearing: Served, made: Made, tmp_path: Path
) -> None:
    config = made.model.config
    drawn = np.array([7, config.audio_token_id, config.image_token_id, 9, config.video_token_id], np.int32)
    asked = sample("r", made.everything(5), 20)
    part = Completion("r", drawn, np.zeros(5, np.float32), np.zeros(5, np.int32), "interrupted")
    async with hearing.engine(tmp_path) as engine:
        done = await engine.generate(asked.resumed(part))
    np.testing.assert_array_equal(done.tokens[:5], drawn)
    expected = trained(made.model, [asked], {"r": done})["r"]
    np.testing.assert_allclose(done.log_probs[5:], expected[5:], rtol=0, atol=NEAR)


async def test_other_sound_under_the_same_tokens_is_another_prompt_and_the_same_is_shared(
    hearing: Served, made: Made, tmp_path: Path
) -> None:
    first, other = made.ask(spoken(1)), made.ask(spoken(9))
    np.testing.assert_array_equal(first.tokens, other.tokens)
    asked = [sample("a", first, 12), sample("b", first, 12), sample("c", other, 12)]
    async with hearing.engine(tmp_path) as engine:
        done = [await engine.generate(each) for each in asked]
        assert engine.stats().shared_prompt_tokens >= len(first.tokens) - 1
    assert gap(made, asked, done) < NEAR


async def test_a_sample_with_sound_is_continued_behind_its_prefix_and_under_new_weights(
    hearing: Served, made: Made, tmp_path: Path
) -> None:
    asked = sample("r", made.everything(2), 30, temperature=0.0)
    async with hearing.engine(tmp_path) as engine:
        whole = await engine.generate(asked)
        part = Completion("r", whole.tokens[:11], whole.log_probs[:11], whole.policy_versions[:11], "interrupted")
        again = await engine.generate(asked.resumed(part))
        await engine.update_weights(1, {name: tensor.clone() for name, tensor in full_tensors(made.model)})
        newer = await engine.generate(replace(asked, id="newer"))
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    np.testing.assert_array_equal(newer.tokens, whole.tokens)
    assert newer.policy_versions.tolist() == [1] * 30
    assert hearing.capabilities.media == ("image", "audio", "video") and hearing.capabilities.takes_processed_media
