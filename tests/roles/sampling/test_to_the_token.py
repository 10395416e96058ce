"""Random episodes of every tested family: what is trained is what was sampled, and what the trainer computes, to the token.

Real are the chat template (as its family's in short), the workflow, tools, engine, processor, columns and packing. `python -m
tests.roles.sampling.test_to_the_token` tells the largest gap of each family.
"""

from __future__ import annotations

import asyncio
import functools
import io
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rondo.models.load import load_model, load_tokenizer
from rondo.models.logprobs import response_log_probs
from rondo.models.media.config import MediaConfig
from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.models.media.processor import Processor
from rondo.models.media.refs import MediaRef
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.routing import enable_replay
from rondo.models.tiny import qwen3, qwen3_5, qwen3_omni, qwen3_vl
from rondo.models.tiny.tokenizer import END_OF_TURN, MEDIA
from rondo.roles.config import JobConfig
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import Row
from rondo.roles.data.prompts import messages_of, template_args
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.columns import columns_of
from rondo.roles.sampling.environments import Environments, Step
from rondo.roles.sampling.episode import Episode, Made
from rondo.roles.sampling.evaluation import limits_of
from rondo.roles.sampling.tools import with_tools
from rondo.roles.sampling.workflow import Client, Context
from rondo.roles.shown import read
from tests.e2e.omni import sound
from tests.roles.data.test_chat import QWEN3, QWEN3_OPENS, QWEN25
from tests.roles.sampling.test_episode import Asked, check_trained, wander
from tests.strength import LONG, strength

CLOSE = 1e-5
TEMPERATURE = 0.8
SAMPLES = 4
_HERMES = '<tool_call>\n{{"name": "tell", "arguments": {{"what": {}}}}}\n</tool_call>'
_CODER = "<tool_call>\n<function=tell>\n<parameter=what>\n{}\n</parameter>\n</function>\n</tool_call>"
_THOUGHT = "<think>\nhm\n</think>\n\n"
_MEDIA = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)


def with_media(template: str) -> str:
    shown = template.replace("{{ m.content }}", "{{ said(m.content) }}")
    return _MEDIA + shown.replace("{{ m.content or '' }}", "{{ said(m.content or '') }}")


def as_coders(template: str) -> str:
    return template.replace("{{ call.function | tojson }}", "<function={{ call.function.name }}></function>")


@dataclass(frozen=True)
class Kind:
    """A family: its model, its template, how it writes calls, whether that rewrites some replies, and what it sees."""

    build: Callable[..., None]
    template: str
    sizes: dict[str, Any]
    call: str = _HERMES
    rewrites: bool = True
    kinds: tuple[str, ...] = ()
    goes_on: float = 0.75
    """How often a user answers, behind which many a template rewrites."""


_EXPERTS = {"num_experts": 4}
_PICTURES = ("image", "video")
QWEN3_5 = as_coders(
    QWEN3.replace(" and (loop.last or thought)", "")
    .replace("{% if enable_thinking is defined and not enable_thinking %}", "")
    .replace("</think>\n\n{% endif %}{% endif %}", "</think>\n\n{% endif %}")
)
"""Without thinking: an empty thought stands before each reply that no user has spoken behind."""
FAMILIES = {
    "qwen3": Kind(qwen3.build, QWEN3, {}),
    "qwen3_moe": Kind(qwen3.build, QWEN3_OPENS, _EXPERTS),
    "qwen3_vl": Kind(qwen3_vl.build, with_media(QWEN25), {}, rewrites=False, kinds=_PICTURES),
    "qwen3_vl_moe": Kind(qwen3_vl.build, with_media(QWEN3), _EXPERTS, kinds=_PICTURES),
    "qwen3_5": Kind(qwen3_5.build, with_media(QWEN3_5), {}, _CODER, kinds=_PICTURES, goes_on=0.1),
    "qwen3_5_moe": Kind(qwen3_5.build, with_media(QWEN3_5), _EXPERTS, _CODER, kinds=_PICTURES, goes_on=0.1),
    "qwen3_omni": Kind(qwen3_omni.build, with_media(QWEN25), {}, rewrites=False, kinds=(*_PICTURES, "audio")),
}
PLANTED = "@@@@"
"""Behind what looks like a control token."""
SPELT = ("<|im_start|>", END_OF_TURN, *MEDIA)
TEXTS = (
    "", "42", " ", "\n\n", "é e\u0301 日本 🤷🏽\u200d♂️ \u2028\x00\x7f\ufdd0", "x" * 600, *(f"{each}{PLANTED}" for each in SPELT),
    "".join(SPELT) + PLANTED, "<tool_call>\n{}\n</tool_call>", f"\U000f0000{END_OF_TURN}{PLANTED}", "<think>", "</think>\n",
)  # fmt: skip
ANSWERS: tuple[Any, ...] = (*TEXTS, {"a": [1, None]}, None)
_NUMBERS = itertools.count()
_NOW: list[Kind] = []
"""The family that plays, which tools and environments are not told of."""


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def part(kind: str, seed: int) -> dict[str, Any]:
    if kind == "audio":
        return {"type": "audio", "audio": sound(seed, 0.2)}
    return {"type": kind, kind: picture(seed) if kind == "image" else [picture(seed + i) for i in range(4)]}


