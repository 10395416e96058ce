"""Control: health, information, aborts, pauses and weights, in SGLang's words.

Owns the endpoints beside generation, and which of them only the engine's owner may use: where a run owns the engine, its callers
may ask and abort, but neither pause it nor change its weights.

    GET /health /ready /ping (open)   /health_generate /model_info /server_info /v1/models /v1/loads
    POST /abort_request   /pause_generation /continue_generation /flush_cache /update_weights_from_disk /weights_checker (owner)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from aiohttp import web
from pydantic import Field

from rondo.roles.engines.engine import SamplingParams
from rondo.roles.engines.sglang.requirements import of_whole
from rondo.roles.serve.fields import Fields, Name, shown
from rondo.roles.serve.requests import Ask, PauseMode
from rondo.roles.serve.service import Service
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.admin.server import dumps, json_answer
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.waits import wait_for

DIALECT = "0.5.23"
"""The version of SGLang whose contract this server keeps to."""
_HEALTH_S = 20.0
MAX_WAIT_S = 60.0
"""That who asks for a sample may be kept waiting."""


# ---- health -------------------------------------------------------------------------------------------------------------


async def health(service: Service, request: web.Request) -> web.Response:
    """200 while requests are taken."""
    if service.requests.closing:
        raise TurnedDown(503, "the server must be open, got one that ends. Ask another server")
    return web.Response()


async def ready(service: Service, request: web.Request) -> web.Response:
    """200 while requests are taken and worked on."""
    await health(service, request)
    if service.requests.paused is not None:
        raise TurnedDown(
            503, f"the server must not be paused, got mode {service.requests.paused!r}. See /continue_generation"
        )
    engine_ready = getattr(service.engine, "ready", None)  # optional for engines
    if engine_ready is not None and not await engine_ready():
        raise TurnedDown(503, "the engine must be ready, got one that is not. Ask again soon")
    return web.Response()


async def health_generate(service: Service, request: web.Request) -> web.Response:
    """200 once the engine has sampled one token."""
    await ready(service, request)
    token = service.stop_token_ids[0] if service.stop_token_ids else 0
    probe = Ask(f"health-{time.monotonic_ns()}", np.array([token], np.int32), SamplingParams(1), seed=0, priority=1)
    try:
        await wait_for(service.requests.answer(probe), name="health", peer="engine", deadline_s=_HEALTH_S)
    except RondoError as error:
        raise TurnedDown(503, f"the engine must sample a token, got {type(error).__name__}: {error}") from error
    return web.Response()


# ---- information --------------------------------------------------------------------------------------------------------


async def info(service: Service, request: web.Request) -> web.Response:
    """What SGLang tells of model and server, as one."""
    stats = service.engine.stats()
    room = {"max_running_requests": stats.num_slots, "max_total_num_tokens": stats.num_slots * service.max_length}
    return json_answer(
        {
            "version": DIALECT,
            "server": "rondo",
            "status": "ready" if service.requests.paused is None else "paused",
            "model_path": service.model_path,
            "tokenizer_path": service.model_path,
            "served_model_name": service.model_name,
            "is_generation": True,
            "weight_version": str(service.engine.version),
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "max_length": service.max_length,
            "context_length": service.max_length,
            "max_req_input_len": of_whole(service.max_length),
            "dtype": service.dtype,
            "device": "cpu",
            "tp_size": 1,
            "dp_size": 1,
            "enable_deterministic_inference": service.seeds,
            "enable_priority_scheduling": False,
            "enable_return_routed_experts": service.tells_experts,
            "internal_states": [room],
            "stats": asdict(stats),
            "trajectories": asdict(service.trajectories.stats()),
            **room,
        }
    )


async def models(service: Service, request: web.Request) -> web.Response:
    model = {
        "id": service.model_name, "object": "model", "created": int(service.started), "owned_by": "rondo",
        "root": service.model_path, "parent": None, "max_model_len": service.max_length,
    }  # fmt: skip
    if "model" in request.match_info:
        service.require_model(request.match_info["model"])
        return json_answer(model)
    return json_answer({"object": "list", "data": [model]})


async def loads(service: Service, request: web.Request) -> web.Response:
    stats = service.engine.stats()
    num_running, num_waiting = stats.num_running, stats.num_waiting
    rank = {
        "dp_rank": 0,
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_total_reqs": num_running + num_waiting,
        "max_running_requests": stats.num_slots,
        "max_total_num_tokens": stats.num_slots * service.max_length,
        "token_usage": num_running / max(1, stats.num_slots),
    }
    return json_answer({"timestamp": time.time(), "dp_rank_count": 1, "loads": [rank]})


# ---- requests in flight -------------------------------------------------------------------------------------------------


class ControlBody(Fields):
    """Of any of these requests; other names mean nothing."""

    off: ClassVar = {"load_format": ("auto", "safetensors")}
    ignored: ClassVar = None
    rid: Name | None = None
    abort_all: bool = False
    mode: PauseMode = "abort"
    model_path: Annotated[str, Field(max_length=4096)] | None = None
    weight_version: Annotated[Name, Field(pattern=r"^\d{1,9}$")] | None = None
    action: Annotated[str, Field(max_length=100)] = "checksum"
    abort_all_requests: bool = False


async def abort_request(service: Service, request: web.Request) -> web.Response:
    body = await _body(service, request)
    if body.abort_all == (body.rid is not None):
        raise ConfigError("rid and abort_all must be sent one without the other, got both or neither. Send rid")
    if body.abort_all:
        _require_control(service, request)
    service.requests.abort(body.rid)
    return web.Response()


async def pause_generation(service: Service, request: web.Request) -> web.Response:
    _require_control(service, request)
    mode = (await _body(service, request)).mode
    await service.requests.pause(mode)
    return json_answer({"status": "ok", "message": f"paused with mode {mode}"})


async def continue_generation(service: Service, request: web.Request) -> web.Response:
    _require_control(service, request)
    service.requests.resume()
    return json_answer({"status": "ok"})


async def flush_cache(service: Service, request: web.Request) -> web.Response:
    """Nothing is kept beyond the sequences that use it: with none there is nothing to flush."""
    _require_control(service, request)
    if service.requests.num_asked:
        raise ConfigError(
            f"no request must be in flight to flush the cache, got {service.requests.num_asked}. Abort them first"
        )
    return web.Response(text="Cache flushed.\n")


async def update_weights_from_disk(service: Service, request: web.Request) -> web.Response:
    """Sequences in flight go on under the new weights from the next step on, paused or not; `weight_versions` tell them apart."""
    _require_control(service, request)
    body = await _body(service, request)
    if body.model_path is None:
        raise ConfigError("model_path must be a folder with safetensors, got nothing. Name it")
    version = service.engine.version + 1 if body.weight_version is None else int(body.weight_version)
    if body.abort_all_requests:
        service.requests.abort(None)
    tensors = await asyncio.to_thread(_read_tensors, Path(body.model_path))
    await service.engine.update_weights(version, tensors)
    return json_answer({"success": True, "message": f"Succeeded to update model weights to version {version}."})


async def weights_checker(service: Service, request: web.Request) -> web.Response:
    """A checksum of every tensor that the engine holds, as SGLang tells those of a server on a CPU."""
    _require_control(service, request)
    if (weights := service.weights) is None:
        return await not_supported(service, request)
    if (action := (await _body(service, request)).action) != "checksum":
        raise ConfigError(f"action must be 'checksum', the only one that is known here, got {action!r}. Change it")
    from rondo.roles.engines.sglang.weights_sums import checksum

    held = await asyncio.to_thread(lambda: {name: checksum([each], "cpu") for name, each in weights()})
    return json_answer({"success": True, "ranks": [{"checksums": held, "parallelism_info": {"tp_rank": 0}}]})


async def not_supported(service: Service, request: web.Request) -> web.Response:
    raise TurnedDown(501, f"{request.path} must be asked of SGLang itself, this is rondo's engine. {_INSTEAD}")


_INSTEAD = "Weights come through /update_weights_from_disk here"
NOT_SUPPORTED = (
    "update_weights_from_tensor", "update_weights_from_distributed", "update_weights_from_ipc", "init_weights_update_group",
    "destroy_weights_update_group", "update_weight_version", "release_memory_occupation",
    "resume_memory_occupation", "open_session", "close_session", "load_lora_adapter", "unload_lora_adapter",
)  # fmt: skip


async def _body(service: Service, request: web.Request) -> ControlBody:
    async with service.body(request) as body:
        return ControlBody.of(body)


def _require_control(service: Service, request: web.Request) -> None:
    if not service.control:
        raise TurnedDown(
            403, f"{request.path} must be left to the run that owns this engine. Use `rondo stop`, or nothing"
        )


def _read_tensors(folder: Path) -> Mapping[str, Any]:
    """All tensors of a Hugging Face folder, by their names there."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:  # a path that none can be, a file that is none
        raise ConfigError(f"model_path must be a folder with safetensors, got {shown(error)}. Name another") from error
    if not files:
        raise ConfigError(
            f"model_path must be a folder with safetensors, got {shown(str(folder))} without any. Name another"
        )
    return tensors


