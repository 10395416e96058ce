"""Several reward functions as one: a weighted sum, or one for each row."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.roles.config.data import RewardConfig
from rondo.roles.rewards.scores import RewardError
from rondo.roles.rewards.worker import in_worker, open_function
from rondo.runtime.errors import ConfigError
from rondo.runtime.values import decode

HERE = __name__
OPEN = "rondo.roles.rewards.worker:open_function"


def right(response: Any, label: Any, *, prompt: Any, metadata: Any) -> dict[str, Any]:
    return {"score": float(response == label), "said": response}


def length(response: str, label: Any, *, prompt: Any, metadata: Any, num_tokens: int, most: int = 4) -> float:
    return min(1.0, num_tokens / most)


async def asked(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    await asyncio.sleep(0)
    return 0.5


def ranks(responses: list[str], label: Any, *, prompt: Any, metadata: Any) -> list[float]:
    return [float(sorted(responses).index(each)) for each in responses]


def one_short(responses: list[str], label: Any, *, prompt: Any, metadata: Any) -> list[float]:
    return [1.0] * (len(responses) - 1)


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, HERE, sys.modules[right.__module__])


def score(
    response: Any, function: Any, metadata: dict[str, Any] | None = None, told: Any = None, **settings: Any
) -> Any:
    config = RewardConfig(function=function, **settings)
    given = config.model_dump(include={"function", "per", "components", "by", "args"})
    item = [response, "72", "6 * 12", metadata or {}, told or {"num_tokens": 2, "max_new_tokens": 64}, []]
    return decode(orjson.loads(in_worker(OPEN, given)(item).text))


def test_a_sum_has_the_score_of_each_by_its_name_and_its_details_behind_it() -> None:
    functions = {"right": right, "long": length}
    assert score("72", functions, components={"right": 1, "long": 0.2}) == [
        pytest.approx(1.1),
        {"right": 1.0, "long": 0.5, "right.said": "72"},
    ]
    assert score("72", functions, components={"right": 1, "long": 0})[0] == 1  # written down, and counts for nothing


def test_arguments_go_to_the_functions_that_have_them_and_one_that_none_has_is_refused() -> None:
    assert (
        score("72", {"right": right, "long": length}, components={"right": 0, "long": 1}, args={"most": 8})[0] == 0.25
    )
    assert score("x", length, args={"most": 2}) == [1.0, {}]
    with pytest.raises(ConfigError, match=r"reward\.args must name parameters of reward\.function, got least"):
        score("x", length, args={"least": 2})


def test_a_row_has_the_function_that_its_metadata_names_or_the_one_for_all_others() -> None:
    functions = {"exact": right, "long": length}
    assert score("72", functions, {"source": "exact"}, by="source") == [1.0, {"said": "72"}]
    assert score("72", functions, {"source": "long"}, by="source") == [0.5, {}]
    assert score("71", functions | {"*": right}, {"source": "new"}, by="source") == [0.0, {"said": "71"}]
    assert score("71", functions | {"*": right}, {}, by="source") == [0.0, {"said": "71"}]
    assert score("72", functions, told={"source": "exact"}, by="source") == [1.0, {"said": "72"}]  # a column
    assert open_function({"exact": f"{HERE}:right"}, by="source").takes >= {"source"}
    for metadata in ({}, {"source": "new"}, {"source": ["exact"]}):
        with pytest.raises(
            RewardError, match=r"metadata\['source'\] must name one of reward\.function, exact, long, got"
        ):
            score("72", functions, metadata, by="source")


def test_functions_that_wait_for_others_do_so_beside_plain_ones_in_the_process_of_these() -> None:
    by_name = {"right": f"{HERE}:right", "asked": f"{HERE}:asked"}
    assert not open_function(by_name).is_async and open_function({"a": by_name["asked"]}).is_async
    assert score("72", {"right": right, "asked": asked}, components={"right": 1, "asked": 1})[0] == 1.5
    assert score("72", {"right": right, "asked": asked}, {"by": "asked"}, by="by")[0] == 0.5


def test_over_a_group_each_function_scores_every_response() -> None:
    weights = {"ranks": 1.0, "again": 10.0}
    told = {"num_tokens": [1, 1], "max_new_tokens": [64, 64]}
    found = score(["b", "a"], {"ranks": ranks, "again": ranks}, told=told, per="group", components=weights)
    assert found == [[11.0, {"ranks": 1.0, "again": 1.0}], [0.0, {"ranks": 0.0, "again": 0.0}]]
    with pytest.raises(RewardError, match="each return one score a response, got 2 of ranks, 1 of again"):
        score(["b", "a"], {"ranks": ranks, "again": one_short}, told=told, per="group", components=weights)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"function": {"a": "math", "b": "tags"}},
            "components must weigh each of reward.function, a, b, got weights of none",
        ),
        (
            {"function": {"a": "math"}, "components": {"b": 1}},
            "must weigh each of reward.function, a, got weights of b",
        ),
        ({"function": "math", "by": "source"}, "reward.by must choose among several"),
        ({"function": {}}, "reward.function must have functions by names"),
        ({"function": {"score": "math"}, "by": "x"}, "by names other than 'score'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RewardConfig(**settings)


@pytest.mark.parametrize(
    ("parameters", "per", "says"),
    [
        ("prompts, completions, answer", "response", "with 'prompts' in their place"),
        ("prompt, response, label", "response", "with 'prompt' in their place"),
        ("label, response", "response", "with 'label' in their place"),
        ("completions, answer, **kwargs", "response", "with 'completions' in their place"),
        ("r, completions", "response", "with 'completions' in their place"),
        ("environments, **kwargs", "response", "with 'environments' in their place"),
        ("response, prompt", "response", "with 'prompt' in their place"),
        ("label, responses", "group", "with 'label' in their place"),
        ("response", "response", "without a parameter 'label'"),
        ("*, prompt", "response", "without a parameter 'response'"),
        ("responses, *, prompt", "group", "without a parameter 'label'"),
    ],
)
def test_parameters_that_are_not_response_and_label_by_position_are_refused_by_name(
    tmp_path: Path, parameters: str, per: str, says: str
) -> None:
    (tmp_path / "own.py").write_text(f"def own({parameters}): return 1\n")
    with pytest.raises(ConfigError) as caught:
        open_function(f"{tmp_path}/own.py:own", per)
    first = "response" if per == "response" else "responses"
    assert f"{says}. The first two are given by position: write `def own({first}, label, *, prompt, metadata)`" in str(
        caught.value
    )


@pytest.mark.parametrize("parameters", ["text, gold", "response, label=None", "*all", "response, answer, **columns"])
def test_the_first_two_parameters_may_have_other_names(tmp_path: Path, parameters: str) -> None:
    (tmp_path / "own.py").write_text(f"def own({parameters}): return 1\n")
    assert open_function(f"{tmp_path}/own.py:own").call(["r", "l", "p", {}, {}, []]) == 1
