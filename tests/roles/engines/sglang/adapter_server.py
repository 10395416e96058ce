"""A server that takes adapters as SGLang does, and computes something of them: enough to tell one from another, and from none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from aiohttp import web
from safetensors.torch import load_file

from rondo.models.config import LoraConfig
from rondo.models.lora import canary_of
from rondo.roles.training.adapter_probe import write
from rondo.roles.training.mismatch import Canary

AT = "base_model.model.model.layers.0."
LORA = LoraConfig(rank=2, alpha=4.0)
PROMPTS = [[3, 4, 5, 6], [7, 8, 9, 3]]
Tensors = dict[str, torch.Tensor]


def adapter(seed: int) -> Tensors:
    """Of two of the products of `weights_server.version`."""
    made = torch.Generator().manual_seed(seed)
    shapes = {
        f"{AT}self_attn.q_proj.lora_A.weight": (2, 8), f"{AT}self_attn.q_proj.lora_B.weight": (16, 2),
        f"{AT}mlp.down_proj.lora_A.weight": (2, 12), f"{AT}mlp.down_proj.lora_B.weight": (8, 2),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=made) for name, shape in shapes.items()}


def log_probs(tokens: Sequence[int], tensors: Tensors) -> list[float]:
    """Of all tokens but the first: every product of an adapter moves them."""
    reach = sum(float(tensor.abs().mean()) for _, tensor in sorted(tensors.items()) if tensor.any())
    return [-(1.0 + token % 3 + reach) for token in tokens[1:]]


def trained(run_dir: Path, attempt: int, *versions: int) -> None:
    """What a trainer tells before it publishes `adapter(version)`."""
    run_dir.mkdir(exist_ok=True)
    far = canary_of({name: tensor.shape for name, tensor in adapter(0).items()}, LORA)
    with_it, base = ([log_probs(prompt, tensors) for prompt in PROMPTS] for tensors in (far, {}))
    Canary(PROMPTS, [[(0, found[-1])] for found in with_it], base[0][0] - with_it[0][0]).write(run_dir)
    for number in versions:
        told = np.array([log_probs(prompt, adapter(number)) for prompt in PROMPTS])
        write(run_dir, f"{attempt}.{number}", np.array(PROMPTS), np.array(base), told)


class AdapterServer:
    """`calls` lists what was asked for. Requests for several tokens wait while `held`."""

    def __init__(self, **info: Any) -> None:
        self.info: dict[str, Any] = {
            "version": "0.5.23", "dp_size": 1, "enable_lora": True, "max_lora_rank": 2, "max_loras_per_batch": 4,
            "max_loaded_loras": None, "model_path": "", "device": "cpu", "dtype": "float32", **info,
        }  # fmt: skip
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.loaded: dict[str, Tensors] = {}
        self.weight_version = "-1"
        self.drops: list[str] = []
        """Names, or parts of names, of the next adapters that are taken and left out, each once."""
        self.held = asyncio.Event()
        self.held.set()
        self.running: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.moved = asyncio.Event()

    def names(self) -> list[str]:
        return list(self.loaded)

    async def until(self, there: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not there():
                self.moved.clear()
                await self.moved.wait()

    def go_on(self) -> None:
        self.held.set()
        self.moved.set()

    async def answer(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.json() if request.can_read_body else {}
        self.calls.append((path, body))
        self.moved.set()
        if path == "/generate":
            return web.json_response(await self._generate(body))
        method = getattr(self, path.removeprefix("/").replace("/", "_"), None)
        if method is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        try:
            return web.json_response(method(body))
        except ValueError as error:
            return web.json_response({"success": False, "error_message": str(error)}, status=400)

    def server_info(self, _: Any) -> Any:
        return self.info

    def model_info(self, _: Any) -> Any:
        return {"weight_version": self.weight_version}

    def v1_models(self, _: Any) -> Any:
        return {"data": [{"id": "base"}, *({"id": name} for name in self.loaded)]}

    def load_lora_adapter(self, body: Any) -> Any:
        name = body["lora_name"]
        if name in self.loaded:
            raise ValueError(f"{name} is already loaded")
        folder = Path(body["lora_path"])
        described = orjson.loads((folder / "adapter_config.json").read_bytes())
        assert (described["r"], described["lora_alpha"]) == (2, 4.0)
        tensors = load_file(folder / "adapter_model.safetensors")
        dropped = next((part for part in self.drops if part in name), None)
        if dropped is not None:
            self.drops.remove(dropped)
        self.loaded[name] = {} if dropped is not None else tensors

    def unload_lora_adapter(self, body: Any) -> Any:
        if body["lora_name"] not in self.loaded:
            raise ValueError(f"{body['lora_name']} does not exist")
        assert not self.running[body["lora_name"]], "an unloading waits for its requests, and every loading for it"
        del self.loaded[body["lora_name"]]
        self.moved.set()

    def abort_request(self, body: Any) -> Any:
        self.aborted.add(body["rid"])

    def pause_generation(self, body: Any) -> Any:
        return None

    def release_memory_occupation(self, body: Any) -> Any:
        return None

    resume_memory_occupation = continue_generation = pause_generation

    async def _generate(self, body: Any) -> Any:
        name, num = body.get("lora_path"), body["sampling_params"]["max_new_tokens"]
        tensors = {} if name is None else self.loaded[name]
        made, finish = num, {"type": "length", "length": num}
        if num > 1:
            self.running[name] += 1
            self.moved.set()
            await self.until(lambda: self.held.is_set() or body["rid"] in self.aborted)
            self.running[name] -= 1
            if not self.held.is_set():
                made, finish = 2, {"type": "abort", "message": "Aborted"}  # type: ignore[dict-item]
        ids, of_prompt = list(range(made)), log_probs(body["input_ids"], tensors)
        meta = {
            "finish_reason": finish, "prompt_tokens": len(body["input_ids"]), "completion_tokens": made,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[of_prompt[-1], token, None] for token in ids],
            "input_token_logprobs": [[None, body["input_ids"][0], None], *([value, 1, None] for value in of_prompt)],
        }  # fmt: skip
        return {"output_ids": ids, "meta_info": meta}
