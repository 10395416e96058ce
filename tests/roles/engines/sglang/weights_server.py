"""A server that takes weights as SGLang does, with no model behind it: sessions, pauses, versions, checksums of fused tensors."""

from __future__ import annotations

import base64
import hashlib
import io
import mmap
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from rondo.roles.engines.sglang.client import SGLangClient

CONFIG = {"num_key_value_heads": 2, "num_attention_heads": 4, "tie_word_embeddings": False, "dtype": "float32"}


def version(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a model, as they are named on disk."""
    made = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (10, 8),
        "model.layers.0.self_attn.q_proj.weight": (16, 8),
        "model.layers.0.self_attn.k_proj.weight": (8, 8),
        "model.layers.0.self_attn.v_proj.weight": (8, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 16),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
        "lm_head.weight": (10, 8),
    }
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def write_model(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_bytes(orjson.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def held_by(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """What a rank of a server has in memory after it loaded `tensors`."""
    at, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."

    def rows(name: str) -> torch.Tensor:
        return tensors[name].chunk(size)[rank]

    def columns(name: str) -> torch.Tensor:
        return tensors[name].chunk(size, 1)[rank]

    def heads(name: str) -> torch.Tensor:
        return rows(name) if size <= 2 else tensors[name].chunk(2)[rank // (size // 2)]

    def vocabulary(name: str) -> torch.Tensor:
        return torch.cat([tensors[name], torch.zeros(54, 8)]).chunk(size)[rank]

    return {
        "model.embed_tokens.weight": vocabulary("model.embed_tokens.weight"),
        at + "qkv_proj.weight": torch.cat(
            [rows(at + "q_proj.weight"), heads(at + "k_proj.weight"), heads(at + "v_proj.weight")]
        ),
        at + "o_proj.weight": columns(at + "o_proj.weight"),
        mlp + "gate_up_proj.weight": torch.cat([rows(mlp + "gate_proj.weight"), rows(mlp + "up_proj.weight")]),
        mlp + "down_proj.weight": columns(mlp + "down_proj.weight"),
        "model.norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": vocabulary("lm_head.weight"),
    }


class Described(NamedTuple):
    """The fields of SGLang's class, in its order."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class Reader(pickle.Unpickler):
    """Reads a payload as the server does, SGLang's own class and the mapping of shared memory replaced."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "FlattenedTensorMetadata":
            assert module == "sglang.srt.weight_sync.tensor_bucket"
            return Described
        if name == "rebuild_storage_filename":
            return _mapped
        assert module in ("torch", "torch.storage", "torch.multiprocessing.reductions"), module
        return super().find_class(module, name)


def _mapped(_: Any, manager: bytes, handle: bytes, num_bytes: int) -> torch.UntypedStorage:
    assert manager == b""
    with Path(f"/dev/shm{handle.decode()}").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=64, count=num_bytes).untyped_storage()


def read_payload(payload: str) -> dict[str, torch.Tensor]:
    told = Reader(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    flat = told["flattened_tensor"]
    return {
        each.name: flat[each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape).clone()
        for each in told["metadata"]
    }


class WeightServer:
    """`calls` lists what was asked for. `before` is called with every path and body, and may raise a refusal."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, size: int = 1, sessions: bool = True) -> None:
        self.tensors = dict(tensors)
        self.size = size
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.paused = self.session = False
        self.version = "default"
        self.extra: dict[str, torch.Tensor] = {}
        """Tensors that no recipe makes."""
        self.before: Callable[[str, dict[str, Any]], None] = lambda path, body: None
        self.loaded: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None
        """Sees every tensor that was loaded, and may damage it."""
        self._sessions = sessions

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    async def answer(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.json() if request.can_read_body else {}
        self.calls.append((path, body))
        try:
            self.before(path, body)
            method = getattr(self, path.removeprefix("/"), None)
            if method is None or (path.endswith("weight_update") and not self._sessions):
                return web.json_response({"detail": "Not Found"}, status=404)
            return web.json_response(method(body))
        except ValueError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)

    def server_info(self, _: Any) -> Any:
        return {"device": "cpu", "dtype": "float32", "tp_size": self.size, "dp_size": 1, "pp_size": 1}

    def model_info(self, _: Any) -> Any:
        return {"weight_version": self.version}

    def pause_generation(self, body: Any) -> Any:
        self.paused = True

    def continue_generation(self, _: Any) -> Any:
        self.paused = False

    def begin_weight_update(self, _: Any) -> Any:
        if self.session:
            raise ValueError("a weight-update session is already open; call end_weight_update() first")
        self.session = True

    def end_weight_update(self, _: Any) -> Any:
        self.session = False

    def update_weights_from_tensor(self, body: Any) -> Any:
        if self._sessions and not self.session:
            raise ValueError("update_weights_from_tensor must run between begin and end")
        assert len(body["serialized_named_tensors"]) == self.size
        assert body["load_format"] == "flattened_bucket"
        self._load(read_payload(body["serialized_named_tensors"][-1]), body)

    def update_weights_from_disk(self, body: Any) -> Any:
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self._load(load_file(file), body)

    def update_weight_version(self, body: Any) -> Any:
        self.version = body["new_version"]

    def release_memory_occupation(self, body: Any) -> Any:
        assert self.paused

    def resume_memory_occupation(self, body: Any) -> Any:
        assert self.paused

    def weights_checker(self, _: Any) -> Any:
        ranks = []
        for rank in range(self.size):
            held = held_by(self.tensors, rank, self.size) | self.extra
            sums = {
                name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
                for name, tensor in held.items()
            }
            ranks.append({"checksums": sums, "parallelism_info": self._told(rank)})
        return {"success": True, "ranks": ranks}

    def _told(self, rank: int) -> Any:
        return [{"role": "target", "tp_rank": rank}] if self._sessions else {"tp_rank": rank}

    def _load(self, tensors: dict[str, torch.Tensor], body: Any) -> None:
        assert self.paused
        self.loaded(tensors)
        self.tensors |= tensors
        self.version = body.get("weight_version", self.version)


@asynccontextmanager
async def serving(server: Any) -> AsyncIterator[SGLangClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with SGLangClient(f"http://{host}:{port}") as client:
            yield client
    finally:
        await runner.cleanup()
