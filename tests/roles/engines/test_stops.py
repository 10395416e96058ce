"""Where samples end: every end of sequence, and stop strings over several tokens, alike in every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest
import transformers

from rondo.models.load import end_ids
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.data.sources import RowError
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.engines.faults import RequestFailed
from rondo.roles.engines.stops import Stops, stops_of, token_stops, whole_sample
from rondo.roles.serve.requests import Ask, Requests
from rondo.runtime.errors import ConfigError, CorruptData, PeerGone
from tests.roles.data import templates
from tests.roles.data.templates import tokenizer_of
from tests.roles.engines.sglang.test_one_server import Client, told
from tests.roles.engines.sglang.test_one_server import engine as sglang_engine

TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
STOPS = Stops((END,), ("</b>",), TOKENIZER)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def asked(num: int = 40, **more: Any) -> Request:
    return Request("r", np.array([5, 6], np.int32), SamplingParams(num, stop_token_ids=(END,)), seed=7, **more)


class Growing:
    """Samples `text`, a few tokens a turn, and tells of each; a turn may `lose` all, or interrupt."""

    def __init__(self, text: str, turn: int = 3, *, turns: Mapping[int, str] | None = None, lost: str = "") -> None:
        self.tokens, self.turn = ids(text), turn
        self.turns = dict(turns or {})  # number of the turn -> "interrupt", or the text of a sample begun anew
        self.lost = lost  # the text of a sample begun anew while it is cancelled
        self.cancelled: set[str] = set()
        self.num_turns = 0

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)

    async def generate(self, request: Request) -> Completion:
        num = 0 if request.prefix is None else len(request.prefix.tokens)
        self.cancelled.clear()
        while True:
            if (happens := self.turns.pop(self.num_turns, None)) not in (None, "interrupt"):
                self.tokens, num = ids(cast(str, happens)), 0
            self.num_turns += 1
            ends = [place for place, token in enumerate(self.tokens, 1) if token in request.params.stop_token_ids]
            num = min([num + self.turn, len(self.tokens), request.params.max_new_tokens, *ends])
            ended = num in ends
            if ended or num in (len(self.tokens), request.params.max_new_tokens):
                return self._so_far(request, num, "stop" if ended else "length")
            if happens == "interrupt":
                return self._so_far(request, num, "interrupted")
            done = self._so_far(request, num, "cancelled")
            assert request.progress is not None
            request.progress(done.as_prefix())
            await asyncio.sleep(0)
            if request.id in self.cancelled and self.lost:
                self.tokens, self.lost = ids(self.lost), ""
                return self._so_far(request, 2, "cancelled")
            if request.id in self.cancelled:
                return done

    def _so_far(self, request: Request, num: int, reason: Any) -> Completion:
        tokens = np.array(self.tokens[:num], np.int32)
        experts = np.zeros((len(request.prompt) + num - 1, 1, 1), np.uint8)
        return Completion("r", tokens, -tokens.astype(np.float32), np.zeros(num, np.int32), reason, experts)


async def sampled(engine: Any, stops: Stops = STOPS, num: int = 40) -> tuple[str, str]:
    async with asyncio.timeout(60):
        done = await whole_sample(engine, asked(num), stops)
    assert len(done.tokens) == len(done.log_probs) == len(done.policy_versions)
    assert done.routed_experts is None or len(done.routed_experts) == 2 + len(done.tokens) - 1
    assert (done.log_probs == -done.tokens).all()
    return TOKENIZER.decode(done.tokens), done.finish_reason


@pytest.mark.parametrize("turn", [1, 2, 3, 5, 100])
async def test_a_stop_string_of_several_tokens_ends_a_sample_at_the_token_that_completes_it(turn: int) -> None:
    assert await sampled(Growing("so <b>7</b> and on and on", turn)) == ("so <b>7</b>", "stop")
    assert await sampled(Growing("so <b>7</b", turn)) == ("so <b>7</b", "length")
    assert await sampled(Growing("<b>7</b>", turn)) == ("<b>7</b>", "stop"), "the last token that it may have"
    assert await sampled(Growing("7<|im_end|></b>", turn)) == ("7<|im_end|>", "stop")
    # Both in one turn of the engine: the first counts.
    assert await sampled(Growing("7</b>, or<|im_end|>", turn)) == ("7</b>", "stop")


async def test_stop_strings_reach_over_special_tokens_and_over_samples_that_new_weights_interrupt() -> None:
    over = Stops((), ("7<|im_end|>\n",), TOKENIZER)
    request = replace(asked(), params=SamplingParams(40))
    done = await whole_sample(cast(Any, Growing("7<|im_end|>\nuser: more")), request, over)
    assert (TOKENIZER.decode(done.tokens), done.finish_reason) == ("7<|im_end|>\n", "stop")
    for turn in range(3):
        engine = Growing("so <b>7</b> and on and on", turns={turn: "interrupt"})
        assert await sampled(engine) == ("so <b>7</b>", "stop")


async def test_a_sample_whose_server_is_lost_is_read_anew() -> None:
    # Once nothing had ended it, and once what had ended it is lost.
    assert await sampled(Growing("so <b>7 and", turns={2: "or </b> so"})) == ("or </b>", "stop")
    assert await sampled(Growing("<b>7</b> and on", lost="other tokens altogether, at some length")) == (
        "other tokens altogether, at some length", "length"
    )  # fmt: skip


async def test_every_engine_and_the_server_end_it_alike() -> None:
    tokens = ids("so <b>7</b> and")
    streamed = Client(told(tokens, "length"))

    async def stream(path: str, body: Any, come: Any, **_: Any) -> None:
        assert body["stream"] and "stop" not in body["sampling_params"]
        for num in (4, 12, len(tokens)):
            part = told(tokens[:num], "length")
            part["meta_info"]["finish_reason"] = {"type": "length"} if num == len(tokens) else None
            come([orjson.dumps(part)])

    streamed.stream = stream  # type: ignore[attr-defined]
    done = await whole_sample(sglang_engine(streamed, vocabulary=300), asked(len(tokens)), STOPS)
    assert (TOKENIZER.decode(done.tokens), done.finish_reason) == ("so <b>7</b>", "stop")
    requests = Requests(cast(Any, Growing("so <b>7</b> and")), TOKENIZER)
    answer = await requests.answer(Ask("r", asked().prompt, asked().params, 7, stops=("</b>",)))
    assert answer.sampled.tokens.tolist() == done.tokens.tolist() and answer.text == "so <b>7"
    assert answer.finish is not None and (answer.finish.kind, answer.finish.matched) == ("stop", "</b>")


def test_every_end_of_sequence_of_the_generation_config_the_config_and_the_tokenizer_ends_a_sample(
    tmp_path: Path,
) -> None:
    transformers.Qwen3Config(eos_token_id=3, num_hidden_layers=1).save_pretrained(tmp_path)
    tokenizer = SimpleNamespace(eos_token_id=9)
    assert end_ids(str(tmp_path), tokenizer) == (3, 9)
    transformers.GenerationConfig(eos_token_id=[7, 5]).save_pretrained(tmp_path)
    assert end_ids(str(tmp_path), tokenizer) == (3, 5, 7, 9)
    assert stops_of(str(tmp_path), TOKENIZER, ("<|im_start|>", "so"), 4) == Stops(
        tuple(sorted({3, 5, 7, END, TOKENIZER.convert_tokens_to_ids("<|im_start|>")})), ("so",), TOKENIZER
    )
    other = tokenizer_of(templates.LLAMA3)  # ends its turns with what nothing else names
    assert other.convert_tokens_to_ids("<|eot_id|>") in stops_of(str(tmp_path), other, (), 4).ids
    with pytest.raises(ConfigError, match="'so long' of 7 tokens"):
        stops_of(str(tmp_path), TOKENIZER, ("so long",), 4)


def test_a_stop_string_that_the_tokenizer_cannot_write_is_refused(tmp_path: Path) -> None:
    class Words:
        eos_token_id, added_tokens_decoder = None, {}

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [0]}

        def decode(self, tokens: list[int], **_: Any) -> str:
            return "<unk>"

    with pytest.raises(ConfigError, match="what the tokenizer can write, got 'Ω', of which it makes '<unk>'"):
        stops_of(str(tmp_path), Words(), ("Ω",), 4)
    assert token_stops(TOKENIZER, ("a", "<|im_end|>")) == {"<|im_end|>": END}


@pytest.mark.parametrize(
    "error", [ConfigError("too long"), RequestFailed("it kills"), CorruptData("a NaN"), PeerGone("x")]
)
async def test_a_failure_of_the_request_itself_costs_its_prompt_and_that_of_an_engine_is_passed_on(
    error: Exception,
) -> None:
    class Failing:
        async def generate(self, request: Request) -> Completion:
            raise error

    with pytest.raises(PeerGone if isinstance(error, PeerGone) else RowError):
        await whole_sample(cast(Any, Failing()), asked(), Stops((END,)))
