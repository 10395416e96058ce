"""Where a sample ends: at a token that ends sequences, or where a stop string is complete in its text.

Owns both, for the run's samples and for those of the server. Tokens end a sample in the engine. Text is read here while the
sample grows, whichever engine makes it; the request is cancelled where a stop string is complete, and what the engine had made
beyond is cut off.

    stops = stops_of(path, tokenizer, ("</answer>",))
    stops.ids                                           # (151643, 151645): the engine ends at them
    done = await whole_sample(engine, request, stops)   # finish_reason "stop", up to the token that completes "</answer>"

Invariant: the tokens of a sample are those that were sampled, up to and with the one that completes the stop string; nothing is
tokenised again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondo.models.load import end_ids
from rondo.roles.data.sources import RowError
from rondo.roles.engines.engine import Completion, Engine, Prefix, Request
from rondo.roles.engines.faults import fault_of
from rondo.roles.serve.text import TextReader
from rondo.runtime.errors import ConfigError, RondoError


class Reading:
    """The text of one sample while it grows, over all attempts at it, from its token `start` on. `num_kept`: its tokens, once a
    stop string has ended it; `torn`: what was told is lost, and other tokens came."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        *,
        keep_stop: bool = False,
        skip_special_tokens: bool = False,
        start: int = 0,
    ) -> None:
        self._start = start
        self._open = functools.partial(
            TextReader, tokenizer, stops=tuple(stops), keep_stop=keep_stop, skip_special_tokens=skip_special_tokens
        )
        self._keep_stop = keep_stop
        self.begin()

    def begin(self) -> None:
        """Anew, of a sample of which nothing is known."""
        self.reader = self._open()
        self.num_kept: int | None = None
        self.torn = False
        self._told: np.ndarray | None = None

    @property
    def over(self) -> bool:
        return self.torn or self.num_kept is not None

    def check(self, tokens: np.ndarray, *, shown: bool, whole: bool = False) -> None:
        """Whether these are what was told before, or go on with it: an engine of several servers may begin again on another one.
        Where nothing was shown, nor anything decided, the text is read anew. Less than was told is no other beginning, but at the
        end (`whole`)."""
        if self._told is None:
            return
        told = self._told if whole else self._told[: len(tokens)]
        if np.array_equal(tokens[: len(told)], told):
            return
        if shown or self.num_kept is not None:
            self.torn = True
        else:
            self.begin()

    def take(self, tokens: np.ndarray, *, shown: bool = False) -> bool:
        """The whole sample so far; whether it has more tokens than were told before."""
        if self.over:
            return False
        self.check(tokens, shown=shown)
        if self.torn or (self._told is not None and len(tokens) <= len(self._told)):
            return False
        self._told = tokens
        self.num_kept = self._whole(self.reader.feed(tokens[self._start :]))
        return True

    def cut(self, done: Completion) -> Completion:
        """The sample that is over, up to the end of its stop string where it has one."""
        if self.num_kept is None:
            # A token that ends a sample is no part of its text.
            ended = done.finish_reason == "stop" and not self._keep_stop
            tokens = done.tokens[self._start :]
            self.num_kept = self._whole(self.reader.finish(tokens[:-1] if ended else tokens))
        if self.num_kept is None:
            return done
        return replace(done.first(self.num_kept), finish_reason="stop")

    def _whole(self, num_read: int | None) -> int | None:
        return None if num_read is None else self._start + num_read


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends the samples of a run: tokens, and texts that are looked for in what is sampled, special tokens included."""

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()
    tokenizer: Any = None


def token_stops(tokenizer: Any, stops: Sequence[str]) -> dict[str, int]:
    """Those stop strings that are one token, which the tokenizer makes of no other text, with their ids."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    return {text: added[text] for text in stops if text in added}


def stops_of(path: str, tokenizer: Any, stops: Sequence[str], max_new_tokens: int) -> Stops:
    """Of the model at `path`, with the stop strings of the settings. ConfigError for one that no sample can have in it."""
    tokens = token_stops(tokenizer, stops)
    texts = tuple(text for text in stops if text not in tokens)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        written = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if text not in written:
            raise ConfigError(
                f"rollout.stop must hold what the tokenizer can write, got {text!r}, of which it makes {written!r}. Change or "
                "remove it"
            )
        if len(ids) > max_new_tokens:
            raise ConfigError(
                f"rollout.stop must fit into rollout.max_new_tokens {max_new_tokens}, got {text!r:.80} of {len(ids)} tokens. "
                "Shorten or remove it"
            )
    return Stops(tuple(sorted({*end_ids(path, tokenizer), *tokens.values()})), texts, tokenizer)


async def whole_sample(engine: Engine, request: Request, stops: Stops) -> Completion:
    """One sample to its end. Where new weights interrupt it, it is asked for again with what it has; prompt and media stay. Texts
    of a prefix that it comes with end nothing. RowError where the failure is the request's own, so that no other sample fails for
    it."""
    start = 0 if request.prefix is None else len(request.prefix.tokens)
    reading = Reading(stops.tokenizer, stops.texts, start=start) if stops.texts else None

    if reading is not None:
        told = request.progress

        def grown(so_far: Prefix) -> None:
            if reading.take(so_far.tokens) and reading.over:
                engine.cancel(request.id)
            if told is not None:
                told(so_far)

        request = replace(request, progress=grown)
    asked = request
    while True:
        try:
            done = await engine.generate(asked)
        except RondoError as error:
            if fault_of(error) != "request":
                raise
            raise RowError(f"sample {request.id} must be answered, got {type(error).__name__}: {error}") from error
        if reading is not None:
            reading.check(done.tokens, shown=False, whole=True)
            if reading.torn:  # the tokens that ended it are lost with their server
                reading.begin()
                asked = request
                continue
        if done.finish_reason != "interrupted" or (reading is not None and reading.over):
            return done if reading is None else reading.cut(done)
        asked = asked.resumed(done)