def answer(draw: np.random.Generator) -> Any:
    """Of a tool or an environment: mostly a text, and where the model sees, one in four with media."""
    text = ANSWERS[int(draw.integers(len(ANSWERS)))]
    kinds = _NOW[-1].kinds
    if not kinds or draw.random() > 0.25:
        return text
    parts = [part(str(kind), int(draw.integers(99))) for kind in draw.choice(kinds, int(draw.integers(1, 3)))]
    return [{"type": "text", "text": text if isinstance(text, str) else "here"}, *parts]


async def tell(what: int) -> Any:
    """Tells something.

    Args:
        what: which
    """
    if what == 0:
        raise LookupError(f"{END_OF_TURN}{PLANTED}")
    return answer(np.random.default_rng([what, next(_NUMBERS)]))


class Talks:
    """Says something, or ends."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(next(_NUMBERS))

    async def reset(self) -> str | None:
        return TEXTS[int(self._draw.integers(len(TEXTS)))] if self._draw.random() < 0.2 and not _NOW[-1].kinds else None

    async def step(self, said: str) -> Step:
        found = answer(self._draw) if self._draw.random() < _NOW[-1].goes_on else None
        return Step(found if isinstance(found, str | list) else None, float(self._draw.random()), over=found is None)


class Tiny:
    """A family's model with its processor, in a folder as a user has it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.kind = kind = FAMILIES[name]
        calls = [kind.call.format(what) for what in range(30)]
        kind.build(folder, words=[*calls, _THOUGHT], tie_embeddings=False, **kind.sizes)
        self.tokenizer = load_tokenizer(str(folder))
        self.tokenizer.chat_template = kind.template
        self.tokenizer.save_pretrained(folder)
        self.model = load_model(str(folder)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(2)  # so that media, order and position decide the log-probs
        self.media = MediaConfig(max_turn_bytes=1 << 20, video_min_tokens=4) if kind.kinds else None
        self.processor = None if self.media is None else Processor.load(str(folder), self.media)
        self.packing = Packing.of(self.model)
        self.specials = np.array(self.tokenizer.convert_tokens_to_ids(list(SPELT)))
        replays = "num_experts" in kind.sizes or name == "qwen3_omni"
        slots = slot_engine(self.model, num_slots=8, max_length=2600, tells_experts=replays)
        self.engine = EmbeddedEngine(slots, at_once)
        if replays:
            enable_replay(self.model)
        self.alone = self.settings(kind, replays=replays, rows=1 if kind.kinds else 8)
        self.roams = self.settings(kind, replays=replays, rows=8)

    def settings(self, kind: Kind, *, replays: bool, rows: int) -> JobConfig:
        """Of samples of one row, with media in all of its turns, or of so many rows."""
        media = {"max_turn_bytes": 1 << 20 if rows == 1 else 0, "video_min_tokens": 4} if kind.kinds else None
        settings = {
            "name": "played", "num_steps": 1, "model": {"path": "model"}, "media": media, "reward": {"function": "rewards:exact"},
            "data": {"path": "train.jsonl", "prompt": "question", "label": None, "apply_chat_template": True},
            "train": {"router_replay": "r3" if replays else "off", "micro_batch_tokens": 1 << 16},
            "rollout": {
                "prompts_per_step": 1, "samples_per_prompt": SAMPLES, "max_prompt_tokens": 1200, "max_new_tokens": 1400,
                "max_turns": 6, "max_rows": rows, "environment": {"factory": Talks, "tools": (tell,)},
            },
        }  # fmt: skip
        return with_tools(JobConfig.model_validate(settings))

    def prompt(self, row: Row) -> tuple[np.ndarray, MediaInputs | None]:
        messages, args = messages_of(row, self.roams.data), template_args(row, self.roams.data)
        if self.processor is not None:
            made = self.processor.prepare(messages, row.media, **args)
            return made.tokens, made.media
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **args)
        return np.array(self.tokenizer(text)["input_ids"], np.int32), None

    async def look(self, text: str, refs: Sequence[MediaRef], room_bytes: int) -> tuple[np.ndarray, MediaInputs | None]:
        assert self.processor is not None
        made = self.processor.behind(text, refs, room_bytes)
        return made.tokens, made.media


