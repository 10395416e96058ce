from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from rondo.roles.rollout.sglang.answers import STRANGE, read_answer, version_of
from rondo.roles.rollout.sglang.capabilities import Experts
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


def routed(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def test_tokens_log_probs_and_versions_are_those_of_the_answer() -> None:
    answer = read_answer(told(), num_before=3, experts=None)
    assert (answer.tokens.dtype, answer.log_probs.dtype, answer.versions.dtype) == (np.int32, np.float32, np.int32)
    assert answer.tokens.tolist() == [10, 11, 12, 13]
    assert answer.log_probs.tolist() == [-0.5, -0.75, -1.0, -1.25]
    assert answer.versions.tolist() == [3] * 4
    assert (answer.finish, answer.matched, answer.experts) == ("length", None, None)


def test_spans_give_each_token_its_version() -> None:
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 4}]
    answer = read_answer(told(weight_version="7", weight_versions=spans), num_before=3, experts=None)
    assert answer.versions.tolist() == [6, 7, 7, 7]


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
    assert read_answer(answer, num_before=3, experts=None).versions.tolist() == [3] * 4


@pytest.mark.parametrize(
    ("text", "version"), [("0", 0), ("17", 17), ("-1", STRANGE), ("default", STRANGE), ("unproved-5", STRANGE)]
)
def test_a_version_that_this_run_did_not_give_is_strange(text: str, version: int) -> None:
    assert version_of(text) == version


def test_an_aborted_answer_has_what_there_was_or_nothing() -> None:
    why = {"type": "abort", "message": "Aborted", "status_code": None}
    answer = read_answer(told(finish_reason=why), num_before=3, experts=None)
    assert (answer.finish, answer.why, answer.tokens.tolist()) == ("abort", "Aborted", [10, 11, 12, 13])
    none = read_answer({"meta_info": {"finish_reason": why, "weight_version": "3"}}, num_before=3, experts=EXPERTS)
    assert len(none.tokens) == len(none.log_probs) == len(none.versions) == 0 and none.experts is None


def test_the_token_that_ended_it_is_told_and_a_text_is_not() -> None:
    assert read_answer(told(finish_reason={"type": "stop", "matched": 13}), num_before=3, experts=None).matched == 13
    assert read_answer(told(finish_reason={"type": "stop", "matched": "."}), num_before=3, experts=None).matched is None


def test_routed_experts_are_rows_of_all_tokens_but_the_last() -> None:
    rows = np.arange(6 * 2 * 2).reshape(6, 2, 2) % 8
    answer = read_answer(told(routed_experts=routed(rows)), num_before=3, experts=EXPERTS)
    assert answer.experts is not None and answer.experts.dtype == np.uint8
    np.testing.assert_array_equal(answer.experts, rows)
    many = Experts(num_layers=2, top_k=2, num=512)
    wide = read_answer(told(routed_experts=routed(rows + 300)), num_before=3, experts=many).experts
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
