"""A reward model in its role: its numbers are those of transformers, whatever is asked beside, and a question outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rondo.models.media.config import MediaConfig
from rondo.models.media.processor import Processor
from rondo.models.media.refs import MediaRef
from rondo.models.tiny import qwen3, qwen3_5
from rondo.models.value_head import ENDS
from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import RowError
from rondo.roles.rewards.genrm import Records
from rondo.roles.rewards.pool import RewardItem
from rondo.roles.rewards.scorer import Scorer
from rondo.roles.scorer import Encoder, check_reward_model, scoring
from rondo.runtime.errors import ConfigError
from tests.e2e.omni import picture

CHAT = [{"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    qwen3.build(folder / "base", hidden_size=32, num_layers=2, max_positions=128)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder / "rm")
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "rm")
    return folder


def job(folder: Path, *, chat: bool = True, deterministic: bool = False, **judge: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "test", "num_steps": 1, "model": {"path": str(folder / "base")}, "deterministic": deterministic,
            "data": {"rows": "m:f", "apply_chat_template": chat},
            "rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_new_tokens": 8},
            "scorer": {"model": {"path": str(folder / "rm"), "dtype": "float32"}, "max_prompt_tokens": 100} | judge,
        }
    )  # fmt: skip


def by_transformers(folder: Path, prompt: Any, response: str) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder / "rm")
    text = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": response}], tokenize=False)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "rm", dtype=torch.float32)
    with torch.no_grad():
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        return float(model(input_ids=ids).logits)


class Context:
    """A worker's, of a process that is alone."""

    rank, world_size, group, token, load_s = 0, 1, "scorer-0", "own", 60.0

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = self.rt_dir = run_dir
        (run_dir / "token").write_text(self.token)
        self.thread, self.batches = ThreadPoolExecutor(1), list[int]()
        self.section = lambda *_: nullcontext()

    async def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    async def working(self, name: str, function: Callable[..., Any], rows: Any) -> Any:
        self.batches.append(len(rows))
        return await self.compute(function, rows)

    async def report(self, *_: Any) -> None: ...

    def progress(self) -> None: ...


def serving(config: JobConfig, run_dir: Path) -> tuple[Context, Any]:
    assert config.scorer is not None
    run_dir.mkdir(exist_ok=True)
    paths = {"scorer": config.scorer.model.path}
    own = SimpleNamespace(config=config, judge_paths=paths, device="cpu", scores_alone=True)
    ctx = Context(run_dir)
    return ctx, scoring(ctx, own)  # type: ignore[arg-type]


@asynccontextmanager
async def judging(config: JobConfig, run_dir: Path) -> AsyncIterator[Scorer]:
    assert config.scorer is not None
    scorer = Scorer(config.scorer, Records(run_dir, "scorer"))
    yield scorer
    await scorer.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_each_response_has_the_number_that_transformers_gives_it(
    folder: Path, tmp_path: Path, deterministic: bool
) -> None:
    config, other = job(folder, deterministic=deterministic), [{"role": "user", "content": "42-1="}]
    asked = [(CHAT, "2"), (CHAT, ""), (other, "41"), (CHAT, "1" * 200), (CHAT, "22")]
    ctx, served = serving(config, tmp_path)
    async with served, judging(config, tmp_path) as judge:
        found = await judge.score([RewardItem(said, prompt=prompt) for prompt, said in asked])
        [again] = await judge.score([RewardItem("2", prompt="1+1")])
        stats = judge.stats()
    for (prompt, said), result in zip(asked, found, strict=True):
        if len(said) > 100:
            assert result.score is None and result.details == {} and not result.timed_out
            assert "must have 2 to 100 tokens of the reward model's, got 2" in (result.error or "")
        else:
            assert result.score == pytest.approx(by_transformers(folder, prompt, said), abs=1e-5), said
            assert result.details == {"scorer": result.score} and result.error is None
    assert len({result.score for result in found}) == 5
    assert (again.score == found[0].score) if deterministic else again.score == pytest.approx(found[0].score, abs=1e-5)
    assert (stats.verdicts, stats.no_verdict, stats.answers) == (5, 1, 2) and stats.prompt_tokens > 30
    assert max(ctx.batches) == (1 if deterministic else 3)  # with the fourth they have over 100 tokens


async def test_a_question_outlives_the_role_and_one_that_is_asked_is_answered_when_it_leaves(
    folder: Path, tmp_path: Path
) -> None:
    config = job(folder)
    async with judging(config, tmp_path) as judge:
        ctx, served = serving(config, tmp_path)
        async with served:
            held, computes = asyncio.Event(), ctx.working

            async def holding(*args: Any) -> Any:
                held.set()
                await asyncio.sleep(0.05)  # meanwhile it is told to leave
                return await computes(*args)

            ctx.working = holding  # type: ignore[method-assign]
            first = asyncio.create_task(judge.score([RewardItem("2", prompt=CHAT)]))
            await held.wait()
        [answered] = await first
        assert answered.score is not None and judge.stats().failed_calls == 0
        waits = asyncio.create_task(judge.score([RewardItem("2", prompt=CHAT)]))  # nobody is there
        _, served = serving(config, tmp_path)
        async with served:
            [later] = await waits
    assert later.score == pytest.approx(answered.score, abs=1e-6)


