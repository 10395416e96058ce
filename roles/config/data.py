"""Settings of prompts, held-out prompts and rewards.

Owns where rows come from and how they are judged. Does not own what is generated for them (`rollout.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from rondo.models.media.refs import Kind
from rondo.roles.data.cursor import SHARE_OF
from rondo.roles.data.sources import MADE
from rondo.roles.engines import ranges
from rondo.roles.rewards import hub
from rondo.runtime.section import FREE, FunctionRef, Section, fixed, nearest

NewTokens = Annotated[int, AfterValidator(ranges.NEW_TOKENS.check)]
Temperature = Annotated[float, AfterValidator(ranges.TEMPERATURE.check)]
TopP = Annotated[float, AfterValidator(ranges.TOP_P.check)]
TopK = Annotated[int, AfterValidator(ranges.TOP_K.check)]
RowKind = Literal["text", "image", "audio", "video", "mixed"]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MOST_SOURCES = 255


class CurriculumConfig(Section):
    """Prompts that the policy has solved, or has not come near, rest for a while: a row is judged by the pass rate of its last
    prompt group, the part of its samples that pass."""

    place = "data.curriculum"
    rest_steps: int = Field(20, ge=1)
    """A row that is judged so rests for so many steps; its turns go to the next row of its source."""
    solved: float | None = Field(1.0, gt=0, le=1)
    """Pass rate from which a row rests as solved; None for none."""
    hopeless: float | None = Field(0.0, ge=0, lt=1)
    """Pass rate up to which it rests as hopeless; None for none."""
    solved_from: float = 1.0
    """A sample with at least this reward passes."""

    def refused(self) -> Iterator[str]:
        if self.solved is None and self.hopeless is None:
            yield "curriculum.solved or curriculum.hopeless must be set, got neither. Set one, or remove data.curriculum"
        elif self.solved is not None and self.hopeless is not None and self.hopeless >= self.solved:
            yield (
                f"curriculum.hopeless must be below curriculum.solved, {self.solved:g}, got {self.hopeless:g}. Lower it, or "
                "every row rests"
            )


OF_ORDER = fixed("its position in the data counts in the order that follows from it")


class SourceConfig(Section):
    """One of several sources of `data`. What is None is as in data."""

    place = "data.sources"
    OF_ROWS: ClassVar = (
        "path", "args", "rows", "transform", "filter", "limit", "prompt", "label", "metadata", "tools", "message_keys",
        "message_roles", "media_columns", "use_audio_in_video", "system",
    )  # fmt: skip
    """Settings that take the place of data's."""
    weight: Annotated[Share | None, OF_ORDER] = None
    """Its share of the rows that are taken, of the sum over all sources: each then goes through passes of its own. None, for all
    sources alike: each row of all sources comes once in a pass."""
    path: str | None = None
    """Files, a folder, a glob, or a data set of the hub, of reasoning-gym or of TextArena."""
    args: dict[str, Any] | None = None
    """What its data set of reasoning-gym, or its game, is made with."""
    rows: FunctionRef | None = None
    """Or a function without arguments that returns the rows."""
    transform: FunctionRef | None = None
    """A function from all of its rows to those to use."""
    filter: FunctionRef | None = None
    """A function that says of each of its rows whether it is used."""
    limit: int | None = Field(None, ge=1)
    """Only its first rows."""
    prompt: str | None = None
    """Its column with the prompt."""
    label: str | None = None
    """Its column with the label."""
    metadata: str | None = None
    """Its column with metadata."""
    tools: str | None = None
    """Its column with tools."""
    message_keys: dict[str, str] | None = None
    """Keys of its messages -> those of chat messages."""
    message_roles: dict[str, str] | None = None
    """Roles of its messages -> those of the chat template."""
    media_columns: dict[Kind, str] | None = None
    """Image, audio or video -> its column with them."""
    use_audio_in_video: str | None = None
    """Its column that says whether videos bring their sound along."""
    system: str | None = None
    """Text of the system message in front of its prompts."""
    reward: str | None = None
    """Which of several `reward.function` its rows have: put into their metadata, under `reward.by`."""
    teacher: str | None = None
    """Which of `distillation.teachers` its rows have: put into their metadata, under `distillation.source`."""
    max_new_tokens: NewTokens | None = None
    """Of its samples in training, at most those of rollout. The temperature is one for all, at which log-probs are trained."""
    top_p: TopP | None = None
    """Of its samples in training."""
    top_k: TopK | None = None
    """Of its samples in training."""

    def refused(self) -> Iterator[str]:
        if (self.path is None) == (self.rows is None):
            yield (
                "a source of data.sources must have a path or rows, one without the other, got "
                f"{'both' if self.path is not None else 'neither'}. Set one"
            )


