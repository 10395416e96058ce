"""Environments: who answers the policy, and what becomes of a sample whose environment fails, is late, or is none."""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from rondo.models.media.errors import MediaError
from rondo.models.media.inputs import MediaInputs
from rondo.models.media.refs import MediaRef
from rondo.models.tiny.tokenizer import END_OF_TURN, build_tokenizer
from rondo.roles.config import JobConfig
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import Row
from rondo.roles.data.prompts import render_prompt
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.rewards.hub import gsm8k
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.rewards.worker import in_worker
from rondo.roles.sampling.columns import columns_of, loss_mask
from rondo.roles.sampling.environments import Environments, EnvironmentStats, Step
from rondo.roles.sampling.episode import Made, SampleRow
from rondo.roles.sampling.evaluation import _item_of, limits_of, scored
from rondo.roles.sampling.leases import Progress
from rondo.roles.sampling.tools import parts_of, with_tools
from rondo.roles.sampling.workflow import Client, Context
from rondo.roles.shown import written
from rondo.runtime.errors import ConfigError
from rondo.runtime.values import decode
from tests.schedules import later

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call with <tool_call>.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<' + p.type + '>' }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3's, in short."""
TOKENIZER = build_tokenizer()
TOKENIZER.chat_template = TEMPLATE
END = TOKENIZER.convert_tokens_to_ids(END_OF_TURN)
ROW = Row("row 9", "Play.", "3", {"level": 2})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def job(
    *,
    chat: bool = True,
    limits: dict[str, Any] | None = None,
    reward: bool = True,
    media: Any = None,
    **environment: Any,
) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "played", "num_steps": 1, "model": {"path": "model"}, "media": media,
            "data": {"path": "train.jsonl", "prompt": "question", "label": "answer", "apply_chat_template": chat},
            **({"reward": {"function": "rewards:exact"}} if reward else {}),
            "rollout": {
                "prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 2048, "max_new_tokens": 2048,
                "max_turns": 8, "environment": environment, **(limits or {}),
            },
        }
    )  # fmt: skip


class Played:
    """What became of the samples in which the policy says these texts, one a turn."""

    def __init__(self, made: list[Made], stats: dict[str, EnvironmentStats], prompts: list[str]) -> None:
        self.made = sorted(made, key=lambda each: each.number)
        self.stats, self.prompts = stats, prompts

    def text(self, number: int = 0) -> str:
        row = self.made[number].rows[-1]
        return str(TOKENIZER.decode([*row.prompt.tolist(), *row.completion.tokens.tolist()]))


async def played(
    config: JobConfig,
    *turns: str,
    samples: int = 1,
    elsewhere: Any = nullcontext,
    look: Any = None,
    originals: Sequence[MediaRef] = (),
) -> Played:
    config, prompts, said = with_tools(config), list[str](), dict[str, int]()
    prompt = render_prompt(TOKENIZER, ROW, config.data, 2048)
    limits = limits_of(config, 2048)
    at = Context(
        ROW,
        prompt,
        None,
        TOKENIZER,
        range(samples),
        limits,
        chat=Chat.of(TOKENIZER, ROW, config.data),
        elsewhere=elsewhere,
        look=look,
        originals=originals,
    )

    async def ask(request: Request) -> Completion:
        number = request.id.split(".")[0]
        turn = said[number] = said.get(number, 0) + 1
        prompts.append(TOKENIZER.decode(request.sequence.tolist()))
        tokens = np.array([*TOKENIZER(turns[turn - 1])["input_ids"], END], np.int32)
        parts = tokens, np.ones(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
        if (before := request.prefix) is not None:
            had = before.tokens, before.log_probs, before.policy_versions
            parts = tuple(np.concatenate(pair) for pair in zip(had, parts, strict=True))  # type: ignore[assignment]
        return Completion(request.id, *parts, "stop")

    params = SamplingParams(2048, stop_token_ids=(END,))
    client = Client(at, lambda number: Request(f"g/{number}", prompt, params, seed=number), ask)
    async with asyncio.timeout(120), Environments(config, load_deadline_s=100) as opened:
        made = [each async for some in at.samples(opened.workflow(TOKENIZER), client) for each in some]
    return Played(made, opened.stats(), prompts)


async def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def look(context: str) -> dict[str, Any]:
    """Looks.

    Args:
        context: where
    """
    raise LookupError(context)


async def test_tools_answer_in_their_messages_and_what_goes_wrong_is_told_to_the_policy() -> None:
    found = await played(
        job(tools=[add, look]),
        "Hm." + call("add", '{"a": 1, "b": 2}') + call("add", f'{{"a": {1 << 65}}}'),
        call("look", '{"context": "home"}') + call("add", '{"x": 4}') + call("run", "{}"),
        "<tool_call>add(1)</tool_call>",
        call("add", '{"a": 1, b: 2}') + call("add", '{"a": 5}') + "<tool_call>[]</tool_call> and <tool_call>{",
        "3",
    )
    [made] = found.made
    assert '"name": "add"' in found.prompts[0] and "the second" in found.prompts[0]
    wrong = "TypeError: missing a required argument: 'a'"
    said = [
        ["3", str((1 << 65) + 1)],
        ["Error: LookupError: home", f"Error: {wrong}", "Error: there is no tool 'run'. There are: add, look"],
        ["Error: the call add(1) could not be read. Write it as shown"],
        [
            'Error: the call {"name": "add", "arguments": {"a": 1, b: 2}} could not be read. Write it as shown', "6",
            "Error: the call [] could not be read. Write it as shown", "Error: the call { could not be read. Write it as shown",
        ],
    ]  # fmt: skip
    told = "<|im_end|>\n" + "".join(f"<|im_start|>tool\n{each}<|im_end|>\n" for each in said[0])
    assert found.prompts[1] == found.prompts[0] + "Hm." + call("add", '{"a": 1, "b": 2}') + call(
        "add", f'{{"a": {1 << 65}}}'
    ) + (told + "<|im_start|>assistant\n")
    for prompt, answers in zip(found.prompts[1:], said, strict=True):
        assert prompt.endswith(
            "".join(f"<|im_start|>tool\n{each}<|im_end|>\n" for each in answers) + "<|im_start|>assistant\n"
        )
    done = made.last
    assert loss_mask(done, False).sum() == sum(done.policy_versions >= 0) < len(done.tokens)
    assert made.error is None and made.reward is None and len(made.rows) == 1
    counts = {name: (each.steps, each.errors, each.timeouts) for name, each in found.stats.items()}
    assert counts == {"add": (4, 1, 0), "look": (1, 1, 0)}


async def test_a_plain_tool_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'import os\n\ndef pid(of: str) -> int:\n    """Which process.\n\n    Args:\n        of: whose\n    """\n'
        "    if of == 'nobody':\n        raise LookupError(of)\n    return os.getpid()\n"
    )
    turns = call("pid", '{"of": "us"}') + call("pid", '{"of": "nobody"}'), "thanks"
    found = await played(job(tools=[f"{file}:pid"], num_workers=1), *turns)
    first, second = found.prompts[1].split("<|im_start|>tool\n")[1:]
    assert int(first.split("<")[0]) not in (0, __import__("os").getpid())
    assert second.startswith("Error: LookupError: nobody<") and found.stats["pid"].errors == 1


class Guess:
    """The protocol: an environment with `step`."""

    closed: list[Any] = []  # noqa: RUF012 - of all

    def reset(self, answer: str, level: int) -> str:
        self.number = int(answer) + level
        return f" Up to {10 * level}."

    def step(self, said: str) -> Any:
        if said == "what?":
            return None
        guess = int(said)
        if guess == self.number:
            return Step("never said", reward=1.0, over=True)
        return Step("higher", reward=0.25) if guess < self.number else "lower"

    async def close(self) -> None:
        Guess.closed.append(self)


class Gallery:
    """Tools that show: a picture as it is, and parts."""

    def show(self) -> Any:
        """Shows a picture."""
        return Image.new("RGB", (4, 2))

    def play(self, size: int) -> list[dict[str, Any]]:
        """Plays a sound.

        Args:
            size: of the file
        """
        return [{"type": "text", "text": "hear:"}, {"type": "audio", "audio": b"a" * size}]

    def cut(self, width: int) -> Any:
        """Shows a part of a picture.

        Args:
            width: of it
        """
        return Image.new("CMYK", (4, 2)).crop((0, 0, width, 2))


class Screen:
    """A game that shows where it stands, and in the end something that is no part."""

    def step(self, said: str) -> Any:
        part = {"type": "image", "image": Image.new("RGB", (4, 2))}
        return {"a": [part], "b": Step([part, {"type": "text", "text": "go on"}], reward=0.5)}.get(
            said, [{"type": "image"}]
        )


async def looked(text: str, refs: Sequence[MediaRef], room_bytes: int) -> tuple[np.ndarray, MediaInputs]:
    """As a processor does, with a token for each byte of text and media of nothing; one of many bytes is broken."""
    if any(len(ref.source) > 5000 for ref in refs):
        raise MediaError(f"{refs[0]} must be a sound that can be read")
    tokens = np.array(TOKENIZER(text)["input_ids"], np.int32)
    positions = np.tile(np.arange(len(tokens), dtype=np.float32), (3, 1))
    return tokens, MediaInputs(f"{[ref.kind for ref in refs]} {len(tokens)}", {"positions": positions})


async def test_what_tools_and_environments_show_is_said_and_stays_with_the_sample() -> None:
    shows = job(factory=Gallery, media={"max_turn_bytes": 1 << 20})
    found = await played(shows, call("show", "{}") + call("play", '{"size": 9}'), "done", look=looked)
    [made] = found.made
    said = "<|im_end|>\n<|im_start|>tool\n<image><|im_end|>\n<|im_start|>tool\nhear:<audio><|im_end|>\n<|im_start|>assistant\n"
    assert found.prompts[1].endswith(said) and made.error is None
    [(at, media)] = made.rows[0].shown
    whole = np.concatenate([made.rows[0].prompt, made.last.tokens])
    assert media.key.startswith("['image', 'audio']")
    assert TOKENIZER.decode(whole[at : at + media.positions.shape[1]].tolist()) == said
    assert (columns_of(shows, [made], [RewardResult(0.0)])[-1].arrays[0] == written(made.rows[0].shown)).all()
    found = await played(job(factory=Screen, media={"max_turn_bytes": 1 << 20}), "a", "b", "c", look=looked)
    assert found.prompts[1].endswith("<|im_start|>user\n<image><|im_end|>\n<|im_start|>assistant\n")
    assert found.prompts[2].endswith("<|im_start|>user\n<image>go on<|im_end|>\n<|im_start|>assistant\n")
    error = found.made[0].error
    assert (
        error is not None
        and "what is said must have each medium in its part" in error
        and len(found.made[0].rows[0].shown) == 2
    )


async def test_a_picture_that_is_empty_is_told_and_one_of_print_is_shown_each_written_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save, threads = Image.Image.save, list[threading.Thread]()

    def noted(picture: Image.Image, *args: Any, **options: Any) -> None:
        threads.append(threading.current_thread())
        save(picture, *args, **options)

    monkeypatch.setattr(Image.Image, "save", noted)
    shows = job(factory=Gallery, media={"max_turn_bytes": 1 << 20})
    found = await played(shows, call("cut", '{"width": 0}'), call("cut", '{"width": 3}'), "done", look=looked)
    assert "tool\nError: ValueError: a picture must have a pixel or more, got 0 x 2<|im_end|>" in found.prompts[1]
    assert found.prompts[2].endswith("tool\n<image><|im_end|>\n<|im_start|>assistant\n") and found.made[0].error is None
    await played(job(factory=Screen, media={"max_turn_bytes": 1 << 20}), "a", "c", look=looked)
    assert len(threads) == 2 and threading.main_thread() not in threads


async def test_media_that_cannot_be_shown_fail_their_sample_alone_and_say_why() -> None:
    shows = job(factory=Gallery, media={"max_turn_bytes": 1 << 20})
    found = await played(shows, call("play", '{"size": 9000}'), samples=2, look=looked)
    for made in found.made:
        assert made.error is not None and "audio of 9000 bytes must be a sound that can be read" in made.error
        assert made.reward is None and made.last.policy_versions.tolist() == [0] * len(made.last.tokens)
    for media, look in (({}, looked), (None, None)):
        found = await played(job(factory=Gallery, media=media), call("show", "{}"), look=look)
        assert "media.max_turn_bytes above 0, got image of" in str(found.made[0].error)


def test_a_picture_of_a_tool_leaves_its_process_as_a_file() -> None:
    told = in_worker("rondo.roles.sampling.tools:open_tools", {"tools": {"draw": f"{__name__}:draw"}})(["draw", {}])
    [content, failed] = decode(json.loads(told.text), [memoryview(each) for each in told.buffers])
    assert not failed and content[0] == {"type": "text", "text": "two:"}
    assert [Image.open(io.BytesIO(each)).size for each in content[1]["video"]] == [(4, 2), (4, 2)]
    assert (
        parts_of([{"type": "text", "text": "a"}])
        is parts_of([{"type": "user"}, {}])
        is parts_of([])
        is parts_of(5)
        is None
    )


def draw() -> list[dict[str, Any]]:
    """Draws."""
    return [{"type": "text", "text": "two:"}, {"type": "video", "video": [Image.new("RGB", (4, 2))] * 2}]


@pytest.mark.parametrize("chat", [True, False])
async def test_an_environment_answers_each_turn_and_says_what_it_is_worth(chat: bool) -> None:
    found = await played(job(chat=chat, factory=Guess), "4", "9", "5")
    [made] = found.made
    if chat:
        begin = "<|im_start|>user\nPlay. Up to 20.<|im_end|>\n<|im_start|>assistant\n"
        between = [
            "<|im_end|>\n<|im_start|>user\n" + each + "<|im_end|>\n<|im_start|>assistant\n"
            for each in ("higher", "lower")
        ]
    else:
        begin, between = "Play. Up to 20.", ["<|im_end|>higher", "<|im_end|>lower"]
    assert found.text() == f"{begin}4{between[0]}9{between[1]}5<|im_end|>"
    assert made.reward == 1.25 and [value for _, value in made.rows[0].rewards] == [0.25, 1.0]
    assert (found.stats["Guess"].steps, found.stats["Guess"].errors) == (3, 0) and found.stats["Guess"].seconds > 0


async def test_an_environment_that_fails_fails_its_sample_and_is_closed_and_one_that_ends_leaves_the_reward_open() -> (
    None
):
    Guess.closed.clear()
    found = await played(job(factory=Guess), "4", "x", samples=2)
    assert len(Guess.closed) == 2
    for each in found.made:
        assert each.error is not None and "Guess.step failed: ValueError: invalid literal" in each.error
        assert each.reward is None
    assert found.stats["Guess"].errors == 2
    [made] = (await played(job(factory=Guess), "what?")).made
    assert made.error is None and made.reward is None and len(Guess.closed) == 3


async def test_the_last_turn_that_a_budget_allows_is_answered_and_worth_what_it_is() -> None:
    [made] = (await played(job(factory=Guess, limits={"max_turns": 2}), "9", "4")).made
    assert made.reward == 0.25 and made.last.finish_reason == "length"


class Board:
    """Keeps what it is given, and writes into it."""

    seen: list[list[int]] = []  # noqa: RUF012 - of all

    async def reset(self, board: list[int]) -> None:
        self.board = board

    async def step(self, said: str) -> Step:
        self.board.append(1)
        self.seen.append(list(self.board))
        return Step(over=True)


async def test_what_an_environment_does_to_its_row_no_sibling_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("row 9", "Play.", "3", {"board": [0]})
    monkeypatch.setitem(globals(), "ROW", row)
    Board.seen.clear()
    await played(job(factory=Board), "x", samples=2)
    assert Board.seen == [[0, 1], [0, 1]] and row.metadata == {"board": [0]}


class Wrong:
    """Each sample has something else that is none of its business."""

    numbers = itertools.count()

    async def step(self, said: str) -> Any:
        number = next(self.numbers) % 4
        if number == 0:
            raise asyncio.CancelledError
        return (Step(say=5), Step(reward=float("nan")), Step(reward=1.0, over=True))[number - 1]  # type: ignore[arg-type]


async def test_what_a_step_does_wrong_fails_its_sample_alone() -> None:
    found = await played(job(chat=False, factory=Wrong), "x", samples=4)
    errors = "; ".join(each.error for each in found.made if each.error is not None)
    for error in (
        "Wrong.step failed: CancelledError",
        "a Step of these or None, got int",
        "finite number, got nan",
    ):
        assert error in errors
    assert [each.reward for each in found.made if each.error is None] == [1.0]
    assert found.stats["Wrong"].errors == 1


async def odd(what: str) -> Any:
    """Answers what no tokenizer takes.

    Args:
        what: kind of answer
    """
    if what == "raised":
        raise OSError("no \udce9")
    return 10**5000 if what == "long" else "half \udce9"


async def test_an_answer_that_cannot_be_written_is_told_as_far_as_it_can() -> None:
    found = await played(
        job(tools=[odd]), *("".join(call("odd", f'{{"what": "{each}"}}') for each in ("long", "half", "raised")), "ok")
    )
    assert found.made[0].error is None
    told = [each.split("<|im_end|>")[0] for each in found.prompts[1].split("<|im_start|>tool\n")[1:]]
    assert told[0].startswith("Error: ValueError: Exceeds the limit")
    assert told[1:] == ["half \\udce9", "Error: OSError: no \\udce9"]


class Wordle:
    """As TRL's `environment_factory` takes it: public methods are tools, the reward is read."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **row: Any) -> str | None:
        self.word, self.done = "crane", False
        return f"\nGuess {row['answer']} times at most."

    def guess(self, word: str) -> str:
        """Guesses the word.

        Args:
            word: five letters

        Returns:
            which letters are right
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = word == self.word
        self.reward = 1.0 if self.done else 0.1
        return "".join("+" if a == b else "-" for a, b in zip(word, self.word, strict=True))

    def _hidden(self) -> None: ...


async def test_a_class_with_tools_for_methods_runs_unchanged() -> None:
    turns = [call("guess", f'{{"word": "{word}"}}') for word in ("brake", "crane", "crane")]
    found = await played(job(factory=Wordle, reward=False), *turns, "Done.")
    assert "Play.\nGuess 3 times at most.<|im_end|>" in found.prompts[0] and "five letters" in found.prompts[0]
    assert "_hidden" not in found.prompts[0] and '"name": "reset"' not in found.prompts[0]
    for prompt, answer in zip(found.prompts[1:], ("-++-+", "+++++", "Error: ValueError: Game over."), strict=True):
        assert f"<|im_start|>tool\n{answer}<|im_end|>\n<|im_start|>assistant\n" in prompt
    [made] = found.made
    assert made.error is None and made.reward == 1.0 and len(made.rows) == 1
    assert (found.stats["Wordle"].steps, found.stats["Wordle"].errors) == (3, 1)


class Increment:
    """Written as TRL's documentation shows an environment whose task lies in the data."""

    def reset(self, target: int, **kwargs: Any) -> None:
        self.counter = 0
        self.target = target
        self.given = kwargs

    def get_reward(self) -> float:
        return float(self.counter == self.target and self.given == {"question": "Play.", "answer": "3", "level": 2})

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class Judged(Increment):
    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward() / 2

    @staticmethod
    def helper() -> None: ...


