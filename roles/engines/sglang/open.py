"""From the settings of a run to its engines over SGLang.

Owns what follows from a setting: how many servers a replica has, on which devices, with which cache, key, log and weights' way.

    engines = kept_engines(ctx, job, newest=newest)        # not started: `kept(engines)` does that
    engine = one_engine(engines, newest=newest)
    more = attached_engine(ctx, job, url, newest=newest)      # `attached.py` adds it while the run goes on
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path

from rondo.roles.config import JobConfig, SGLangConfig
from rondo.roles.engines.dispatch import Dispatcher, DispatchLimits
from rondo.roles.engines.dispatch.installing import Reload
from rondo.roles.engines.ranges import PRIORITY
from rondo.roles.engines.sglang.adapter_folder import target_modules
from rondo.roles.engines.sglang.adapters import ServerAdapters
from rondo.roles.engines.sglang.capabilities import probe
from rondo.roles.engines.sglang.client import SGLangClient, read_key
from rondo.roles.engines.sglang.model_folder import ModelFolder
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.roles.engines.sglang.requirements import silent_about_experts, too_short
from rondo.roles.engines.sglang.restarts import Connect, KeptEngine
from rondo.roles.engines.sglang.router import RoutedServers
from rondo.roles.engines.sglang.server import Argument, AttachedServer, Launch, Server, SGLangServer
from rondo.roles.engines.sglang.suitable import require_suitable
from rondo.roles.engines.sglang.weights import LOAD_DEADLINE_S, ServerWeights
from rondo.roles.job import Job
from rondo.runtime.worker.context import WorkerContext

_SPARE_TOKENS = 256
"""Of the cache of a server on a processor: what it keeps for itself."""


def kept_engines(ctx: WorkerContext, job: Job, *, newest: Reload) -> list[KeptEngine]:
    """The engines of this process, in the order of its devices or of the addresses. ConfigError for a key that is not there."""
    settings = job.config.rollout.sglang
    assert settings is not None
    folders = (_folder(ctx, job, _name(ctx, index)) for index in itertools.count())
    connect = functools.partial(_connect_of, ctx, job, processed_media=not settings.urls)
    return [
        _kept(ctx, settings, server, functools.partial(connect, folder=folder), newest)
        for server, folder in zip(servers_of(ctx, job, settings), folders, strict=False)
    ]


def attached_engine(ctx: WorkerContext, job: Job, url: str, *, newest: Reload) -> KeptEngine:
    """The engine over a server that is attached to the run. Its server must suit the run, each time that it is found."""
    settings = job.config.rollout.sglang
    assert settings is not None
    name = f"{_name(ctx, 0)}.{hashlib.sha256(url.encode()).hexdigest()[:12]}"

    async def connect(client: SGLangClient) -> SGLangEngine:
        await require_suitable(client, job.config, job.model_path)
        return await _connect_of(ctx, job, client, folder=_folder(ctx, job, name), processed_media=False)

    return _kept(ctx, settings, AttachedServer(url, key=read_key(settings.api_key_file)), connect, newest)


def _kept(ctx: WorkerContext, settings: SGLangConfig, server: Server, connect: Connect, newest: Reload) -> KeptEngine:
    return KeptEngine(
        server, connect, newest=newest, deadline_s=settings.start_deadline_s, silent_s=settings.silent_deadline_s,
        tell=ctx.report,
    )  # fmt: skip


async def _connect_of(
    ctx: WorkerContext, job: Job, client: SGLangClient, *, folder: Path, processed_media: bool
) -> SGLangEngine:
    config, settings = job.config, job.config.rollout.sglang
    assert settings is not None
    adapters = None
    if config.adapts_engines:
        assert config.train.lora is not None
        adapters = ServerAdapters(
            client, lora=config.train.lora, folder=folder, model_path=job.model_path, run_dir=ctx.run_dir,
            attempt=ctx.attempt, room=config.adapter_room, exact=config.train.dtype == "float32",
            deadline_s=settings.update_deadline_s or LOAD_DEADLINE_S,
        )  # fmt: skip
    return await connect_engine(
        client, settings=settings, folder=folder, model_path=job.model_path, device=job.device,
        processed_media=processed_media, tells_experts=config.train.router_replay == "r3",
        max_prompt_tokens=config.rollout.max_prompt_tokens, adapters=adapters,
    )  # fmt: skip


def _folder(ctx: WorkerContext, job: Job, name: str) -> Path:
    """A server's own. Adapters are small, and lie where servers on other nodes find them too."""
    return (ctx.run_dir / "adapters" if job.config.adapts_engines else ctx.rt_dir) / name


