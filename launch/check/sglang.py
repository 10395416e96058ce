"""The part of the check that looks for SGLang: an interpreter that has it, or servers that answer.

Owns no rule between settings (`roles/config/`). Starts no server and imports nothing of SGLang: the interpreter tells the
version of the package that it would start.
"""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.check.findings import Finding, error, ok
from rondo.launch.config import RunConfig
from rondo.launch.sglang_env import has_sglang
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang.requirements import (
    MEDIA,
    Lengths,
    of_server,
    parse_version,
    require_adapters,
    require_version,
    silent_about_experts,
    too_short,
)
from rondo.runtime.errors import ConfigError

_ANSWER_S = 5.0
_BUILD = "Build one with `rondo sglang install PATH`, and set rollout.sglang.python to PATH/bin/python"


def look_at_sglang(config: RunConfig) -> Iterator[Finding]:
    """On this machine. Nothing without `rollout.sglang`."""
    settings = config.rollout.sglang
    if settings is None:
        return
    try:
        if settings.python is not None:
            version = installed(settings.python)
            yield ok(f"{settings.python} has SGLang {version}")
            if config.media is not None and parse_version(version) < MEDIA:
                yield error(
                    f"SGLang must be {'.'.join(map(str, MEDIA))} or newer for media, whose predecessors make up positions, got "
                    f"{version} of {settings.python}. {_BUILD}"
                )
        else:
            for url in settings.urls:
                version, lengths, info = answered(url, settings, tells_experts=config.train.router_replay == "r3")
                if config.adapts_engines and config.train.lora is not None:
                    require_adapters(info, rank=config.train.lora.rank, room=config.adapter_room, where=url)
                yield ok(f"SGLang {version} answers at {url}")
                if lengths is not None and config.longest_sample > lengths.whole:
                    what = "rollout.max_prompt_tokens + rollout.max_new_tokens"
                    raise too_short(what, config.longest_sample, lengths.whole, url)
    except ConfigError as wrong:
        yield error(str(wrong))


def installed(python: str) -> str:
    """The version of SGLang that this interpreter has. ConfigError without one, or where it is too old."""
    if shutil.which(python) is None:
        raise ConfigError(f"rollout.sglang.python must be an interpreter that runs, got {python}. {_BUILD}")
    version = has_sglang(python)
    if version is None:
        raise ConfigError(
            f"rollout.sglang.python must be an interpreter that has SGLang, got {python}, which has none. {_BUILD}"
        )
    require_version(version, python)
    return version


def context_of(settings: SGLangConfig, max_positions: int) -> int:
    """Tokens of the context of a server that is started so, for a model with so many positions."""
    given = {name.replace("_", "-"): value for name, value in settings.arguments.items()}.get("context-length", "")
    return int(given) if str(given).isdecimal() else max_positions


def answered(
    url: str, settings: SGLangConfig, *, tells_experts: bool = False
) -> tuple[str, Lengths | None, Mapping[str, Any]]:
    """The version of the server there, how long a sample may be, and all else that it tells. With `tells_experts` it must tell
    them."""
    request = urllib.request.Request(f"{url.rstrip('/')}/server_info")
    if settings.api_key_file is not None:
        try:
            request.add_header("Authorization", f"Bearer {Path(settings.api_key_file).read_text().strip()}")
        except OSError as error:
            raise ConfigError(
                f"rollout.sglang.api_key_file must be a file to read, got {settings.api_key_file}: {error.strerror}. "
                "Correct it"
            ) from error
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_S) as answer:
            told = orjson.loads(answer.read())
            version, lengths = str(told.get("version")), of_server(told)
    except (urllib.error.URLError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"rollout.sglang.urls must be servers that answer, got {error} of {url}. Start it, or correct the address"
        ) from error
    require_version(version, url)
    if tells_experts and not told.get("enable_return_routed_experts"):
        raise silent_about_experts(url)
    return version, lengths, told