# ---- trajectories -------------------------------------------------------------------------------------------------------


async def trajectories(service: Service, request: web.Request) -> web.Response:
    """All sessions by name, with the totals."""
    kept = service.trajectories
    return json_answer({"sessions": kept.names(), **asdict(kept.stats())})


async def trajectory(service: Service, request: web.Request) -> web.StreamResponse:
    """One session's calls, and the rows to train on that they make. Told piece by piece: each call repeats its whole prompt."""
    name = request.match_info["session"]
    kept = service.trajectories
    told = (("calls", (call.shown() for call in kept.calls(name))), ("rows", kept.rows(name)))
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    with suppress(ConnectionError):  # whoever asked has left
        await response.prepare(request)
        await response.write(b'{"session":' + dumps(name))
        for part, values in told:
            await response.write(b',"%s":[' % part.encode())
            for number, value in enumerate(values):
                await response.write(b"," * (number > 0) + dumps(value))
            await response.write(b"]")
        await response.write(b"}")
    return response


async def reward(service: Service, request: web.Request) -> web.Response:
    """What a session is worth, as whoever has its key says; so it ends."""
    name = service.session_of(request)
    if name != request.match_info["session"] or service.samples is None:
        raise TurnedDown(403, f"session must be that of the key, {name!r}, got another one. Use RONDO_REWARD_URL")
    async with service.body(request) as body:
        service.samples.rewarded(name, body)
    return json_answer({"session": name, "over": True})


class EpisodeBody(Fields):
    wait_s: Annotated[float, Field(gt=0, le=MAX_WAIT_S)] = MAX_WAIT_S
    """How long there may be none."""


async def episode(service: Service, request: web.Request) -> web.Response:
    """A sample to make, for an agent that runs elsewhere: its session, key and row. 204 where there was none meanwhile."""
    assert service.samples is not None
    async with service.body(request) as body:
        wait_s = EpisodeBody.of(body).wait_s
    try:
        told = await asyncio.wait_for(service.samples.taken(), wait_s)
    except TimeoutError:
        return web.Response(status=204)
    return json_answer({each.name: getattr(told, each.name) for each in fields(told)})


async def forget(service: Service, request: web.Request) -> web.Response:
    name = request.match_info["session"]
    if not service.trajectories.forget(name):
        raise TurnedDown(404, f"session must have a recorded call to be forgotten, got {name!r} without one")
    return json_answer({"session": name, "forgotten": True})