def make_increment() -> Increment:
    return Increment()


@pytest.mark.parametrize(("factory", "reward"), [(Increment, 1.0), (Judged, 0.5), (make_increment, 1.0)])
async def test_an_environment_of_trl_gets_all_columns_and_says_its_reward(
    factory: Any, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"question": "Play.", "answer": "3", "target": 5}
    monkeypatch.setitem(globals(), "ROW", replace(ROW, columns=columns))
    found = await played(job(factory=factory), call("increment", '{"step": 2}'), call("increment", '{"step": 3}'), "5.")
    assert "Value to add to the counter." in found.prompts[0]
    assert '"name": "get_reward"' not in found.prompts[0] and '"name": "helper"' not in found.prompts[0]
    assert "<|im_start|>tool\n5<|im_end|>" in found.prompts[2]
    assert [(made.error, made.reward) for made in found.made] == [(None, reward)]


async def test_a_reward_is_given_the_final_answer_and_beside_it_all_turns() -> None:
    first, last = "Hm." + call("add", '{"a": 1, "b": 2}'), "It is 3."
    found = await played(job(tools=[add]), first, last)
    items = []

    class Pool:
        async def score(self, given: Any) -> Any:
            items.extend(given)
            return [RewardResult(0.0)] * len(given)

    await scored(Pool(), TOKENIZER, ROW, found.made, 8)  # type: ignore[arg-type]
    [item] = items
    assert (item.response, item.in_thought) == (last, False)
    assert item.turns == [
        {"role": "assistant", "content": first}, {"role": "tool", "content": "3"}, {"role": "assistant", "content": last}
    ]  # fmt: skip
    assert item.transcript == f"{first}\ntool\n3\nassistant\n{last}"
    bare = [replace(made, turns=()) for made in found.made]  # as a workflow of one's own makes them
    await scored(Pool(), TOKENIZER, ROW, bare, 8)  # type: ignore[arg-type]
    assert items[1].response == last
    assert [turn["role"] for turn in items[1].turns] == ["assistant", "user", "assistant"]


