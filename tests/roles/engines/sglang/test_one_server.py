"""What is asked of a server and what its answers mean, without one."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.roles.engines.engine import Completion, Prefix, Request, SamplingParams
from rondo.roles.engines.sglang import one_server as engine_module
from rondo.roles.engines.sglang.capabilities import Capabilities, Experts, probe
from rondo.roles.engines.sglang.client import ServerError
from rondo.roles.engines.sglang.one_server import Pause, SGLangEngine
from rondo.roles.engines.sglang.requirements import Lengths, of_context
from rondo.roles.engines.sglang.server import SGLangServer
from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded, PeerGone, ProtocolError, Refused
from rondo.runtime.waits import wait_for
from tests.roles.engines.sglang.pretender import launch

FOUND = Capabilities(
    version="0.5.23", model_path="/model", architecture="Qwen3ForCausalLM", tensor_parallel=1, data_parallel=1, max_running=8,
    max_cached_tokens=1024, lengths=None, vocabulary=100, version_spans=True, log_probs_after_temperature=True,
    seeds=False, priority=0, in_order=True, tells_new_tokens=False, experts=None, media=(), takes_processed_media=False,
)  # fmt: skip


HANGS: dict[str, Any] = {}


class Client:
    """Answers what it was told to, and keeps what it was asked."""

    url = "http://server"

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self.answers = deque(answers)
        self.asked: list[dict[str, Any]] = []
        self.aborted = asyncio.Event()

    async def post(self, path: str, body: Any = None, *, deadline_s: float | None, moved: Any = None) -> Any:
        if path == "/abort_request":
            self.aborted.set()
            return None
        assert path == "/generate"
        self.asked.append(body)
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        if answer == HANGS:
            await wait_for(
                self.aborted.wait(), name="sglang /generate", peer=self.url, deadline_s=deadline_s, moved=moved
            )
        return answer

    async def __aexit__(self, *_: object) -> None:
        return


class Weights:
    proof, asleep = None, False

    async def open(self) -> None:
        return

    async def update(self, version: int, tensors: Mapping[str, Any]) -> None:
        return

    async def close(self) -> None:
        return


def engine(client: Any, pause: Pause = "in_place", **changes: Any) -> SGLangEngine:
    return SGLangEngine(client, weights=Weights(), pause=pause, capabilities=replace(FOUND, **changes))


def told(tokens: list[int], finish: str = "length", version: str = "1", **more: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish, **more},
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
    }
    return {"output_ids": tokens, "meta_info": meta}


def request(num: int = 4, **changes: Any) -> Request:
    params = SamplingParams(
        num, **{name: changes.pop(name) for name in ("temperature", "stop_token_ids") if name in changes}
    )
    return Request("r", np.array([5, 6], np.int32), params, seed=(3 << 40) + 7, **changes)


async def test_only_what_a_server_can_do_is_asked_of_it() -> None:
    client = Client(told([1, 2, 3, 4]), told([1, 2, 3, 4]))
    asked = request(priority=3, session="s", stop_token_ids=(9,))
    await engine(client).generate(asked)
    able = engine(client, seeds=True, priority=-1, experts=Experts(2, 2, 8))
    await able.generate(replace(asked, params=replace(asked.params, top_k=2**31 - 1)))  # of 100 tokens
    plain, rich = client.asked
    assert plain["sampling_params"] == {
        "max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": [9]
    }  # fmt: skip
    assert plain["input_ids"] == [5, 6] and plain["return_logprob"] and plain["session_id"] == "s"
    assert not {"priority", "return_routed_experts"} & plain.keys()
    assert rich["sampling_params"]["top_k"] == -1
    assert rich["sampling_params"]["sampling_seed"] == 7 and rich["return_routed_experts"]
    assert rich["priority"] == -3 and plain["rid"] != ""


async def test_what_an_aborted_request_is_continued_with_keeps_the_experts_that_it_was_sampled_with() -> None:
    def routed(first: int, num_rows: int) -> str:
        return base64.b64encode(np.full((num_rows, 2, 1), first, "<i4").tobytes()).decode()

    client = Client(
        told([1, 2], "abort", message="weights"), told([], "abort", message="again"), told([3, 4], version="2")
    )
    for answer, experts in zip(client.answers, (routed(3, 2 + 2 - 1), routed(5, 3), routed(7, 2 + 4 - 1)), strict=True):
        answer["meta_info"]["routed_experts"] = experts  # type: ignore[index]
    done = await engine(client, "abort", experts=Experts(2, 1, 8)).generate(request())
    assert done.tokens.tolist() == [1, 2, 3, 4] and done.routed_experts is not None
    assert done.routed_experts[:, 0, 0].tolist() == [3, 3, 3, 7, 7]


async def test_no_stop_token_means_that_nothing_stops_a_sample() -> None:
    client = Client(told([1, 2, 3, 4]))
    await engine(client).generate(request())
    assert client.asked[0]["sampling_params"]["ignore_eos"] is True


async def test_a_foreign_stop_is_gone_beyond_and_the_whole_is_one_sample() -> None:
    client = Client(told([1, 2], "stop", matched=2), told([3, 4], version="2"))
    done = await engine(client).generate(request(stop_token_ids=(9,)))
    assert done.tokens.tolist() == [1, 2, 3, 4] and done.policy_versions.tolist() == [1, 1, 2, 2]
    assert done.finish_reason == "length" and client.asked[1]["input_ids"] == [5, 6, 1, 2]
    assert client.asked[1]["sampling_params"]["max_new_tokens"] == 2
    assert client.asked[0]["rid"] != client.asked[1]["rid"]


async def test_an_update_that_aborts_ends_a_request_that_wants_it_and_is_gone_beyond_by_others() -> None:
    answers = told([1, 2], "abort"), told([3, 4], version="2")
    handed = await engine(Client(*answers), "abort").generate(request(on_new_weights="interrupt"))
    assert handed.finish_reason == "interrupted" and handed.tokens.tolist() == [1, 2]
    whole = await engine(Client(*answers), "abort").generate(request())
    assert whole.finish_reason == "length" and whole.policy_versions.tolist() == [1, 1, 2, 2]
    often = await engine(Client(*answers), "abort").generate(request(on_new_weights="interrupt", interruptions=0))
    assert often.finish_reason == "length"


async def test_one_that_was_aborted_before_its_first_token_is_asked_again() -> None:
    client = Client(told([], "abort"), told([1, 2, 3, 4]))
    made = engine(client, "abort")
    done = await made.generate(request(on_new_weights="interrupt"))
    assert done.finish_reason == "length" and made.stats().num_interrupted == 1


async def test_an_abort_that_nobody_here_asked_for_is_an_error() -> None:
    with pytest.raises(Refused, match="See who else controls this server"):
        await engine(Client(told([1], "abort", message="Aborted"))).generate(request())


LIMITS = of_context(12)  # 5 tokens of a prompt, 10 of prompt and response


async def test_a_sample_that_reaches_the_length_of_its_server_ends_by_it_and_is_no_failure() -> None:
    client = Client(told([*range(8)]), told([*range(3)]))
    made = engine(client, lengths=LIMITS)
    done = await made.generate(request(20))
    assert (done.finish_reason, done.tokens.tolist()) == ("length", [*range(8)])
    assert client.asked[0]["sampling_params"]["max_new_tokens"] == 8  # for more the server would refuse all of it
    less = await made.generate(request(20))  # its cache is smaller than its context
    assert (less.finish_reason, less.tokens.size) == ("length", 3)


async def test_what_a_server_would_not_read_again_ends_by_length_where_it_was_begun_and_is_refused_where_it_was_not() -> (
    None
):
    client = Client(told([1, 2, 3, 4], "abort"), told([]))
    made = engine(client, "abort", lengths=LIMITS)
    done = await made.generate(request(20))
    assert (done.finish_reason, done.tokens.tolist()) == ("length", [1, 2, 3, 4]) and len(client.asked) == 1
    with pytest.raises(ConfigError, match="must have 5 tokens at most, the limit of http://server, got 6"):
        await made.generate(replace(request(), prompt=np.arange(6, dtype=np.int32)))
    assert len(client.asked) == 1
    with pytest.raises(ConfigError, match="must leave room for a token on http://server, got a prompt of 2"):
        await made.generate(request())


async def test_a_request_that_does_not_fit_is_the_callers_mistake_and_other_errors_are_not() -> None:
    no = ServerError("http://server", "/generate", 400, "longer than the model's maximum context length")
    with pytest.raises(ConfigError, match="maximum context length"):
        await engine(Client(no)).generate(request())
    with pytest.raises(ServerError):
        await engine(Client(ServerError("http://server", "/generate", 500, "oh"))).generate(request())
    with pytest.raises(PeerGone):
        await engine(Client(PeerGone("left"))).generate(request())


async def test_tokens_of_strange_weights_are_refused_once_weights_were_given() -> None:
    client = Client(told([1, 2, 3, 4], version="default"), told([1, 2, 3, 4], version="default"))
    made = engine(client)
    assert (await made.generate(request())).policy_versions.tolist() == [-1] * 4
    await made.update_weights(3, {})
    with pytest.raises(Refused, match="got tokens of version 'default'"):
        await made.generate(request())


async def test_tokens_of_weights_that_were_not_given_yet_are_refused() -> None:
    made = engine(Client(told([1, 2, 3, 4], version="7")))
    await made.update_weights(3, {})
    with pytest.raises(Refused, match="weights that it was given, 3 the newest, got tokens of version '7'"):
        await made.generate(request())


@pytest.mark.parametrize("loads", [None, {}, {"loads": [7]}, {"loads": [{"num_running_reqs": "many"}]}])
async def test_a_load_that_is_none_is_the_servers_failure(loads: Any) -> None:
    class Loaded(Client):
        async def get(self, path: str, *, deadline_s: float | None) -> Any:
            return loads

    with pytest.raises(ProtocolError):
        await engine(Loaded()).load()


async def test_requests_share_prefixes_under_one_version_alone() -> None:
    client = Client(*(told([1, 2, 3, 4], version="3") for _ in range(3)))
    made = engine(client)
    await made.update_weights(3, {})
    await made.generate(request())
    await made.generate(request())
    await made.update_weights(4, {})
    await made.generate(request())
    first, second, third = (asked["extra_key"] for asked in client.asked)
    assert first == second != third


@pytest.mark.parametrize(("pause", "first"), [("in_place", 3), ("retract", 4)])
async def test_what_was_sent_before_an_update_in_place_counts_as_begun_under_the_old_weights(
    pause: Pause, first: int
) -> None:
    """Its prompt may have been read under them, though the server tells all tokens as the new version's."""

    class Updated(Client):
        async def post(self, *asked: Any, **how: Any) -> Any:
            answer = await super().post(*asked, **how)
            await made.update_weights(4, {})
            return answer

    made = engine(Updated(told([1, 2, 3, 4], version="4")), pause)
    await made.update_weights(3, {})
    assert (await made.generate(request())).policy_versions.tolist() == [first, 4, 4, 4]


