from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import pytest

from rondo.roles.engines.sglang.capabilities import Experts
from rondo.roles.engines.sglang.numbers import STRANGE, version_of
from rondo.roles.engines.sglang.responses import Answer, Growing
from rondo.runtime.errors import ProtocolError

EXPERTS = Experts(num_layers=2, top_k=2, num=8)


def told(num: int = 4, **meta: Any) -> dict[str, Any]:
    """What a server answers with tokens 10, 11, ... of version 3."""
    ids = list(range(10, 10 + num))
    found = {
        "finish_reason": {"type": "length", "length": num},
        "output_token_logprobs": [[-0.5 - 0.25 * place, token, None] for place, token in enumerate(ids)],
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": num}],
        **meta,
    }
    return {"text": "", "output_ids": ids, "meta_info": found}


def read_answer(told: Any, *, num_before: int, experts: Experts | None) -> Answer:
    """For 4 tokens of a vocabulary of 32."""
    growing = Growing(num_top=1, vocabulary=32)
    growing.take_whole(told)
    return growing.answer(num_before=num_before, most=4, experts=experts)


def routed(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def test_tokens_log_probs_and_versions_are_those_of_the_answer() -> None:
    answer = read_answer(told(), num_before=3, experts=None)
    new = answer.new
    assert (new.tokens.dtype, new.log_probs.dtype, new.policy_versions.dtype) == (np.int32, np.float32, np.int32)
    assert new.tokens.tolist() == [10, 11, 12, 13]
    assert new.log_probs.tolist() == [-0.5, -0.75, -1.0, -1.25]
    assert new.policy_versions.tolist() == [3] * 4
    assert (answer.finish, answer.matched, new.routed_experts) == ("length", None, None)


def test_spans_give_each_token_its_version() -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 4}]
    answer = read_answer(told(weight_version="7", weight_versions=spans), num_before=3, experts=None)
    assert answer.new.policy_versions.tolist() == [6, 7, 7, 7]


@pytest.mark.parametrize(
    "spans",
    [[], [{"version": "6", "start": 0, "end": 3}], [{"version": "6", "start": 1, "end": 4}]],
    ids=["none", "short", "late"],
)
def test_spans_that_leave_tokens_out_are_refused(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(ProtocolError, match="spans of weight versions"):
        read_answer(told(weight_versions=spans), num_before=3, experts=None)


def test_an_older_server_tells_one_version_for_all_tokens() -> None:
    answer = told()
    del answer["meta_info"]["weight_versions"]
    assert read_answer(answer, num_before=3, experts=None).new.policy_versions.tolist() == [3] * 4


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0", 0),
        ("17", 17),
        ("-1", STRANGE),
        ("default", STRANGE),
        ("unproved-5", STRANGE),
        ("9" * 40, STRANGE),
        ("\u00b2", STRANGE),
        (5, STRANGE),
        (None, STRANGE),
    ],
)
def test_a_version_that_this_run_did_not_give_is_strange(text: Any, version: int) -> None:
    assert version_of(text) == version


def test_an_aborted_answer_has_what_there_was_or_nothing() -> None:
    why = {"type": "abort", "message": "Aborted", "status_code": None}
    answer = read_answer(told(finish_reason=why), num_before=3, experts=None)
    assert (answer.finish, answer.why, answer.new.tokens.tolist()) == ("abort", "Aborted", [10, 11, 12, 13])
    none = read_answer({"meta_info": {"finish_reason": why, "weight_version": "3"}}, num_before=3, experts=EXPERTS)
    assert len(none.new.tokens) == len(none.new.log_probs) == len(none.new.policy_versions) == 0
    assert none.new.routed_experts is None


def test_the_token_that_ended_it_is_told_and_a_text_is_not() -> None:
    assert read_answer(told(finish_reason={"type": "stop", "matched": 13}), num_before=3, experts=None).matched == 13
    assert read_answer(told(finish_reason={"type": "stop", "matched": "."}), num_before=3, experts=None).matched is None


