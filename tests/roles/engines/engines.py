"""Tiny random models, requests for them, and the log-probs that a plain forward gives: what the engine tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Completion, Request, SamplingParams

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that attention and position decide the log-probs
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _made(model: Callable[[Any], Any], config: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    made = model(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)  # all ones would hide a norm that is left out
    return made


def qwen3(seed: int = 0, **changes: Any) -> Any:
    return _made(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**_SHAPE | changes), seed)


def qwen3_tied(seed: int = 0) -> Any:
    return qwen3(seed, tie_word_embeddings=True)


def qwen3_sliding(seed: int = 0) -> Any:
    """One full and one sliding layer."""
    return qwen3(seed, use_sliding_window=True, sliding_window=6, max_window_layers=1)


def qwen3_moe(seed: int = 0, **changes: Any) -> Any:
    experts = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return _made(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**_SHAPE | experts | changes), seed)


def llama(seed: int = 0) -> Any:
    return _made(transformers.LlamaForCausalLM, transformers.LlamaConfig(**_SHAPE), seed)


def mistral(seed: int = 0) -> Any:
    """Every layer sliding."""
    return _made(transformers.MistralForCausalLM, transformers.MistralConfig(**_SHAPE | {"sliding_window": 6}), seed)


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, length]).integers(1, VOCAB, length).astype(np.int32)


def request(name: str, prompt: np.ndarray | int, num_new: int, *, seed: int | None = None, **params: Any) -> Request:
    """`prompt` may be a length; the seed is the name's, unless given."""
    tokens = prompt_of(prompt) if isinstance(prompt, int) else prompt
    own = int.from_bytes(name.encode()[-7:], "big")
    return Request(name, tokens, SamplingParams(num_new, **params), own if seed is None else seed)


def ragged(count: int) -> list[Request]:
    """Requests of many prompt and response lengths, every third one hotter."""
    rng = np.random.default_rng(7)
    return [
        request(
            f"r{index}",
            prompt_of(int(rng.integers(1, 20)), index),
            int(rng.integers(1, 30)),
            temperature=1.0 if index % 3 else 1.5,
        )
        for index in range(count)
    ]


def run(engine: SlotEngine, requests: Iterable[Request] = ()) -> dict[str, Completion]:
    """Steps to the end; request id -> completion."""
    for each in requests:
        engine.add(each)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


@torch.no_grad()
def full_log_probs(model: Any, asked: Request, tokens: np.ndarray) -> np.ndarray:
    """The log-probs of `tokens` from one forward over the whole sequence, without any cache."""
    ids = torch.from_numpy(np.concatenate([asked.prompt, tokens]).astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    log_probs = torch.log_softmax(logits / (asked.params.temperature or 1.0), -1)
    start = asked.prompt.size
    return log_probs[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0].numpy()


def gap(model: Any, requests: Iterable[Request], done: Mapping[str, Completion]) -> float:
    """The largest difference between the engine's log-probs and the plain forward's."""
    return max(
        float(np.abs(full_log_probs(model, each, done[each.id].tokens) - done[each.id].log_probs).max())
        for each in requests
    )
