"""Verdicts of a judge over real HTTP: each response gets its score, or an error where nothing was said, whatever it does."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from rondo.roles.config.genrm import GenrmConfig
from rondo.roles.rewards.genrm import Genrm, Records
from rondo.roles.rewards.pool import RewardItem, RewardPool, RewardResult
from tests.roles.rewards.judge import judging

HERE = __name__


def item(response: str) -> RewardItem:
    return RewardItem(response, label="1", prompt="say 1")


def said(body: dict[str, Any]) -> str:
    content: str = body["messages"][-1]["content"]
    return content


@asynccontextmanager
async def opened(*urls: str, **settings: Any) -> AsyncIterator[Genrm]:
    config = GenrmConfig.model_validate({"urls": urls, "prompt": "{response}"} | settings)
    async with Genrm(config, lambda: (), seed=3, deadline_s=300, load_deadline_s=120) as judge:
        yield judge


def scores(results: list[RewardResult]) -> list[float | None]:
    return [result.score for result in results]


async def test_each_response_gets_its_verdict_and_one_that_says_none_is_asked_again_with_another_seed() -> None:
    told = iter(["well", "hm", "yes", "no"])
    with judging(lambda body: "yes" if said(body) == "right" else next(told)) as (url, asked):
        async with opened(url, num_calls=1, retries=1, chat_template_args={"enable_thinking": False}) as judge:
            assert scores(await judge.score([item("right")])) == [1.0]
            [failed] = await judge.score([item("unclear")])
            assert failed.score is None and failed.details == {"said": "hm"}
            assert "must say a verdict, got 'hm'" in (failed.error or "") and not failed.timed_out
            assert (
                scores(await judge.score([item("a"), item("b")])) == [1.0, 0.0] and scores(await judge.score([])) == []
            )
            stats = judge.stats()
    assert (stats.verdicts, stats.no_verdict, stats.answers, stats.unparsed) == (3, 1, 5, 2)
    assert (stats.prompt_tokens, stats.answer_tokens, stats.asking, stats.waiting) == (
        35,
        10,
        0,
        0,
    ) and stats.answer_s > 0
    first, again = asked[1:3]
    assert first["messages"] == again["messages"] and first["seed"] != again["seed"]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("stub", 4096, 0.1)
    assert first["chat_template_kwargs"] == {"enable_thinking": False}


async def test_what_a_judge_refuses_or_never_answers_is_an_error_of_its_responses() -> None:
    with judging(lambda body: 400 if said(body) == "long" else 503) as (url, _):
        async with opened(url) as judge:
            [refused] = await judge.score([item("long")])
        async with opened(url, deadline_s=0.05) as judge:
            [unanswered] = await judge.score([item("other")])
    assert refused.score is None and "must take what it is asked" in (refused.error or "") and not refused.timed_out
    assert unanswered.score is None and unanswered.timed_out
    assert "a judge must answer within 0.05 s" in (unanswered.error or "")


async def test_a_judge_that_is_not_what_the_settings_say_is_asked_once() -> None:
    with judging(lambda body: int(said(body))) as (url, asked):
        async with opened(url) as judge:  # its deadline is ten minutes
            refused = await judge.score([item("401"), item("403"), item("404")])
    assert len(asked) == 3
    for status, result in zip((401, 403, 404), refused, strict=True):
        words = f"got HTTP {status}: no. Correct genrm.urls, genrm.api_key_file or genrm.served_model"
        assert words in (result.error or "") and result.score is None and not result.timed_out


async def test_an_answer_that_does_not_say_how_long_it_is_is_one() -> None:
    yes = {"choices": [{"message": {"content": "yes"}}]}
    told = iter((yes, yes | {"usage": {"prompt_tokens": None, "completion_tokens": None}}))
    with judging(lambda _: next(told)) as (url, asked):
        async with opened(url, num_calls=1) as judge:
            assert scores(await judge.score([item("a"), item("b")])) == [1.0, 1.0] and len(asked) == 2
            stats = judge.stats()
    assert (stats.answers, stats.prompt_tokens, stats.answer_tokens) == (2, 0, 0)


async def test_a_group_is_one_question_and_a_pair_is_one_each() -> None:
    def better(body: dict[str, Any]) -> str:
        first, second = said(body).split("<")
        return "neither" if "3" in (first, second) else "A" if first > second else "B"

    with judging(lambda body: "<score>1 2 4</score>") as (url, asked):
        async with opened(url, per="group", tag="score", prompt="{responses}") as judge:
            assert scores(await judge.score([item(each) for each in "abc"])) == [1.0, 2.0, 4.0]
            assert len(asked) == 1
    with judging(better) as (url, asked):
        async with opened(url, per="pair", prompt="{first}<{second}", retries=0) as judge:
            found = await judge.score([item(each) for each in "0213"])
            assert scores(found) == [0.0, 1.0, 0.5, None]  # of the pairs that have a verdict
            assert sorted(map(said, asked)) == ["0<2", "0<3", "1<0", "1<3", "2<1", "3<2"]
            [alone] = await judge.score([item("0")])
            assert alone.score is None and "two responses to compare" in (alone.error or "")


def ruled(response: str, label: Any, *, prompt: Any, metadata: Any) -> float:
    if response == "broken":
        raise LookupError("planted")
    return float(len(response))


async def test_rule_and_judge_are_summed_and_one_that_fails_fails_the_response() -> None:
    with judging(lambda body: "?" if said(body) == "unclear" else "yes") as (url, _):
        config = GenrmConfig(urls=(url,), prompt="{response}", retries=0)
        judge = Genrm(config, lambda: (), deadline_s=300, load_deadline_s=120)
        async with RewardPool(f"{HERE}:ruled", deadline_s=300, load_deadline_s=120, judges=[(judge, 0.5)]) as pool:
            both, unruled, unjudged = await pool.score([item("abc"), item("broken"), item("unclear")])
            stats = pool.stats()
    assert both == RewardResult(3.5, {"genrm": 1.0, "said": "yes", "rule": 3.0})
    assert unruled.score is None and "planted" in (unruled.error or "") and unruled.details["genrm"] == 1.0
    assert unjudged.score is None and "must say a verdict" in (unjudged.error or "")
    assert (stats.num_scored, stats.num_errors, stats.num_timed_out) == (1, 2, 0)


async def test_rule_judge_and_another_are_one_sum_and_what_each_says_is_among_the_details() -> None:
    with judging(lambda body: "yes") as (url, _):
        judge = Genrm(GenrmConfig(urls=(url,), prompt="{response}"), lambda: (), deadline_s=300, load_deadline_s=120)
        beside = Lengths()
        async with RewardPool(
            f"{HERE}:ruled", deadline_s=300, load_deadline_s=120, judges=[(judge, 0.5), (beside, 2.0)]
        ) as pool:
            all_three, without = await pool.score([item("abc"), item("unscored")])
    assert all_three == RewardResult(9.5, {"genrm": 1.0, "said": "yes", "scorer": 3.0, "rule": 3.0})
    assert without == RewardResult(None, {"genrm": 1.0, "said": "yes", "rule": 8.0}, "planted", brief="planted")


class Lengths:
    """Scores beside the judge."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        failed = RewardResult(None, {}, "planted", brief="planted")
        made = [RewardResult(float(len(each.response)), {"scorer": float(len(each.response))}) for each in items]
        return [failed if each.response == "unscored" else result for each, result in zip(items, made, strict=True)]


