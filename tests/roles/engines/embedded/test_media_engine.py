"""The embedded engine on prompts with media: what it reports is what the trainer computes, however samples come, share and go."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rondo.models.config import LoraConfig
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.lora import adapt, base_alone, published_adapter
from rondo.models.media.batch import placeholder_ids
from rondo.models.media.config import MediaConfig
from rondo.models.media.processor import Prepared, Processor
from rondo.models.media.refs import MediaRef
from rondo.models.packing import Packing, Sequence
from rondo.models.routing import enable_replay, listen, routers_of
from rondo.models.tiny import qwen3_5, qwen3_omni, qwen3_vl
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Completion, OnNewWeights, Prefix, Request
from rondo.runtime.errors import ConfigError
from tests.e2e.omni import picture, sound
from tests.models.builders import full_tensors
from tests.models.media.builders import video_bytes
from tests.roles.engines.engines import qwen3, request, run

BUILDS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "omni": (qwen3_omni.build, {}),
    "vl": (qwen3_vl.build, {}),
    "vl_moe": (qwen3_vl.build, {"num_experts": 4}),
    "3_5": (qwen3_5.build, {}),
}
WAYS_TO_CACHE = ("omni", "vl", "3_5")
"""Sound and experts; pictures alone; states of linear attention."""
CLOSE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A tiny model, read only, and its processor."""

    model: Any
    processor: Processor
    films: Path

    def ask(self, *refs: MediaRef, text: str = "sum?") -> Prepared:
        """A prompt of those media and that text."""
        parts: list[dict[str, str]] = [{"type": ref.kind} for ref in refs]
        content = [*parts, {"type": "text", "text": text}]
        return self.processor.prepare([{"role": "user", "content": content}], refs)

    def everything(self, seed: int = 0) -> Prepared:
        """A prompt with every modality of the model."""
        audio = [spoken(seed)] if self.hears else []
        return self.ask(image(seed), *audio, frames(seed, 4))

    @property
    def hears(self) -> bool:
        return "omni" in self.model.config.model_type


