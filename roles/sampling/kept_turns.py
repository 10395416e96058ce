"""The turns of a prompt group's episodes, written down as they come, for whoever holds the lease next.

Owns what is written of a turn and of an answer to it, and finding it again. Does not own the files (`comm/bus/unfinished.py`),
nor whether an environment can go on from them: that says it itself (`environments.py`), or a workflow (`replays`).

    with KeptTurns(run_dir, group, epoch, missing, counts) as turns:
        turns.sampled(request)                      # what an earlier lease sampled for it, or None: the engine is asked
        turns.add(request, done)                    # before anybody acts on it
        turns.answer(place)                         # of an environment that is not asked again: what it said
        turns.add_answer(request.id, place, [...])

A turn is found by its *place*: the seed of its row and all tokens in front of it. So a turn that is read back stands behind
what it was sampled behind, whatever becomes of the rest: where an environment says something else, the policy is asked.

Invariant: a turn that is read back is to the bit what was sampled. A file that cannot be written or read costs turns, never the
run.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rondo.comm.bus import unfinished
from rondo.comm.bus.group import NO_VERSION
from rondo.roles.data.datasets import RowError
from rondo.roles.engines.engine import Completion, Request
from rondo.runtime.records.telling import telling
from rondo.runtime.values import as_json, decode

_WHOLE = ("stop", "length")
_ARRAYS = ("tokens", "log_probs", "policy_versions", "routed_experts")


@dataclass(slots=True)
class EpisodeCounts:
    """Of one replica since its start: samples of groups that had a lease before which went on from a turn, and which began again;
    turns that were not sampled again."""

    resumed: int = 0
    begun_again: int = 0
    turns_resumed: int = 0


def place_of(seed: int, *tokens: np.ndarray) -> str:
    """Where a row with this seed stands, with these tokens end to end, int32 [T] each."""
    digest = hashlib.blake2b(digest_size=12, key=seed.to_bytes(8, "little"))
    for each in tokens:
        digest.update(each.data)
    return digest.hexdigest()


class KeptTurns:
    """Of the `missing` samples of one lease. Nothing is kept until a workflow says that it goes on from it: `keeps`."""

    def __init__(self, run_dir: Path, group: int, epoch: int, missing: Collection[int], counts: EpisodeCounts) -> None:
        self._file = unfinished.file_of(run_dir, group, epoch)
        self._earlier = unfinished.files_of(run_dir, group, epoch)
        self._counts = counts
        self._turns, self._answers = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        self.keeps = False
        had = set[int]()
        for path in self._earlier:
            for each in unfinished.records(path):
                (self._turns if "finish" in each else self._answers)[each["place"]] = each
                had |= {each["sample"]} if "finish" in each else set()
        if epoch:
            resumed = len(had.intersection(missing))
            counts.resumed += resumed
            counts.begun_again += len(missing) - resumed

    def sampled(self, request: Request) -> Completion | None:
        """What an earlier lease sampled for this request."""
        if not self._turns or (found := self._turns.get(_place(request))) is None:
            return None
        self._counts.turns_resumed += 1
        parts = dict[str, Any]()
        for name, (dtype, shape, text) in found["arrays"].items():
            new = np.frombuffer(binascii.a2b_base64(text), dtype).reshape(shape)
            had = None if request.prefix is None else getattr(request.prefix, name)
            parts[name] = new if had is None else np.concatenate([had, new])
        return Completion(request.id, finish_reason=found["finish"], **parts)

    def add(self, request: Request, done: Completion) -> None:
        """What was sampled for it, before anybody acts on it."""
        if not self.keeps or done.finish_reason not in _WHOLE or done.top is not None:
            return
        arrays, newest = dict[str, list[Any]](), NO_VERSION
        for name in _ARRAYS:
            had, array = None if request.prefix is None else getattr(request.prefix, name), getattr(done, name)
            if array is None:
                continue
            new = array if had is None else array[len(had) :]
            arrays[name] = [new.dtype.str, new.shape, binascii.b2a_base64(new.tobytes(), newline=False).decode()]
            newest = int(new.max(initial=newest)) if name == "policy_versions" else newest
        place = _place(request)
        self._write(request.id, {"place": place, "newest": newest, "finish": done.finish_reason, "arrays": arrays})

    def answer(self, place: str) -> Any:
        """What an environment answered there, as `add_answer` was given it; None where nothing is kept."""
        found = self._answers.get(place)
        return None if found is None else decode(found["answer"])

    def add_answer(self, name: str, place: str, answer: Any) -> None:
        """Of the sample whose request has this name. TypeError for what does not travel."""
        if self.keeps:
            self._write(name, {"place": place, "answer": as_json(answer, "what an environment keeps")})

    def _write(self, name: str, record: dict[str, Any]) -> None:
        number = name.partition("/")[2].partition(".")[0]
        line = orjson.dumps({"sample": int(number), **record})
        with telling("unfinished episodes"):
            # In front, too: what a full disk tore is a line of its own. Closed, since a replica may hold thousands of leases.
            unfinished.append(self._file, b"\n%b\n" % line)

    def __enter__(self) -> KeptTurns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Nobody goes on with a group that has ended, or that begins anew for an error of its own; the next holder does where a
        lease is lost, and where a replica leaves or fails."""
        if kind is None or issubclass(kind, RowError):
            with telling("unfinished episodes"):
                for path in (*self._earlier, self._file):
                    path.unlink(missing_ok=True)


def _place(request: Request) -> str:
    return place_of(request.seed, request.prompt, *([] if request.prefix is None else [request.prefix.tokens]))