async def test_marks_of_thoughts_that_are_special_tokens_reach_the_reward_and_no_other_special_token_does() -> None:
    (tokenizer := build_tokenizer()).add_special_tokens(
        {"additional_special_tokens": ["[THINK]", "[/THINK]", "<pad2>"]}
    )

    class Pool:
        async def score(self, given: Any) -> Any:
            return [
                RewardResult(gsm8k(each.response, "72", prompt="", metadata={}, in_thought=each.in_thought))
                for each in given
            ]

    for prompt, said, expected in (
        ("Q", "[THINK]#### 72", 0), ("Q[THINK]", "hm[/THINK]#### 72", 1), ("Q", "#### 72<pad2><|im_end|>", 1),
    ):  # fmt: skip
        asked, tokens = (np.array(tokenizer(text)["input_ids"], np.int32) for text in (prompt, said))
        zeros = np.zeros(len(tokens), np.float32)
        made = Made(0, (SampleRow(asked, Completion("", tokens, zeros, zeros.astype(np.int32), "stop")),))
        [found] = await scored(Pool(), tokenizer, ROW, [made], 8)  # type: ignore[arg-type]
        item = _item_of(tokenizer, ROW, made, 8, ())
        assert (found.score, "pad2" in item.response or "im_end" in item.response) == (expected, False), said
        assert item.response == item.turns[-1]["content"] == item.transcript


