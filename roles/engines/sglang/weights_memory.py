"""Memory that a colocated server gives back while the trainer has the device: released by tags, resumed by the same ones.

Owns which tags are released, and the pause before it. Does not own the end of the pause, nor the weights: they come back as
anything, so an update follows (`weights.py`).

    memory = ServerMemory(client)
    await memory.release("kv_cache", "weights")      # the server is paused; requests in flight wait in its queue
    await memory.resume("weights")                   # update the weights here: it stays paused
    await memory.resume("kv_cache")

Invariant: no tag is released twice, nor resumed without: a server that is asked for either ends itself. Only a server on a GPU
with `--enable-memory-saver` frees anything; any other answers alike.
"""

from __future__ import annotations

from typing import Literal

from rondo.roles.engines.sglang.client import SGLangClient
from rondo.runtime.errors import ConfigError

Tag = Literal["weights", "kv_cache", "cuda_graph"]
DEADLINE_S = 120.0


class ServerMemory:
    """The memory of the server behind `client`."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._released: set[Tag] = set()

    @property
    def released(self) -> frozenset[Tag]:
        return frozenset(self._released)

    async def release(self, *tags: Tag) -> None:
        """Take requests in flight back to the queue, drop their cache, and give the memory of `tags` to the device."""
        again = self._released & set(tags)
        if again or not tags:
            raise ConfigError(f"memory to release must not be released yet, got {sorted(again) or 'no tags'}.")
        if not self._released:
            await self._client.post("/pause_generation", {"mode": "retract"}, deadline_s=DEADLINE_S)
        await self._client.post("/release_memory_occupation", {"tags": list(tags)}, deadline_s=DEADLINE_S)
        self._released |= set(tags)

    async def resume(self, *tags: Tag) -> None:
        """Take the memory of `tags` again; the server stays paused."""
        missing = set(tags) - self._released
        if missing or not tags:
            raise ConfigError(
                f"memory to resume must be released, got {sorted(missing) or 'no tags'}. Release it first"
            )
        await self._client.post("/resume_memory_occupation", {"tags": list(tags)}, deadline_s=DEADLINE_S)
        self._released -= set(tags)
