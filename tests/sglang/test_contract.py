"""What every engine promises, asked of both: the one inside the process and one over a real server, with the same weights."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.models.load import load_model
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.engine import Completion, Engine
from rondo.runtime.errors import Closed, ConfigError
from tests.models.builders import full_tensors
from tests.roles.engines.engines import full_log_probs, request
from tests.sglang.servers import Served

NEAR = 5e-5


@asynccontextmanager
async def embedded(model: Any) -> AsyncIterator[Engine]:
    with ThreadPoolExecutor(1) as thread:

        async def compute(function: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(thread, function)

        engine = EmbeddedEngine(slot_engine(model, num_slots=8, max_length=1024), compute)
        try:
            yield engine
        finally:
            await engine.close()


@pytest.fixture(params=["embedded", "sglang"])
async def engine(request: pytest.FixtureRequest, served: Served, tmp_path: Path) -> AsyncIterator[Engine]:
    model = load_model(str(served.model)).eval()
    opened = embedded(model) if request.param == "embedded" else served.engine(tmp_path)
    async with opened as made:
        await made.update_weights(1, weights(str(served.model)))
        yield made


@functools.cache
def weights(path: str) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in full_tensors(load_model(path))}


@pytest.fixture(scope="module")
def model(served: Served) -> Any:
    return load_model(str(served.model)).eval()


async def test_every_token_has_its_log_prob_and_version(engine: Engine, model: Any) -> None:
    asked = [request(f"r{n}", n, 12 + n, temperature=0.8) for n in (1, 4, 9)]
    done = await asyncio.gather(*map(engine.generate, asked))
    for each, got in zip(asked, done, strict=True):
        assert (got.request_id, got.finish_reason, len(got.tokens)) == (each.id, "length", each.params.max_new_tokens)
        assert (got.tokens.dtype, got.log_probs.dtype, got.policy_versions.dtype) == (np.int32, np.float32, np.int32)
        assert got.policy_versions.tolist() == [1] * len(got.tokens)
        np.testing.assert_allclose(got.log_probs, full_log_probs(model, each, got.tokens), atol=NEAR)


async def test_greedy_is_the_same_everywhere(engine: Engine, model: Any) -> None:
    got = await engine.generate(request("r", 6, 20, temperature=0.0))
    own = await first_greedy(model)
    np.testing.assert_array_equal(got.tokens, own.tokens)


async def first_greedy(model: Any) -> Completion:
    async with embedded(model) as plain:
        return await plain.generate(request("r", 6, 20, temperature=0.0))


async def test_a_stop_token_ends_a_sample_and_is_its_last_token(engine: Engine) -> None:
    free = await engine.generate(request("free", 4, 20, temperature=0.0))
    stop = int(free.tokens[7])
    got = await engine.generate(request("r", 4, 20, temperature=0.0, stop_token_ids=(stop,)))
    assert got.finish_reason == "stop" and got.tokens[-1] == stop
    assert stop not in got.tokens[:-1]


async def test_the_likeliest_tokens_are_told_where_they_are_asked_for(engine: Engine) -> None:
    got = await engine.generate(request("r", 4, 5, temperature=0.0, num_top=3))
    assert got.top is not None and got.top.tokens.shape == (5, 3)
    np.testing.assert_array_equal(got.top.tokens[:, 0], got.tokens)
    np.testing.assert_allclose(got.top.log_probs[:, 0], got.log_probs, atol=NEAR)
    assert (np.diff(got.top.log_probs, axis=1) <= 0).all()


async def test_a_prefix_is_the_beginning_of_what_comes(engine: Engine) -> None:
    asked = request("r", 5, 24, temperature=0.0)
    whole = await engine.generate(asked)
    part = Completion("r", whole.tokens[:9], whole.log_probs[:9], np.zeros(9, np.int32), "interrupted")
    got = await engine.generate(asked.resumed(part))
    np.testing.assert_array_equal(got.tokens, whole.tokens)
    assert got.policy_versions.tolist() == [0] * 9 + [1] * 15


async def test_a_cancelled_request_ends_as_cancelled_with_what_it_has(engine: Engine) -> None:
    asking = asyncio.create_task(engine.generate(request("r", 5, 900)))
    await asyncio.sleep(0)
    engine.cancel("r")
    got = await asking
    assert got.finish_reason == "cancelled" and len(got.tokens) == len(got.log_probs) < 900
    engine.cancel("r")


async def test_what_cannot_be_is_refused_and_harms_nobody(engine: Engine) -> None:
    with pytest.raises(ConfigError):
        await engine.generate(request("long", 5000, 5))
    twice = await asyncio.gather(*(engine.generate(request("r", 5, 4)) for _ in range(2)), return_exceptions=True)
    assert [type(each) for each in twice] in ([Completion, ConfigError], [ConfigError, Completion])
    assert len((await engine.generate(request("r", 5, 4))).tokens) == 4


async def test_counters_only_grow_and_tell_what_was_done(engine: Engine) -> None:
    before = engine.stats()
    await asyncio.gather(*(engine.generate(request(f"r{n}", 5, 6)) for n in range(3)))
    after = engine.stats()
    assert after.num_completed - before.num_completed == 3
    assert after.tokens_generated - before.tokens_generated == 18
    assert (after.num_running, after.num_waiting, after.version) == (0, 0, 1) == (0, 0, engine.version)


async def test_a_closed_engine_says_so(engine: Engine) -> None:
    await engine.close()
    with pytest.raises(Closed):
        await engine.generate(request("r", 5, 4))
    await engine.close()


async def test_new_weights_are_those_of_the_next_token(engine: Engine, served: Served, model: Any) -> None:
    own = weights(str(served.model))
    name = next(each for each in own if each.endswith("lm_head.weight"))
    await engine.update_weights(2, {**own, name: own[name] * 0.5})
    asked = replace(request("r", 5, 10), id="after")
    got = await engine.generate(asked)
    await engine.update_weights(3, own)
    assert got.policy_versions.tolist() == [2] * 10 and engine.version == 3
    expected = full_log_probs(model, replace(asked, params=replace(asked.params, temperature=2.0)), got.tokens)
    np.testing.assert_allclose(got.log_probs, expected, atol=NEAR)  # half the logits are twice the temperature