class Slow:
    """Its `step` lasts until somebody lets it go."""

    entered, go = threading.Event(), threading.Event()
    loop: Any = None
    called: Any = None

    def step(self, said: str) -> Step:
        self.entered.set()
        self.loop.call_soon_threadsafe(self.called.set)
        return Step(reward=float(self.go.wait(60)), over=True)


async def test_a_method_that_blocks_holds_neither_the_loop_nor_the_lease_nor_a_place_at_the_engine() -> None:
    Slow.loop, Slow.called = asyncio.get_running_loop(), asyncio.Event()
    Slow.entered.clear()
    Slow.go.clear()
    key, leases = (1, 0), Progress(10.0)
    leases.begin(key)

    async def look() -> None:
        await Slow.called.wait()
        assert leases.num_away == 1
        assert [leases.since_last({}, 0) for _ in range(3)] == [[key]] * 3, "as long as it lasts"
        Slow.go.set()

    looking = asyncio.create_task(look())
    [made] = (await played(job(factory=Slow), "x", elsewhere=functools.partial(leases.elsewhere, key))).made
    await looking
    assert made.reward == 1.0 and leases.num_away == 0


async def test_a_call_beyond_its_deadline_has_one_outcome() -> None:
    Slow.loop, Slow.called = asyncio.get_running_loop(), asyncio.Event()
    Slow.go.clear()

    async def pass_by() -> None:
        await Slow.called.wait()
        later(60.0)

    passing = asyncio.create_task(pass_by())
    try:
        found = await played(job(factory=Slow, deadline_s=60.0), "x")
    finally:
        Slow.go.set()
    await passing
    [made] = found.made
    assert made.error is not None and "Slow.step must return within 60 s, got no end" in made.error
    assert (found.stats["Slow"].errors, found.stats["Slow"].timeouts) == (0, 1)


