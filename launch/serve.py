"""`rondo serve MODEL`: a model behind HTTP, in SGLang's dialect and OpenAI's, by the embedded engine.

Owns the process: what is loaded, the compute thread, the token's file, the signals. Does not own the server
(`roles/serve/`) or the engine.

    rondo serve runs/quickstart --port 30000       # a Hugging Face folder, a name on the hub, or a run with a checkpoint
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import secrets
import signal
import ssl
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from rondo.launch.progress import at_work
from rondo.launch.rundir import checkpoint_of
from rondo.runtime.admin.tls import server_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.checkpoints import has
from rondo.runtime.config import is_loopback
from rondo.runtime.errors import ConfigError

DEFAULT_LENGTH = 8192


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line says. None: derived from model and machine."""

    model: str
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str | None = None
    device: str | None = None
    num_slots: int = 32
    max_length: int | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    served_model_name: str | None = None


def main(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT, then answers what is in flight; a second signal ends it at once. ConfigError for what
    cannot be served."""
    _check(options)
    tls = server_context(options.tls_cert, options.tls_key, ("--tls-cert", "--tls-key"))
    path = model_folder(options.model)
    with _token(options.token_file) as (token, token_path):
        with at_work(f"loads {path}"):
            loaded = _load(options, path)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(options, path, token, token_path, tls, loaded))


def model_folder(model: str) -> str:
    """Where the model's files are; of a run directory those of its newest checkpoint."""
    run = Path(model)
    if not (run / "config.resolved.json").is_file():
        return model
    _, checkpoint = checkpoint_of(run)
    if not has(checkpoint, "hf"):
        raise ConfigError(
            f"MODEL must be a run whose newest checkpoint has a Hugging Face folder, got {checkpoint} without: it was saved "
            f"during the run, or is of adapters. Write one: `rondo export {run} OUT`, with --merged for adapters"
        )
    return str(checkpoint / "hf")


def _check(options: ServeOptions) -> None:
    if not is_loopback(options.host) and options.token_file is None:
        raise ConfigError(
            f"--token-file must be given when --host is not loopback, got host {options.host!r}. "
            "Name a file of mode 0600 that whoever asks has too"
        )
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, got {options.port}. 0 takes a free one")
    if options.num_slots < 1:
        raise ConfigError(f"--num-slots must be at least 1, got {options.num_slots}. Raise it")


@contextmanager
def _token(path: Path | None) -> Iterator[tuple[str, Path]]:
    """The bearer token and the file that it is in; without a file given one of its own, gone at the end."""
    if path is not None:
        yield read_token_file(path, "--token-file"), path
        return
    with tempfile.TemporaryDirectory(prefix="rondo-serve-") as folder:  # mode 0700
        made = Path(folder) / "token"
        token = secrets.token_hex(32)
        made.touch(mode=0o600)
        made.write_text(token + "\n")
        yield token, made


def _load(options: ServeOptions, path: str) -> tuple[Any, Any, dict[str, Any]]:
    """(slot engine, tokenizer, what a `Service` is told of the model)."""
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # torch reads it once; a thread that spins takes the callers' core
    import torch

    from rondo.models.load import end_ids, load_config, load_model, load_tokenizer, num_tokens
    from rondo.models.logprobs import score_tokens
    from rondo.models.published import own_weights
    from rondo.roles.engines.embedded.embedded import slot_engine

    config = load_config(path)
    tokenizer = load_tokenizer(path)
    positions = getattr(getattr(config, "text_config", config), "max_position_embeddings", None) or DEFAULT_LENGTH
    length = min(positions, DEFAULT_LENGTH) if options.max_length is None else options.max_length
    if not 2 <= length <= positions:
        raise ConfigError(f"--max-length must be 2 to {positions}, the model's positions, got {length}. Change it")
    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    model = load_model(path, dtype=dtype, device=device)
    slots = slot_engine(model, num_slots=options.num_slots, max_length=length, num_tokens=num_tokens(tokenizer))
    gc.freeze()  # what was loaded stays, and is never walked again: that would hold up all callers
    told = {"max_length": length, "stop_token_ids": end_ids(path, tokenizer), "dtype": dtype}
    own = {"weights": functools.partial(own_weights, model), "scores": functools.partial(score_tokens, model)}
    return slots, tokenizer, told | own


async def _serve(
    options: ServeOptions,
    path: str,
    token: str,
    token_path: Path,
    tls: ssl.SSLContext | None,
    loaded: tuple[Any, Any, dict[str, Any]],
) -> int:
    from rondo.roles.engines.embedded.embedded import EmbeddedEngine
    from rondo.roles.serve.app import listening
    from rondo.roles.serve.prompt_work import prompt_work
    from rondo.roles.serve.service import Service

    slots, tokenizer, told = loaded
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
    on_thread = functools.partial(asyncio.get_running_loop().run_in_executor, thread)
    engine = EmbeddedEngine(slots, on_thread)
    told["scores"] = functools.partial(on_thread, told["scores"])  # between two turns of the engine
    name = options.served_model_name or options.model
    try:
        async with prompt_work(path) as work:
            service = Service(engine, tokenizer, work, name, model_path=path, **told)
            asked = _signals()
            own, given = ([token], []) if options.token_file is None else ([], [token])
            async with listening(service, own, options.host, options.port, given=given, tls=tls) as url:
                print(f"serving {name} at {url}  token: {token_path}", flush=True)
                await asked.wait()
                print("ends: answers what is in flight; a second signal ends it at once", file=sys.stderr, flush=True)
    finally:
        await engine.close()
        thread.shutdown(wait=False, cancel_futures=True)
    return 0


def _signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second is what it is without us."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)

    def ask() -> None:
        asked.set()
        for each in handled:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for each in handled:
        loop.add_signal_handler(each, ask)
    return asked