class DataConfig(Section):
    """Where prompts come from, and in which order they are taken."""

    place = "data"
    OF_PROMPTS: ClassVar = (
        "apply_chat_template", "chat_template_args", "message_keys", "message_roles", "system", "too_long",
    )  # fmt: skip
    """Settings that say how a prompt is written, wherever it comes from."""

    path: str | None = None
    """A .jsonl, .json, .csv, .parquet or .arrow file, also a compressed one ('train.jsonl.gz'), a glob or folder of such files, a
    folder of datasets' save_to_disk, a data set of the hub ('hub:name/split') or of reasoning-gym ('gym:name'), or a game of
    TextArena ('textarena:name'). With '@[a:b]' behind it only rows a to b, as Python slices."""
    args: dict[str, Any] = Field(default_factory=dict)
    """What a data set of reasoning-gym is made with: fields of its configuration, `size` (10,000) and `seed` (0) among them, and
    the `level` of its curriculum; of a game `size` and `seed` alone (docs/environments.md)."""
    rows: FunctionRef | None = None
    """Or a function without arguments that returns the rows: a list or any iterable of dicts."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Or several sources by names of yours, mixed by their weights; metrics tell reward and length of each."""
    transform: FunctionRef | None = None
    """A function from all rows as they lie (an iterable of dicts) to the rows to use; its result is kept in memory."""
    filter: FunctionRef | None = None
    """A function that says of each row, as it lies (a dict), before its turn comes, whether it is used: True, False, or text that
    says why not. Reasons are counted."""
    curriculum: CurriculumConfig | None = None
    """Prompts that are solved or hopeless rest for a while."""
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (with `apply_chat_template`)."""
    message_keys: dict[str, str] = Field(default_factory=dict)
    """Keys of the rows' messages -> those of chat messages, where they differ: {"from": "role", "value": "content"} for
    ShareGPT."""
    message_roles: dict[str, str] = Field(default_factory=lambda: {"human": "user", "gpt": "assistant"})
    """Roles of the rows' messages -> those of the chat template; others stay as they are."""
    tools: str | None = None
    """Column with the tools that the chat template shows: a list of function schemas, or its JSON; null for none."""
    system: str | None = None
    """Text of a system message in front of every prompt that has none."""
    label: str | None = "label"
    """Column that the reward function gets as `label`; None for data without one."""
    rejected: str | None = None
    """Of pairs (`dpo`): column with the worse answer, where `label` names that with the better."""
    margin: str | None = None
    """Of pairs for a reward model: column with how far apart the rewards of a pair are to be, at least 0."""
    metadata: str | None = None
    """Column with a dict that the reward function gets as `metadata`; it gets other columns by their names."""
    media_columns: dict[Kind, str] = Field(default_factory=dict)
    """Image, audio or video -> column with one or a list of them: path, URL, data URI, bytes, or Hugging Face's Image and
    Audio. They take the places of <image>, <audio> and <video> in the prompt; of text without these, the beginning."""
    use_audio_in_video: str | None = None
    """Column that says of each row whether its videos bring their sound along; without it `media.use_audio_in_video` does."""
    apply_chat_template: bool = False
    """Prompts go through the tokenizer's chat template; without, they are text as it lies."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the tokenizer's chat template, such as {"enable_thinking": False}. With {"continue_final_message":
    True} a prompt that ends with a message of the assistant is continued from there; without, such a prompt is refused."""
    too_long: Literal["drop", "error", "truncate"] = "drop"
    """What becomes of a row whose tokens are beyond the limit: it is left out, it ends the run, or the beginning of its prompt is
    cut off. A prompt with media is never cut, but left out."""
    max_bad_rows: float = Field(0.01, ge=0, le=1)
    """At most this share of the rows may be unusable: not readable, without a column that is named here, or with a value of
    another kind. They are left out. With more the run is refused."""
    shuffle: Annotated[bool, OF_ORDER] = True
    """Rows are taken in an order drawn anew for each pass; without, as they lie."""
    balance: Annotated[Literal["natural"] | dict[RowKind, Share] | None, OF_ORDER] = None
    """So mixes rows of text, image, audio, video, and of several of these ("mixed"), that every step holds them in these shares,
    or in those of the data ("natural"). Where a kind has no more rows in a pass, the others fill its places."""
    num_passes: Annotated[int | None, FREE] = Field(None, ge=1)
    """A run with rollouts ends after so many passes over the rows, or after num_steps, whichever comes first."""
    limit: int | None = Field(None, ge=1)
    """Only the first rows, before anything is held out."""
    held_out: Annotated[int, OF_ORDER] = Field(0, ge=0)
    """So many rows, drawn with the run's seed, are never trained on; evaluation takes them."""

    def refused(self) -> Iterator[str]:
        if self.sources:
            yield from self._mixture_refused()
        elif (self.path is None) == (self.rows is None):
            both = self.path is not None
            yield (
                f"data.path and data.rows must be set one without the other, got {'both' if both else 'neither'}. "
                + ("Remove one" if both else "Set data.path to a file, or data.rows to a function")
            )
        given = {"data": (self.path, self.args)}
        given |= {f"data.sources.{name}": (each.path, each.args or {}) for name, each in self.sources.items()}
        for at, (path, args) in given.items():
            if args and not (path or "").startswith(MADE):
                yield (
                    f"{at}.args must come with a path 'gym:NAME' or 'textarena:NAME', for whose rows they are, got {args}. "
                    f"Set {at}.path, or remove them"
                )
        for name in ("chat_template_args", "message_keys", "tools", "system"):
            if getattr(self, name) and not self.apply_chat_template:
                yield (
                    f"data.{name} must not be set without data.apply_chat_template, got {getattr(self, name)!r}. "
                    "Set data.apply_chat_template to True, or remove it"
                )
        if self.media_columns and not self.apply_chat_template:
            yield (
                "data.apply_chat_template must be True with data.media_columns, whose places in the prompt the template of the "
                f"model makes, got False with {', '.join(self.media_columns)}. Set it to True"
            )
        if self.limit is not None and self.held_out >= self.limit:
            yield (
                f"data.held_out must leave rows to train on, got {self.held_out} of data.limit {self.limit}. "
                "Lower data.held_out or raise data.limit"
            )

    def _mixture_refused(self) -> Iterator[str]:
        for name in ("path", "rows", "transform", "limit"):
            if (given := getattr(self, name)) is not None:
                yield f"data.{name} must be None with data.sources, which have their own, got {given!r}. Set it in a source"
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name in get_args(RowKind):
                yield (
                    "data.sources must have names of letters, digits, _ and -, and none of a kind of rows "
                    f"({', '.join(get_args(RowKind))}), got {name!r}. Rename the source"
                )
        if len(self.sources) > MOST_SOURCES:
            yield f"data.sources must be at most {MOST_SOURCES}, got {len(self.sources)}. Let one path name several files"
        bare = [name for name, each in self.sources.items() if each.weight is None]
        if bare and len(bare) < len(self.sources):
            yield f"data.sources must all have a weight, or none, got none of {', '.join(bare)}. Set it"
        elif not bare:
            weights = {name: each.weight or 0.0 for name, each in self.sources.items()}
            least = sum(weights.values()) / SHARE_OF
            if light := [name for name, weight in weights.items() if weight < least]:
                yield (
                    f"data.sources.{light[0]}.weight must be at least 1/{SHARE_OF} of all weights, {least:g}, got "
                    f"{weights[light[0]]:g}. Raise it, or remove the source"
                )
            for name in ("balance", "num_passes"):
                if (given := getattr(self, name)) is not None:
                    yield (
                        f"data.{name} must be None with weights of data.sources, by which each has passes of its own, got "
                        f"{given!r}. Remove it, or the weights"
                    )
        systems = [name for name, each in self.sources.items() if each.system is not None]
        if systems and not self.apply_chat_template:
            yield (
                f"data.apply_chat_template must be True with data.sources.{systems[0]}.system, a message, got False. Set it"
            )

    @property
    def filters(self) -> bool:
        """Whether any of the rows have a filter."""
        return bool(self.filter or any(source.filter for source in self.sources.values()))

    @property
    def leaves_out(self) -> bool:
        """Whether rows are looked at before they are admitted, since some are left out."""
        return self.filters or self.curriculum is not None

    def of(self, source: str) -> DataConfig:
        """The settings of the rows of one of the sources; these where there are none."""
        if not self.sources:
            return self
        own = self.sources[source]
        given = {name: getattr(own, name) for name in own.OF_ROWS if getattr(own, name) is not None}
        return self.model_copy(update=given | {"sources": {}, "balance": None, "curriculum": None, "held_out": 0})