async def test_a_judge_that_returns_elsewhere_is_found_and_no_question_is_lost(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k")
    records = Records(tmp_path, "genrm")
    (tmp_path / "genrm").mkdir()

    def serve(url: str, name: str) -> None:
        aside = tmp_path / name
        aside.write_bytes(orjson.dumps({"url": url, "token_path": str(key), "pid": os.getpid()}))
        aside.replace(tmp_path / "genrm" / "genrm-0.json")

    config = GenrmConfig.model_validate({"model": {"path": "m"}, "prompt": "{response}"})
    with judging(lambda _: "yes") as (url, asked):

        def dying(body: dict[str, Any]) -> int:
            serve(url, "second")  # it left, and its next life listens somewhere else
            return 503

        with judging(dying) as (gone, before):
            serve(gone, "first")
            async with Genrm(config, records, deadline_s=300, load_deadline_s=120) as judge:
                assert scores(await judge.score([item("a")])) == [1.0]
                assert judge.stats().failed_calls == 1
    assert len(before) == len(asked) == 1 and asked[0]["model"] == "default"


def test_no_record_is_no_judge_nor_is_one_that_just_left(tmp_path: Path) -> None:
    records, folder, key = Records(tmp_path, "genrm"), tmp_path / "genrm", tmp_path / "key"
    assert records() == []
    folder.mkdir()
    (folder / "genrm-0.json").symlink_to(tmp_path / "removed after it was listed")
    told = {"url": "http://127.0.0.1:1", "token_path": str(key), "pid": 1}
    (folder / "genrm-1.json").write_bytes(orjson.dumps(told))
    assert records() == []
    key.write_text("k")
    changed = folder.stat()
    assert [client.url for client in records()] == ["http://127.0.0.1:1"]
    (folder / "genrm-2.json").write_bytes(orjson.dumps(told | {"url": "http://127.0.0.1:2"}))
    os.utime(folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))  # within one tick of the file system's clock
    assert [client.url[-1] for client in records()] == ["1", "2"]


async def test_a_template_that_raises_fails_its_responses_alone() -> None:
    with judging(lambda _: "yes") as (url, asked):
        async with opened(url, per="pair", prompt=None, template=f"{HERE}:broken", tag="n", bounds=(0, 1)) as judge:
            found = await judge.score([item("a"), item("b")])
    assert scores(found) == [None, None] and all("planted" in (each.error or "") for each in found) and asked == []


def broken(response: Any, label: Any, *, prompt: Any, metadata: Any) -> str:
    raise LookupError("planted")
