"""What the check sees of teachers: that each is a model of the policy's own tokens, which takes the policy's samples.

Owns which of them are refused, and where their files are. Does not own how tokenizers are compared (`tokenizers.py`) nor what the
teachers' processes hold (`trace.py`).
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rondo.launch.check.tokenizers import PROBE, other_specials, why_different
from rondo.roles.algorithms.teachers import TeacherConfig
from rondo.roles.engines.scoring_servers import ScoringServers
from rondo.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rondo.launch.check.findings import Report
    from rondo.launch.config import RunConfig


_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""In the text of a token that is a part of a character."""


def look_at_teachers(config: RunConfig, folder: Path, report: Report, tokenizers: list[Any]) -> None:
    """`folder` is for those that are built; `tokenizers` has the policy's, or is empty where an error says why."""
    assert config.distillation is not None
    if not tokenizers or report.facts.model_path is None:
        return
    for name, teacher in config.distillation.named().items():
        look = functools.partial(_look_at, config, name, teacher, folder, report, tokenizers[0])
        report.look(look, f"the teacher {name!r}")


def _look_at(config: RunConfig, name: str, teacher: TeacherConfig, folder: Path, report: Report, own: Any) -> None:
    import torch

    from rondo.models.load import check_weights, empty_model, load_config, load_tokenizer, prepare
    from rondo.models.names import disk_shapes

    assert report.facts.model_path is not None
    if teacher.urls:
        asyncio.run(_ask(name, teacher, report, own))
        return
    path = prepare(teacher.model, folder / name) if teacher.model is not None else report.facts.model_path
    model, others = empty_model(path), load_tokenizer(path)
    if teacher.model is not None:
        check_weights(path, model)
    if different := why_different(own, others):
        raise ConfigError(
            f"the tokenizer of the teacher {name!r} must be the policy's, since it judges the policy's own tokens, got "
            f"{different}. Choose a teacher of the policy's family"
        )
    _refuse_other_media(config, name, load_config(report.facts.model_path), model.config)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    assert config.distillation is not None
    seen = max(config.rollout.max_prompt_tokens, config.distillation.max_context_tokens or 0)
    if most is not None and (longest := seen + config.rollout.max_new_tokens) > most:
        raise ConfigError(
            "rollout.max_new_tokens with the longer of rollout.max_prompt_tokens and distillation.max_context_tokens must be at "
            f"most the positions of the teacher {name!r}, {most}, got {longest}. Lower one of them"
        )
    parameters = sum(torch.Size(shape).numel() for shape in disk_shapes(model).values())
    report.facts.teacher_paths[name] = path
    report.facts.teacher_parameters += parameters
    report.add("ok", f"the teacher {name!r} has {parameters:,} parameters and the policy's tokenizer")
    if special := other_specials(own, others):
        report.add(
            "note", f"policy and teacher {name!r} differ in {special}: it may find no end where the policy makes one"
        )


async def _ask(name: str, teacher: TeacherConfig, report: Report, own: Any) -> None:
    """Of servers only what they say is known: here of a text that cuts tokenizers apart."""
    tokens = np.asarray(own(PROBE, add_special_tokens=False)["input_ids"], np.int32)
    async with ScoringServers.of(teacher) as servers:
        told = await servers.texts(tokens)
    for url, texts in told.items():
        for token, text in zip(tokens[1:].tolist(), texts, strict=True):
            mine = own.decode([token])
            if text is not None and _BROKEN not in text + mine and text.strip() != mine.strip():
                raise ConfigError(
                    f"the tokenizer of the teacher {name!r} must be the policy's, since it judges the policy's own tokens, got "
                    f"{text!r} of {url} for the id {token}, which is {mine!r} to the policy. Choose a teacher of the policy's "
                    "family"
                )
    report.add(
        "ok",
        f"the teacher {name!r} at {', '.join(told)} tells of {len(tokens) - 1} tokens, which are the policy's to it",
    )


def _refuse_other_media(config: RunConfig, name: str, policy: Any, teacher: Any) -> None:
    """A teacher sees what the policy's processor made of media, at the places of the policy's placeholders."""
    from rondo.models.families import family_of

    if config.media is None:
        return
    families = [family_of(each) for each in (policy, teacher)]
    seen = [_seen_of(each, family) for each, family in zip((policy, teacher), families, strict=True)]
    if families[0] is not families[1] or seen[0] != seen[1]:
        raise ConfigError(
            f"the teacher {name!r} must take media as the policy does, since it sees what the policy's processor makes of them, "
            f"got {teacher.model_type!r} with {seen[1]} for {policy.model_type!r} with {seen[0]}. Choose a teacher of its family"
        )


def _seen_of(config: Any, family: Any) -> dict[str, Any]:
    """How pictures are cut and sounds are, and what stands for them among the tokens."""
    names = ("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels", "num_mel_bins")
    towers = [getattr(config, tower, None) for tower in ("vision_config", "audio_config")]
    found = {name: getattr(tower, name) for tower in towers for name in names if hasattr(tower, name)}
    places = family.placeholders.values() if family is not None else ()
    return found | {name: getattr(config, name, None) for name in places}
