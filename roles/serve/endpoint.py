"""What a run answers to others: the endpoint on a rollout replica's engine, and the record of where a server listens.

Owns the record `endpoints/GROUP.json` (mode 0600) in the run directory, while the endpoint answers. Does not own the engine. Its
callers ask and abort; pauses and weights are the run's.

    {"group": "rollout-0", "url": "http://127.0.0.1:41233", "token_path": "/run/.../token", "model": "digits", "pid": 4711}

Invariant: a replica that returns listens where it listened before, if the port is still free.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from rondo.roles.config import EndpointConfig, ListenConfig
from rondo.roles.engines.engine import Engine
from rondo.roles.serve.app import listening
from rondo.roles.serve.prompt_work import prompt_work
from rondo.roles.serve.service import Service
from rondo.roles.serve.trajectory import Trajectories
from rondo.runtime.admin.tls import server_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.records.record import write_whole
from rondo.runtime.records.telling import telling
from rondo.runtime.worker.context import WorkerContext

FOLDER = "endpoints"
_DRAIN_S = 5.0


@asynccontextmanager
async def endpoint(
    ctx: WorkerContext,
    config: EndpointConfig | None,
    engine: Engine,
    tokenizer: Any,
    *,
    model_name: str,
    model_path: str,
    max_length: int,
    stop_token_ids: tuple[int, ...],
    seeds: bool,
    tells_experts: bool = False,
    folder: str = FOLDER,
    drain_s: float = _DRAIN_S,
) -> AsyncIterator[None]:
    """Answers while the body lasts, `to_others`; without a config nothing is done. `folder`: of the run directory, for its
    record; `drain_s`: what is in flight at the end has so long to be answered."""
    if config is None:
        yield
        return
    kept = Trajectories(
        max_sessions=config.max_sessions, max_bytes=config.max_bytes, max_session_bytes=config.max_session_bytes,
        max_age_s=config.max_age_s, idle_s=config.idle_s,
    )  # fmt: skip
    async with prompt_work(model_path, num_workers=config.prompt_workers) as work:
        service = Service(
            engine, tokenizer, work, model_name, max_length=max_length, model_path=model_path,
            stop_token_ids=stop_token_ids, control=False, seeds=seeds, tells_experts=tells_experts,
            max_body_bytes=config.max_body_bytes, trajectories=kept,
        )  # fmt: skip
        async with to_others(ctx, config, service, folder=folder, drain_s=drain_s):
            yield


@asynccontextmanager
async def to_others(
    ctx: WorkerContext, config: ListenConfig, service: Service, *, folder: str, drain_s: float
) -> AsyncIterator[str]:
    """A server at the address of the settings while the body lasts, which a record in `folder` of the run directory tells; the
    value is its URL. ConfigError where the port cannot be had, nor the token or the certificate be read."""
    given, section = [], config.section
    token_path = ctx.rt_dir / "token"
    if config.token_file is not None:
        token_path = config.token_file.resolve()
        given.append(read_token_file(token_path, f"{section}.token_file"))
    tls = server_context(config.tls_cert, config.tls_key, (f"{section}.tls_cert", f"{section}.tls_key"))
    name = ctx.group if ctx.world_size == 1 else f"{ctx.group}.{ctx.rank}"
    record = ctx.run_dir / folder / f"{name}.json"
    port = config.port + int(ctx.group.rpartition("-")[2]) * ctx.world_size + ctx.rank if config.port else 0
    earlier = 0 if config.port else _earlier(record)
    async with listening(
        service, [ctx.token], config.host, port, given=given, tls=tls, earlier=earlier, drain_s=drain_s
    ) as url:
        tls_told = {} if config.tls_cert is None else {"tls_cert": str(config.tls_cert.resolve())}
        async with announced(ctx, record, url, token_path, service.model_name, **tls_told):
            yield url


@asynccontextmanager
async def announced(
    ctx: WorkerContext, record: Path, url: str, token_path: Path, model_name: str, **more: str
) -> AsyncIterator[None]:
    """What answers at `url` is in the record while the body lasts, and is told."""
    told = {
        "group": record.stem, "url": url, "token_path": str(token_path), "model": model_name, "pid": os.getpid(), **more,
    }  # fmt: skip
    with telling("endpoints"):
        record.parent.mkdir(exist_ok=True)
        write_whole(record, orjson.dumps(told) + b"\n", 0o600)
    await ctx.report("endpoint", told)
    yield
    _remove(record)


def _remove(record: Path) -> None:
    with suppress(FileNotFoundError):
        record.unlink()


def _earlier(record: Path) -> int:
    """The port that was taken before, 0 without one."""
    try:
        return int(orjson.loads(record.read_bytes())["url"].rpartition(":")[2])
    except (FileNotFoundError, orjson.JSONDecodeError):
        return 0
