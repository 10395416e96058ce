"""Tiny models of the multimodal families from their configs alone, and prompts with media made by hand, for the tests beside."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.models import parallel
from rondo.models.families import family_of
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs, contents_key
from rondo.models.packing import Packing, Sequence
from tests.strength import LONG

FAMILIES = ("qwen3_vl", "qwen3_5", "qwen3_omni")
IMAGE, VIDEO, AUDIO, START, END, AUDIO_START = 256, 257, 258, 259, 260, 261
MEL_BINS = 16

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_TEXT = {
    "vocab_size": 266, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "rope_parameters": _ROPE,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16, "initializer_range": 0.1,
}  # fmt: skip
_PATCH = 3 * 2 * 4 * 4
_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
    "initializer_range": 0.1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def tiny(family: str) -> Any:
    """A seeded model in float32 and evaluation mode, about 40 thousand parameters."""
    import transformers as hf
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

    torch.manual_seed(7)
    deep = _VISION | {"deepstack_visual_indexes": [0, 1]}
    if family == "qwen3_vl":
        config = hf.Qwen3VLConfig(text_config=_TEXT, vision_config=deep, **_TOKENS)
        return hf.Qwen3VLForConditionalGeneration(config).eval()
    if family == "qwen3_vl_moe":
        config = hf.Qwen3VLMoeConfig(text_config=_TEXT | _EXPERTS, vision_config=deep, **_TOKENS)
        return hf.Qwen3VLMoeForConditionalGeneration(config).eval()
    linear = {
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 32,
    }  # fmt: skip
    if family == "qwen3_5_moe":
        text = _TEXT | linear | _EXPERTS | {"shared_expert_intermediate_size": 16}
        return hf.Qwen3_5MoeForConditionalGeneration(
            hf.Qwen3_5MoeConfig(text_config=text, vision_config=_VISION, **_TOKENS)
        ).eval()
    if family == "qwen3_5":
        return hf.Qwen3_5ForConditionalGeneration(
            hf.Qwen3_5Config(text_config=_TEXT | linear, vision_config=_VISION, **_TOKENS)
        ).eval()
    if family == "qwen3_omni":
        audio = {
            "num_mel_bins": MEL_BINS, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16,
            "output_dim": 32, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 100, "initializer_range": 0.1,
        }  # fmt: skip
        config = Qwen3OmniMoeThinkerConfig(
            text_config=_TEXT | _EXPERTS, vision_config=deep, audio_config=audio, audio_token_id=AUDIO,
            audio_start_token_id=AUDIO_START, **_TOKENS,
        )  # fmt: skip
        return hf.Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()
    raise KeyError(family)


def folder_of(folder: Path, family: str) -> Path:
    """A Hugging Face folder of `tiny(family)`, without a tokenizer."""
    tiny(family).save_pretrained(folder / family)
    return folder / family


def prompt(
    model: Any, seed: int, *, image: tuple[int, ...] = (), video: tuple[int, ...] = (), audio: int = 0
) -> Sequence:
    """A prompt of some text and at most one of each: an image of [height, width] merged patches, a video of [frames, height,
    width] of them, and so many frames of sound. No response."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, 3).tolist()
    arrays: dict[str, np.ndarray] = {}
    if image:
        grid = np.array([[1, 2 * image[0], 2 * image[1]]], np.int64)
        arrays |= {"pixel_values": _noise(rng, int(grid.prod()), _PATCH), "image_grid_thw": grid}
        tokens += [START, *[IMAGE] * (image[0] * image[1]), END]
    if audio:
        family = family_of(model)
        assert family is not None and family.sound_tokens is not None
        arrays["input_features"] = _noise(rng, 1, MEL_BINS, audio)
        arrays["feature_attention_mask"] = np.ones((1, audio), np.int32)
        count = int(family.sound_tokens(model.config, np.array([audio]))[0])
        tokens += [AUDIO_START, *[AUDIO] * count, END]
    if video:
        grid = np.array([[video[0], 2 * video[1], 2 * video[2]]], np.int64)
        arrays |= {"pixel_values_videos": _noise(rng, int(grid.prod()), _PATCH), "video_grid_thw": grid}
        one = [START, *[VIDEO] * (video[1] * video[2]), END]
        if audio or "omni" in model.config.model_type:
            tokens += [START, *[VIDEO] * (video[0] * video[1] * video[2]), END]
        else:  # each frame after its time
            tokens += [token for _ in range(video[0]) for token in (*rng.integers(0, 256, 2).tolist(), *one)]
    tokens += rng.integers(0, 256, 2).tolist()
    ids = np.array(tokens, np.int32)
    if not arrays:
        return Sequence(ids, 0)
    family = family_of(model)
    assert family is not None
    extra = {"video_second_per_grid": np.array([1.0], np.float32)} if video else {}
    arrays["positions"] = family.positions(model, ids.astype(np.int64), arrays | extra)
    return Sequence(ids, 0, MediaInputs(contents_key(arrays), arrays))


def sample(asked: Sequence, seed: int, response: int) -> Sequence:
    """A sample of that prompt."""
    answer = np.random.default_rng(seed).integers(0, 256, response).astype(np.int32)
    return Sequence(np.concatenate([asked.tokens, answer]), response, asked.media)


def group(asked: Sequence, seed: int, responses: Ordered[int]) -> list[Sequence]:
    return [sample(asked, seed + number, response) for number, response in enumerate(responses)]


