"""Settings of models whose word is part of a reward: the judge (a generative reward model), with what it is asked and how its
text becomes a reward, and the scorer (a reward model), which answers with a number.

Owns which of these contradict each other. Does not own the roles that serve them (`roles/genrm.py`, `roles/scorer.py`), who asks
them (`roles/rewards/`), or how texts are made and read (`roles/rewards/verdicts.py`). Imports no torch.

    GenrmConfig(model=ModelConfig(path="Qwen/Qwen3-8B"), prompt="Is {response} right for {prompt}? Answer yes or no.")
    GenrmConfig(urls=("http://10.0.0.7:8000",), template=as_messages, tag="score", bounds=(0, 10), weight=0.1)
    ScorerConfig(model=ModelConfig(path="runs/reward_model/checkpoints/step_000120/hf"))
"""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter
from typing import Any, Literal

from pydantic import Field

from rondo.models.config import ModelConfig
from rondo.roles.config.data import NewTokens, Temperature, TopP
from rondo.roles.config.rollout import SGLangConfig
from rondo.runtime.section import FunctionRef, Section

Per = Literal["response", "group", "pair"]
PLACES: dict[Per, tuple[str, ...]] = {"response": ("response",), "group": ("responses",), "pair": ("first", "second")}
"""What a prompt is given of responses, beside `prompt`, `label` and `metadata`."""
SCORE = "genrm"
"""The judge's score among the details of a reward, and the component of a judge that has no others."""
SCORER = "scorer"
"""The scorer's, of both."""
_OF_A_SERVER = {"python", "tensor_parallel", "arguments", "environment", "start_deadline_s", "silent_deadline_s"}
"""Of `rollout.sglang`, what a server has whose weights never change."""


class JudgeConfig(Section):
    """A model whose word on responses is part of their reward."""

    model: ModelConfig | None = None
    """Its weights never change. The role of its section's name serves it."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of its chat template, such as {"enable_thinking": False}."""
    weight: float = 1.0
    """So many times its score is added to what `reward.function` returns."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Of its own tokens: a judge's question, with the prompt and the responses in it; of a scorer a prompt and its response, and
    as many of them go through it at once as have no more tokens together."""
    num_calls: int = Field(64, ge=1)
    """Questions that are asked at a time, by each rollout process; further ones wait."""
    call_deadline_s: float = Field(120.0, gt=0)
    """What one call may take."""
    deadline_s: float = Field(600.0, gt=0)
    """Servers that fail, or are not there, are asked again for so long; then the responses have no reward."""

    @property
    def longest_s(self) -> float:
        """What a verdict may take, once it is being asked for."""
        return self.deadline_s


class ScorerConfig(JudgeConfig):
    """A reward model, for sequence classification with one label: the number that it gives a response is part of the reward."""

    place = "scorer"
    model: ModelConfig
    """Its weights never change. The role `scorer` serves it."""
    too_long: Literal["fail", "cut"] = "fail"
    """What becomes of a response that is longer with its prompt than `max_prompt_tokens`: it has no reward, or the first tokens
    are left out."""


