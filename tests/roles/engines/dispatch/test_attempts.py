"""What was told of a request whose attempt is lost, and the dispatcher that goes on from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rondo.roles.engines.dispatch.attempts import Told
from rondo.roles.engines.engine import Completion, Prefix, Request, SamplingParams
from rondo.runtime.errors import PeerGone
from tests.roles.engines.dispatch.engines import asked
from tests.roles.engines.dispatch.test_requests import over
from tests.roles.engines.dispatch.test_rolling import Told as Answering


def prefix(tokens: Sequence[int], versions: Sequence[int]) -> Prefix:
    return Prefix(np.array(tokens, np.int32), -np.array(tokens, np.float32), np.array(versions, np.int32))


def request(**changes: Any) -> Request:
    return Request("r", np.array([5, 6], np.int32), SamplingParams(4, stop_token_ids=(9,)), seed=1, **changes)


def after(*parts: Prefix, at: int = 1, of: Request | None = None) -> Request:
    """What is asked after an attempt that told these, and began under version `at`."""
    told = Told(lambda so_far: None)
    asking = told.attempt(of or request(), at)
    assert asking.progress is not None
    for part in parts:
        asking.progress(part)
    return told.lost(of or request())


def test_the_newest_of_what_was_told_is_the_next_prefix() -> None:
    newest = prefix([1, 2], [1, 1])
    assert after(prefix([1], [1]), newest).prefix is newest
    assert after().prefix is None
    before = prefix([7], [0])
    begun = request(prefix=before)
    assert after(of=begun).prefix is before
    longer = prefix([7, 1], [0, 1])
    assert after(longer, of=begun).prefix is longer


@pytest.mark.parametrize(
    "part",
    [prefix([1, 2], [1, 2]), prefix([1, 9], [1, 1]), prefix([1, 2, 3, 4], [1] * 4)],
    ids=["version", "stop", "full"],
)
def test_what_is_not_known_for_sure_or_has_no_next_token_is_no_prefix(part: Prefix) -> None:
    assert after(part).prefix is None


def test_an_attempt_that_is_over_tells_nothing_more() -> None:
    heard: list[Prefix] = []
    told = Told(heard.append)
    first = told.attempt(request(), 1)
    told.lost(request())
    second = told.attempt(request(), 1)
    assert first.progress is not None and second.progress is not None
    first.progress(prefix([1], [1]))
    second.progress(prefix([2], [1]))
    assert [so_far.tokens.tolist() for so_far in heard] == [[2]]
    assert told.lost(request()).prefix is heard[0]


class Leaving(Answering):
    """Tells one of `parts`, while there are some, and leaves; answers else with tokens of its own behind the prefix."""

    def __init__(self, parts: list[Prefix]) -> None:
        super().__init__()
        self.parts = parts

    async def generate(self, request: Request) -> Completion:
        if self.parts:
            assert request.progress is not None
            request.progress(self.parts.pop(0))
            raise PeerGone("it left")
        begun = request.prefix or prefix([], [])
        num = request.params.max_new_tokens - len(begun.tokens)
        new = prefix(range(100, 100 + num), [self.version] * num)
        whole = zip(
            (begun.tokens, begun.log_probs, begun.policy_versions), (new.tokens, new.log_probs, new.policy_versions),
            strict=True,
        )  # fmt: skip
        return Completion(request.id, *map(np.concatenate, whole), "length")


@pytest.mark.parametrize("surely", [True, False])
async def test_the_dispatcher_asks_another_engine_for_what_is_missing_behind_what_was_told(surely: bool) -> None:
    heard: list[Prefix] = []
    part = prefix([50, 51], [1, 1 if surely else 2])
    parts = [part]
    async with over(Leaving(parts), Leaving(parts)) as dispatcher:
        done = await dispatcher.generate(replace(asked("r"), progress=heard.append))
        stats = dispatcher.dispatch_stats()
    assert heard == [part]
    assert done.tokens.tolist() == ([50, 51, 100, 101] if surely else [100, 101, 102, 103])
    assert done.policy_versions.tolist() == [1] * 4 and (stats.num_continued, stats.num_lost_attempts) == (surely, 1)
    assert stats.tokens_delivered == 4 and done.request_id == "r"