def ragged(model: Any, seed: int = 0) -> list[Sequence]:
    """Groups of several samples over all modalities of the model, in no order."""
    sound = "omni" in model.config.model_type
    prompts = [
        prompt(model, seed + 1, image=(2, 3)),
        prompt(model, seed + 2),
        prompt(model, seed + 3, video=(2, 1, 2)),
        prompt(model, seed + 4, image=(1, 1), video=(1, 2, 2)),
        prompt(model, seed + 5, image=(3, 1)),
    ]
    if sound:
        prompts += [
            prompt(model, seed + 6, audio=130),
            prompt(model, seed + 7, audio=40, image=(1, 2), video=(1, 1, 1)),
        ]
    samples = [one for number, asked in enumerate(prompts) for one in group(asked, 100 * number + seed, (5, 3, 9))]
    order = np.random.default_rng(seed).permutation(len(samples))
    return [samples[i] for i in order]


def alone(model: Any, one: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [response] through transformers' own forward on this sequence, which makes its positions itself."""
    ids = torch.from_numpy(one.tokens.astype(np.int64))[None]
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if one.media is not None:
        arrays = {name: torch.from_numpy(array) for name, array in one.media.arrays.items() if name != "positions"}
        arguments |= arrays
        if "omni" not in model.config.model_type:
            arguments["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        elif "video_grid_thw" in arrays:
            arguments["video_second_per_grid"] = torch.ones(1)
    last = ids.shape[1] - 1
    logits = model(**arguments).logits[0, last - one.response : last].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, ids.shape[1] - one.response :, None])[:, 0]


def _noise(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


# ---- a step of training -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One way to spread a model over ranks."""

    family: str
    encoders: str = "replicate"
    freeze: tuple[str, ...] = ()
    dtype: str = "float32"
    recomputed: bool = False
    saved: bool = False
    """Whether snapshots and checkpoints of it are tried too."""
    ep: int = 1

    @property
    def name(self) -> str:
        extra = [*self.freeze, *(["recomputed"] if self.recomputed else []), *([f"ep{self.ep}"] if self.ep > 1 else [])]
        return "-".join([self.family, self.encoders, self.dtype, *extra])


CASES = (
    Case("qwen3_omni"),
    Case("qwen3_omni", "shard", saved=True, ep=2),
    Case("qwen3_omni", freeze=("vision",), saved=True),
    Case("qwen3_omni", "shard", freeze=("vision", "language")),
    Case("qwen3_vl", freeze=("language",)),
    Case("qwen3_vl_moe", "shard", recomputed=True, ep=2),
    Case("qwen3_5_moe", ep=2),
    Case("qwen3_omni", dtype="bfloat16", recomputed=True, ep=2),
    Case("qwen3_omni", "shard", dtype="bfloat16"),
    *((Case("qwen3_vl", "shard", recomputed=True), Case("qwen3_5"), Case("qwen3_5_moe")) if LONG else ()),
)
LR = 1e-3


def shares(model: Any, step: int) -> list[list[list[Sequence]]]:
    """[rank][micro-batch] -> samples. Rank 0 sees images and sound first and then text; rank 1 text first, then a video."""
    sound = 70 if "omni" in model.config.model_type else 0
    at = 1000 * step
    pictures = group(prompt(model, at + 1, image=(2, 2 + step), audio=sound), at + 10, (4, 6))
    words = [group(prompt(model, at + 2 + i), at + 20 + 10 * i, (5, 3)) for i in range(2)]
    film = group(prompt(model, at + 5, video=(2, 1, 2)), at + 50, (7, 2))
    return [[pictures, words[0]], [words[1], film]]


def train_step(
    model: Any,
    packing: Packing,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    rank: int | None = None,
    world_size: int = 1,
    take: bool = True,
) -> list[float]:
    """One step over the share of `rank`, or over all shares: [loss sum of all, gradient norm where the step is taken]."""
    every = shares(model, step)
    batches = every[rank] if rank is not None else [batch for share in every for batch in share]
    num_tokens = sum(one.response for share in every for batch in share for one in batch)
    model.train()
    total = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(batches):
        parallel.set_last(model, number == len(batches) - 1)
        log_probs, _ = response_log_probs(model, packing.pack(batch, train=True), chunk_tokens=7)
        loss = -log_probs.sum()
        loss.backward()
        total += loss.detach()
    if world_size > 1:
        dist.all_reduce(total)
    parallel.scale_gradients(model, 1 / num_tokens)
    if not take:
        return [float(total)]
    norm = parallel.clip_grad_norm(model, 0.5)
    optimizer.step()
    parallel.discard_gradients(model)
    return [float(total), norm]


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Name in memory -> the whole gradient, of every parameter that has one (collective when sharded)."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items()}


def long_prompt(model: Any) -> list[Sequence]:
    """Samples at positions beyond 256, which bfloat16 cannot tell apart."""
    asked = prompt(model, 3, image=(2, 2))
    before = np.random.default_rng(4).integers(0, 256, 300).astype(np.int32)
    assert asked.media is not None
    positions = np.concatenate([np.tile(np.arange(300, dtype=np.float32), (3, 1)), asked.media.positions + 300], axis=1)
    arrays = {**asked.media.arrays, "positions": positions}
    whole = Sequence(np.concatenate([before, asked.tokens]), 0, MediaInputs(contents_key(arrays), arrays))
    return group(whole, 5, (20, 12))
