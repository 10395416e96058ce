"""Versions of an adapter at one server: each has a name of its own, and goes when nobody generates with it any more.

    folder/run-3f9c21aa@0.7/                    an adapter as peft writes it, which the server reads by itself: no pickle
        adapter_model.safetensors, adapter_config.json
    POST /load_lora_adapter  run-3f9c21aa@0.7   beside requests under ..@0.6, which end under it
    POST /unload_lora_adapter  run-3f9c21aa@0.6 once they have ended

A name begins with the run: its folder's name, and a digest of where that is, since a server may serve runs of one name.

Owns the names, the loading, the proof that a version has arrived, and which versions are in use. Does not own what proves one
(`training/mismatch.py`: the canary, once a server; `training/adapter_probe.py`: every version), what an adapter's folder holds
(`adapter_folder.py`), nor what becomes of a request (`one_server.py`).

The server keys its prefix cache by an id that each loading makes anew, so no prefix outlives its version. Its base stays what it
was started with. An unloading waits for the requests under the adapter, and every loading behind it: so it is asked for only when
this engine has none.

Invariant: an update ends when the version is proved. A server that does not compute with what it was given ends the run: another
try would not differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.models.config import LoraConfig
from rondo.models.lora import canary_of
from rondo.roles.engines.ranges import PRIORITY
from rondo.roles.engines.sglang.adapter_folder import completed, write
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.model_folder import ModelFolder
from rondo.roles.engines.sglang.numbers import sampled
from rondo.roles.engines.sglang.requirements import require_adapters
from rondo.roles.engines.sglang.server_memory import CALL_DEADLINE_S, ServerMemory
from rondo.roles.training.adapter_probe import AdapterProbe
from rondo.roles.training.mismatch import Canary
from rondo.runtime.errors import CorruptData, DeadlineExceeded, Fatal, PeerGone, ProtocolError
from rondo.runtime.waits import finished

_CANARY = "canary"
_TRIES = 2
"""Loadings of a version that is told to be there, and does not show."""


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The last version that was proved. `shown`: it is far enough from the base for its log-probs to tell."""

    version: int
    num_bytes: int
    total_s: float
    shown: bool


