"""Which versions of SGLang are spoken to, and about what. Owns the oldest ones, and why; and what else a run may need of a
server. Imports nothing but errors.

parse_version("0.5.10.post1")   ->   (0, 5, 10)
"""

from __future__ import annotations

import re

from rondo.runtime.errors import ConfigError

OLDEST = (0, 5, 10)
"""Older servers read pickles from the network."""
MEDIA = (0, 5, 16)
"""Older servers make up positions of media themselves, whatever comes with them."""


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
        f"train.router_replay must be False with servers that do not tell which experts they route to, got {where}. Start it "
        "with --enable-return-routed-experts and a model whose config.json can be read here, or set train.router_replay=False"
    )