def _by_name(function: object) -> object:
    """A name of the hub as its reference; a function or a reference as it is."""
    if not isinstance(function, str) or ":" in function:
        return function
    if function not in hub.__all__:
        raise ValueError(
            f"must be a function, its reference 'module:function', or a reward with a name, got {function!r}. "
            + nearest(function, hub.__all__)
        )
    return f"{hub.__name__}:{function}"


Reward = Annotated[FunctionRef, BeforeValidator(_by_name)]
"""A reward function: one of the hub's by its name, or the user's."""


class EvalSet(Section):
    """Prompts to measure the policy on, and how they are sampled. What is None is taken from the rollout section."""

    place = "evaluation"
    num_prompts: int = Field(256, ge=1)
    """At most so many prompts are measured, the first of the set."""
    data: DataConfig | None = None
    """Prompts of their own; without it the rows that `data.held_out` keeps back."""
    samples_per_prompt: int = Field(1, ge=1)
    """Answers to each prompt."""
    temperature: Temperature = 1.0
    """0 takes the most probable token."""
    top_p: TopP | None = None
    """Nucleus to sample from."""
    top_k: TopK | None = None
    """Most probable tokens to sample from; -1 is all."""
    max_new_tokens: NewTokens | None = None
    """Longest answer."""
    reward: Reward | None = None
    """What scores its samples, in the place of `reward.function`: a function, or one of the hub's by its name."""
    solved_from: float = 1.0
    """A sample with at least this reward solves its prompt; pass@k counts these."""
    pass_at: tuple[int, ...] | None = None
    """The k of pass@k: how probable it is that one of k samples solves the prompt. None: 1, 2, 4, ... samples_per_prompt."""

    def refused(self) -> Iterator[str]:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            yield (
                "evaluation.samples_per_prompt must be 1 with evaluation.temperature 0, where all samples are equal, "
                f"got {self.samples_per_prompt}. Raise the temperature or take one sample"
            )
        beyond = [k for k in self.pass_at or () if not 1 <= k <= self.samples_per_prompt]
        if beyond:
            yield (
                f"evaluation.pass_at must hold numbers from 1 to evaluation.samples_per_prompt, {self.samples_per_prompt}, "
                f"got {beyond[0]}. Take more samples, or remove it"
            )
        if self.data is not None and self.data.held_out:
            yield (
                "evaluation.data.held_out must be 0, since all of these rows are for evaluation, "
                f"got {self.data.held_out}. Remove it"
            )

    @property
    def ks(self) -> tuple[int, ...]:
        """The k that are reported: those named, else the powers of two up to the samples, and these."""
        if self.pass_at is not None:
            return self.pass_at
        powers = (1 << i for i in range(self.samples_per_prompt.bit_length()))
        return tuple(dict.fromkeys((*powers, self.samples_per_prompt)))

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what is reported."""
        return (f"mean@{self.samples_per_prompt}", *(f"pass@{k}" for k in self.ks))


class EvalConfig(EvalSet):
    """When and how the policy is measured, by the reward function, on prompts that it is not trained on: one set of them, or
    several with names."""

    at_start: bool = True
    """Measures the policy before the first step."""
    at_end: bool = True
    """Measures the policy after the last step."""
    every: int | None = Field(None, ge=1)
    """Measures the version that every so many steps make, beside the training and never under any other version's weights.
    The first replica measures: it holds a second copy of the model, and the slab one more slot, for it. With SGLang too that is
    the embedded engine: servers have one version for all their requests."""
    share: float = Field(0.25, gt=0, le=1)
    """Of the engine's time that this may take while there are training samples to generate."""
    num_slots: int = Field(16, ge=4)
    """Sequences that are decoded at once beside the training."""
    sets: dict[str, EvalSet] = Field(default_factory=dict)
    """Name -> prompts and sampling of their own, in the place of the fields above."""

    def refused(self) -> Iterator[str]:
        yield from super().refused()
        if not (self.at_start or self.at_end or self.every):
            yield (
                "evaluation.at_start or evaluation.at_end must be True, or evaluation.every be set, got none of them. "
                "Set one, or remove the evaluation section"
            )
        for name, value in self.changed(*EvalSet.model_fields).items() if self.sets else ():
            yield (
                f"evaluation.{name} must not be set beside evaluation.sets, which have their own, "
                f"got {value!r}. Set evaluation.sets.NAME.{name}"
            )
        for name in self.sets:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                yield f"evaluation.sets must have names of letters, digits, _ and -, got {name!r}. Rename the set"
        for name, value in self.changed("share", "num_slots").items() if self.every is None else ():
            yield (
                f"evaluation.{name} must not be set without evaluation.every, for which it counts, "
                f"got {value}. Set evaluation.every, or remove it"
            )

    def named_sets(self) -> dict[str, EvalSet]:
        """Name -> set; the only one is called "held_out" where it has no name."""
        return self.sets or {"held_out": self}