class Stuck:
    """Its `step` does not return until the test has ended."""

    go: threading.Event
    closed: threading.Semaphore
    entered: itertools.count[int]

    def step(self, said: str) -> None:
        next(self.entered)
        self.go.wait(60)

    def close(self) -> None:
        self.closed.release()


async def make_stuck() -> Stuck:
    return Stuck()


async def test_methods_that_never_return_keep_their_threads_and_further_ones_fail() -> None:
    Stuck.go, Stuck.closed, Stuck.entered = threading.Event(), threading.Semaphore(0), itertools.count()
    try:
        found = await played(job(factory=make_stuck, max_threads=2, deadline_s=0.1), "x", samples=6)
        assert all(Stuck.closed.acquire(timeout=60) for _ in range(6))
    finally:
        Stuck.go.set()
    errors = [each.error or "" for each in found.made]
    assert next(Stuck.entered) == 2 and sum("must return within 0.1 s, got no end" in each for each in errors) == 2
    assert sum("must have one of 2 threads (environment.max_threads), got none" in each for each in errors) == 4
    assert found.stats["make_stuck"].timeouts >= 6


async def hangs(text: str) -> str:
    """Never.

    Args:
        text: any
    """
    await asyncio.Event().wait()
    return text


async def test_a_tool_beyond_its_deadline_is_told_to_the_policy() -> None:
    found = await played(job(tools=[hangs], deadline_s=0.05), call("hangs", '{"text": "x"}'), "well")
    assert "<|im_start|>tool\nError: hangs must return within 0.05 s, got no end<|im_end|>" in found.prompts[1]
    assert found.made[0].error is None
    assert (found.stats["hangs"].steps, found.stats["hangs"].errors, found.stats["hangs"].timeouts) == (1, 0, 1)