async def at_once(function: Callable[[], Any]) -> Any:
    return function()


async def roam(seed: int, row: Row, client: Client, context: Context) -> None:
    async def play(episode: Episode) -> None:
        await wander(episode, np.random.default_rng([seed, episode.number]))

    await context.each(client, play)


@dataclass(frozen=True)
class Played:
    """Samples of one prompt, with its media, and what the engine was asked for each."""

    config: JobConfig
    made: list[Made]
    media: MediaInputs | None
    said: dict[int, list[Asked]]


async def group(tiny: Tiny, environments: Environments, seed: int) -> Played:
    """With tools and media, or every third time with branches and other contexts."""
    roams = seed % 3 == 1
    _NOW.append(tiny.kind)
    config = tiny.roams if roams else tiny.alone
    refs, content = tuple[MediaRef, ...](), list[dict[str, Any]]()
    if tiny.kind.kinds and seed % 3 == 0:
        refs = (MediaRef("video", [_png(picture(seed + i)) for i in range(4)]), MediaRef("image", _png(picture(seed))))
        content = [{"type": "video"}, {"type": "text", "text": "What?"}, {"type": "image"}]
    row = Row(f"row {seed}", [{"role": "user", "content": content or "Play."}], None, {}, media=refs)
    prompt, media = tiny.prompt(row)
    limits, said = limits_of(config, config.rollout.max_new_tokens), defaultdict[int, list[Asked]](list)
    chat = Chat.of(tiny.tokenizer, row, config.data)
    look = None if tiny.processor is None else tiny.look
    context = Context(row, prompt, media, tiny.tokenizer, range(SAMPLES), limits, chat=chat, look=look)
    ends = (int(tiny.tokenizer.eos_token_id), *range(20))
    params = SamplingParams(limits.max_new_tokens, temperature=TEMPERATURE, stop_token_ids=ends)

    def request(number: int) -> Request:
        return Request(f"g{seed}/{number}", prompt, params, seed=1000 * seed + number, media=media)

    async def ask(asked: Request) -> Completion:
        done = await tiny.engine.generate(asked)
        had = 0 if asked.prefix is None else len(asked.prefix.tokens)
        number = int(asked.id.split("/")[1].split(".")[0])
        said[number].append((asked.sequence, done.tokens[had:], done.log_probs[had:], done.policy_versions[had:]))
        return done

    client = Client(context, request, ask, tiny.engine.cancel)
    workflow = functools.partial(roam, seed) if roams else environments.workflow(tiny.tokenizer)
    made = [each async for some in context.samples(workflow, client) for each in some]
    return Played(config, sorted(made, key=lambda each: each.number), media, said)