class ServerAdapters:
    """How the server behind `client` gets versions of an adapter; one update at a time. `folder` is this server's own, which it
    must see. Versions are named by `run_dir`, where the trainer says what proves them, and `attempt`. `room`: versions that may
    be in use at once. `exact`: the trainer computes in float32."""

    def __init__(
        self, client: SGLangClient, *, lora: LoraConfig, folder: Path, model_path: str, run_dir: Path, attempt: int, room: int,
        exact: bool, deadline_s: float,
    ) -> None:  # fmt: skip
        self._client, self._lora, self._folder, self._model_path = client, lora, folder, model_path
        self._run_dir, self._attempt, self._room, self._deadline_s = run_dir, attempt, room, deadline_s
        where = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=4).hexdigest()
        self._run = f"{run_dir.name}-{where}"
        self._memory = ServerMemory(client)
        self._model: ModelFolder | None = None
        self._base: Any = None
        self._alike = exact
        """The server computes so, too, with torch."""
        self._first: dict[str, int] = {}
        """What puts a question before the requests that wait at the server."""
        self._told_base: np.ndarray | None = None
        """The server's log-probs of the probe without an adapter; None until the canary has shown that adapters arrive."""
        self._users: Counter[int] = Counter()
        self._newest: int | None = None
        self._stats: AdapterStats | None = None
        self._updating = asyncio.Lock()
        self._sweeping: asyncio.Task[None] | None = None

    def name_of(self, version: int | str) -> str:
        return f"{self._run}@{self._attempt}.{version}"

    def stats(self) -> AdapterStats | None:
        return self._stats

    async def open(self) -> None:
        """Ask the server what it takes; what the processes before this one have left there goes. Raises ConfigError for a server
        that takes no such adapters."""
        info = await self._client.get("/server_info", deadline_s=CALL_DEADLINE_S)
        require_adapters(info, rank=self._lora.rank, room=self._room, where=self._client.url)
        self._alike &= info.get("device") == "cpu" and info.get("dtype") == "float32"
        if info.get("enable_priority_scheduling"):
            sign = -1 if info.get("schedule_low_priority_values_first") else 1
            self._first = {"priority": sign * int(PRIORITY.most)}
        self._model = await asyncio.to_thread(ModelFolder.of, self._model_path)
        self._base = (await self._client.get("/model_info", deadline_s=CALL_DEADLINE_S))["weight_version"]
        await self._sweep()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        await asyncio.to_thread(self._folder.mkdir, parents=True)

    # ---- versions ---------------------------------------------------------------------------------------------------

    async def update(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the adapter `tensors`, and prove that the server computes with it. They are not read any more on return. Raises
        Fatal where it does not; ConfigError for an adapter that SGLang has no place for; ServerError, PeerGone and
        DeadlineExceeded as they come."""
        async with self._updating:
            began = time.monotonic()
            if self.asleep:
                await self._memory.resume()
                await self._client.post("/continue_generation", {}, deadline_s=CALL_DEADLINE_S)
            probe = await asyncio.to_thread(AdapterProbe.read, self._run_dir, f"{self._attempt}.{version}")
            if self._told_base is None:
                await self._show_canary({name: tuple(tensor.shape) for name, tensor in tensors.items()})
                self._told_base = await self._log_probs(probe.prompts, None)
            shown = await self._show(version, probe, self._told_base, tensors)
            self._newest = version
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            self._stats = AdapterStats(version, num_bytes, time.monotonic() - began, shown)
            await self._sweep()

    async def _show_canary(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        name = self.name_of(_CANARY)
        known = await asyncio.to_thread(Canary.read, self._run_dir)
        try:
            await self._load(name, await asyncio.to_thread(canary_of, shapes, self._lora))
            found = [await self._greedy(prompt, name) for prompt in known.prompts]
            known.refuse(found, self._client.url, alike=self._alike)
        except (CorruptData, ServerError) as error:
            if isinstance(error, ServerError) and error.status != 400:
                raise
            raise self._not_there("adapters", error) from error
        finally:
            await finished(self._forget(name))

    async def _show(
        self, version: int, probe: AdapterProbe, told_base: np.ndarray, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether its log-probs tell it from the base; see `AdapterProbe.check`."""
        name = self.name_of(version)
        for tries_left in reversed(range(_TRIES)):
            try:
                if name not in await self._names():  # a server that slept has it still
                    await self._load(name, tensors)
                return probe.check(told_base, await self._log_probs(probe.prompts, name))
            except CorruptData as error:
                if not tries_left:
                    raise self._not_there(f"version {version} of the adapter", error) from error
                await self._forget(name)
        raise AssertionError

    def _not_there(self, what: str, error: Exception) -> Fatal:
        return Fatal(
            f"{what} must arrive at the SGLang server {self._client.url}, which would generate without, got: {error}. Look at "
            "its log for weights that it skips, or set train.lora.publish='merged'"
        )

    async def _load(self, name: str, adapter: Mapping[str, torch.Tensor]) -> None:
        assert self._model is not None, "adapters must be open to be loaded"
        folder = self._folder / name
        await asyncio.to_thread(write, folder, completed(adapter, self._model.shapes), self._lora)
        body = {"lora_name": name, "lora_path": str(folder.resolve())}
        await self._client.post("/load_lora_adapter", body, deadline_s=self._deadline_s)
        if name not in (told := await self._names()):
            raise CorruptData(f"/v1/models must name {name} once it is loaded, got {', '.join(sorted(told))}")

    async def _log_probs(self, prompts: np.ndarray, name: str | None) -> np.ndarray:
        """The server's, of all tokens but the first of each prompt, under an adapter or none. float32 [N, T - 1]."""
        asked = (self._asked(prompt.tolist(), name, "input_token_logprobs", logprob_start_len=0) for prompt in prompts)
        return np.stack([sampled(triples[1:], None)[1] for triples in await asyncio.gather(*asked)])

    async def _greedy(self, prompt: list[int], name: str) -> tuple[int, float]:
        """(the likeliest token behind the prompt, its log-prob) under an adapter."""
        tokens, log_probs = sampled(await self._asked(prompt, name, "output_token_logprobs", greedy=True), None)
        return int(tokens[0]), float(log_probs[0])

    async def _asked(
        self, prompt: list[int], name: str | None, field: str, *, greedy: bool = False, **more: Any
    ) -> list[Any]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0 if greedy else 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **self._first, **more}
        body |= {} if name is None else {"lora_path": name}
        told = await self._client.post("/generate", body, deadline_s=self._deadline_s)
        try:
            found = told["meta_info"][field]
            if found:
                return list(found)
        except (TypeError, LookupError):
            pass
        raise ProtocolError(f"{self._client.url} must tell the log-probs of a prompt, got {told!r:.200}")

    # ---- use --------------------------------------------------------------------------------------------------------

    @contextmanager
    def used(self, version: int) -> Iterator[str]:
        """The name under which a request asks for this version; it stays loaded while the body runs."""
        self._users[version] += 1
        try:
            yield self.name_of(version)
        finally:
            self._users[version] -= 1
            if not self._users[version]:
                del self._users[version]
                if version != self._newest and (self._sweeping is None or self._sweeping.done()):
                    self._sweeping = asyncio.create_task(self._swept(), name="unload adapters")

    async def _swept(self) -> None:
        async with self._updating:
            # The next update tries again, or it left with all it had.
            with suppress(PeerGone, DeadlineExceeded, ServerError, ProtocolError):
                await self._sweep()

    async def _sweep(self) -> None:
        """What nobody uses goes, whoever of this run has loaded it."""
        kept = {self.name_of(version) for version in (self._newest, *self._users) if version is not None}
        for name in await self._names() - kept:
            if name.startswith(f"{self._run}@"):
                await self._forget(name)

    async def _forget(self, name: str) -> None:
        with suppress(ServerError):  # it never came so far
            await self._client.post("/unload_lora_adapter", {"lora_name": name}, deadline_s=self._deadline_s)
        await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    async def _names(self) -> set[str]:
        """Of all models that the server tells: its base and every loaded adapter."""
        told = await self._client.get("/v1/models", deadline_s=CALL_DEADLINE_S)
        try:
            return {str(each["id"]) for each in told["data"]}
        except (TypeError, LookupError) as error:
            raise ProtocolError(f"/v1/models of {self._client.url} must tell its models, got {told!r:.200}") from error

    def is_base(self, told: Any) -> bool:
        """Whether an answer's weight version is that of the base which the server had when this began."""
        return bool(told == self._base)

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def asleep(self) -> bool:
        return bool(self._memory.released)

    async def release(self) -> None:
        """As `ServerWeights.release`. The base comes back from the server's own copy on the host, and adapters stay."""
        async with self._updating:
            if not self.asleep:
                await self._memory.release()

    async def close(self) -> None:
        """Leave: what was loaded goes, but for what requests in flight still use. Idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        async with self._updating:
            self._newest = None
            try:
                await self._sweep()
            finally:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