Make = Callable[..., Made]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(name in BUILDS, seed of the weights) -> the model, built once."""

    @functools.cache
    def made(name: str, seed: int = 0) -> Made:
        build, sizes = BUILDS[name]
        folder = tmp_path_factory.mktemp(f"{name}-{seed}")
        build(folder, tie_embeddings=False, seed=seed, **sizes)
        model = load_model(str(folder)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)  # so that media, order and position decide the log-probs
        return Made(model, Processor.load(str(folder), MediaConfig(video_min_tokens=4)), folder)

    return made


def image(seed: int) -> MediaRef:
    return MediaRef("image", picture(seed))


def frames(seed: int, count: int) -> MediaRef:
    return MediaRef("video", [picture(100 + 10 * seed + number) for number in range(count)])


def spoken(seed: int, seconds: float = 0.5) -> MediaRef:
    return MediaRef("audio", sound(seed, seconds))


def engine_for(model: Any, num_slots: int = 4, max_length: int = 240, **options: Any) -> SlotEngine:
    return slot_engine(model, num_slots=num_slots, max_length=max_length, **options)


def sample(name: str, prompt: Prepared, num_new: int, **params: Any) -> Request:
    return replace(request(name, prompt.tokens, num_new, **params), media=prompt.media)


def samples(name: str, prompt: Prepared, lengths: Iterable[int], **params: Any) -> list[Request]:
    return [sample(f"{name}/{number}", prompt, num_new, **params) for number, num_new in enumerate(lengths)]


@torch.inference_mode()
def trained(
    model: Any, requests: Iterable[Request], done: Mapping[str, Completion], temperature: float = 1.0
) -> dict[str, np.ndarray]:
    """Request id -> log-probs of its completion as training and scoring compute them, packed with the others."""
    finished = [(each, done[each.id].tokens) for each in requests]
    rows = [Sequence(np.concatenate([each.prompt, tokens]), len(tokens), each.media) for each, tokens in finished]
    flat, _ = response_log_probs(model, Packing.of(model).pack(rows), temperature=temperature)
    parts = np.split(flat.float().numpy(), np.cumsum([row.response for row in rows])[:-1])
    return {each.id: part for (each, _), part in zip(finished, parts, strict=True)}


def gap(model: Any, requests: Iterable[Request], done: Mapping[str, Completion], temperature: float = 1.0) -> float:
    """The largest difference between the engine's log-probs and the trainer's."""
    requests = list(requests)
    expected = trained(model, requests, done, temperature)
    return max(float(np.abs(expected[each.id] - done[each.id].log_probs).max()) for each in requests)


@contextmanager
def seen_by_towers(model: Any) -> Iterator[list[tuple[str, int]]]:
    """(tower, patches or frames that it got) of every call, in order."""
    calls: list[tuple[str, int]] = []

    def seeing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(("vision", int(kwargs["grid_thw"].prod(1).sum())))

    def hearing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append(("audio", int(kwargs["feature_lens"].sum())))

    handles = [model.model.visual.register_forward_hook(seeing, with_kwargs=True)]
    if hasattr(model.model, "audio_tower"):
        handles.append(model.model.audio_tower.register_forward_hook(hearing, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def mixed(made: Made) -> list[Prepared]:
    """Prompts of many lengths: text, each modality, several at once, in no order."""
    prompts = [
        made.ask(image(0)),
        made.ask(text="words alone, and rather more of them than beside a picture"),
        made.ask(frames(0, 4), text="?"),
        made.ask(image(1), image(2), frames(1, 6)),
        made.ask(text=""),
    ]
    if made.hears:
        film = video_bytes(made.films, num_frames=8, fps=8, width=64, height=32, sound=True, noise=True)
        with_sound = MediaRef("video", film, use_audio=True)
        prompts += [
            made.ask(spoken(0, 1.3)),
            made.ask(spoken(1, 0.2), image(3), spoken(2, 0.6)),
            made.ask(with_sound, text="what is said?"),
            made.ask(image(4), with_sound, frames(2, 4)),
        ]
    return [prompts[index] for index in np.random.default_rng(3).permutation(len(prompts))]


@pytest.mark.parametrize("name", BUILDS)
def test_log_probs_equal_the_trainers_on_ragged_batches_of_text_and_media(make: Make, name: str) -> None:
    made = make(name)
    rng = np.random.default_rng(5)
    requests = [
        each
        for number, prompt in enumerate(mixed(made))
        for each in samples(str(number), prompt, rng.integers(1, 12, 3), temperature=0.8)
    ]
    modalities = {modality for each in requests if each.media is not None for modality in each.media.modalities}
    assert modalities == {"image", "video"} | ({"audio"} if made.hears else set())
    engine = engine_for(made.model, num_slots=5, max_prefill_tokens=250)
    done = run(engine, requests)
    assert gap(made.model, requests, done, temperature=0.8) < CLOSE
    assert engine.stats().shared_prompt_tokens > 0


@pytest.mark.parametrize("name", ["omni", "vl_moe"])
def test_experts_of_prompts_with_media_are_those_of_the_trainer_which_replays_them(make: Make, name: str) -> None:
    made = make(name)
    requests = [each for number, prompt in enumerate(mixed(made)) for each in samples(str(number), prompt, (4, 7))]
    done = run(engine_for(copy.deepcopy(made.model), num_slots=5, max_prefill_tokens=250, tells_experts=True), requests)
    model = copy.deepcopy(made.model)
    packing = Packing.of(model)
    enable_replay(model)
    heard: dict[int, torch.Tensor] = {}
    listen(model, heard.__setitem__)
    rows = [
        Sequence(np.concatenate([each.prompt, tokens]), len(tokens), each.media, experts)
        for each in requests
        for tokens, experts in [(done[each.id].tokens, done[each.id].routed_experts)]
    ]
    packed = packing.pack(rows, train=True)
    assert packed.routes is not None and packing.dummy is not None
    last = 0 if packed.shared is not None else len(rows)  # tokens that predict nothing
    assert int(packed.routes.recorded.sum()) == packed.num_tokens - len(packing.dummy.tokens) - last
    found = []
    for routes in (packed.routes, None):
        with torch.no_grad():
            found.append(response_log_probs(model, replace(packed, routes=routes))[0])
        for layer in routers_of(model):
            chosen = heard[layer][packed.routes.recorded]
            assert torch.equal(chosen, packed.routes.experts[packed.routes.recorded, layer].long())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", BUILDS)
def test_other_media_under_the_same_tokens_are_another_prompt(make: Make, name: str) -> None:
    made = make(name)
    first, second = made.everything(0), made.everything(1)
    assert first.tokens.tolist() == second.tokens.tolist()
    requests = [sample("a", first, 6, seed=1), sample("b", second, 6, seed=1)]
    engine = engine_for(made.model)
    done = run(engine, requests)
    assert engine.stats().shared_prompt_tokens == 0
    assert gap(made.model, requests, done) < CLOSE
    swapped = [replace(requests[0], media=second.media), replace(requests[1], media=first.media)]
    assert gap(made.model, swapped, done) > 1e-2  # so the media do decide them


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers_generate(make: Make, name: str) -> None:
    made = make(name)
    prompt, num_new = made.ask(image(0), image(1)), 16
    assert prompt.media is not None
    ids = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
    media = {key: torch.from_numpy(array) for key, array in prompt.media.arrays.items() if key != "positions"}
    if not made.hears:
        media["mm_token_type_ids"] = (ids == made.model.config.image_token_id).int()
    generated = made.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **media,
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=[],
        return_dict_in_generate=True,
        output_logits=True,
    )
    expected = generated.sequences[0, ids.shape[1] :]
    beside = samples("other", made.ask(text="a sample beside it"), (5, 9))
    done = run(engine_for(made.model), [beside[0], sample("a", prompt, num_new, temperature=0.0), beside[1]])["a"]
    assert done.tokens.tolist() == expected.tolist()
    log_probs = torch.log_softmax(torch.cat(generated.logits).float(), -1).gather(1, expected[:, None])[:, 0]
    np.testing.assert_allclose(done.log_probs, log_probs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
async def test_samples_asked_for_together_cross_towers_and_prefill_once(make: Make, name: str) -> None:
    made = make(name)
    first, second = made.everything(0), made.ask(image(5))
    requests = [*samples("g", first, (3, 7, 5)), *samples("h", second, (4, 6))]
    slots = engine_for(made.model, num_slots=8)
    engine = EmbeddedEngine(slots, at_once)
    with seen_by_towers(made.model) as calls:
        done = await asyncio.gather(*(engine.generate(each) for each in requests))
    await engine.close()
    assert first.media is not None
    sounds = [("audio", int(first.media.arrays["feature_attention_mask"].sum()))] if made.hears else []
    films = ("vision", len(first.media.arrays["pixel_values_videos"]))
    if name == "3_5":  # each prompt is prefilled alone
        assert calls == [("vision", 16), films, ("vision", 16)]
    else:
        assert calls == [*sounds, ("vision", 16 + 16), films]
    stats = engine.stats()
    assert stats.prefill_tokens == len(first.tokens) + len(second.tokens)
    assert stats.shared_prompt_tokens == 2 * len(first.tokens) + len(second.tokens)
    assert gap(made.model, requests, {each.request_id: each for each in done}) < CLOSE


async def at_once(function: Callable[[], Any]) -> Any:
    """A compute thread that is the test's own."""
    return function()