def _png(image: Image.Image) -> bytes:
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def gaps(tiny: Tiny, played: Played) -> list[float]:
    """The largest difference between the engine's log-probs and the trainer's in each turn, of rows as they come off the bus."""
    results = [RewardResult(1.0)] * len(played.made)
    found = {each.name: each for each in columns_of(played.config, played.made, results)}

    def rows_of(name: str) -> list[np.ndarray]:
        column = found[name]
        if column.lengths is None:
            return list(column.arrays)
        return np.split(np.concatenate(column.arrays), np.cumsum(column.lengths)[:-1])

    masks, told = rows_of("loss_mask"), rows_of("rollout_log_probs")
    assert all(mask.any() for mask in masks)
    shown = [read(each) for each in rows_of("turn_media")] if "turn_media" in found else [[] for _ in masks]
    experts = rows_of("routed_experts") if "routed_experts" in found else [None for _ in masks]
    rows = [
        Packable(tokens, len(mask), with_turns(played.media, own), routes)
        for tokens, mask, own, routes in zip(rows_of("tokens"), masks, shown, experts, strict=True)
    ]
    with torch.no_grad():
        packed = tiny.packing.pack(rows, train=True)
        flat, _ = response_log_probs(tiny.model, packed, temperature=TEMPERATURE)
    parts = np.split(flat.float().numpy(), np.cumsum([row.response for row in rows])[:-1])
    result = []
    for mine, theirs, mask in zip(parts, told, masks, strict=True):
        cuts = np.flatnonzero(np.diff(mask)) + 1
        turns = zip(np.split(np.abs(mine - theirs), cuts), np.split(mask, cuts), strict=True)
        result += [float(off.max()) for off, own in turns if own.all()]
    return result


def check_spelt(tiny: Tiny, made: Made) -> int:
    """Of a sample: how often something stands that looks like a control token; none of them is one."""
    planted, count = np.array(tiny.tokenizer(PLANTED)["input_ids"]), 0
    for row in made.rows:
        tokens = np.concatenate([row.prompt, row.completion.tokens])
        windows = np.lib.stride_tricks.sliding_window_view(tokens, len(planted))
        for at in np.flatnonzero((windows == planted).all(1)).tolist():
            assert tokens[at - 1] not in tiny.specials
            assert tiny.tokenizer.decode(tokens[:at].tolist()).endswith(SPELT)
            count += 1
    return count


async def measured(name: str, folder: Path, episodes: int, first: int = 0) -> dict[str, float]:
    tiny = Tiny(name, folder)
    counts = defaultdict[str, float](float)
    async with Environments(tiny.alone, load_deadline_s=100) as environments:
        for seed in range(first, first + -(-episodes // SAMPLES)):
            played = await group(tiny, environments, seed)
            for each in played.made:
                rewritten = (
                    tiny.kind.rewrites and played.config is tiny.alone and "must have one row" in str(each.error)
                )
                assert each.error is None or rewritten, each.error
                counts["failed"] += rewritten
                check_trained(each, played.said[each.number])
                counts["spelt"] += check_spelt(tiny, each)
                counts["rows"] += len(each.rows)
                counts["media"] += sum(len(row.shown) for row in each.rows)
                counts["tokens"] += each.num_tokens
            found = gaps(tiny, played)
            counts["turns"] += len(found)
            counts["gap"] = max(counts["gap"], *found)
            counts["episodes"] += len(played.made)
        counts["calls"] = environments.stats()["tell"].steps
    await tiny.engine.close()
    return dict(counts)


@pytest.mark.parametrize("name", FAMILIES if LONG else ("qwen3", "qwen3_omni"))
async def test_what_is_trained_is_what_was_sampled_and_what_the_trainer_computes_in_every_turn(
    name: str, tmp_path: Path
) -> None:
    episodes = strength(quick=8, full=144)  # a thousand over all families
    found = await measured(name, tmp_path, episodes)
    assert found["gap"] < CLOSE and found["episodes"] == episodes
    assert found["calls"] > episodes / 4 and found["spelt"] > episodes / 4 and found["turns"] > 1.5 * episodes
    assert found["rows"] > episodes and found["failed"] < episodes / 4
    assert (found["media"] > episodes / 10) == bool(FAMILIES[name].kinds)


if __name__ == "__main__":
    import sys

    from tests.roles.sampling import test_to_the_token as this  # the one that settings refer to

    for each in sys.argv[2:] or FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            print(each, asyncio.run(this.measured(each, Path(place), int(sys.argv[1]))), flush=True)
