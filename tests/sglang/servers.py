"""Real SGLang servers for tests: tiny models, how they are started without a GPU, and engines over them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang.capabilities import Capabilities, probe
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.one_server import Pause, SGLangEngine
from rondo.roles.engines.sglang.server import Launch, SGLangServer
from rondo.roles.engines.sglang.weights import ServerWeights

SHIM = Path(__file__).parent / "shim"
START_S = 500.0
GRACE_S = 0.1
"""A server that is asked to leave looks every five seconds whether it was."""
FAMILIES = {"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_omni_moe"}
"""SGLang's modules of the models that the tests serve. A server imports hundreds of others at its start, which takes seconds."""
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # large enough that attention, position and routing decide the log-probs
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def python() -> str:
    """The interpreter of SGLang's environment."""
    return str(Path(os.environ["SGLANG_VENV"]) / "bin" / "python")


def environment(*, forks: bool = True) -> dict[str, str]:
    """What a server needs here: the shim, where there is no GPU. `forks`: it starts in a third of the time, by another way than
    that of servers in use; tests of a server's processes themselves start theirs without."""
    if torch.cuda.is_available():
        return {}
    modules = Path(os.environ["SGLANG_VENV"]).glob("lib/python*/site-packages/sglang/srt/models/*.py")
    others = ",".join(sorted({path.stem for path in modules} - FAMILIES))
    found = {"PYTHONPATH": str(SHIM), "SGLANG_DISABLED_MODEL_ARCHS": others}
    return found | {"RONDO_SHIM_FORK": "1"} if forks else found


def moe(folder: Path, seed: int = 0) -> Path:
    """A tiny Qwen3-MoE in float32: 8 experts, 2 of them for each token."""
    tokenizer = build_tokenizer()
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **_SHAPE | experts
    )
    torch.manual_seed(seed)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def launch(model: Path, arguments: Mapping[str, Any] | None = None, **changes: Any) -> Launch:
    given: dict[str, Any] = {
        "dtype": "float32", "max_running": 16, "max_tokens": 8192, "arguments": arguments or {},
        "environment": environment(), **changes,
    }  # fmt: skip
    return Launch(python(), str(model), **given)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers. Clients are made anew for each test's event loop."""

    url: str
    key: str
    model: Path
    server: SGLangServer
    capabilities: Capabilities

    def client(self) -> SGLangClient:
        return SGLangClient(self.url, api_key=self.key)

    @asynccontextmanager
    async def engine(self, folder: Path, *, pause: Pause = "in_place", **changes: Any) -> AsyncIterator[SGLangEngine]:
        """An engine over it; weights go through files in `folder` unless `changes` say otherwise."""
        client = await self.client().__aenter__()
        settings = SGLangConfig(python=python(), pause=pause, **changes)
        weights = ServerWeights(settings, client, folder=folder, model_path=str(self.model))
        engine = SGLangEngine(client, weights=weights, pause=pause, capabilities=self.capabilities)
        await weights.open()
        try:
            yield engine
        finally:
            await engine.close()


@contextmanager
def serve(runner: asyncio.Runner, how: Launch, folder: Path) -> Iterator[Served]:
    """The server as long as the body runs; `runner`'s loop is left alone meanwhile."""
    server = SGLangServer(how, log=folder / "server.log", folder=folder, name="served", grace_s=GRACE_S)

    async def start() -> tuple[str, Capabilities]:
        client = await server.start(START_S)
        try:
            return client.url, await probe(client, processed_media=True)
        finally:
            await client.__aexit__()

    try:
        url, found = runner.run(start())
        yield Served(url, server.key, Path(how.model_path), server, found)
    finally:
        runner.run(server.close())
