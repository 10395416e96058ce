"""The check knows media: settings against the model, and the first rows through its processor."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.check import child as check_child
from rondo.launch.check.findings import Finding
from rondo.launch.config import RunConfig, load
from rondo.models.families import QWEN3_VL
from rondo.models.tiny import qwen3_vl
from tests.launch import configs, full_size

TEMPLATE = "data.apply_chat_template=True"
COLUMNS = 'data.media_columns={"image": "picture"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    qwen3_vl.build(folder)
    return folder


def look(config: RunConfig, model: Path) -> list[Finding]:
    report, tokenizers = check_child.Report(), list[Any]()
    report.look(lambda: check_child.look_at_model(config, model / "unused", report, tokenizers), "model")
    report.look(lambda: check_child.look_at_data(config, report, tokenizers, []), "data")
    return report.findings


def config_of(folder: Path, model: Path, pictures: list[str], *sets: str) -> RunConfig:
    full_size.rows(folder, "image", 1)  # leaves picture.png
    file = folder / "rows.jsonl"
    rows = [{"prompt": "What is <image>?", "label": "3", "picture": picture} for picture in pictures]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["model.build=null", "model.build_args={}", f"model.path={model}", "data.rows=null", f"data.path={file}"]
    settings += ["data.held_out=0", "evaluation=null", "rollout.max_prompt_tokens=256", *sets]
    return load(configs.write(folder), settings)


def test_a_model_of_text_with_media_columns_is_an_error_that_names_both(tmp_path: Path) -> None:
    config = load(configs.write(tmp_path), [TEMPLATE, COLUMNS])
    report = check_child.Report()
    report.look(lambda: check_child.look_at_media(config, "FOLDER", "qwen3", None), "media")
    assert report.findings == [
        Finding(
            "error",
            "data.media_columns must name media that the model takes, which is of text alone, got image with the "
            "model of type 'qwen3' at FOLDER. Remove them, or set model.path to another model",
        )
    ]


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (
            'data.media_columns={"audio": "sound"}',
            "data.media_columns must name media that the model takes, image, video, got audio",
        ),
        (
            "data.use_audio_in_video=sound",
            "data.use_audio_in_video must be left out for a model without audio, got 'sound'",
        ),
    ],
)
def test_media_that_the_model_does_not_take_are_an_error(tmp_path: Path, sets: str, error: str) -> None:
    config = load(configs.write(tmp_path), [TEMPLATE, sets])
    report = check_child.Report()
    report.look(lambda: check_child.look_at_media(config, "FOLDER", "qwen3_vl", QWEN3_VL), "media")
    (finding,) = report.findings
    assert finding.text.startswith(error)


@pytest.mark.parametrize("sets", ["media.fps=1.0", "train.encoders=shard"])
def test_settings_of_media_without_effect_on_a_model_of_text_are_errors(tmp_path: Path, sets: str) -> None:
    config = load(configs.write(tmp_path), [sets])
    report = check_child.Report()
    report.look(lambda: check_child.look_at_media(config, "FOLDER", "qwen3", None), "media")
    (finding,) = report.findings
    assert (finding.level, finding.text.split(" must ")[0]) == ("error", sets.split("=")[0].replace(".fps", ""))


def test_a_part_that_the_model_does_not_have_is_an_error(tmp_path: Path, model: Path) -> None:
    findings = look(config_of(tmp_path, model, ["picture.png"], TEMPLATE, COLUMNS, 'train.freeze=("audio",)'), model)
    (text,) = [finding.text for finding in findings if finding.level == "error"]
    assert text.startswith(
        "train.freeze must name parts of Qwen3VLForConditionalGeneration, language, projector, vision, got audio"
    )


def test_the_first_rows_go_through_the_models_processor(tmp_path: Path, model: Path) -> None:
    findings = look(
        config_of(tmp_path, model, ["picture.png"] * 2, TEMPLATE, COLUMNS, 'train.freeze=("vision",)'), model
    )
    assert not [finding for finding in findings if finding.level == "error"]
    texts = [finding.text for finding in findings]
    assert any(text.endswith("parameters are trained, the others stay as they are") for text in texts)
    found = re.fullmatch(
        r"data: 2 of 2 rows were looked at, and take up to \d+ tokens of rollout.max_prompt_tokens 256 and media up to .* KiB",
        next(text for text in texts if text.startswith("data: ")),
    )
    assert found, texts


def test_a_broken_medium_is_a_note_since_a_run_leaves_its_row_out(tmp_path: Path, model: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    allowed = "data.max_bad_rows=0.5"
    findings = look(config_of(tmp_path, model, ["broken.png", "picture.png"], TEMPLATE, COLUMNS, allowed), model)
    note = next(finding.text for finding in findings if finding.level == "note")
    assert note.startswith(
        "data: 1 of 2 rows that were looked at cannot be used, and a run leaves such rows out; the first: "
    )
    assert "rows.jsonl:1: " in note and "broken.png" in note
    assert not [finding for finding in findings if finding.level == "error"]


def test_rows_of_which_none_can_be_used_are_errors(tmp_path: Path, model: Path) -> None:
    findings = look(
        config_of(tmp_path, model, ["missing.png", "picture.png"], TEMPLATE, COLUMNS, "rollout.max_prompt_tokens=16"),
        model,
    )
    (told,) = [finding.text for finding in findings if finding.level == "error"]
    assert (
        told.startswith("data: no row can be used of 2 rows that were looked at; the first: ") and "missing.png" in told
    )


def test_rows_with_media_need_the_media_section(tmp_path: Path, model: Path) -> None:
    config = config_of(tmp_path, model, ["picture.png"], TEMPLATE, COLUMNS)
    report, tokenizers = check_child.Report(), list[Any]()
    report.look(lambda: check_child.look_at_model(config, tmp_path, report, tokenizers), "model")
    bare = config.model_copy(update={"media": None})
    report.look(lambda: check_child.look_at_data(bare, report, tokenizers, []), "data")
    (told,) = [finding.text for finding in report.findings if finding.level == "error"]
    assert told.startswith("rows.jsonl:1: prompt must be text without the media section, got image ")
