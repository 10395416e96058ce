"""The slot engine: sequences come and go at every decode step, and none waits for another's end.

Owns which request sits in which slot, its tokens, and the order of a step. Does not own the arithmetic (a `Forward` does,
with its key-value cache), threads or asyncio (`embedded.py`).

Invariant: slots 0 .. num_running - 1 hold the sequences in flight, the rest are free. A slot that ends is filled with the
last one, so decoding is always over one dense range of rows. Samples of one prompt share its prefill: together in a step,
or by copying from a sample still in flight under the same weights.

    step: admit waiting requests -> one forward (decode rows, then new prompts) -> draw -> record -> free what ended

         slot 0  [prompt............|tokens....            ]
         slot 1  [prompt..|tokens..........                ]     per-slot lengths, no padding between
         slot 2  [                                         ]     free
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

from rondo.models.media.inputs import MediaInputs
from rondo.roles.engines.embedded.sampler import DRAWN, draw, likeliest, uniforms
from rondo.roles.engines.embedded.waiting import Waiting
from rondo.roles.engines.engine import Completion, EngineStats, FinishReason, Prefix, Request, Top, experts_of_whole
from rondo.runtime.errors import ConfigError, CorruptData

_COUNTED = (
    "num_completed", "num_cancelled", "num_interrupted", "tokens_generated", "decode_steps", "prefill_tokens",
    "shared_prompt_tokens",
)  # fmt: skip
"""Of `EngineStats`, what only grows."""


class Prefill(NamedTuple):
    """A prompt to compute into a slot, with what was sampled after it before an interruption."""

    slot: int
    tokens: np.ndarray
    """int64 [T], placeholders of media included; the media's positions end with the last medium"""
    media: MediaInputs | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward: slots 0 .. len(tokens) - 1 take one token each at their positions, then `prompts` fill other slots."""

    tokens: np.ndarray
    """int64 [num_decode]"""
    positions: np.ndarray
    """int64 [num_decode], the index of each token in its sequence"""
    prompts: tuple[Prefill, ...] = ()


class Forward(Protocol):
    """A model with a ragged key-value cache of `num_slots` rows, each `max_length` long. Called in inference mode."""

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows: 0 .. vocab_size - 1."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """Of the media that prompts may carry; empty for a model of text."""

    @property
    def held(self) -> bool:
        """Whether its weights are just now not the version that was loaded: then it must not be called."""

    @property
    def keeps_prefixes(self) -> bool:
        """Whether `copy` can still take a prompt from a slot that has gone on since. Not so where layers carry a state."""

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Writes the cache and returns the next token's logits [num_decode + num_prompts, vocab], in the batch's order."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of a slot's cache into another slot, which then holds exactly these. Without
        `keeps_prefixes` they must be all that the slot holds."""

    def clear(self, slot: int | None = None) -> None:
        """Zeroes the cache, or a slot's alone: a NaN in it would reach later sequences even through a mask."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces the weights in place (Hugging Face disk names), or raises ConfigError and changes nothing."""

    def refresh(self) -> None:
        """Takes over weights that somebody else has changed in place."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Prompt:
    """A prompt whose cache lies in at least one slot in flight; it dies with the last of them. `logits` [vocab] is what follows
    it, None while it is being computed."""

    logits: torch.Tensor | None = None


@dataclass(slots=True)
class _Running:
    request: Request
    prompt: _Prompt
    stops: frozenset[int]
    top: list[tuple[np.ndarray, np.ndarray]] | None = None
    """For each token that was sampled here the likeliest ones, of requests that want them."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A request whose own numbers went wrong; it is no longer here, and what runs beside it goes on."""

    request_id: str
    error: CorruptData


