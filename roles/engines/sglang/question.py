"""What one server is asked for a request: whether it can do it, for how many tokens, and the body of /generate.

Pure. Owns the server's words for a request. Does not own what an answer means (`responses.py`) or the call (`one_server.py`).

    check(request, found, url)                  # ConfigError for what this server would refuse, get wrong, or die of
    room = room_for(request, found)             # new tokens that it may get there
    body = body_of(request, "g7/3#1", room, found)

Invariant: nothing is asked that a server would silently leave out.
"""

from __future__ import annotations

from typing import Any

from rondo.roles.engines.engine import Request
from rondo.roles.engines.sglang.capabilities import Capabilities
from rondo.roles.engines.sglang.media_items import media_body
from rondo.runtime.errors import ConfigError

PART_TOKENS = 128
"""A server hands tokens from one of its processes to the next every 50 anyway; a part costs a write there and a read here."""
STOP_TOKENS = 16
"""Of the run's own samples whose text is read for stop strings: so many at most are made behind one in vain."""
_SEEDS = 1 << 31


def check(request: Request, found: Capabilities, url: str) -> None:
    """Raises ConfigError for a request that this server cannot take."""
    params, sequence = request.params, request.sequence
    if found.vocabulary is not None and not (sequence.min() >= 0 and sequence.max() < found.vocabulary):
        raise ConfigError(
            f"the tokens of request {request.id!r} must be from 0 to {found.vocabulary - 1}, the model's vocabulary, got "
            f"{sequence.min()} to {sequence.max()}. Use the model's own tokenizer."
        )
    if found.lengths is not None and request.prompt.size > found.lengths.prompt:
        raise ConfigError(
            f"the prompt of request {request.id!r} must have {found.lengths.prompt} tokens at most, the limit of "
            f"{url}, got {request.prompt.size}. Shorten it, or start the server with a longer context"
        )
    if params.temperature not in (0.0, 1.0) and not found.log_probs_after_temperature:
        raise ConfigError(
            f"temperature must be 0 or 1 on {url}, which tells log-probs of the plain logits, got "
            f"{params.temperature}. Start the server without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    if request.media is not None and not found.takes_processed_media:
        raise ConfigError(
            f"request {request.id!r} must be text on {url}, SGLang {found.version} without rondo's processor of "
            f"media, got {', '.join(request.media.modalities)}. Let rondo start the server, with 0.5.16 or newer"
        )
    if request.media is not None and (beyond := set(request.media.modalities) - set(found.media)):
        raise ConfigError(
            f"the media of request {request.id!r} must be of kinds that the model of {url} takes, "
            f"{', '.join(found.media) or 'none'}, got {', '.join(sorted(beyond))}. Name a model that takes them"
        )


def room_for(request: Request, found: Capabilities) -> int:
    """New tokens that it may get here: what it asks for, and has not got yet, within the server's own limits."""
    lengths, there = found.lengths, len(request.sequence)
    left = request.params.max_new_tokens - (there - request.prompt.size)
    if lengths is None:
        return left
    return min(left, lengths.whole - there) if there <= lengths.prompt else 0


def body_of(request: Request, rid: str, room: int, found: Capabilities, adapter: str | None = None) -> dict[str, Any]:
    """`rid` names the call at the server; `adapter` the one to generate with."""
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": room,
        "temperature": params.temperature,
        "top_p": params.top_p,
        # More than there are tokens is no limit, in the server's word for that.
        "top_k": -1 if found.vocabulary is not None and params.top_k >= found.vocabulary else params.top_k,
    }
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    else:
        sampling["ignore_eos"] = True
    if found.tells_new_tokens and (request.progress is None or request.kind in ("train", "evaluation")):
        sampling["stream_interval"] = PART_TOKENS if request.progress is None else STOP_TOKENS
    if found.seeds:
        sampling["sampling_seed"] = request.seed % _SEEDS
    body: dict[str, Any] = {
        "rid": rid, "input_ids": request.sequence.tolist(), "sampling_params": sampling, "return_logprob": True,
    }  # fmt: skip
    if adapter is not None:
        body["lora_path"] = adapter
    if params.num_top:
        body["top_logprobs_num"] = params.num_top
    if found.experts is not None:
        body["return_routed_experts"] = True
    if found.priority:
        body["priority"] = found.priority * request.priority
    if request.session is not None:
        body["session_id"] = request.session
    if request.media is not None:
        body |= media_body(request.media, request.sequence)
    return body
