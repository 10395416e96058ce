"""New weights for a running SGLang server: the protocol around every way they travel, and the proof that they are there.

    prepare -> pause -> [begin] -> buckets ... the last with its version -> [end] -> version and checksums told -> continue
                            \\______ once more, whole, when a checksum is not ours ______/

Owns this order, and what is known of the server's weights (`proof`). Does not own how bytes travel (`weights_disk.py`,
`weights_tensor.py`, `weights_distributed.py`), what checksums are over (`weights_proof.py`), nor in which order several servers
are updated (the dispatcher).

What a pause does to requests in flight:

    pause      requests in flight                             their cache              the server's prefix cache
    in_place   frozen, go on                                  of the old weights       stays, of the old weights
    retract    back to the queue, go on, num_retractions + 1  computed anew            flushed
    abort      end with what they have, as "abort"            gone                     flushed

A server that has released its memory is paused already; it takes that of the weights at the pause, the rest when it continues.

Invariants: the server samples nothing under weights that changed until they are proved. However an update ends, the server is
left generating. When it could not be proved, `proof` is None and tokens carry version "unproved-5"; a whole update repairs it.

    weights = ServerWeights(config, client, folder=run_dir / "weights", model_path="model")
    await weights.open()
    await weights.update(5, tensors)         # /model_info: weight_version "5"
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rondo.comm.groups.carriers import local_address
from rondo.comm.ring.tensors import torch_dtype
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.model_folder import ModelFolder
from rondo.roles.engines.sglang.server_memory import CALL_DEADLINE_S, ServerMemory, beside
from rondo.roles.engines.sglang.weights_buckets import Transfer
from rondo.roles.engines.sglang.weights_disk import DiskTransfer
from rondo.roles.engines.sglang.weights_distributed import DistributedTransfer
from rondo.roles.engines.sglang.weights_proof import Key, Proof, Recipes, told_by
from rondo.roles.engines.sglang.weights_tensor import TensorTransfer
from rondo.runtime.errors import Closed, ConfigError, CorruptData, RondoError
from rondo.runtime.waits import finished

LOAD_DEADLINE_S = 600.0
"""Of one update call, and of one pause, which in mode abort waits for every request's end; longer where the settings give an
update more."""
UNPROVED = "unproved-"
_FLUSHES = {"in_place": False, "retract": True, "abort": True}
"""In place, requests keep their cache: a server that is asked to flush it loads the weights, and answers with an error."""
_SENDINGS = 2


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """The last update that was proved. `paused_s` of its `total_s` the server generated nothing; `num_sendings` is 1, or 2 where
    the first came wrong."""

    version: int
    num_bytes: int
    total_s: float
    paused_s: float
    num_sendings: int


class ServerWeights:
    """How the server behind `client` gets new weights, as `config` asks for it; one update at a time. `folder` is this server's
    own, for weights on disk."""

    def __init__(
        self, config: SGLangConfig, client: SGLangClient, *, folder: Path, model_path: str, device: str = "cpu"
    ) -> None:
        """device: this process's own, from which a process group sends."""
        self._config, self._client, self._device = config, client, device
        self._folder, self._model_path = folder, model_path
        self._load_s = max(LOAD_DEADLINE_S, config.update_deadline_s or 0.0)
        self._transfer: Transfer | None = None
        self._model: ModelFolder | None = None
        self._recipes: Recipes | None = None
        self._memory = ServerMemory(client)
        self.proof: Proof | None = None
        """What is proved of the weights that it serves; None before the first update and after one that failed."""
        self._stats: UpdateStats | None = None
        self._sessions = True
        self._updating = asyncio.Lock()

    def stats(self) -> UpdateStats | None:
        return self._stats

    async def open(self) -> None:
        """Ask the server what it is, and prepare the way (join the process group); again for one that was started anew.

        Raises ConfigError where the way cannot be gone.
        """
        self.proof = None
        info = await self._client.get("/server_info", deadline_s=CALL_DEADLINE_S)
        self._model = model = await asyncio.to_thread(ModelFolder.of, self._model_path)
        self._transfer = self._made(info, model)
        self._recipes = await self._learned(info, model)
        await self._transfer.open()

    async def update(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send `tensors` (Hugging Face disk names), which are not read any more on return, and prove that the server has them.

        Raises ConfigError for other names or shapes, having changed nothing; CorruptData when the server does not hold what was
        sent, twice; ServerError, PeerGone, GroupBroken and DeadlineExceeded as they come. After all but the first, see `proof`.
        """
        async with self._updating:
            transfer, name = self._transfer, str(version)
            if transfer is None or self._model is None:
                raise Closed("weights must be sent between open and close, got an update outside. Open the path first")
            self._model.check(tensors)
            began = time.monotonic()
            # The checksums are computed beside the sending.
            expecting = asyncio.create_task(self._expected(tensors))
            try:
                await transfer.prepare(name, tensors)
                paused = time.monotonic()
                try:
                    await self._pause()
                    self.proof = None
                    proof: Proof | None = None
                    num_sendings = 0
                    while proof is None:
                        num_sendings += 1
                        await self._load(transfer, name, tensors)
                        proof = await self._proved(version, tensors, expecting, last=num_sendings == _SENDINGS)
                        if proof is None:
                            await transfer.refused(name)
                except BaseException as error:
                    await finished(self._give_up(transfer, version, error))
                    raise
                await self._continue()
                self.proof, now = proof, time.monotonic()
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                self._stats = UpdateStats(version, num_bytes, now - began, now - paused, num_sendings)
                await transfer.proved(name)
            finally:
                await finished(expecting)

    @property
    def asleep(self) -> bool:
        """Whether the server has released its memory, or a part."""
        return bool(self._memory.released)

    async def release(self) -> None:
        """Pause the server, take its requests back to the queue, and give its memory to the device until the next `update` takes
        it again: the weights' before, the cache's after them. Only one on a GPU with `--enable-memory-saver` frees anything."""
        async with self._updating:
            if not self.asleep:
                self.proof = None
                await self._memory.release()

    async def close(self) -> None:
        """Leave; the server goes on with what it has. Idempotent."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            await transfer.close()

    # ---- an update --------------------------------------------------------------------------------------------------

    async def _load(self, transfer: Transfer, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        flush = _FLUSHES[self._config.pause]
        if not (transfer.in_session and self._sessions and await self._begin()):
            await transfer.send(version, tensors, flush=flush)
            return
        try:
            await transfer.send(version, tensors, flush=flush)
        except BaseException as error:
            await finished(beside(self._client, error, "/end_weight_update", {}))
            raise
        await self._client.post("/end_weight_update", {}, deadline_s=self._load_s)

    async def _begin(self) -> bool:
        """Whether the server has sessions: those before 0.5.21 do not, and need none."""
        try:
            await self._client.post("/begin_weight_update", {}, deadline_s=CALL_DEADLINE_S)
        except ServerError as error:
            if error.status == 404:
                self._sessions = False
                return False
            if "already open" not in error.words:
                raise
            # Whoever began it has gone: everybody who updates this server goes through this process.
            await self._client.post("/end_weight_update", {}, deadline_s=self._load_s)
            await self._client.post("/begin_weight_update", {}, deadline_s=CALL_DEADLINE_S)
        return True

    async def _pause(self) -> None:
        """A server that has released its memory stands still already, and gets back what new weights are written to."""
        if self.asleep:
            await self._memory.resume("weights")
        else:
            await self._client.post("/pause_generation", {"mode": self._config.pause}, deadline_s=self._load_s)

    async def _continue(self) -> None:
        await self._memory.resume()
        await self._client.post("/continue_generation", {}, deadline_s=CALL_DEADLINE_S)

    async def _give_up(self, transfer: Transfer, version: int, error: BaseException) -> None:
        """Leave the server generating, its tokens marked; what fails here is told beside the first error."""
        if self.proof is None:
            await transfer.refused(str(version))
            mark = {"new_version": f"{UNPROVED}{version}", "abort_all_requests": False}
            await beside(self._client, error, "/update_weight_version", mark)
            error.add_note(
                "The server's weights are not proved: they may be of two versions. A whole update repairs that."
            )
        try:
            await self._continue()
        except RondoError as second:
            error.add_note(f"Then {second}")

    # ---- the proof --------------------------------------------------------------------------------------------------

    async def _proved(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        expecting: asyncio.Task[Mapping[Key, str]],
        *,
        last: bool,
    ) -> Proof | None:
        """The proof that the server has what was sent; None where it has to be sent again, CorruptData after the `last` time."""
        told_version = (await self._client.get("/model_info", deadline_s=CALL_DEADLINE_S))["weight_version"]
        if told_version != str(version):
            raise CorruptData(
                f"the SGLang server {self._client.url} must tell version {version} after its update, got {told_version!r}. "
                "Look for another one that updates it"
            )
        if self._recipes is None:
            return Proof(version)
        told, expected = await self._told(), await expecting
        wrong = await asyncio.to_thread(self._recipes.wrong, told, expected, tensors)
        if not wrong:
            return self._recipes.proof(version, told)
        if not last:
            return None
        names = sorted({name for _, name in wrong})
        raise CorruptData(
            f"the SGLang server {self._client.url} must hold version {version} as it was sent, got {len(names)} tensors with "
            f"other checksums ({', '.join(names[:3])}) after {_SENDINGS} sendings. It serves unproved weights"
        )

    async def _expected(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[Key, str]:
        return {} if self._recipes is None else await asyncio.to_thread(self._recipes.expect, tensors)

    async def _told(self) -> dict[Key, str]:
        return told_by(await self._client.post("/weights_checker", {"action": "checksum"}, deadline_s=self._load_s))

    async def _learned(self, info: Mapping[str, Any], model: ModelFolder) -> Recipes | None:
        """The recipes of a server that still has the weights it was started from; of another one they are learned by updates."""
        if not self._config.checksums:
            return None
        dtype = info["dtype"] if info["dtype"] != "auto" else model.setting("dtype") or model.setting("torch_dtype")
        recipes = Recipes(
            device=info["device"], dtype=torch_dtype(dtype), size=info["tp_size"],
            num_kv_heads=model.setting("num_key_value_heads") or 1,
        )  # fmt: skip
        try:
            told = await self._told()
        except ServerError as error:
            raise ConfigError(
                f"sglang.checksums must be False for a server without them, got True, and {error}. Change it"
            ) from error
        await asyncio.to_thread(recipes.learn, told, model)
        return recipes

    # ---- the way ----------------------------------------------------------------------------------------------------

    def _made(self, info: Mapping[str, Any], model: ModelFolder) -> Transfer:
        config = self._config
        if config.weights == "disk":
            return DiskTransfer(self._client, folder=self._folder, model=model.path, deadline_s=self._load_s)
        for name in ("dp_size", "pp_size"):
            if info.get(name, 1) != 1:
                raise ConfigError(
                    f"sglang.weights must be 'disk' for a server with {name} {info[name]}, got {config.weights!r}. Change it"
                )
        if config.weights == "distributed":
            return DistributedTransfer(
                self._client, tensor_parallel=info["tp_size"], device=self._device, on_device=info["device"] == "cuda",
                bucket_bytes=config.bucket_bytes, deadline_s=self._load_s,
            )  # fmt: skip
        at = urlsplit(self._client.url)
        addresses = {each[4][0] for each in socket.getaddrinfo(at.hostname, at.port or 80, type=socket.SOCK_STREAM)}
        if local_address(at.hostname, at.port or 80) not in addresses:  # it is on another node
            raise ConfigError(
                f"sglang.weights must be 'disk' or 'distributed' for a server on another node, "
                f"got 'tensor' for {self._client.url}. Handles of memory mean nothing there"
            )
        return TensorTransfer(
            self._client, tensor_parallel=info["tp_size"], bucket_bytes=config.bucket_bytes, deadline_s=self._load_s
        )