@pytest.mark.parametrize("name", ["omni", "vl"])
def test_prompts_about_the_same_media_encode_them_once_and_share_no_prefill(make: Make, name: str) -> None:
    made = make(name)
    one, other = made.ask(image(0), text="left"), made.ask(image(0), text="next")
    assert one.media is not None and other.media is not None and one.media.key == other.media.key
    requests = [*samples("one", one, (4, 6)), *samples("other", other, (5, 3))]
    engine = engine_for(made.model)
    with seen_by_towers(made.model) as calls:
        done = run(engine, requests)
    assert calls == [("vision", 16)]
    assert engine.stats().prefill_tokens == len(one.tokens) + len(other.tokens)
    assert gap(made.model, requests, done) < CLOSE


@pytest.mark.parametrize("name", ["omni", "vl"])
def test_a_later_sample_copies_the_prompt_with_its_media_from_one_in_flight(make: Make, name: str) -> None:
    made = make(name)
    prompt, other = made.everything(), made.ask(text="words")
    requests = [*samples("g", prompt, (12, 3, 5, 4)), sample("other", other, 6)]
    engine = engine_for(made.model, num_slots=2)
    with seen_by_towers(made.model) as calls:
        done = run(engine, requests)
    assert len(calls) == len(set(calls)) == (3 if made.hears else 2)
    assert engine.stats().prefill_tokens == len(prompt.tokens) + len(other.tokens)
    assert gap(made.model, requests, done) < CLOSE