NO_REWARD = "rondo.roles.rewards.function:no_reward"


class RewardConfig(Section):
    """The reward function and the processes that run it."""

    function: Annotated[
        Annotated[Reward, Tag("one")] | Annotated[dict[str, Reward], Tag("several")],
        Discriminator(lambda given: "several" if isinstance(given, dict) else "one"),
    ]
    """One of the hub's by its name (docs/rewards.md has them), or a function of your own. Several, by names of yours, are
    components that `components` weighs; with `by` each row has one of them.

    `def reward(response: str, label, *, prompt, metadata) -> float | dict`; a dict holds "score" and what to log. It gets what it
    has parameters for: columns of the data, `finish_reason`, `num_tokens`, `max_new_tokens`, `turns` and `transcript` too. An
    `async def` is awaited in the rollout process, for all responses beside each other."""
    per: Literal["response", "group"] = "response"
    """'group': the function is given a list of the responses of a whole prompt group, and lists of what it asks for, and returns
    a list of as many scores. What fails there fails for all of them."""
    by: str | None = None
    """What in a row's metadata, or which of its columns, names its function; "*" is the name of that of all other rows."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of the functions, by name: each is given those that it has."""
    components: dict[str, float] = Field(default_factory=dict)
    """Numbers that the dict holds, with their weights: without a "score" their weighted sum is it. `algorithm.name` 'gdpo'
    compares each of them by itself."""
    overlong_tokens: int | None = Field(None, ge=1)
    """So many tokens in front of `rollout.max_new_tokens` a reward in training begins to fall, evenly, by `overlong_penalty` at
    the limit (DAPO's soft overlong punishment)."""
    overlong_penalty: float = Field(1.0, gt=0)
    """What a response at the limit loses of its reward."""
    postprocess: FunctionRef | None = None
    """`def postprocess(rewards, samples)`: what advantages are made of in the place of the rewards, one number for each; metrics
    and filters keep these."""
    postprocess_per: Literal["group", "step"] = "group"
    """'step': it is given the samples of a whole step at once, whose training waits for the last of them."""
    num_workers: Annotated[int, FREE] = Field(1, ge=1)
    """Processes for each rollout replica."""
    deadline_s: float = Field(10.0, gt=0)
    """What one call may take; then its process is killed and its sample has no reward, as where the function raises."""
    max_failures: int = Field(2, ge=1)
    """How often a prompt group is given out again whose row cannot be used; one more failure puts it into quarantine."""

    def refused(self) -> Iterator[str]:
        if isinstance(self.function, str):
            if self.by is not None:
                yield f"reward.by must choose among several reward.function by name, got one and {self.by!r}. Remove it"
        elif not self.function or "score" in self.function:
            yield f"reward.function must have functions by names other than 'score', got {list(self.function)}. Name them"
        elif self.by is None and self.function.keys() != self.components.keys():
            yield (
                "reward.components must weigh each of reward.function, "
                f"{', '.join(self.function)}, got weights of {', '.join(self.components) or 'none'}. "
                "A weight of 0 writes down what counts for nothing; or set reward.by"
            )
        for name in ("retry_s", "total_s"):
            if isinstance(own := self.args.get(name), int | float) and own >= self.deadline_s:
                yield (
                    f"reward.deadline_s must be longer than reward.args {name}, since what reaches it has no reward, got "
                    f"{self.deadline_s:g} and {own:g}. Raise it"
                )
        if self.postprocess is None and self.postprocess_per != "group":
            yield (
                "reward.postprocess must be set with reward.postprocess_per, got only postprocess_per "
                f"{self.postprocess_per!r}. Set both"
            )
        if self.overlong_tokens is None and self.overlong_penalty != 1:
            yield (
                "reward.overlong_tokens must be set with reward.overlong_penalty, got only overlong_penalty "
                f"{self.overlong_penalty:g}. Set both"
            )

    def overlong(self, num_tokens: int, max_new_tokens: int) -> float:
        """What a response of so many tokens loses of its reward: DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13)."""
        if self.overlong_tokens is None:
            return 0.0
        over = num_tokens - (max_new_tokens - self.overlong_tokens)
        return self.overlong_penalty * min(1.0, max(0.0, over / self.overlong_tokens))
