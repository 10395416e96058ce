"""The recipes' column maps, prompts and rewards, on rows in the very form of their data sets, and their files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import recipe_rows
from rondo.launch import cli
from rondo.launch.config import RunConfig, load
from rondo.roles.config.data import DataConfig
from rondo.roles.data.choices import avqa, nextqa
from rondo.roles.data.datasets import Dataset, RowError, open_dataset, open_splits
from rondo.roles.data.media import located
from rondo.roles.data.prompts import messages_of
from rondo.roles.sampling.tools import open_tools
from rondo.runtime.errors import Fatal
from rondo.runtime.reference import load_reference

EXAMPLES = Path(__file__).parents[3] / "examples" / "full_size"
RECIPES: dict[str, Callable[[Path], dict[str, str]]] = {
    "dapo_math_qwen3_4b": lambda to: recipe_rows.dapo(to, 8) | recipe_rows.aime(to, 30),
    "open_r1_qwen3_vl_4b": lambda to: recipe_rows.open_r1(to, 8),
    "avqa_qwen3_omni_30b_lora": lambda to: recipe_rows.avqa(to, 8, 4),
    "nextqa_qwen3_omni_30b_lora": lambda to: recipe_rows.nextqa(to, 8),
    "deepeyes_qwen3_vl_30b_a3b_lora": lambda to: recipe_rows.deepeyes(to, 8),
    "deepeyes_code_qwen3_vl_30b_a3b_lora": lambda to: recipe_rows.open_r1(to, 8),
}
Opened = tuple[RunConfig, Dataset, dict[str, Dataset]]


def opened(name: str, folder: Path) -> Opened:
    sets = [f"{setting}={value}" for setting, value in RECIPES[name](folder).items()]
    sets += [] if name.startswith("dapo") else ["evaluation.num_prompts=4"]
    sets += ["data.held_out=4"] if name.startswith(("open", "next", "deep")) else []
    config = load(EXAMPLES / f"{name}.py", sets)
    return config, *open_splits(config)


def scores(config: RunConfig, label: object, *responses: str) -> list[float]:
    assert isinstance(config.reward.function, str)
    reward = load_reference(config.reward.function, "reward.function")
    found = [reward(response, label, prompt="", metadata={}) for response in responses]
    return [each["score"] if isinstance(each, dict) else each for each in found]


def test_rows_of_dapo_math_ask_for_their_own_last_line_and_are_worth_1_or_minus_1(tmp_path: Path) -> None:
    config, train, sets = opened("dapo_math_qwen3_4b", tmp_path)
    row = train.row(0)
    [asked] = messages_of(row, config.data)
    assert "of the form Answer: $Answer" in asked["content"] and row.label.isdecimal()
    assert scores(config, row.label, f"So.\nAnswer: {row.label}", f"Answer: {row.label}0", row.label) == [
        1.0,
        -1.0,
        -1.0,
    ]
    assert len(sets["aime24"]) == 30 and sets["aime24"].row(0).label.isdecimal()


def test_rows_of_open_r1_show_their_picture_first_and_their_solution_holds_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    config, train, sets = opened("open_r1_qwen3_vl_4b", tmp_path)
    row = train.row(0)
    system, user = messages_of(row, config.data)
    assert "<think>" in system["content"] and [part["type"] for part in user["content"]] == ["image", "text"]
    [picture] = row.media
    assert isinstance(picture.source, bytes) and picture.source.startswith(b"\x89PNG")
    letter = row.label.rpartition("<answer>")[2][0]
    right, wrong = (f"<think>so</think><answer>{said}</answer>" for said in (letter, "E"))
    assert scores(config, row.label, right, wrong) == [1.0, 0.0] and len(sets["held_out"]) == 4


def test_rows_of_avqa_show_picture_and_sound_of_their_own_part_and_ask_for_a_letter(tmp_path: Path) -> None:
    config, train, sets = opened("avqa_qwen3_omni_30b_lora", tmp_path)
    for rows, data, part in ((train, config.data, "train"), (sets["held_out"], config.evaluation.data, "valid")):  # type: ignore[union-attr]
        assert data is not None and config.media is not None
        row = rows.row(0)
        system, user = messages_of(row, data)
        assert "the letter of the right option alone" in system["content"]
        assert [each["type"] for each in user["content"]] == ["image", "audio", "text"]
        assert user["content"][-1]["text"].endswith("\n\n" + "\n".join(recipe_rows.BOTH_OPTIONS))
        files = [Path(str(medium.source)) for medium in located(row.media, data, config.media)]
        assert all(file.is_file() and file.is_relative_to(tmp_path / part) for file in files) and len(files) == 2
        letter = row.label[len("<answer>")]
        others = [f"<answer>{each}</answer>" for each in "ABCD" if each != letter]
        assert scores(config, row.label, f"<answer>{letter}</answer>", *others, letter) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_digit_in_a_picture_does_not_tell_which_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIGITS", raising=False)
    seen, heard = ([digit for _, digit in recipe_rows.media(kind, 400)] for kind in ("image", "audio"))
    assert len(set(zip(seen, heard, strict=True))) == 16


def test_rows_of_nextqa_show_the_file_of_their_video_and_ask_for_a_letter(tmp_path: Path) -> None:
    config, train, _ = opened("nextqa_qwen3_omni_30b_lora", tmp_path)
    row = train.row(0)
    assert config.media is not None and config.media.root is not None
    [video] = located(row.media, config.data, config.media)
    assert (config.media.root / str(video.source)).is_file() and row.label in "ABCDE"
    _, user = messages_of(row, config.data)
    assert user["content"][-1]["text"].startswith("Which digit is shown?\n\nA. 0\nB. 1\nC. 2\nD. 3\nE. 4")
    assert scores(config, row.label, f"<think>so</think><answer>{row.label}</answer>", row.label) == [1.0, 0.0]


def said(turns: list[str]) -> list[dict[str, str]]:
    answered = {"role": "tool", "content": "<answer>"}
    return [each for turn in turns for each in ({"role": "assistant", "content": turn}, answered)][:-1]


def test_rows_of_deepeyes_are_looked_at_through_their_tool_and_scored_as_it_does(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    config, train, _ = opened("deepeyes_qwen3_vl_30b_a3b_lora", tmp_path)
    row, environment = train.row(0), config.rollout.environment
    system, user = messages_of(row, config.data)
    assert "image_zoom_in_tool" in system["content"] and [part["type"] for part in user["content"]] == ["image", "text"]
    assert environment is not None and config.media is not None and isinstance(config.reward.function, str)
    call, ref = open_tools({"zoom": environment.tools[0]}, config.media.limits()).call, row.media[0]
    [shown] = call(["zoom", {"bbox_2d": [0, 0, 99, 28]}, [[ref.kind, ref.source]]]).content
    assert Image.open(io.BytesIO(shown["image"])).size == (28, 28)
    assert "must have 28 pixels" in call(["zoom", {"bbox_2d": [9, 0, 20, 28]}, [[ref.kind, ref.source]]]).content
    reward, right = load_reference(config.reward.function, "reward.function"), row.label["ground_truth"]
    look, answer, wrong = (
        "<think>where?</think><tool_call></tool_call>",
        f"<think>so</think><answer>{right}</answer>",
        "9 of 9",
    )
    weights = config.reward.components
    for turns, worth in (([look, answer], 2.0), ([answer], 0.8), ([look, wrong], -0.2), ([wrong], -0.2)):
        parts = reward(turns[-1], row.label, prompt="", turns=said(turns))
        assert sum(weights[name] * part for name, part in parts.items()) == pytest.approx(worth)
    code, rows, _ = opened("deepeyes_code_qwen3_vl_30b_a3b_lora", tmp_path)
    reward = load_reference(str(code.reward.function), "reward.function")
    right = rows.row(0).label.rpartition("</think>")[2].strip()
    answer = f"<think>so</think>{right}"
    parts = reward(answer, rows.row(0).label, prompt="", turns=said([look, answer]))
    assert parts == {"accuracy": 1.0, "format": 0.0, "tool": 1.0}


def test_a_recipe_of_one_machine_is_a_batch_job_of_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    for name in RECIPES:
        assert cli.main(["slurm", str(EXAMPLES / f"{name}.py"), "--mem", "900G", "--time", "24:00:00"]) == 0
        text = capsys.readouterr().out
        assert "#SBATCH --gres=gpu:8\n" in text and f"{name}.py" in text and "--resume-or-start" in text


def test_a_row_of_another_form_is_refused_by_its_place() -> None:
    row = {"problem": "?", "options": ["A. x"], "solution": "<answer>A</answer>", "path": {"audio": "a.wav"}}
    assert list(avqa([row])) == [
        {"prompt": "?\n\nA. x", "label": "<answer>A</answer>", "image": None, "audio": "a.wav"}
    ]
    with pytest.raises(RowError, match="row 1 must have a list of 'options' and an object in 'path', got str and dict"):
        list(avqa([row, row | {"options": "A. x"}]))
    with pytest.raises(RowError, match=r"row 0 must have the column 'options' that data\.transform names"):
        list(avqa([{"problem": "?"}]))
    asked = {"video": 7, "question": "why", "answer": "walk", **{f"a{number}": "x" for number in range(5)}}
    with pytest.raises(
        RowError, match="row 0 must have the number of the right choice in 'answer', from 0 to 4, got walk"
    ):
        list(nextqa([asked]))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.json", '{"rows": []}', "a.json:1 must have the column 'prompt' that data.prompt names, got 'rows'"),
        ("a.json", '[{"prompt": 1', "data.path must name a .json file of a list of objects, or of one object a line, got a.json"),
        ("a.csv", "prompt,label\n\xff", "data.path must name a readable .csv file, got"),
        ("a.json", "[]", "data must have rows, got none"),
        ("a.txt", "x", "data.path must name .jsonl, .json, .csv, .parquet or .arrow files, one kind at a time, got .txt"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_rows_is_refused_by_its_name(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises((Fatal, RowError), match=told):
        open_dataset(DataConfig(path=str(tmp_path / name)))


def test_a_list_in_json_and_a_table_in_csv_are_rows_and_one_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "x", "label": 10**30}, 7]))
    rows = open_dataset(DataConfig(path=str(tmp_path / "a.json")))
    assert (len(rows), rows.row(0).label, rows.row(0).name) == (2, 10**30, "a.json row 0")
    with pytest.raises(RowError, match=r"a\.json row 1: row must be a dict, got int\. Correct it"):
        rows.row(1)
    (tmp_path / "b.csv").write_text('\ufeffprompt,label\n"two\nlines, or more",3\nx,4\n', encoding="utf-8")
    cut = open_dataset(DataConfig(path=f"{tmp_path}/b.csv@[:1]"))
    assert (len(cut), cut.row(0).prompt, cut.row(0).label) == (1, "two\nlines, or more", "3")