def test_a_later_sample_under_linear_attention_computes_its_prompt_anew(make: Make) -> None:
    made = make("3_5")
    prompt, other = made.everything(), made.ask(text="words")
    requests = [*samples("g", prompt, (12, 3, 5, 4)), sample("other", other, 6)]
    engine = engine_for(made.model, num_slots=2)
    done = run(engine, requests)
    # Two start together and share; of the state that follows the prompt nothing is left for those that come later.
    assert engine.stats().shared_prompt_tokens == len(prompt.tokens)
    assert engine.stats().prefill_tokens == 3 * len(prompt.tokens) + len(other.tokens)
    assert gap(made.model, requests, done) < CLOSE
    for each in requests:
        alone = run(engine_for(made.model, num_slots=1), [each])[each.id]
        assert alone.tokens.tolist() == done[each.id].tokens.tolist()


def test_prompts_shorter_than_the_convolution_of_linear_attention_are_exact(make: Make) -> None:
    made = make("3_5")
    tokens = made.ask(image(0)).tokens[:4]
    requests = [request(f"r{length}", tokens[:length], 7) for length in (1, 2, 3, 4)]
    done = run(engine_for(made.model, num_slots=3), [*requests, sample("media", made.everything(), 9)])
    assert gap(made.model, requests, done) < CLOSE


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
def test_slots_that_move_into_the_place_of_cancelled_and_finished_ones_stay_right(make: Make, name: str) -> None:
    made = make(name)
    requests = [
        sample("cancelled", made.ask(image(0), image(1)), 20),
        sample("ends", made.ask(text="a few words"), 6),
        sample("stays", made.everything(1), 16),
        sample("moves twice", made.ask(frames(2, 6)), 18),
        sample("waits", made.ask(image(2)), 12),
    ]
    engine = engine_for(made.model)
    for each in requests:
        engine.add(each)
    for _ in range(4):
        engine.step()
    cancelled = engine.cancel("cancelled")
    assert cancelled is not None
    done = run(engine) | {"cancelled": cancelled}
    assert [done[each.id].tokens.size for each in requests] == [4, 6, 16, 18, 12]
    assert gap(made.model, requests, done) < CLOSE


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
@torch.no_grad()
def test_tokens_after_a_flip_come_from_the_new_weights_over_the_old_cache(make: Make, name: str) -> None:
    made, old, new = make(name), make(name).model, make(name, seed=1).model
    prompt, num_before, num_after = made.everything(), 4, 7
    assert prompt.media is not None
    asked = sample("a", prompt, num_before + num_after)
    engine = engine_for(copy.deepcopy(old), version=3)
    engine.add(asked)
    for _ in range(num_before):
        engine.step()
    engine.load_weights(7, dict(full_tensors(new)))
    late = sample("late", prompt, 5)
    done = run(engine, [late])
    assert done["a"].policy_versions.tolist() == [3] * num_before + [7] * num_after
    # The same by hand: the prompt and all but the newest token through the old weights, every later one through the new.
    length = asked.prompt.size
    ids = torch.from_numpy(np.concatenate([asked.prompt, done["a"].tokens]).astype(np.int64))[None]
    after = prompt.media.positions.max() + 1 + np.arange(num_before + num_after, dtype=np.float32)
    axes = np.concatenate([prompt.media.positions, np.tile(after, (3, 1))], axis=1)
    at = torch.from_numpy(np.concatenate([np.arange(ids.shape[1], dtype=np.float32)[None], axes]))[:, None]
    media = {key: torch.from_numpy(array) for key, array in prompt.media.arrays.items() if key != "positions"}
    cache = transformers.DynamicCache(config=old.config.get_text_config(decoder=True))
    flip = length + num_before - 1
    rows = [
        old(input_ids=ids[:, :length], position_ids=at[..., :length], past_key_values=cache, **media).logits[0, -1:]
    ]
    for index in range(length, ids.shape[1] - 1):
        model, here = old if index < flip else new, slice(index, index + 1)
        rows.append(model(input_ids=ids[:, here], position_ids=at[..., here], past_key_values=cache).logits[0])
    log_probs = torch.log_softmax(torch.cat(rows).float(), -1).gather(1, ids[0, length:, None])[:, 0]
    np.testing.assert_allclose(done["a"].log_probs, log_probs, rtol=0, atol=CLOSE)
    assert np.abs(trained(old, [asked], done)["a"] - done["a"].log_probs)[num_before:].max() > 1e-2
    # A sample that begins after the flip has its media seen by the new towers.
    assert done["late"].policy_versions.tolist() == [7] * 5
    assert gap(new, [late], done) < CLOSE


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
def test_placeholders_that_the_policy_samples_are_tokens_like_any_other(make: Make, name: str) -> None:
    made = make(name)
    model = copy.deepcopy(made.model)
    placeholders = placeholder_ids(model)
    with torch.no_grad():  # a policy that always likes one of the two
        head = model.get_output_embeddings().weight
        head[placeholders[0]] *= 2.5
        head[placeholders[-1]] = -head[placeholders[0]]
    typed = np.array([7, *placeholders, 9, *placeholders], np.int32)  # stand for nothing in a prompt without media
    requests = [
        sample("media/0", made.everything(), 9, top_k=3),
        request("typed/0", typed, 12, top_k=3),  # computed in one forward with media, which are not its own
        *samples("image", made.ask(image(3)), (15, 12), top_k=3),
        *samples("text", made.ask(text="words"), (8, 14), top_k=3),
        sample("media/1", made.everything(), 17, top_k=3),
        request("typed/1", typed, 9, top_k=3),
    ]
    done = run(engine_for(model, num_slots=3), requests)
    # Not only as the last token, which is never computed upon.
    sampled = {each.id.split("/")[0] for each in requests if np.isin(done[each.id].tokens[:-1], placeholders).any()}
    assert sampled == {"media", "image", "text", "typed"}
    assert gap(model, requests, done) < CLOSE