async def test_a_prefix_is_sent_and_told_again_as_it_was() -> None:
    client = Client(told([3, 4], version="2"))
    prefix = Prefix(np.array([1, 2], np.int32), np.array([-3.0, -4.0], np.float32), np.array([0, 0], np.int32))
    done = await engine(client).generate(request(prefix=prefix))
    assert done.tokens.tolist() == [1, 2, 3, 4] and done.log_probs.tolist() == [-3.0, -4.0, -1.0, -1.0]
    assert done.policy_versions.tolist() == [0, 0, 2, 2] and client.asked[0]["input_ids"] == [5, 6, 1, 2]


async def test_an_old_server_may_not_let_a_sequence_live_through_an_update() -> None:
    with pytest.raises(ConfigError, match=r"sglang.pause must be 'abort' with SGLang 0.5.16"):
        engine(Client(), version="0.5.16", version_spans=False)
    assert engine(Client(), "abort", version="0.5.16", version_spans=False).version == -1


async def test_log_probs_of_plain_logits_are_taken_where_they_are_right_alone() -> None:
    client = Client(told([1, 2, 3, 4]), told([1, 2, 3, 4]))
    plain = engine(client, log_probs_after_temperature=False)
    for temperature in (0.0, 1.0):
        await plain.generate(request(temperature=temperature))
    with pytest.raises(ConfigError, match=r"temperature must be 0 or 1 .* SGLANG_RETURN_ORIGINAL_LOGPROB"):
        await plain.generate(request(temperature=0.7))


