"""What the caller of a request was told of it, over the attempts that it takes.

Owns what becomes of tokens that were told and then lost with their server. They are kept: the next attempt continues from them.
They were sampled, with these log-probs, so that this is a sample as good as any; one that was begun anew would have other tokens,
and what a caller has shown cannot be taken back.

    told = Told(request.progress)
    engine.generate(told.attempt(request, engine.version))      # its server leaves
    request = told.lost(request)                                # begins with what was told

Invariant: tokens that are kept have the version they were sampled under. The version of tokens that are told around an
update of weights may be the next one (`sglang/responses.py`), so only those are kept that bear the version that their attempt
began under. Else the sample is begun anew, and a caller that has shown tokens compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rondo.roles.engines.engine import Prefix, Request


class Told:
    """Of one request. `progress` is the caller's own."""

    __slots__ = ("_attempt", "_progress", "_so_far", "_version")

    def __init__(self, progress: Callable[[Prefix], None]) -> None:
        self._progress = progress
        self._attempt = 0
        self._so_far: Prefix | None = None
        self._version = 0

    def attempt(self, request: Request, version: int) -> Request:
        """The request as an engine is asked that samples under `version` now. What earlier attempts still tell is dropped."""
        self._attempt += 1
        number, self._so_far, self._version = self._attempt, None, version

        def progress(so_far: Prefix) -> None:
            if number == self._attempt:
                self._so_far = so_far
                self._progress(so_far)

        return replace(request, progress=progress)

    def lost(self, request: Request) -> Request:
        """The request that goes on after an attempt at `request` was lost."""
        self._attempt += 1
        so_far, params = self._so_far, request.params
        before = 0 if request.prefix is None else len(request.prefix.tokens)
        if so_far is None or not before < len(so_far.tokens) < params.max_new_tokens:
            return request
        if so_far.tokens[-1] in params.stop_token_ids or (so_far.policy_versions[before:] != self._version).any():
            return request
        return replace(request, prefix=so_far)
