"""What the server needs of the embedded engine beside the protocol: that it tells of progress, and stands still."""

from __future__ import annotations

import asyncio

import numpy as np

from rondo.roles.engines.embedded.embedded import EmbeddedEngine
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.engine import Completion, Prefix, Request, SamplingParams
from tests.roles.serve.serving import Speaker, computing, ids, prompt_ids, tokenizer


def request(name: str, num_new: int = 8, **more: object) -> Request:
    return Request(name, np.array(prompt_ids(), np.int32), SamplingParams(num_new), seed=0, **more)  # type: ignore[arg-type]


async def test_progress_is_told_as_it_grows_and_never_after_the_end() -> None:
    told: list[Prefix] = []
    async with computing() as compute:
        speaker = Speaker(lambda prompt: "abcdefgh", tokenizer())
        engine = EmbeddedEngine(SlotEngine(speaker, num_slots=2, max_length=64), compute, turn_s=0.0)
        watched, other = await asyncio.gather(
            engine.generate(request("watched", progress=told.append)), engine.generate(request("other"))
        )
        counts = [len(each.tokens) for each in told]
        again = await engine.generate(request("watched"))
        await engine.close()
    assert counts == sorted(set(counts)) and counts[0] > 0 and counts[-1] < 8 and len(told) == len(counts) > 2
    for each in told:
        assert each.tokens.tolist() == ids("abcdefgh")[: len(each.tokens)]
        assert each.log_probs.tolist() == watched.log_probs[: len(each.tokens)].tolist()
    assert watched.tokens.tolist() == other.tokens.tolist() == again.tokens.tolist()


async def test_an_engine_that_is_paused_takes_requests_and_weights_and_samples_nothing() -> None:
    async with computing() as compute:
        speaker = Speaker(lambda prompt: "abcdefgh", tokenizer())
        engine = EmbeddedEngine(SlotEngine(speaker, num_slots=2, max_length=64), compute, turn_s=0.0)
        grown = asyncio.Event()
        first = asyncio.create_task(engine.generate(request("first", progress=lambda so_far: grown.set())))
        await grown.wait()
        await engine.pause()
        before = engine.stats().tokens_generated
        second = asyncio.create_task(engine.generate(request("second")))
        await engine.update_weights(9, {})
        engine.cancel("unknown")
        await engine.update_weights(10, {})
        assert engine.stats().tokens_generated == before and not first.done() and not second.done()
        engine.resume()
        done: list[Completion] = await asyncio.gather(first, second)
        await engine.close()
    assert [each.tokens.tolist() for each in done] == [ids("abcdefgh")] * 2
    assert sorted(set(done[0].policy_versions.tolist())) == [0, 10] and set(done[1].policy_versions.tolist()) == {10}
