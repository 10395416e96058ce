"""What a server of SGLang takes of a device, apart from the trainer and in turn with it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.check.child import look_at_frozen
from rondo.launch.check.engines import ON_DEVICE, Server, at_rest, moments, no_room
from rondo.launch.check.findings import Report
from rondo.launch.check.target import judge_devices
from rondo.launch.config import RunConfig
from rondo.launch.groups import RoleGroup
from rondo.models.config import LoraConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import SGLangConfig
from rondo.runtime.errors import ConfigError
from tests.launch.check.test_target import FACTS, GIB, SHAPE, TRACED, config_of
from tests.models import multimodal
from tests.models.builders import tiny

BIG = replace(SHAPE, decoder_parameters=GIB, encoder_parameters=0, keys=1024, num_caching=32, adapters=32 << 20)
TURNS = RoleGroup(name="actor", roles=("rollout", "actor", "advantages"), devices=1)


def served(folder: Path, *, lora: bool = False, staleness: int = 0, **settings: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    config = config_of(folder)
    sglang = SGLangConfig(python="p", arguments={"mem_fraction_static": 0.5}, **settings)
    train = config.train.model_copy(update={"lora": LoraConfig(rank=8) if lora else None, "release_memory": True})
    changed = {
        "rollout": config.rollout.model_copy(update={"sglang": sglang, "num_slots": 64}), "train": train,
        "role_groups": (TURNS,), "max_staleness": staleness, "model": config.model.model_copy(update={"dtype": "bfloat16"}),
    }  # fmt: skip
    return config.model_copy(update=changed)


def test_a_server_has_weights_adapters_and_for_its_cache_what_they_leave_of_its_share(tmp_path: Path) -> None:
    plain, adapting = (
        Server.of(served(tmp_path / name, lora=lora), BIG, 80 * GIB) for name, lora in (("a", False), ("b", True))
    )
    assert plain.weights == 2 * GIB and plain.adapters == 0 and plain.cache == 38 * GIB
    # Three slots: the newest, one that comes, none. Two bytes a number.
    assert adapting.adapters == 3 * (32 << 20) * 2 and adapting.cache == 38 * GIB - adapting.adapters
    assert plain.token_bytes == 2 * 32 * 1024 * 2
    cut = Server.of(served(tmp_path / "c", lora=True, tensor_parallel=2), BIG, 80 * GIB)
    assert (cut.weights, cut.adapters, cut.token_bytes) == (GIB, adapting.adapters // 2, plain.token_bytes // 2)
    assert adapting.asleep == {"SGLang asleep": ON_DEVICE + adapting.adapters + 64 * (2 << 20)}


def test_a_server_in_turn_with_the_trainer_is_asleep_while_it_trains_and_has_its_share_while_that_rests(
    tmp_path: Path,
) -> None:
    config = served(tmp_path, lora=True)
    found = moments(config, BIG, TRACED, TURNS, 80 * GIB)
    assert list(found) == [" while it trains", " while SGLang generates"]
    trains, generates = ({name: n for sizes in held for name, n in sizes.parts.items()} for held in found.values())
    assert trains["parameters"] == 8 * GIB and "SGLang asleep" in trains and "SGLang's cache" not in trains
    assert "parameters" not in generates and generates["SGLang's weights"] == 2 * GIB
    assert at_rest(config, BIG, TURNS) == 2 * GIB  # nobody gives a server its base again
    assert at_rest(served(tmp_path / "c"), BIG, TURNS) == 0
    awake = moments(served(tmp_path / "b", release_memory=False), BIG, TRACED, TURNS, 80 * GIB)[" while it trains"]
    assert "SGLang's cache" in awake[-1].parts


def test_each_moment_is_judged_and_a_share_without_room_for_a_sample_is_refused(tmp_path: Path) -> None:
    facts = replace(FACTS, shape=BIG)
    config = served(tmp_path)
    told = [(finding.level, finding.text) for finding in judge_devices(config, facts, 80 * GIB)]
    moments_told = [text for level, text in told if level == "ok" and text.startswith("actor takes ")]
    assert ["on each device while it trains: " in moments_told[0], "while SGLang generates: " in moments_told[1]] == [
        True
    ] * 2
    tight = [finding.text for finding in judge_devices(config, facts, 9 * GIB) if finding.level == "error"]
    assert len(tight) == 1 and tight[0].startswith(
        "a process of actor must fit into the memory of its device while it trains, 9.0 GiB"
    )
    lack = no_room(config, BIG, TURNS, 4 * GIB)
    assert lack is not None and "got 0.0 GiB" in lack and "mem-fraction-static" in lack
    assert no_room(config, BIG, RoleGroup(name="a", roles=("actor",)), 4 * GIB) is None


@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_apart_are_counted_without_a_trainer(tmp_path: Path, staleness: int) -> None:
    group = RoleGroup(name="rollout", roles=("rollout",), devices=1)
    found = moments(served(tmp_path, staleness=staleness), BIG, TRACED, group, 80 * GIB)
    assert list(found) == [""] and [each.parts["SGLang's weights"] for each in found[""]] == [2 * GIB]


def test_adapters_that_no_server_computes_are_refused_before_one_is_started_and_can_be_merged(tmp_path: Path) -> None:
    config, report = served(tmp_path, lora=True), Report()
    lora = LoraConfig(rank=2, targets=("q_proj", "experts"))
    of_experts = {"adapter": lora, "merged": lora.model_copy(update={"publish": "merged"})}
    for publish, chosen in of_experts.items():
        train = config.train.model_copy(update={"lora": chosen})
        with pytest.raises(ConfigError, match="without their experts") if publish == "adapter" else nullcontext():
            look_at_frozen(config.model_copy(update={"train": train}), report, tiny("qwen3_moe"))
    (told,) = report.findings
    assert told.text.endswith("parameters are trained, in adapters of 6 products; the model's stay")


@pytest.mark.parametrize(("publish", "media"), [("adapter", True), ("adapter", False), ("merged", True)])
def test_adapters_of_a_model_that_hears_are_refused_with_media_for_a_server_would_end_at_the_first_sound(
    tmp_path: Path, publish: str, media: bool
) -> None:
    config, report = served(tmp_path, lora=True), Report()
    train = config.train.model_copy(update={"lora": LoraConfig(rank=2, publish=publish)})
    config = config.model_copy(update={"train": train, "media": MediaConfig() if media else None})
    refused = media and publish == "adapter"
    with (
        pytest.raises(ConfigError, match=r"publish must be 'merged' for media with SGLang")
        if refused
        else nullcontext()
    ):
        look_at_frozen(config, report, multimodal.tiny("qwen3_omni"))
    assert len(report.findings) == (not refused)
