"""Rewards for instructions that a program can check: those of IFEval and IFBench, by if-verifiable, which has their checkers.

Owns what a row must say, and what holds a checker up: one that takes more than a second of processor time, or raises, says that
its instruction was not followed. Does not own what a checker looks at.

    ifeval("yes", None, prompt="...", metadata={"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]})
    ->   {"score": 1.0, "followed": {"punctuation:no_comma": True}}

Invariant: a response scores the same each time; what the original draws by chance, where a row leaves it out, is refused.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Any

from rondo.roles.rewards.hub.named import named
from rondo.roles.rewards.hub.processor_time import TookTooLong, at_most
from rondo.roles.rewards.scores import RewardError
from rondo.runtime.errors import ConfigError

_EXTRA = "pip install 'rondo-rl[instructions]'"
_PROCESSOR_S = 1.0
"""Of one instruction."""
_DATA = {
    "punkt_tab": "tokenizers/punkt_tab",
    "punkt": "tokenizers/punkt",
    "stopwords": "corpora/stopwords",
    "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng",
}
"""Of nltk; IFEval goes by the first alone."""

try:
    import nltk
    from if_verifiable.common import get_loose_transformations
    from langdetect import DetectorFactory, detector_factory
except ModuleNotFoundError as error:
    raise ConfigError(
        f"if-verifiable must be installed for the rewards ifeval and ifbench, got no such package. Run: {_EXTRA}"
    ) from error

DetectorFactory.seed = 0  # else it says another language of a short text each time
detector_factory.init_factory()  # the languages that it knows, in most of a second, which no answer is to be charged with
# Its checkers tell the root logger the whole of each response that is in no language.
logging.getLogger().addFilter(lambda record: not str(record.msg).startswith("Unable to detect language"))


@named
def ifeval(
    response: str, label: Any, *, prompt: Any, metadata: Any, every: bool = True, loose: bool = False
) -> dict[str, Any]:
    """1 where every instruction of the row is followed, or, without `every`, the part that is (Zhou et al. 2023). `loose`: in the
    response, or in it without its first line, its last, or its asterisks. The row is `google/IFEval`'s: `instruction_id_list` and
    `kwargs` in its metadata."""
    return _scored("ifeval", response, prompt, metadata, every, loose)


@named
def ifbench(
    response: str, label: Any, *, prompt: Any, metadata: Any, every: bool = True, loose: bool = False
) -> dict[str, Any]:
    """As `ifeval`, of `allenai/IFBench_test` (Pyatkin et al. 2025)."""
    return _scored("ifbench", response, prompt, metadata, every, loose)


def _scored(name: str, response: str, prompt: Any, metadata: Any, every: bool, loose: bool) -> dict[str, Any]:
    names = (metadata or {}).get("instruction_id_list")
    settings = (metadata or {}).get("kwargs") or [{}] * len(names or ())
    if not names or len(settings) != len(names):
        raise RewardError(
            f"a row of {name} must have instruction_id_list and as many kwargs in its metadata, got {names!r:.80}. Add them "
            "with data.metadata_key"
        )
    forms = get_loose_transformations(response) if loose else [response]
    forms = [each for each in dict.fromkeys(forms) if each.strip()]
    followed: dict[str, bool] = {}
    for each, own in zip(names, settings, strict=True):
        checker = _built(name, each, own or {}, prompt)
        followed[each] = followed.get(each, True) and any(_follows(checker, form) for form in forms)
    score = all(followed.values()) if every else sum(followed.values()) / len(followed)
    return {"score": float(score), "followed": followed}


def _built(name: str, instruction: str, settings: Mapping[str, Any], prompt: Any) -> Any:
    found = _checkers(name).get(instruction)
    if found is None:
        raise RewardError(f"a row of {name} must name instructions of its own, got {instruction!r}. Correct it")
    checker = found(instruction)
    # A table of rows has every column in each, and numbers with a point where some are missing.
    own = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in settings.items()
    }
    own = {key: value for key, value in own.items() if value is not None}
    checker.build_description(**own)
    asked = checker.get_instruction_args_keys()
    if "prompt" in asked:
        checker.build_description(prompt=prompt)
    elif missing := [key for key in asked if key not in own]:
        raise RewardError(
            f"kwargs of {instruction} must have {', '.join(missing)}, got {sorted(own)}. Add what is missing"
        )
    return checker


def _follows(checker: Any, response: str) -> bool:
    try:
        with at_most(_PROCESSOR_S):
            return bool(checker.check_following(response))
    except (Exception, TookTooLong):  # noqa: BLE001 - they expect answers that make sense
        return False


@functools.cache
def _checkers(name: str) -> Mapping[str, Any]:
    """By instruction. Without its data the package would ask the network for it."""
    for data in list(_DATA)[: 1 if name == "ifeval" else None]:
        try:
            nltk.data.find(_DATA[data])
        except LookupError as error:
            needed = "punkt_tab" if name == "ifeval" else " ".join(_DATA)
            raise ConfigError(
                f"nltk's {data} must be there for the reward {name}, got none in {', '.join(nltk.data.path[:2])} and others. "
                f"Run: python -m nltk.downloader {needed}, and name their folder in NLTK_DATA"
            ) from error
    found: Mapping[str, Any] = importlib.import_module(f"if_verifiable.{name}.instructions_registry").INSTRUCTION_DICT
    return found