@pytest.mark.parametrize("name", ["vl", "3_5"])
def test_fixed_shapes_make_a_sample_with_media_the_same_to_the_bit(make: Make, name: str) -> None:
    made = make(name)
    requests = [each for number, prompt in enumerate(mixed(made)[:5]) for each in samples(str(number), prompt, (4, 7))]
    together = run(engine_for(made.model, fixed_shapes=True), requests)
    for each in requests[::3]:
        alone = run(engine_for(made.model, fixed_shapes=True), [each])[each.id]
        assert alone.tokens.tolist() == together[each.id].tokens.tolist()
        assert alone.log_probs.tobytes() == together[each.id].log_probs.tobytes()
    assert gap(made.model, requests, together) < CLOSE


def test_what_encoders_take_counts_towards_the_prompts_of_a_step(make: Make) -> None:
    made = make("vl")
    prompts = [made.ask(image(number)) for number in range(3)]
    tokens, patches = len(prompts[0].tokens), 16
    running = []
    for room in (2 * (tokens + patches) - 1, 2 * (tokens + patches)):
        engine = engine_for(made.model, max_prefill_tokens=room)
        for number, prompt in enumerate(prompts):
            engine.add(sample(str(number), prompt, 5))
        engine.step()
        running.append(engine.stats().num_running)
    assert running == [1, 2]


async def test_media_that_the_model_cannot_take_are_refused_with_the_reason(make: Make) -> None:
    heard = make("omni").ask(spoken(0))
    wordy = EmbeddedEngine(slot_engine(qwen3(vocab_size=300), num_slots=1, max_length=240), at_once)
    seeing = EmbeddedEngine(engine_for(make("vl").model), at_once)
    for engine, takes in ((wordy, "none"), (seeing, "image, video")):
        with pytest.raises(ConfigError) as caught:
            await engine.generate(sample("a", heard, 2))
        assert str(caught.value) == (
            f"the media of request 'a' must be of kinds that the model takes, {takes}, got audio. "
            "Name a model that takes them."
        )
        assert engine.stats().num_waiting == 0
        await engine.close()