def test_routed_experts_are_rows_of_all_tokens_but_the_last() -> None:
    rows = np.arange(6 * 2 * 2).reshape(6, 2, 2) % 8
    answer = read_answer(told(routed_experts=routed(rows)), num_before=3, experts=EXPERTS)
    found = answer.new.routed_experts
    assert found is not None and found.dtype == np.uint8
    np.testing.assert_array_equal(found, rows)
    many = Experts(num_layers=2, top_k=2, num=512)
    wide = read_answer(told(routed_experts=routed(rows + 300)), num_before=3, experts=many).new.routed_experts
    assert wide is not None and wide.dtype == np.int16
    np.testing.assert_array_equal(wide, rows + 300)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (routed(np.zeros((5, 2, 2), int)), "told for 6 tokens, got 5 rows"),
        (routed(np.zeros((23,), int)), "whole rows"),
        (routed(np.full((6, 2, 2), 8)), "below 8"),
        ("not base64!", "whole rows"),
    ],
)
def test_routed_experts_that_cannot_be_are_refused(sent: str, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_answer(told(routed_experts=sent), num_before=3, experts=EXPERTS)


def one(log_prob: Any = -1.0, token: Any = 10) -> dict[str, Any]:
    """An answer whose last token is this one."""
    answer = told()
    answer["meta_info"]["output_token_logprobs"][-1] = [log_prob, token, None]
    answer["output_ids"][-1] = token
    return answer


@pytest.mark.parametrize("log_prob", [None, math.nan, math.inf, -math.inf, 0.5, 1.1e-3, -3.4e38, "-1.0", [-1.0], True])
def test_a_log_prob_that_no_sampler_gives_is_refused(log_prob: Any) -> None:
    with pytest.raises(ProtocolError, match="log-prob"):
        read_answer(one(log_prob), num_before=3, experts=None)


def test_a_log_prob_may_be_above_zero_by_rounding() -> None:
    assert read_answer(one(1e-6), num_before=3, experts=None).new.log_probs[-1] == np.float32(1e-6)
    assert read_answer(one(0), num_before=3, experts=None).new.log_probs[-1] == 0.0


@pytest.mark.parametrize("token", [None, 32, -1, 2**31, 2**70, 1.5, "7"])
def test_a_token_that_is_none_of_the_vocabulary_is_refused(token: Any) -> None:
    with pytest.raises(ProtocolError, match="tokens"):
        read_answer(one(token=token), num_before=3, experts=None)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (told(5), "the 4 tokens that were asked for at most, got 5"),
        (told(completion_tokens=5), "4 ids, 5 counted and 4 log-probs"),
        (told(completion_tokens="4"), "completion_tokens of a server must be a count, got '4'"),
        (told(prompt_tokens=2), "to all 3 tokens that were sent, got one to 2"),
        (told(output_token_logprobs=7), "must be a list, got 7"),
        (told(output_token_logprobs=[[]] * 4), "told as"),
        (told(weight_versions=[{"version": "3"}]), "spans of weight versions"),
        (told(weight_versions=[{"version": "3", "start": 0, "end": "4"}]), "spans of weight versions"),
        (told(weight_versions=7), "spans of weight versions"),
        (told(output_top_logprobs=[[[-1.0, 40, None]]] * 4), "from 0 to 31, got 40 to 40"),
        (told(output_top_logprobs=[[[-1.0]]] * 4), "likeliest"),
        (told(output_top_logprobs=[7] * 4), "likeliest"),
        (told(routed_experts=7), "whole rows"),
    ],
)
def test_numbers_that_cannot_be_are_refused(broken: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_answer(broken, num_before=3, experts=EXPERTS)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        {"meta_info": {}},
        told(finish_reason={"type": "weary"}),
        {**told(), "output_ids": [10, 11]},
        told(finish_reason=None),
    ],
)
def test_an_answer_that_is_none_is_refused(broken: Any) -> None:
    with pytest.raises(ProtocolError):
        read_answer(broken, num_before=3, experts=None)
