"""What a run needs of a server: its version, what it tells, and how long a sample may be there. The check of a run and an engine
go by the same. Imports nothing but numbers and errors.

    require_version("0.5.10.post1", url)                    # (0, 5, 10)
    of_server(await client.get("/server_info", ...))        # lengths of one that runs
    of_context(40_960)                                      # of one that is to be started: Lengths(prompt=40953, whole=40958)

A server keeps room for a few tokens (`get_worker_info` of SGLang's `tp_worker.py`, and `init_req_max_new_tokens` of its
`scheduler.py`): with C the smaller one of its context and its cache it refuses a prompt of C - 6 tokens, and ends a sequence of
C - 2 by its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rondo.roles.engines.sglang.numbers import integer
from rondo.runtime.errors import ConfigError

OLDEST = (0, 5, 10)
"""Older servers read pickles from the network."""
MEDIA = (0, 5, 16)
"""Older servers make up positions of media themselves, whatever comes with them."""
_REFUSED = 6
_ENDED = 2


def parse_version(text: str) -> tuple[int, ...]:
    """The three numbers. Raises ConfigError for what is no version."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ConfigError(f"the version of SGLang must look like 0.5.10, got {text!r}. Use a released one")
    return tuple(map(int, match.groups()))


def require_version(text: str, where: str) -> tuple[int, ...]:
    """The version, as numbers. Raises ConfigError for one that is too old to be safe."""
    found = parse_version(text)
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"SGLang of {where} must be {oldest} or newer, whose predecessors read pickles that anybody may send them, "
            f"got {text}. Install a newer one with `rondo sglang install PATH`"
        )
    return found


def silent_about_experts(where: str) -> ConfigError:
    """For a server of which routed experts are wanted, and which does not tell them."""
    return ConfigError(
        f"train.router_replay must not be 'r3' with servers that do not tell which experts they route to, got {where}. Start it "
        "with --enable-return-routed-experts and a model whose config.json can be read here, or change it"
    )


def require_adapters(info: Mapping[str, Any], *, rank: int, room: int, where: str) -> None:
    """Raises ConfigError unless a server that tells this of itself (/server_info) takes `room` versions of an adapter at once."""
    slots = room + 1  # one for requests without an adapter
    most, in_batch = info.get("max_loaded_loras"), integer(info, "max_loras_per_batch", 0)
    wrong = [
        "no adapters" if not info.get("enable_lora") else "",
        f"ranks up to {info.get('max_lora_rank')}" if integer(info, "max_lora_rank", rank) < rank else "",
        f"{in_batch} at once" if info.get("enable_lora") and in_batch < slots else "",
        f"{most} loaded" if most is not None and most < slots else "",
        f"dp_size {info.get('dp_size')}" if integer(info, "dp_size", 1) != 1 else "",
    ]
    if any(wrong):
        raise ConfigError(
            f"the SGLang server {where} must take {room} versions of an adapter of rank {rank} on one data-parallel rank, got "
            f"{', '.join(filter(None, wrong))}. Start it with --enable-lora --max-lora-rank {rank} --max-loras-per-batch {slots} "
            "and --lora-target-modules, or set train.lora.publish='merged'"
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens."""

    prompt: int
    """Of a prompt, with what there is of its response already."""
    whole: int
    """Of prompt and response together; one that reaches it ends by its length."""


def of_context(num_tokens: int) -> Lengths:
    """Of a server with so long a context, whose cache holds as much."""
    return Lengths(prompt=num_tokens - _REFUSED - 1, whole=num_tokens - _ENDED)


def of_whole(num_tokens: int) -> int:
    """What a server that ends sequences of so many tokens tells as its `max_req_input_len`."""
    return num_tokens + _ENDED - _REFUSED


def of_server(info: Mapping[str, Any]) -> Lengths | None:
    """What /server_info tells; None where it does not. ProtocolError for what is no length."""
    if "max_req_input_len" not in info:
        return None
    return of_context(integer(info, "max_req_input_len") + _REFUSED)


def too_short(what: str, num_tokens: int, most: int, where: str) -> ConfigError:
    """For a server that does not take so many tokens."""
    return ConfigError(
        f"{what} must be at most {most}, what SGLang of {where} takes beside those that it keeps free, got {num_tokens}. "
        "Lower it, or give the server a longer context or more memory"
    )


def address_of(text: str) -> str:
    """An address as it is compared: scheme, host and port, and a path without its last slash. ConfigError for what is none."""
    parts = urlsplit(text.strip())
    try:
        port = parts.port
    except ValueError:
        port = -1
    plain = parts.scheme in ("http", "https") and parts.hostname and port != -1
    if not plain or parts.username is not None or parts.query or parts.fragment or not text.isprintable():
        raise ConfigError(
            f"the address of an engine must look like http://10.0.0.9:30000, got {text[:200]!r}. A key stands in "
            "rollout.sglang.api_key_file"
        )
    assert parts.hostname is not None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"
