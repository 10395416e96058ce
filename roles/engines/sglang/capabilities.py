"""What one SGLang server can do, found out by asking it.

Owns the questions and the report. Does not own what follows from an answer: `one_server.py` asks for nothing that a server would
silently leave out, and says so where a run needs it.

    found = await probe(client)
    found.seeds                # False: the server takes a seed for a sample, and does not use it
    asdict(found)              # for events.jsonl

Invariant: what is reported was told or shown by this server, and is not concluded from its version, but for one thing: the
spans of weight versions, which nothing tells before the first answer; that answer is asked for here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rondo.models.media.inputs import Modality
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.numbers import integer
from rondo.roles.engines.sglang.requirements import MEDIA, Lengths, of_server, parse_version, require_version
from rondo.runtime.errors import ProtocolError

_ASK_S = 60.0
_HOT = 1e6
"""A temperature at which all tokens are equally likely."""
_EQUAL = 1e-3


@dataclass(frozen=True, slots=True)
class Experts:
    """What the routed experts of a model look like: per token [layers, top_k], each below `num`."""

    num_layers: int
    top_k: int
    num: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    version: str
    model_path: str
    architecture: str
    tensor_parallel: int
    data_parallel: int
    max_running: int
    max_cached_tokens: int
    lengths: Lengths | None
    """What a sample may have in tokens; None: not known."""
    vocabulary: int | None
    """Token ids are below it. A server does not survive one that is not, so they are refused here. None: not known."""
    version_spans: bool
    """Tells for each token under which weights it was sampled. Without, a sequence must not live through an update."""
    log_probs_after_temperature: bool
    seeds: bool
    """The seed of a sample decides its draws (the server runs with enable-deterministic-inference)."""
    priority: int
    """1: the greatest first; -1: the smallest first; 0: priorities are ignored."""
    in_order: bool
    """Requests of one priority begin in the order in which they come: one queue, whose policy is the default, fcfs."""
    tells_new_tokens: bool
    """The parts of a streamed answer have the new tokens alone (incremental-streaming-output), so that streaming costs little."""
    experts: Experts | None
    """Of a server that tells them (enable-return-routed-experts)."""
    media: tuple[Modality, ...]
    takes_processed_media: bool
    """Media as the trainer's own processor made them, so that both see the same numbers."""


async def probe(client: SGLangClient, *, processed_media: bool = False) -> Capabilities:
    """Asks the server everything; it must not be paused. Raises ConfigError for one that is too old.

    `processed_media`: whoever started it gave it rondo's processor of media, of which a server says nothing itself.
    """
    info = await _told(client, "/server_info")
    version = str(info.get("version", ""))
    require_version(version, client.url)
    model = await _told(client, "/model_info")
    shape = model_config(str(info.get("model_path", "")))
    spans, after_temperature = await _look_at_an_answer(client)
    priority = 0
    if info.get("enable_priority_scheduling"):
        priority = -1 if info.get("schedule_low_priority_values_first") else 1
    return Capabilities(
        version=version,
        model_path=str(info.get("model_path", "")),
        architecture=(model.get("architectures") or ["unknown"])[0],
        tensor_parallel=integer(info, "tp_size", 1),
        data_parallel=integer(info, "dp_size", 1),
        max_running=_internal(info, "max_running_requests"),
        max_cached_tokens=_internal(info, "max_total_num_tokens"),
        lengths=of_server(info),
        vocabulary=text_config(shape).get("vocab_size"),
        version_spans=spans,
        log_probs_after_temperature=after_temperature,
        seeds=bool(info.get("enable_deterministic_inference")),
        priority=priority,
        in_order=integer(info, "dp_size", 1) == 1 and info.get("schedule_policy", "fcfs") == "fcfs",
        tells_new_tokens=bool(info.get("incremental_streaming_output")),
        experts=_experts(shape) if info.get("enable_return_routed_experts") else None,
        media=_media(shape, model),
        takes_processed_media=processed_media and parse_version(version) >= MEDIA,
    )


async def _told(client: SGLangClient, path: str) -> dict[str, Any]:
    told = await client.get(path, deadline_s=_ASK_S)
    if not isinstance(told, dict):
        raise ProtocolError(f"{path} of {client.url} must tell a JSON object, got {told!r:.200}")
    return told


async def _look_at_an_answer(client: SGLangClient) -> tuple[bool, bool]:
    """(spans of versions are told, log-probs are those after the temperature), from one token at a great temperature."""
    asked = {
        "input_ids": [1],
        "sampling_params": {"max_new_tokens": 1, "temperature": _HOT, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    told = await client.post("/generate", asked, deadline_s=_ASK_S)
    try:
        meta = told["meta_info"]
        [likeliest] = meta["output_top_logprobs"]
        return "weight_versions" in meta, abs(likeliest[0][0] - likeliest[1][0]) < _EQUAL
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(
            f"an answer of {client.url} must have the log-probs that were asked for, got {told!r:.300}"
        ) from error


def _internal(info: Mapping[str, Any], name: str) -> int:
    """A number that stands among the arguments, or among what became of them at the start; 0 where it is in neither."""
    states = info.get("internal_states") or [{}]
    return integer(info, name, 0) or integer(states[0], name, 0)


def model_config(model_path: str) -> dict[str, Any]:
    """config.json of the model, where this process can read it; else nothing."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    return found.get("thinker_config", found)


def _media(shape: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[Modality, ...]:
    """By the towers of the model's config: a server denies that an omni model sees. Where none can be read, by its word."""
    sees = "vision_config" in shape or (not shape and told.get("has_image_understanding"))
    hears = "audio_config" in shape or (not shape and told.get("has_audio_understanding"))
    has: Mapping[Modality, Any] = {"image": sees, "audio": hears, "video": sees}
    return tuple(kind for kind, there in has.items() if there)


def text_config(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a model's config that its text model has."""
    found: Mapping[str, Any] = shape.get("text_config", shape)
    return found


def _experts(shape: Mapping[str, Any]) -> Experts | None:
    text = text_config(shape)
    num = text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts")
    if not num:
        return None
    return Experts(int(text["num_hidden_layers"]), int(text["num_experts_per_tok"]), int(num))