class SlotEngine:
    """Generates with continuous batching. Not thread-safe: one thread calls everything.

    `num_slots` sequences run at once, each of at most `max_length` tokens, prompt included. `max_prefill_tokens` bounds the
    prompt tokens, and positions that encoders take, computed in one step beyond the first prompt, and so how long running
    sequences pause for new ones.
    `fixed_shapes` runs every decode over all slots and every prompt alone, so that a sample's bits do not depend on what
    runs beside it; it needs at least 4 slots (float32 products of 1 to 3 rows round differently). In a model with experts
    they still do, in the last bits: how many rows an expert gets is up to all sequences. `sleep` releases the forward's memory.
    `experts(slot, length)` are those of a slot's first tokens, [length, layers, top_k], in an engine that tells them.
    Ids from `num_tokens` on are never sampled: rows of a padded vocabulary, which stand for nothing in the tokenizer.
    `loaded(version, tensors)` raises where weights that were just loaded are not there.

    After an exception from `step` the cache is undefined: call `clear`, which drops every request.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        num_slots: int,
        max_length: int,
        max_prefill_tokens: int = 8192,
        fixed_shapes: bool = False,
        num_tokens: int | None = None,
        version: int = 0,
        sleep: Callable[[], None] | None = None,
        experts: Callable[[int, int], np.ndarray] | None = None,
        loaded: Callable[[int, Mapping[str, torch.Tensor]], None] | None = None,
    ) -> None:
        least = 4 if fixed_shapes else 1
        if max_prefill_tokens < 1:
            raise ConfigError(f"max_prefill_tokens must be at least 1, got {max_prefill_tokens}. Use the default.")
        if num_slots < least:
            raise ConfigError(f"num_slots must be at least {least}, got {num_slots}. Give the engine more slots.")
        if max_length < 2:
            raise ConfigError(f"max_length must be at least 2, got {max_length}. Leave room for a prompt and a token.")
        self.version = version
        self.num_slots = num_slots
        self.max_length = max_length
        self._forward = forward
        self._num_tokens = num_tokens
        self._sleep = sleep
        self._experts, self._loaded = experts, loaded
        self.asleep = False
        self._max_prefill_tokens = max_prefill_tokens
        self._fixed_shapes = fixed_shapes
        self._waiting = Waiting()
        self._running: list[_Running] = []
        self._prompts: WeakValueDictionary[bytes, _Prompt] = WeakValueDictionary()
        # A row a slot. What a token has is of each place of its sequence; `limit` is the length at which that ends.
        each = {"tokens": np.int32, "log_probs": np.float32, "versions": np.int32, "uniforms": np.float32}
        columns = [(name, dtype, (max_length,)) for name, dtype in each.items()]
        counts = [("length", np.int64), ("limit", np.int64), ("drawn", DRAWN)]
        self._slots = slots = np.zeros(num_slots, np.dtype([*columns, *counts], align=True))
        self._tokens, self._log_probs, self._versions, self._uniforms = (slots[name] for name in each)
        self._length, self._limit, self._drawn = slots["length"], slots["limit"], slots["drawn"]
        self._all_slots = np.arange(num_slots)
        self._counts = dict.fromkeys(_COUNTED, 0)

    @property
    def held(self) -> bool:
        """Whether `step` has to wait until other weights are loaded."""
        return self._forward.held

    def sleep(self) -> None:
        """Releases the forward's memory until weights are loaded, where it can and nothing is here that needs it."""
        if self._sleep is not None and not self.has_work:
            self._prompts.clear()
            self._sleep()
            self.asleep = True

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def check(self, request: Request) -> None:
        """Raises ConfigError if the request can never run here."""
        num_prompt, num_new = request.prompt.size, request.params.max_new_tokens
        if num_prompt + num_new > self.max_length:
            raise ConfigError(
                f"prompt and max_new_tokens of request {request.id!r} must fit into max_length {self.max_length}, "
                f"got {num_prompt} + {num_new}. Shorten the prompt, ask for fewer tokens or raise the engine's max_length."
            )
        low, high = int(request.sequence.min()), int(request.sequence.max())
        if low < 0 or high >= self._forward.vocab_size:
            raise ConfigError(
                f"the tokens of request {request.id!r} must be in [0, {self._forward.vocab_size}), "
                f"got {low if low < 0 else high}. Tokenize the prompt with the model's own tokenizer."
            )
        if request.media is None:
            return
        beyond = [modality for modality in request.media.modalities if modality not in self._forward.modalities]
        if beyond:
            raise ConfigError(
                f"the media of request {request.id!r} must be of kinds that the model takes, "
                f"{', '.join(self._forward.modalities) or 'none'}, got {', '.join(beyond)}. Name a model that takes them."
            )
        shape, most = request.media.positions.shape, len(request.sequence) if request.media.turns else num_prompt
        if shape[0] != 3 or not num_prompt <= shape[1] <= most:
            raise ConfigError(
                f"the positions of request {request.id!r} must be of shape [3, {most}], a column a prompt token, "
                f"got {list(shape)}. Take tokens and media from one processor call."
            )

    def add(self, request: Request) -> None:
        """Queues a request, behind those of its priority. Raises ConfigError if it can never run or its id is in use."""
        self.check(request)
        if request.id in self._waiting or any(running.request.id == request.id for running in self._running):
            raise ConfigError(
                f"the id of a request must be unique in its engine, got {request.id!r} twice. Rename one."
            )
        self._waiting.add(request)

    @torch.inference_mode()
    def cancel(self, request_id: str) -> Completion | None:
        """Ends a request with what it has; None if it is not here (any more)."""
        waiting = self._waiting.pop(request_id)
        if waiting is not None:
            self._counts["num_cancelled"] += 1
            empty = np.zeros(0, np.int32)
            has = waiting.prefix or Prefix(empty, np.zeros(0, np.float32), empty)
            return Completion(
                request_id, has.tokens, has.log_probs, has.policy_versions, "cancelled", has.routed_experts
            )
        for slot, running in enumerate(self._running):
            if running.request.id == request_id:
                return self._finish(slot, "cancelled")
        return None

    @torch.inference_mode()
    def clear(self) -> None:
        """Drops every request. The next step starts from an empty cache."""
        self._waiting.clear()
        self._running.clear()
        self._prompts.clear()
        self._forward.clear()

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> list[Completion]:
        """Flips to other weights between two steps: sequences in flight keep their cache and go on under the new ones, or wait
        in front of all others to be computed anew, or are returned as interrupted, as each asked for.
        Raises ConfigError, with weights and version unchanged, if names or shapes are not exactly the model's."""
        self._forward.load(tensors)
        if self._loaded is not None:
            self._loaded(version, tensors)
        self.asleep = False
        self.version = version
        self._prompts.clear()  # a prompt computed under the old weights is not shared any more
        return self._interrupt()

    @torch.inference_mode()
    def _interrupt(self) -> list[Completion]:
        """Takes out what new weights interrupt; returns those who are to ask again, in the order of their slots."""
        taken: list[tuple[Request, Completion]] = []
        for slot in range(len(self._running) - 1, -1, -1):
            request = self._running[slot].request
            if request.on_new_weights != "continue" and request.interruptions != 0:
                taken.append((request, self._finish(slot, "interrupted")))
        for request, completion in taken:  # from the last slot on: the first comes to stand in front
            if request.on_new_weights == "recompute":
                self._waiting.put_first(request.resumed(completion))
        return [completion for request, completion in reversed(taken) if request.on_new_weights == "interrupt"]

    def so_far(self) -> list[tuple[Callable[[Prefix], None], Prefix]]:
        """(whom to tell, what was sampled) of the requests whose progress is asked for, as far as they run and have a token."""
        found = []
        for slot, running in enumerate(self._running):
            request = running.request
            if request.progress is not None and self._length[slot] > request.prompt.size:
                found.append((request.progress, self._sampled(slot)))
        return found

    def progress(self) -> dict[str, int]:
        """The tokens of each request that has a slot, its prefix included. It may be called beside `step`: of a slot that is just
        passed on it tells one sequence or the other."""
        running = list(self._running)
        return {
            each.request.id: self._length.item(slot) - each.request.prompt.size for slot, each in enumerate(running)
        }

    def stats(self) -> EngineStats:
        return EngineStats(self.version, self.num_slots, len(self._running), len(self._waiting), **self._counts)

    @torch.inference_mode()
    def step(self) -> list[Completion | Failed]:
        """Samples one token for every sequence in flight, new ones included, and returns those that ended."""
        num_decode = len(self._running)
        prompts: list[Prefill] = []
        computed: list[_Prompt] = []
        copies: list[tuple[int, int, int]] = []
        budget = self._max_prefill_tokens
        while self._waiting and len(self._running) < self.num_slots:
            request = self._waiting.first()
            slot, media = len(self._running), request.media
            tokens = request.sequence.astype(np.int64)
            key = tokens.tobytes() + (media.key.encode() if media is not None else b"")
            prompt = self._prompts.get(key)
            if prompt is None or (prompt.logits is not None and not self._forward.keeps_prefixes):
                cost = tokens.size + (media.encoder_positions if media is not None else 0)
                if prompts and cost > budget:
                    break
                budget -= cost
                prompt = self._prompts[key] = _Prompt()
                prompts.append(Prefill(slot, tokens, media))
                computed.append(prompt)
                self._counts["prefill_tokens"] += tokens.size
            else:
                holder = next(slot for slot, running in enumerate(self._running) if running.prompt is prompt)
                copies.append((holder, slot, tokens.size))
                self._counts["shared_prompt_tokens"] += tokens.size
            self._waiting.pop(request.id)
            self._place(slot, request)
            params = request.params
            self._running.append(
                _Running(request, prompt, frozenset(params.stop_token_ids), [] if params.num_top else None)
            )
        if not self._running:
            return []
        logits_NV = self._compute(num_decode, prompts)
        for prompt, logits_V in zip(computed, logits_NV[num_decode:], strict=True):
            prompt.logits = logits_V.clone()
        if copies:
            new = [running.prompt.logits for running in self._running[num_decode:]]
            logits_NV = torch.stack([*logits_NV[:num_decode], *(each for each in new if each is not None)])
        for source, target, length in copies:
            self._forward.copy(source, target, length)
        return self._record(logits_NV)

    def _compute(self, num_decode: int, prompts: list[Prefill]) -> torch.Tensor:
        """The logits [num_decode + num_prompts, vocab]: one forward, many of fixed shapes, or none where there is nothing new."""
        if not num_decode and not prompts:
            return torch.empty(0, 0)
        decode = self._all_slots[:num_decode]
        positions = self._length[:num_decode] - 1
        tokens = self._tokens[decode, positions].astype(np.int64)
        self._counts["decode_steps"] += num_decode > 0
        if not self._fixed_shapes:
            return self._forward(Batch(tokens, positions, tuple(prompts)))
        nothing = np.zeros(0, np.int64)
        parts = []
        if num_decode:
            # Free slots take token 0 at position 0, which the next prompt there overwrites.
            free = np.zeros(self.num_slots - num_decode, np.int64)
            batch = Batch(np.concatenate([tokens, free]), np.concatenate([positions, free]))
            parts.append(self._forward(batch)[:num_decode])
        parts += [self._forward(Batch(nothing, nothing, (prompt,))) for prompt in prompts]
        return torch.cat(parts)

    def _record(self, logits_NV: torch.Tensor) -> list[Completion | Failed]:
        """Draws the next token of slots 0 .. N - 1 and ends those that are done."""
        num_running = len(self._running)
        slots, at = self._all_slots[:num_running], self._length[:num_running]
        tokens, log_probs = draw(logits_NV, self._drawn[:num_running], self._uniforms[slots, at], self._num_tokens)
        broken = ~np.isfinite(log_probs)
        self._tokens[slots, at] = tokens
        self._log_probs[slots, at] = log_probs
        self._versions[slots, at] = self.version
        for slot, running in enumerate(self._running):
            if running.top is not None:
                params = running.request.params
                running.top.append(likeliest(logits_NV[slot], params.temperature, params.num_top, self._num_tokens))
        at += 1  # a view of the lengths
        self._counts["tokens_generated"] += num_running
        pairs = zip(self._running, tokens.tolist(), strict=True)
        stopped = np.fromiter((token in running.stops for running, token in pairs), np.bool_, num_running)
        ended = np.flatnonzero(broken | stopped | (at >= self._limit[:num_running]))
        # From the last to the first, so that the slot which moves into a freed one is never itself about to end.
        return [
            self._failed(slot) if broken[slot] else self._finish(slot, "stop" if stopped[slot] else "length")
            for slot in map(int, ended[::-1])
        ]

    def _place(self, slot: int, request: Request) -> None:
        """Writes a request's state into a free slot."""
        params, size, sequence, has = request.params, request.prompt.size, request.sequence, request.prefix
        start, end = sequence.size, size + params.max_new_tokens
        self._drawn[slot] = params.temperature, params.top_k, params.top_p
        self._tokens[slot, :start] = sequence
        if has is not None:
            self._log_probs[slot, size:start], self._versions[slot, size:start] = has.log_probs, has.policy_versions
        self._uniforms[slot, start:end] = uniforms(request.seed, start, end - start)
        self._length[slot], self._limit[slot] = start, end

    def _sampled(self, slot: int) -> Prefix:
        """Copies of what a slot has."""
        running, span = self._running[slot], slice(self._running[slot].request.prompt.size, int(self._length[slot]))
        tokens, log_probs, versions = (
            column[slot, span].copy() for column in (self._tokens, self._log_probs, self._versions)
        )
        return Prefix(tokens, log_probs, versions, _top(running, len(tokens)))

    def _finish(self, slot: int, reason: FinishReason) -> Completion:
        """Takes a sequence out with what it has."""
        request, has = self._running[slot].request, self._sampled(slot)
        length = int(self._length[slot]) - 1  # the newest is not in the cache
        told = None if self._experts is None else self._experts(slot, length)
        experts = experts_of_whole(request.prefix, told)
        completion = Completion(request.id, has.tokens, has.log_probs, has.policy_versions, reason, experts, has.top)
        self._free(slot)
        self._counts["num_completed" if reason in ("stop", "length") else f"num_{reason}"] += 1
        return completion

    def _failed(self, slot: int) -> Failed:
        """Takes a sequence out whose numbers are no numbers, with all that it left in the cache."""
        request = self._running[slot].request
        self._forward.clear(slot)
        self._free(slot)
        return Failed(
            request.id,
            CorruptData(
                f"the log-probs of request {request.id!r} under policy version {self.version} must be finite, got a NaN. "
                "Where every request fails so, check the published weights; else look at its prompt and media"
            ),
        )

    def _free(self, slot: int) -> None:
        """Closes the gap that a sequence leaves with the last slot."""
        moved = self._running.pop()
        last = len(self._running)
        if slot != last:
            self._running[slot] = moved
            self._forward.copy(last, slot, int(self._length[last]) - 1)
            self._slots[slot] = self._slots[last]


def _top(running: _Running, num_tokens: int) -> Top | None:
    """The likeliest tokens at each of a sample's places: those of its prefix, then those recorded here."""
    if running.top is None:
        return None
    prefix, width = running.request.prefix, running.request.params.num_top
    tokens = np.full((num_tokens, width), -1, np.int32)
    log_probs = np.full((num_tokens, width), np.nan, np.float32)
    if prefix is not None and prefix.top is not None:
        tokens[: len(prefix.tokens)], log_probs[: len(prefix.tokens)] = prefix.top.tokens, prefix.top.log_probs
    for row, (ids, values) in enumerate(running.top, num_tokens - len(running.top)):
        tokens[row, : len(ids)], log_probs[row, : len(ids)] = ids, values
    return Top(tokens, log_probs)