def test_a_model_of_the_job_is_asked_at_the_end_of_sequence_and_others_behind_their_whole_template(
    folder: Path, tmp_path: Path
) -> None:
    tokenizer, path = AutoTokenizer.from_pretrained(folder / "rm"), str(folder / "rm")
    text = tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": "2"}], tokenize=False)
    whole = tokenizer(text, add_special_tokens=False).input_ids
    assert Encoder(job(folder), path).scored(CHAT, "2").tokens.tolist() == whole
    plain = Encoder(job(folder, chat=False), path).scored("1+1=", "2").tokens.tolist()
    assert plain == [*tokenizer("1+1=").input_ids, *tokenizer("2").input_ids, tokenizer.eos_token_id]

    own = tmp_path / "own"
    own.mkdir()
    for file in (folder / "rm").iterdir():
        (own / file.name).symlink_to(file)
    (own / "config.json").unlink()
    told = orjson.loads((folder / "rm" / "config.json").read_bytes())
    (own / "config.json").write_bytes(orjson.dumps(told | {ENDS: True}))
    begin = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(begin, add_special_tokens=False).input_ids
    expected = [*ids, *tokenizer("2").input_ids, tokenizer.eos_token_id]
    assert Encoder(job(folder), str(own)).scored(CHAT, "2").tokens.tolist() == expected != whole


async def test_the_tools_that_the_policy_was_shown_are_shown_to_it(folder: Path, tmp_path: Path) -> None:
    config, path, tool = job(folder), str(folder / "rm"), {"name": "add"}
    told = config.data.model_copy(update={"chat_template_args": {"tools": [tool], "not": "its"}})  # of an environment
    plain, given = Encoder(config, path), Encoder(config.model_copy(update={"data": told}), path)
    before = plain.scored(CHAT, "2").tokens.tolist()
    shown = plain.scored(CHAT, "2", [tool]).tokens.tolist()
    told_of = plain._tokenizer("<|im_start|>system\nadd <tool_call><|im_end|>\n").input_ids
    assert shown == [*told_of, *before] == given.scored(CHAT, "2").tokens.tolist()

    asked: dict[str, Any] = {}

    class Client:
        url = "http://scorer"

        async def post(self, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
            asked.update(body)
            return {"scores": [1.0], "errors": [None], "num_tokens": 1}

        async def __aexit__(self) -> None: ...

    clients: Any = [Client()]
    assert config.scorer is not None
    await Scorer(config.scorer, lambda: clients).score([RewardItem("2", prompt=CHAT, tools=(tool,))])
    assert asked == {"answers": [{"prompt": CHAT, "response": "2", "tools": [tool]}]}


async def test_a_model_that_sees_scores_each_answer_with_the_pictures_of_its_prompt(tmp_path: Path) -> None:
    """As transformers does from the same arrays; what is no picture costs its own answers alone."""
    torch.manual_seed(5)
    qwen3_5.build(tmp_path / "rm")
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(tmp_path / "rm")
    config = job(tmp_path).model_copy(update={"media": MediaConfig()})
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    refs = [MediaRef("image", picture(seed)) for seed in (1, 2)] + [MediaRef("image", b"not a picture")]
    asked = [[RewardItem(said, prompt=prompt, media=(ref,)) for said in ("2", "41")] for ref in refs]
    _, served = serving(config, tmp_path)
    async with served, judging(config, tmp_path) as judge:
        found = [result for items in asked for result in await judge.score(items)]
    processor, wanted = Processor.load(str(tmp_path / "rm"), MediaConfig()), list[float]()
    for item in asked[0] + asked[1]:
        whole = [*prompt, {"role": "assistant", "content": item.response}]
        made = processor.prepare(whole, item.media)
        assert made.media is not None
        ids = torch.from_numpy(made.tokens).long()[None]
        arrays = {name: torch.from_numpy(made.media.arrays[name]) for name in ("pixel_values", "image_grid_thw")}
        with torch.no_grad():
            said = model(input_ids=ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **arrays)
        wanted.append(float(said.logits))
    assert [result.score for result in found] == [*(pytest.approx(each, abs=1e-4) for each in wanted), None, None]
    assert len({round(each, 3) for each in wanted}) == 4 and "image of 13 bytes" in (found[-1].error or "")


def test_padding_at_the_end_is_not_scored_and_what_is_too_long_fails_or_is_cut(folder: Path) -> None:
    path = str(folder / "rm")
    encoder = Encoder(job(folder), path)
    plain = encoder.scored(CHAT, "2").tokens
    encoder._pad = int(plain[-1])
    assert encoder.scored(CHAT, "2").tokens.tolist() == plain[:-1].tolist()
    with pytest.raises(RowError, match=r"must have 2 to 6 tokens of the reward model's, got \d+\. Raise scorer"):
        Encoder(job(folder, max_prompt_tokens=6), path).scored(CHAT, "2")
    cut = Encoder(job(folder, max_prompt_tokens=6, too_long="cut"), path)
    np.testing.assert_array_equal(cut.scored(CHAT, "2").tokens, plain[-6:])
    assert len(cut.scored(CHAT, "2", limits=False).tokens) == len(plain)
    encoder._tokenizer.chat_template = "{{ raise_exception('nothing') }}"
    with pytest.raises(RowError, match="it must suit the chat template, got TemplateError: nothing"):
        encoder.scored(CHAT, "2")


def test_what_gives_no_one_number_is_refused(folder: Path, tmp_path: Path) -> None:
    assert type(check_reward_model(str(folder / "rm"))).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(
        ConfigError, match=r"got '.*': Qwen3ForCausalLM with 2 labels and no head\. Name a reward model"
    ):
        check_reward_model(str(folder / "base"))
    AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Qwen3ForSequenceClassification with 3 labels and score\.weight"):
        check_reward_model(str(tmp_path))