async def test_tokens_outside_the_vocabulary_never_reach_a_server() -> None:
    client = Client()
    with pytest.raises(ConfigError, match="from 0 to 99"):
        await engine(client).generate(replace(request(), prompt=np.array([100], np.int32)))
    assert client.asked == []


async def test_a_closed_engine_takes_nothing() -> None:
    made = engine(Client())
    await made.close()
    await made.close()
    with pytest.raises(Closed):
        await made.generate(request())
    assert not await made.ready()


async def test_what_was_done_is_counted() -> None:
    client = Client(told([1, 2, 3, 4]))
    client.answers[0]["meta_info"] |= {"prompt_tokens": 2, "cached_tokens": 1}
    made = engine(client)
    done: Completion = await made.generate(request())
    stats = made.stats()
    assert (stats.num_completed, stats.tokens_generated, stats.prefill_tokens, stats.shared_prompt_tokens) == (
        1,
        4,
        1,
        1,
    )
    assert (stats.num_slots, stats.num_running, stats.version) == (8, 0, -1) and done.request_id == "r"
    assert (stats.cached_tokens, stats.cache_tokens) == (0, 1024)
    assert (stats + stats).cache_tokens == 2048 and stats.ended().cache_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "seeds", "priority", "experts"),
    [
        ({}, False, 0, None),
        ({"enable-deterministic-inference": True, "enable-priority-scheduling": True}, True, 1, None),
        ({"enable-priority-scheduling": True, "schedule-low-priority-values-first": True}, False, -1, None),
        ({"enable-return-routed-experts": True, "max-req-input-len": 34}, False, 0, Experts(3, 2, 64)),
    ],
)
async def test_a_server_is_asked_what_it_can_do(
    tmp_path: Path, arguments: dict[str, bool | int], seeds: bool, priority: int, experts: Experts | None
) -> None:
    text = {"vocab_size": 50, "num_hidden_layers": 3, "num_experts": 64, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    server = SGLangServer(launch(tmp_path, arguments), log=tmp_path / "log", folder=tmp_path, grace_s=0.2)
    client = await server.start(60)
    try:
        found = await probe(client)
    finally:
        await client.__aexit__()
        await server.close()
    assert (found.seeds, found.priority, found.experts, found.vocabulary) == (seeds, priority, experts, 50)
    assert (found.version, found.version_spans) == ("0.5.23", True)
    assert found.lengths == (Lengths(prompt=33, whole=38) if "max-req-input-len" in arguments else None)
    assert found.log_probs_after_temperature and found.max_running == 8 and found.in_order and found.tells_new_tokens
    assert json.loads(json.dumps(asdict(found)))["version"] == "0.5.23"


async def test_a_server_that_is_too_old_is_refused_with_the_reason(tmp_path: Path) -> None:
    server = SGLangServer(launch(tmp_path, PRETEND_VERSION="0.5.9"), log=tmp_path / "log", folder=tmp_path, grace_s=0.2)
    client = await server.start(60)
    try:
        with pytest.raises(ConfigError, match=r"must be 0.5.10 or newer.*pickles.*got 0.5.9"):
            await probe(client)
    finally:
        await client.__aexit__()
        await server.close()


async def test_a_server_that_hangs_ends_its_requests_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STALL_S", 0.02)
    with pytest.raises(
        DeadlineExceeded, match=r"wait 'sglang /generate' of 'main' for 'http://server' must end within 0\.02 s"
    ):
        await engine(Client(HANGS)).generate(request())