def test_tokens_and_media_of_different_prompts_are_refused(make: Make) -> None:
    made = make("vl")
    seen, other = made.ask(image(0)), made.ask(image(0), text="something longer")
    with pytest.raises(ConfigError) as caught:
        engine_for(made.model).add(replace(sample("a", seen, 2), media=other.media))
    assert str(caught.value) == (
        f"the positions of request 'a' must be of shape [3, {len(seen.tokens)}], a column a prompt token, "
        f"got [3, {len(other.tokens)}]. Take tokens and media from one processor call."
    )


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
def test_bfloat16_is_finite_and_near_the_trainers_bfloat16(make: Make, name: str) -> None:
    made = make(name)
    model = copy.deepcopy(made.model).to(torch.bfloat16)
    far = made.ask(image(0), frames(0, 4), text="word " * 60)  # positions that bfloat16 cannot tell apart
    requests = [
        each
        for number, prompt in enumerate((far, made.everything(1), made.ask()))
        for each in samples(str(number), prompt, (5, 12))
    ]
    done = run(engine_for(model, max_length=420), requests)
    assert all(np.isfinite(each.log_probs).all() for each in done.values())
    assert gap(model, requests, done) < 2e-2


@pytest.mark.parametrize("name", WAYS_TO_CACHE)
def test_a_sample_with_media_is_recomputed_or_taken_up_again_as_the_trainer_would_score_it(
    make: Make, name: str
) -> None:
    old, new = make(name), make(name, 1)
    engine = engine_for(copy.deepcopy(old.model))
    prompts = (old.everything(), old.ask(image(1)), old.ask(text="words"))
    ways: tuple[OnNewWeights, ...] = ("recompute", "interrupt", "interrupt")
    requests = [
        replace(sample(f"r{n}", prompt, 14), on_new_weights=way)
        for n, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    ]
    for each in requests:
        engine.add(each)
    for _ in range(6):
        engine.step()
    parts = engine.load_weights(1, dict(full_tensors(new.model)))
    assert [part.request_id for part in parts] == ["r1", "r2"]
    for part, each in zip(parts, requests[1:], strict=True):
        engine.add(each.resumed(part))
    done = run(engine)
    by_old, by_new = trained(old.model, requests, done), trained(new.model, requests, done)
    for each in requests:
        versions, log_probs = done[each.id].policy_versions, done[each.id].log_probs
        assert versions.tolist() == [0] * 6 + [1] * 8
        expected = np.where(versions == 0, by_old[each.id], by_new[each.id])
        np.testing.assert_allclose(log_probs, expected, rtol=0, atol=CLOSE)
        assert np.abs(by_old[each.id] - by_new[each.id])[6:].max() > 1e-2


def test_a_sampled_placeholder_is_no_medium_when_its_sequence_is_recomputed(make: Make) -> None:
    made = make("vl")
    prompt = made.ask(image(0))
    placeholder = int(made.model.config.image_token_id)
    prefix = Prefix(np.array([7, placeholder, 9], np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32))
    each = replace(sample("a", prompt, 8), prefix=prefix)
    done = run(engine_for(made.model), [each])
    assert done["a"].tokens[:3].tolist() == [7, placeholder, 9]
    expected = trained(made.model, [each], done)["a"]
    np.testing.assert_allclose(done["a"].log_probs[3:], expected[3:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("name", "targets"), [("omni", ("language", "experts")), ("vl", "all-linear")])
def test_adapters_of_the_language_model_go_with_media(make: Make, name: str, targets: Any) -> None:
    made, trainer, engine = make(name), *(copy.deepcopy(make(name).model) for _ in range(2))
    for model in (trainer, engine):
        adapt(model, LoraConfig(rank=3, alpha=3.0, targets=targets))
    tensors = published_adapter(trainer)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(len(tensor)))
    slots = engine_for(engine)
    slots.load_weights(1, tensors)
    asked = samples("a", made.everything(), (12, 9, 14))
    done = run(slots, asked)
    assert gap(trainer, asked, done) < CLOSE
    with base_alone(trainer):
        assert gap(trainer, asked, done) > 0.1
