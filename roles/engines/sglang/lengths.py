"""How long a sample may be on a server, by the server's own rules. Imports nothing but its numbers, so that the check of a run
and an engine go by the same.

    of_server(await client.get("/server_info", ...))        # one that runs
    of_context(40_960)                                      # one that is to be started: Lengths(prompt=40953, whole=40958)

A server keeps room for a few tokens (`get_worker_info` of SGLang's `tp_worker.py`, and `init_req_max_new_tokens` of its
`scheduler.py`): with C the smaller one of its context and its cache it refuses a prompt of C - 6 tokens, and ends a sequence of
C - 2 by its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rondo.roles.engines.sglang.numbers import integer
from rondo.runtime.errors import ConfigError

_REFUSED = 6
_ENDED = 2


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