class GenrmConfig(JudgeConfig):
    """A model that is asked of each response, of a whole prompt group or of pairs of it; its answer is part of the reward."""

    place = "genrm"
    model: ModelConfig | None = None
    """Its weights never change. The role `genrm` serves it, by the embedded engine or by SGLang (`sglang`)."""
    sglang: SGLangConfig | None = None
    """Each process of the role starts such a server of `model`; its `python` is needed."""
    urls: tuple[str, ...] = ()
    """Or equal servers that run already and speak as OpenAI ("http://10.0.0.7:8000", with /v1/chat/completions behind it)."""
    served_model: str | None = None
    """What the servers call the model; None: the first one that they serve."""
    api_key_file: str | None = None
    """A file with the bearer key of `urls`."""
    per: Per = "response"
    """What one question is about. 'group': all responses of a prompt group; its answer has a number for each. 'pair': two of
    them; its answer says how much better the first is, 0 to 1, and a response gets the mean of its pairs."""
    prompt: str | None = None
    """The question as text, with places {prompt}, {label}, {metadata}, {response} and {transcript}, all turns of a sample; per
    group {responses}, which numbers them; per pair {first} and {second}. A brace is written twice."""
    template: FunctionRef | None = None
    """Or `def template(response, label, *, prompt, metadata) -> str | list[dict]`: text or chat messages, which may hold images
    where the judge takes them. Per group and per pair it is given a list of responses. It may have parameters as a reward has."""
    system: str | None = None
    """Text of a system message in front of a question that has none."""
    choices: dict[str, float] = Field(default_factory=dict)
    """Words and what each is worth; the last of them in the answer counts, in any case but for single letters. Without `tag` and
    `parse`: {"yes": 1, "no": 0}, of pairs {"A": 1, "B": 0}."""
    tag: str | None = Field(None, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    """Or the number in the last <tag>7</tag>; per group as many numbers, in one such place or in as many."""
    bounds: tuple[float, float] | None = None
    """With `tag`: a number outside of these is no verdict."""
    parse: FunctionRef | None = None
    """Or `def parse(text) -> float | dict`, a dict as reward functions return; per group a list of them. None, or an error, is
    no verdict."""
    components: dict[str, float] = Field(default_factory=dict)
    """Of dicts that `parse` returns, as `reward.components`."""
    temperature: Temperature = 0.1
    """Of the verdicts' sampling."""
    top_p: TopP = 1.0
    """Nucleus that verdicts are sampled from."""
    max_new_tokens: NewTokens = 4096
    """Of its answer, with what it thinks before."""
    num_slots: int = Field(32, ge=1)
    """Answers that one engine or server of the role decodes at once."""
    retries: int = Field(2, ge=0)
    """How often a question is asked again whose answer has no verdict; then its responses have no reward, as where a reward
    function fails."""

    @property
    def longest_s(self) -> float:
        return (1 + self.retries) * self.deadline_s

    @property
    def words(self) -> dict[str, float]:
        """`choices`, or what they are where nothing is set."""
        if self.choices or self.tag is not None or self.parse is not None:
            return self.choices
        return {"A": 1.0, "B": 0.0} if self.per == "pair" else {"yes": 1.0, "no": 0.0}

    def refused(self) -> Iterator[str]:
        for names in (("model", "urls"), ("prompt", "template")):
            given = [name for name in names if getattr(self, name)]
            if len(given) != 1:
                one, other = (f"genrm.{name}" for name in names)
                yield f"exactly one of {one} and {other} must be set, got {'both' if given else 'neither'}. Set one of them"
        given = [name for name in ("choices", "tag", "parse") if getattr(self, name)]
        if len(given) > 1:
            yield f"at most one of genrm.choices, genrm.tag and genrm.parse must be set, got {' and '.join(given)}. Keep one"
        if any("@" in url.partition("://")[2].partition("/")[0] for url in self.urls):
            yield (
                "genrm.urls must hold no password, since settings are saved and shown, got one before an @. Put a key into the "
                "file of genrm.api_key_file"
            )
        has, names = ("with", ("sglang", "num_slots")) if self.urls else ("without", ("served_model", "api_key_file"))
        for name, value in self.changed(*names).items():
            yield f"genrm.{name} must be left out {has} genrm.urls, got {value!r:.80}. Remove it"
        if self.sglang is not None and (others := sorted(self.sglang.model_fields_set - _OF_A_SERVER)):
            yield (
                f"genrm.sglang must set nothing but {', '.join(sorted(_OF_A_SERVER))}, since the judge's weights never change "
                f"and each process has one server, got {', '.join(others)}. Remove it"
            )
        yield from self._places_are_there()
        yield from self._verdicts_fit()

    def _places_are_there(self) -> Iterator[str]:
        if self.prompt is None:
            return
        known = {"prompt", "label", "metadata", *PLACES[self.per], *(["transcript"] if self.per == "response" else [])}
        try:
            used = {
                field.partition(".")[0].partition("[")[0]
                for _, field, _, _ in Formatter().parse(self.prompt)
                if field is not None
            }
        except ValueError as error:
            yield f"genrm.prompt must be a format, got {error}. Write a brace that is text twice"
            return
        if unknown := sorted(used - known):
            yield (
                f"genrm.prompt must name none but the places {', '.join(sorted(known))} of genrm.per {self.per!r}, got "
                f"{{{unknown[0]}}}. Correct it, or write a brace that is text twice"
            )
        elif missing := [name for name in PLACES[self.per] if name not in used and "transcript" not in used]:
            yield f"genrm.prompt must have the place {{{missing[0]}}} with genrm.per {self.per!r}, got none. Add it"

    def _verdicts_fit(self) -> Iterator[str]:
        if self.bounds is not None and (self.tag is None or self.bounds[0] >= self.bounds[1]):
            yield f"genrm.bounds must be two rising numbers, with genrm.tag, got {self.bounds}. Correct it, or remove it"
        if self.components and self.parse is None:
            yield (
                "genrm.components must come with genrm.parse, which returns dicts, got "
                f"{', '.join(self.components)} without it. Remove them"
            )
        if self.per == "group" and self.words:
            yield (
                "genrm.tag or genrm.parse must be set with genrm.per 'group', whose answers have a number for each response, got "
                "neither. Set one"
            )
        if self.per == "pair" and self.components:
            yield "genrm.components must be empty with genrm.per 'pair', whose answers are one number, got some. Remove them"
        if self.per == "pair" and self.words and not all(0 <= value <= 1 for value in self.words.values()):
            yield f"genrm.choices must be worth 0 to 1 with genrm.per 'pair', the first's part, got {self.choices}. Change them"
        if self.per == "pair" and self.tag is not None and self.bounds != (0, 1):
            yield f"genrm.bounds must be (0, 1) with genrm.per 'pair' and genrm.tag, the first's part, got {self.bounds}. Set it"
