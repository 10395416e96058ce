"""A server's memory on a device that it shares: given back while others compute there, and taken again.

Owns which parts are away. Does not own when they go or come. Only a server on a GPU that was started with `--enable-memory-saver`
frees anything.

    await memory.release()                # paused, and its requests taken back to the queue
    await memory.resume("weights")        # what new weights are written to
    await memory.resume()                 # and the rest; it stays paused
"""

from __future__ import annotations

from rondo.roles.engines.sglang.client import SGLangClient
from rondo.runtime.errors import RondoError
from rondo.runtime.waits import finished

CALL_DEADLINE_S = 60.0
_DEADLINE_S = 120.0
_TAGS = ("kv_cache", "weights")


class ServerMemory:
    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self.released: tuple[str, ...] = ()
        """Of `_TAGS`. A server that is asked to release one twice, or to resume one that it has, ends itself."""

    async def release(self) -> None:
        """Pauses the server first. Where that fails it goes on."""
        try:
            await self._client.post("/pause_generation", {"mode": "retract"}, deadline_s=_DEADLINE_S)
            await self._client.post("/release_memory_occupation", {"tags": list(_TAGS)}, deadline_s=_DEADLINE_S)
        except BaseException as error:
            await finished(beside(self._client, error, "/continue_generation", {}))
            raise
        self.released = _TAGS

    async def resume(self, *tags: str) -> None:
        """These of those that are away; all without."""
        if coming := [tag for tag in self.released if tag in tags or not tags]:
            await self._client.post("/resume_memory_occupation", {"tags": coming}, deadline_s=_DEADLINE_S)
            self.released = tuple(tag for tag in self.released if tag not in coming)


async def beside(client: SGLangClient, error: BaseException, path: str, body: dict[str, object]) -> None:
    """A call while `error` is on its way up; what it fails with is told there."""
    try:
        await client.post(path, body, deadline_s=CALL_DEADLINE_S)
    except RondoError as second:
        error.add_note(f"Then {path} failed: {second}")
