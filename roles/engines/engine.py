"""What every generation engine is: the request, the completion, and the protocol between them.

Owns the words that rollout, evaluation, judges and the HTTP server share. Owns no engine: `embedded.py` runs one in this
process, other engines are adapters over servers. Light: imports numpy, never torch.

Invariant: every `generate` ends exactly once, with a completion or with an error; nothing waits for ever. Each token of a
completion carries the log-prob and the policy version it was sampled under.

    completion = await engine.generate(Request("g7/3", prompt, SamplingParams(max_new_tokens=64), seed=0x5EED))
    completion.tokens          # int32 [R], the last one is the stop token when finish_reason is "stop"
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from rondo.models.media.inputs import MediaInputs
from rondo.roles.engines import ranges
from rondo.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

Kind = Literal["train", "evaluation", "judge", "agent"]
FinishReason = Literal["stop", "length", "cancelled", "interrupted"]
OnNewWeights = Literal["continue", "recompute", "interrupt"]
"""What new weights do to a sequence in flight: it goes on with the cache that the old ones filled, its cache is computed anew, or
it ends as "interrupted", to be asked for again with what it has as its prefix."""

STALL_S = 3600.0
"""An engine that is asked for something and does not get on for so long is given up: waits for it end."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    `temperature` 0 is greedy. `top_k` (-1: off) keeps the k likeliest tokens, then `top_p` the smallest set of the rest that
    holds this share of their probability; both act after the temperature. `num_top`: for each token the log-probs of so many
    likeliest tokens are told too, by engines that can. Raises ConfigError on values outside `ranges`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    num_top: int = 0

    def __post_init__(self) -> None:
        ranges.NEW_TOKENS.check(self.max_new_tokens, "max_new_tokens")
        ranges.TEMPERATURE.check(self.temperature, "temperature")
        ranges.TOP_P.check(self.top_p, "top_p")
        ranges.TOP_K.check(self.top_k, "top_k")
        ranges.NUM_STOPS.check(len(self.stop_token_ids), "the number of stop_token_ids")
        for token in self.stop_token_ids:
            ranges.TOKEN.check(token, "stop_token_ids")
        ranges.NUM_TOP.check(self.num_top, "num_top")


@dataclass(frozen=True, slots=True)
class Top:
    """The K likeliest tokens at the place of each of R tokens, the likeliest first: `tokens` int32 [R, K] and `log_probs` float32
    [R, K], as in `Completion`. -1 and NaN where they are not known."""

    tokens: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, slots=True)