def one_engine(engines: Sequence[KeptEngine], *, newest: Reload, update_deadline_s: float | None = None) -> Dispatcher:
    """All of them, or the only one, as an engine that outlives any of them."""

    # A server may take all of its time to start, and then it is given weights.
    absent_s = 2 * max(engine.start_deadline_s for engine in engines)
    limits = DispatchLimits(absent_deadline_s=absent_s, update_deadline_s=update_deadline_s)
    return Dispatcher(engines, names=[engine.server.name for engine in engines], limits=limits, reload=newest)


async def connect_engine(
    client: SGLangClient,
    *,
    settings: SGLangConfig,
    folder: Path,
    model_path: str,
    device: str = "cpu",
    processed_media: bool,
    tells_experts: bool = False,
    max_prompt_tokens: int = 1,
    adapters: ServerAdapters | None = None,
) -> SGLangEngine:
    """An engine over a server that answers. ConfigError for one that does not tell routed experts where it should, or that does
    not take prompts of `max_prompt_tokens`."""
    found = await probe(client, processed_media=processed_media)
    if found.lengths is not None and max_prompt_tokens > found.lengths.prompt:
        raise too_short("rollout.max_prompt_tokens", max_prompt_tokens, found.lengths.prompt, client.url)
    if tells_experts and found.experts is None:
        raise silent_about_experts(client.url)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    weights = adapters or ServerWeights(settings, client, folder=folder, model_path=model_path, device=device)
    engine = SGLangEngine(client, weights=weights, pause=settings.pause, capabilities=found, adapters=adapters)
    await weights.open()
    return engine


def servers_of(ctx: WorkerContext, job: Job, settings: SGLangConfig) -> list[Server]:
    """Those that run already, or those that this replica is to start."""
    if settings.urls:
        key = read_key(settings.api_key_file)
        if settings.router is not None:
            return [RoutedServers(settings.router, settings.urls, key=key)]
        return [AttachedServer(url, key=key) for url in settings.urls]
    names = [_name(ctx, index) for index in range(settings.num_servers)]
    logs = ctx.run_dir / "logs" / f"attempt_{ctx.attempt}"
    return [
        SGLangServer(
            launch_of(job.config, settings, job.model_path, job.device, index, releases=releases_memory(job)),
            log=logs / f"{name}.log",
            folder=ctx.rt_dir,
            name=name,
        )
        for index, name in enumerate(names)
    ]


def _name(ctx: WorkerContext, index: int) -> str:
    """Of a server of this process; of several ranks each has its own."""
    rank = f".{ctx.rank}" if ctx.world_size > 1 else ""
    return f"{ctx.group}.{ctx.incarnation}{rank}.sglang-{index}"


def releases_memory(job: Job) -> bool:
    """Whether servers give their memory to the trainer of this process while it trains."""
    settings = job.config.rollout.sglang
    assert settings is not None
    if not job.takes_turns or settings.urls:
        return False
    return job.device != "cpu" if settings.release_memory is None else settings.release_memory


def launch_of(
    config: JobConfig, settings: SGLangConfig, model_path: str, device: str, index: int, *, releases: bool = False
) -> Launch:
    """How server `index` of a replica is started, whose devices begin with `device`. `releases`: it can give its memory back."""
    assert settings.python is not None
    rollout = config.rollout
    first = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else None
    arguments: dict[str, Argument] = dict(settings.arguments)
    if config.adapts_engines:
        arguments = {**_takes_adapters(config, model_path, on_cpu=first is None, releases=releases), **arguments}
    if releases and first is not None:  # without a GPU there is nothing to release, and a server does not start so
        arguments = {"enable-memory-saver": True, **arguments}
    if config.train.router_replay == "r3":
        arguments = {"enable-return-routed-experts": True, **arguments}
    return Launch(
        settings.python,
        model_path,
        dtype=config.model.dtype,
        first_device=None if first is None else first + index * settings.tensor_parallel,
        tensor_parallel=settings.tensor_parallel,
        max_running=rollout.num_slots,
        max_tokens=rollout.num_slots * config.longest_sample + _SPARE_TOKENS,
        arguments=arguments,
        environment=settings.environment,
    )


def _takes_adapters(config: JobConfig, model_path: str, *, on_cpu: bool, releases: bool) -> dict[str, Argument]:
    lora = config.train.lora
    assert lora is not None
    found: dict[str, Argument] = {
        "enable-lora": True, "max-lora-rank": lora.rank, "max-loras-per-batch": config.adapter_room + 1,
        "lora-target-modules": target_modules(lora, ModelFolder.of(model_path)),
        # What is asked to prove a version stands before all that waits for room, and takes none from what runs.
        "enable-priority-scheduling": True, "priority-scheduling-preemption-threshold": int(PRIORITY.most),
    }  # fmt: skip
    if on_cpu:
        found["lora-backend"] = "torch_native"  # its other kernels are a GPU's
    elif releases:
        found["enable-weights-cpu-backup"] = True  # nobody gives a server its base again
    return found
