"""Whether a server that runs elsewhere suits a run, before it joins: what a server answers is compared with the settings.

Owns these questions, and the words of a refusal. Does not own what every server must do (`capabilities.py`), nor the way of its
weights, which is tried when the engine over it is made (`weights.py`).

    compared                   with
    architecture, shape        config.json of the run's model; the server's own where this process can read it
    dtype                      model.dtype
    length                     the run's longest prompt and sample
    tokenizer                  the tokens of one text, which the server tells of a prompt

Invariant: what a server does not tell is not held against it: its first weights are then what it must take, and prove.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from rondo.models.load import load_tokenizer
from rondo.roles.config import JobConfig
from rondo.roles.engines.sglang.capabilities import model_config, text_config
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.model_folder import ModelFolder
from rondo.roles.engines.sglang.requirements import of_server
from rondo.runtime.errors import ConfigError

_ASK_S = 60.0
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "tie_word_embeddings",
)  # fmt: skip
_TEXT = "1234 + 5678 = ? \u00e9\u4e2d <|im_end|>\n"
"""Digits, letters beyond ASCII, and what chat models have as one token."""


async def require_suitable(client: SGLangClient, config: JobConfig, model_path: str) -> None:
    """Raises ConfigError with all that keeps the server from taking part in the run."""
    info = await client.get("/server_info", deadline_s=_ASK_S)
    told = await client.get("/model_info", deadline_s=_ASK_S)
    reasons = [*differences(info, told, ModelFolder.of(model_path).config, config)]
    reasons += [] if reasons else await _other_tokens(client, model_path)
    if reasons:
        raise ConfigError(
            f"the server {client.url} must suit the run to be attached, got {'; '.join(reasons)}. Start it with the run's model "
            "and limits, or attach another one"
        )


def differences(
    info: Mapping[str, Any], told: Mapping[str, Any], ours: Mapping[str, Any], config: JobConfig
) -> Iterator[str]:
    """What the server says that it is and the run is not. `info`, `told`: its /server_info and /model_info."""
    theirs = (told.get("architectures") or ["unknown"])[0]
    architecture = (ours.get("architectures") or ["unknown"])[0]
    if "unknown" not in (theirs, architecture) and theirs != architecture:
        yield f"architecture {theirs}, where the run's is {architecture}"
    shape = text_config(model_config(str(info.get("model_path", ""))))
    wanted = text_config(ours.get("thinker_config", ours))
    for name in _SHAPE:
        if name in shape and name in wanted and shape[name] != wanted[name]:
            yield f"{name} {shape[name]}, where the run's is {wanted[name]}"
    dtype = info.get("dtype", "auto")
    if dtype not in ("auto", config.model.dtype):
        yield f"dtype {dtype}, where model.dtype is {config.model.dtype}"
    if (room := of_server(info)) is None:
        return
    if room.prompt < (most := config.rollout.max_prompt_tokens):
        yield f"room for prompts of {room.prompt} tokens, where rollout.max_prompt_tokens is {most}"
    if room.whole < config.longest_sample:
        yield f"room for {room.whole} tokens of a sample and its prompt, where the run's longest have {config.longest_sample}"


async def _other_tokens(client: SGLangClient, model_path: str) -> list[str]:
    """Of a text that both make tokens of; nothing of a server that reads no text or does not tell."""
    asked = {"text": _TEXT, "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
    try:
        answer = await client.post("/generate", asked, deadline_s=_ASK_S)
    except ServerError as error:
        if error.status != 400:
            raise
        return []
    found = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
    tokenizer = await asyncio.to_thread(load_tokenizer, model_path)
    expected = tokenizer(_TEXT)["input_ids"]
    if found is None or list(found) == list(expected):
        return []
    return [f"another tokenizer: {_TEXT!r} is {list(found)[:12]} there and {list(expected)[:12]} here"]