class Prefix:
    """What was sampled of a request before: as in `Completion`, at least one token. It is continued as though it had never
    been interrupted, and is the beginning of the completion. `routed_experts` are [T + P - 1, layers, top_k], where known."""

    tokens: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    top: Top | None = None
    routed_experts: np.ndarray | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate.

    `prompt` is int32 [T], T >= 1. `seed` (0 <= seed < 2**63) belongs to the sample: the draw at a position depends on the seed
    and that position alone. `media` are what the processor made of images, audios and videos of the prompt, and of what was
    said behind it, whose placeholders are among the tokens; engines of text models refuse them. `max_new_tokens` counts the
    tokens of `prefix` too. After `interruptions` of them (None: without end), new weights let the sequence go on in place. Of
    the requests that wait, those of higher `priority` start first, where the engine can tell them apart; requests of one
    `session` share prefixes, so an engine of several servers keeps them on one. `progress` is told, in the event loop, of the
    whole sample so far, now and then while it grows and never after its end; an engine that cannot tell does not call it.
    """

    id: str
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    kind: Kind = "train"
    media: MediaInputs | None = field(default=None, repr=False)
    prefix: Prefix | None = field(default=None, repr=False)
    on_new_weights: OnNewWeights = "continue"
    interruptions: int | None = None
    priority: int = 0
    session: str | None = None
    progress: Callable[[Prefix], None] | None = field(default=None, repr=False, compare=False)

    @property
    def sequence(self) -> np.ndarray:
        """Prompt and prefix, int32 [T + P]: the tokens that are there before the next one is sampled."""
        return self.prompt if self.prefix is None else np.concatenate([self.prompt, self.prefix.tokens])

    def resumed(self, completion: Completion) -> Request:
        """The request that goes on where an interrupted one ended."""
        prefix = completion.as_prefix()
        left = None if self.interruptions is None else self.interruptions - 1
        return replace(self, prefix=prefix, interruptions=left)

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1 or self.prompt.dtype.kind not in "iu" or self.prompt.size == 0:
            raise ConfigError(
                f"the prompt of request {self.id!r} must be a non-empty vector of token ids, "
                f"got {self.prompt.dtype} {list(self.prompt.shape)}. Render and tokenize it first."
            )
        ranges.SEED.check(self.seed, f"the seed of request {self.id!r}")
        ranges.PRIORITY.check(self.priority, f"the priority of request {self.id!r}")
        prefix = self.prefix
        if prefix is None:
            return
        sizes = [len(prefix.tokens), len(prefix.log_probs), len(prefix.policy_versions)]
        if len(set(sizes)) > 1 or not 1 <= sizes[0] < self.params.max_new_tokens:
            raise ConfigError(
                f"the prefix of request {self.id!r} must hold 1 to {self.params.max_new_tokens - 1} tokens, each with its "
                f"log-prob and version, got {sizes}. Take the arrays of the interrupted completion."
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """What was sampled for a request, R tokens (R = 0 only when it was cancelled before its first token).

    `tokens` int32 [R]; `log_probs` float32 [R], after the temperature and before top-k and top-p (greedy: of the plain
    logits); `policy_versions` int32 [R], the weights that each token was sampled under. `routed_experts`, of engines that
    tell them, uint8 or int16 [T + R - 1, layers, top_k]: the experts that each token but the last one was routed to, T tokens
    of the prompt (media expanded) first, in the order of the router's choice. Of a prefix that came without them they are those
    of the weights that computed it anew.
    """

    request_id: str
    tokens: np.ndarray
    log_probs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = field(default=None, repr=False)
    top: Top | None = field(default=None, repr=False)

    def as_prefix(self) -> Prefix:
        """What a request goes on from."""
        return Prefix(self.tokens, self.log_probs, self.policy_versions, self.top, self.routed_experts)

    def first(self, size: int) -> Completion:
        """The first `size` tokens, with what is told of them."""
        experts, top, beyond = self.routed_experts, self.top, len(self.tokens) - size
        return replace(
            self,
            tokens=self.tokens[:size],
            log_probs=self.log_probs[:size],
            policy_versions=self.policy_versions[:size],
            routed_experts=None if experts is None else experts[: len(experts) - beyond],
            top=None if top is None else Top(top.tokens[:size], top.log_probs[:size]),
        )


def sample_seed(*of: object) -> int:
    """63 bits, the same in every epoch, replica and attempt: of (run seed, what it is for, position in the data order,
    sample), or of (a sample's seed, the name of what is drawn beside it or behind it)."""
    digest = hashlib.blake2b("/".join(map(str, of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def ended_with(request: Request, reason: FinishReason, done: Prefix | None) -> Completion:
    """What a request has when it ends for this reason."""
    if done is None:
        done = Prefix(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
    return Completion(
        request.id, done.tokens, done.log_probs, done.policy_versions, reason, done.routed_experts, done.top
    )


def experts_of_whole(before: Prefix | None, told: np.ndarray | None) -> np.ndarray | None:
    """`told` by an engine of a whole sample that it continued after `before`, with the experts in their place that the earlier
    tokens were sampled with: what it told of these is how it computed them anew."""
    if told is None or before is None or before.routed_experts is None:
        return told
    return np.concatenate([before.routed_experts, told[len(before.routed_experts) :]])


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; the `num_` fields without "slots", "running" and "waiting" only grow."""

    version: int
    num_slots: int
    num_running: int
    num_waiting: int
    num_completed: int
    num_cancelled: int
    tokens_generated: int
    decode_steps: int
    prefill_tokens: int
    shared_prompt_tokens: int
    """Prompt tokens that were copied from another sample of the same prompt instead of being computed."""
    num_interrupted: int = 0
    """Sequences that new weights took out of their slots, to be computed anew here or asked for again."""
    cached_tokens: int = 0
    """Those of running sequences in the cache of keys and values, which takes `cache_tokens`; 0 where an engine does not tell."""
    cache_tokens: int = 0

    def __add__(self, other: EngineStats) -> EngineStats:
        """Of two engines together; the older version."""
        _, *sums = map(operator.add, _values(self), _values(other))
        return EngineStats(min(self.version, other.version), *sums)

    def ended(self) -> EngineStats:
        """What stays counted of an engine that is no more."""
        return replace(self, num_slots=0, num_running=0, num_waiting=0, cached_tokens=0, cache_tokens=0)


_values = operator.attrgetter(*(each.name for each in fields(EngineStats)))


class Engine(Protocol):
    """Generates samples under the newest weights that it was given."""

    @property
    def version(self) -> int:
        """The policy version that the next token is sampled under."""

    async def generate(self, request: Request) -> Completion:
        """Waits for the whole sample. Raises ConfigError if it can never fit, Closed after `close`, and whatever the engine
        failed with. Cancelling the awaiting task drops the request."""

    def cancel(self, request_id: str) -> None:
        """Ends a request early: its `generate` returns what it has, as "cancelled". Unknown and finished ids are ignored,
        since a request may finish while its cancellation is under way."""

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flips to `tensors` (Hugging Face disk names) between two decode steps; sequences in flight go on under them as their
        `on_new_weights` says. On return the tensors are no longer read. Raises ConfigError, and keeps the old weights, if names
        or shapes differ."""

    def progress(self) -> Mapping[str, int]:
        """Of each request here a number that changes when this very request comes further: its tokens, as far as they are known.
        One that waits its turn comes further with those before it; its number is negative. Asked a few times a lease."""

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Fails what still waits with Closed and frees the engine. Idempotent."""
