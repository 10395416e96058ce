"""What is kept beside the files: whole or cut off, of this file or made anew, and as good as reading all again."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import orjson
import pytest

from rondo.launch.dashboard import behind
from rondo.launch.dashboard import metrics as metrics_module
from rondo.launch.dashboard import samples as samples_module
from rondo.launch.dashboard.blocks import FOLDER, Blocks
from rondo.launch.dashboard.metrics import Metrics, chosen, decimate
from rondo.launch.dashboard.samples import Samples, Wanted
from rondo.runtime.checkpoints import goes_on_from
from tests.launch.dashboard.runs import a_run, evaluated, lines, of_step, sample


def all_of(run: Path) -> tuple[Metrics, dict[str, object]]:
    metrics = Metrics(run)
    metrics.advance()
    assert metrics.share == 1.0
    return metrics, metrics.series(metrics.names(), None, None, 1000)


def test_a_block_that_is_torn_is_cut_off_with_all_behind_it(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / FOLDER / "x")
    assert list(blocks.read()) == []
    for number in range(3):
        blocks.append({"number": number}, b"data")
    blocks.close()
    path = tmp_path / FOLDER / "x"
    whole = path.read_bytes()
    for torn in (whole[:-1], whole.replace(b'"number":2', b'"number":2,,'), whole[:-4] + b"DATA"):
        path.write_bytes(torn)
        again = Blocks(path)
        assert [head["number"] for head, _ in again.read()] == [0, 1]
        again.append({"number": 7}, b"")
        again.close()
        last = Blocks(path)
        assert [head["number"] for head, _ in last.read()] == [0, 1, 7]
        last.close()


def test_two_dashboards_of_a_run_do_not_write_one_index(tmp_path: Path) -> None:
    first, second = Blocks(tmp_path / "x"), Blocks(tmp_path / "x")
    assert list(first.read()) == list(second.read()) == []
    second.append({"number": 2}, b"")
    first.append({"number": 1}, b"")
    first.close()
    assert [head["number"] for head, _ in second.read()] == [1]
    second.close()


def test_curves_from_the_index_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_BLOCK_BYTES", 1)
    run = a_run(tmp_path, steps=40)
    first, expected = all_of(run)
    first.close()
    lines(run / "metrics.jsonl", [of_step(40, kl=0.5), evaluated(41, 0.8)])
    monkeypatch.setattr(metrics_module.Metrics, "_write", lambda self: None)
    second, found = all_of(run)
    assert found["loss"]["mean"] == [*expected["loss"]["mean"], -40.0]  # type: ignore[index]
    assert found["staleness_tokens/1"]["mean"][:40] == expected["staleness_tokens/1"]["mean"]  # type: ignore[index]
    assert found["kl"] == {"num": 1, "x": [40.0], "mean": [0.5]}
    assert [each["version"] for each in second.evaluations()] == [0, 40, 41]
    assert second.last["step"] == 40
    second.close()


def test_an_index_of_another_run_in_the_same_place_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "_BLOCK_BYTES", 1)
    run = a_run(tmp_path, steps=40)
    first, _ = all_of(run)
    first.close()
    (run / "metrics.jsonl").write_text("")
    lines(run / "metrics.jsonl", [of_step(step, loss=9.0) for step in range(60)])
    second, found = all_of(run)
    assert set(found["loss"]["mean"]) == {9.0}  # type: ignore[index]
    second.close()


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_curves_are_those_of_the_branch_that_goes_on_also_from_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(metrics_module, "_BLOCK_BYTES", block_bytes)
    run = a_run(tmp_path, steps=40)
    first, _ = all_of(run)
    goes_on_from(run, 20)
    first.advance()
    assert first.series(["loss"], None, None, 100)["loss"]["num"] == 20 and first.last == {}
    assert [each["version"] for each in first.evaluations()] == [0]
    lines(run / "metrics.jsonl", [of_step(20, loss=9.0), evaluated(21, 0.5)])
    first.advance()
    first.close()
    second, found = all_of(run)
    assert found["loss"]["mean"] == [*(-float(step) for step in range(20)), 9.0]  # type: ignore[index]
    assert [each["version"] for each in second.evaluations()] == [0, 21] and second.last["loss"] == 9.0
    second.close()


def test_samples_from_the_index_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "_BLOCK_ROWS", 7)
    run = a_run(tmp_path)
    first = Samples(run)
    first.advance()
    expected = first.find(Wanted(), None, 200)
    first.close()
    lines(run / "samples" / "step_000010.jsonl", [sample(99)])
    monkeypatch.setattr(samples_module, "_row", lambda line: (0, 0, 0.5, False, False))  # of new lines alone
    second = Samples(run)
    second.advance()
    new, *old = second.find(Wanted(), None, 200)["rows"]
    assert new["line"]["group"] == 99 and old == expected["rows"]
    assert second.find(Wanted(least=0.5, most=0.5, kind="trained"), None, 200)["matching"] == 1
    second.close()


def test_a_search_parses_few_lines_and_finds_what_parsing_all_of_them_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parsed = a_run(tmp_path, steps=3), list[int]()
    said = ('the "END"\n', "Straße", "aus \\ein", "ﬁve", "Привет", "数学题") * 20
    with (run / "samples" / "step_000001.jsonl").open("ab") as file:  # as JsonLines writes them
        file.writelines(orjson.dumps(sample(n, n / 120, said[n])) + b"\n" for n in range(120))
    line = samples_module._line
    monkeypatch.setattr(samples_module, "_line", lambda file, at, size: parsed.append(at) or line(file, at, size))
    monkeypatch.setattr(samples_module, "_PIECE_BYTES", 500)
    samples = Samples(run)
    samples.advance()
    every = samples.find(Wanted(), None, 200)["rows"]
    for text in ("what is 71 +", 'THE "end"\n', "STRASSE", "aus \\Ein", "five", "привет", "数学", "?", "nothing of it"):
        wanted = Wanted(search=text, least=0.2, most=0.9)
        fits = [row for row in every if 0.2 <= (row["line"]["reward"] or 0.0) <= 0.9]
        expected = [row for row in fits if any(text.casefold() in str(v).casefold() for v in row["line"].values())]
        found, told = list[dict[str, object]](), {"next": None}
        while told is not None:
            told = samples.find(wanted, told["next"], 7, seconds=60.0)
            found += told["rows"]
            told = None if told["next"] is None else told
        assert found == expected, text
    parsed.clear()
    assert len(samples.find(Wanted(search="what is 71 +"), None, 20)["rows"]) == 1
    assert len(parsed) <= 3
    cut = samples.find(Wanted(search="nothing of it"), None, 20, seconds=0.0)
    assert cut["rows"] == [] and cut["next"] == every[0]["row"]  # a long line, and it goes on before it
    samples.close()


def test_reading_much_is_done_in_parts_and_says_how_far_it_is(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=40)
    samples = Samples(run)
    samples.advance(seconds=0.0)
    assert samples.share == 0.0
    until = time.monotonic() + 60
    while samples.share < 1.0 and time.monotonic() < until:
        samples.advance(seconds=0.001)
    assert samples.find(Wanted(), None, 1)["total"] == 40 * 5 + 8
    samples.close()


def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / FOLDER).write_text("in the way")
    metrics, found = all_of(run)
    assert found["loss"]["num"] == 10  # type: ignore[index]
    metrics.close()


@pytest.mark.parametrize("link", ["file", "hard link", "folder"])
def test_an_index_that_leads_elsewhere_is_not_written_and_the_run_is_read_all_the_same(
    tmp_path: Path, link: str
) -> None:
    run, other = a_run(tmp_path), tmp_path / "other"
    other.mkdir()
    for name in ("metrics", "samples"):
        (other / name).write_text("of somebody else")
    if link == "folder":
        (run / FOLDER).symlink_to(other)
    else:
        (run / FOLDER).mkdir()
        for name in ("metrics", "samples"):
            (run / FOLDER / name).hardlink_to(other / name) if link != "file" else (run / FOLDER / name).symlink_to(
                other / name
            )
    metrics, found = all_of(run)
    samples = Samples(run)
    samples.advance()
    assert found["loss"]["num"] == 10 and samples.find(Wanted(), None, 1)["total"] == 58  # type: ignore[index]
    metrics.close()
    samples.close()
    assert [(other / name).read_text() for name in ("metrics", "samples")] == ["of somebody else"] * 2


def test_the_note_of_a_dashboard_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of somebody else")
    (tmp_path / behind.NOTE).symlink_to(tmp_path / "other")
    with behind.noted(tmp_path, "http://127.0.0.1:1", "token"):
        assert (tmp_path / "other").read_text() == "of somebody else"


@pytest.mark.parametrize("files", [[[7, "step_000000.jsonl", 0, 0]], [[0, "../metrics.jsonl", 0, 0]], [[0]], None])
def test_an_index_of_samples_that_says_what_none_of_ours_does_is_made_anew(tmp_path: Path, files: object) -> None:
    run = a_run(tmp_path)
    blocks = Blocks(run / FOLDER / "samples")
    assert list(blocks.read()) == []
    blocks.append({"files": files}, b"")
    blocks.close()
    samples = Samples(run)
    samples.advance()
    assert samples.find(Wanted(), None, 1)["total"] == 58
    samples.close()


def test_a_step_that_ran_again_counts_as_its_last_run() -> None:
    x, y = chosen(np.array([0.0, 1, 2, 1, 2, 3]), np.array([1.0, 2, 3, 20, np.nan, 40]), None, None)
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], [1, 20, 3, 40])
    assert chosen(np.arange(9.0), np.arange(9.0), 2, 4)[0].tolist() == [2, 3, 4]


@pytest.mark.parametrize("num", [1, 7, 100, 1001])
def test_buckets_keep_the_extremes_and_the_mean(num: int) -> None:
    random = np.random.default_rng(num)
    x = np.unique(random.integers(0, 10 * num, num)).astype(float)
    y = random.normal(size=len(x))
    told = decimate(x, y, 50)
    assert len(told["x"]) <= 50 and told["num"] == len(x) and told["x"][0] == x[0]
    if "min" in told:
        assert (min(told["min"]), max(told["max"])) == (y.min(), y.max())
        counts = np.diff(np.append(np.searchsorted(x, told["x"]), len(x)))
        assert np.dot(told["mean"], counts) / len(x) == pytest.approx(y.mean())