def unspoken(a, b):  # type: ignore[no-untyped-def]
    return a + b


class Called:
    def __call__(self, a: int) -> int:
        return a


CALLED = Called()


class Nothing:
    reward = 1.0


def needs(port: int) -> Guess:
    return Guess()


def test_settings_that_no_run_could_follow_are_refused() -> None:
    for options, error in (
        ({}, "environment.factory, tools or mcp must be set, got none of them"),
        ({"factory": Guess, "limits": {"max_turns": None}}, "rollout.max_turns must be set with rollout.environment"),
        (
            {"factory": Guess, "limits": {"workflow": "a:b"}},
            "rollout.workflow must not be set with rollout.environment",
        ),
    ):
        with pytest.raises(ValidationError, match=error):
            job(**options)
    for limits, error in (
        ({"max_rows": 2}, "rollout.max_rows must be 1 with media.max_turn_bytes"),
        (
            {"environment": None, "max_turns": None},
            "media.max_turn_bytes must be 0 without rollout.environment",
        ),
    ):
        with pytest.raises(ValidationError, match=error):
            job(factory=Guess, media={"max_turn_bytes": 1}, limits=limits)
    for options, error in (
        ({"tools": [unspoken]}, "must have tools with type hints, and a docstring .* got unspoken"),
        ({"tools": [f"{__name__}:CALLED"]}, "must have tools with type hints, and a docstring .* got .*Called object"),
        ({"tools": [add, add]}, "must have tools of different names, got two of add"),
        ({"tools": [add], "chat": False}, "data.apply_chat_template must be True"),
        ({"factory": Wordle, "chat": False}, "data.apply_chat_template must be True"),
        ({"factory": Nothing}, "must make what has a `step`, or public methods as tools, got Nothing"),
        ({"factory": needs}, "must be called without arguments, got .*:needs"),
        ({"tools": ["nowhere.at.all:add"]}, "must name a function that can be imported"),
    ):
        with pytest.raises(ConfigError, match=error):
            with_tools(job(**options))
    (toolless := build_tokenizer()).chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="must come without tools for a chat template that does not show how"):
        Environments(job(tools=[add]), load_deadline_s=1).workflow(toolless)
    evaluated = job(tools=[add]).model_dump() | {"evaluation": {"data": job(tools=[add]).data.model_dump()}}
    told = with_tools(JobConfig.model_validate(evaluated))
    assert told.evaluation is not None and told.evaluation.data is not None
    for data in (told.data, told.evaluation.data):
        assert [each["function"]["name"] for each in data.chat_template_args["tools"]] == ["add"]
