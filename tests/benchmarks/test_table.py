"""The README's figures are those that the benchmarks kept."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson
import pytest

from benchmarks import lora, table
from benchmarks.gpu_parts import rows as on_gpu
from rondo.launch.bench import ROOT, benchmarks


def kept(folder: Path, name: str, figures: object) -> None:
    about = {
        "command": f"rondo bench {name}", "processor": "P", "cores": 2, "flags": ["avx2"], "versions": {"torch": "2"},
        "load_before": [0.1, 0, 0], "load_after": [1.25, 0, 0], "figures": figures,
    }  # fmt: skip
    (folder / f"{name}.json").write_bytes(orjson.dumps(about))


def test_the_command_writes_the_figures_of_the_last_runs_into_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path, "media", {
        "images": 3, "peak_main_mib": 4.2, "peak_workers_mib": 5, "decoded_mib": 6, "samples": 8, "ratio": 0.125,
    })  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    other = tmp_path / "other.md"
    other.write_text(page.read_text())
    given = ["--results", str(tmp_path), "--into", str(page), "--gpu-into", str(other)]
    monkeypatch.setattr(sys, "argv", ["table", *given])
    table.main()
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and "old" not in lines
    assert lines[5].endswith("| 4 MiB and 5 MiB; 6 MiB | `rondo bench media`; 0.1, 1.2 |")
    assert lines[6] == (
        "| bytes on the bus of a prompt group of 8 with an image, over 8 times those of a sample | 0.125 | as above |"
    )
    assert "Machine: P, 2 cores, avx2; torch 2." in lines
    assert other.read_text().splitlines()[5] == "| `tests` | | not yet run |"


def test_a_rank_that_holds_its_share_is_told_case_by_case() -> None:
    case = {
        "ranks": 2,
        "copies": 1,
        "experts": 8,
        "checkpointing": False,
        "rows": 1,
        "tokens": 1024,
        "parameters": 134_260_736,
    }
    ratios = {"load_ratio": 0.6, "step_ratio": 1.32, "publish_ratio": 0.95, "trace_error": -0.06}
    [(what, figure)] = table.fit({"cases": {"one": case | ratios}})
    assert "2 gloo ranks holds of 0.13 B float32 parameters, 8 experts a layer, 1,024 tokens" in what
    assert figure == "0.60x, 1.32x, 0.95x; 0.94x"


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="Put them where the table goes"):
        table.written("nothing here", "")


def test_the_readme_shows_what_was_kept_and_every_kept_file_has_its_rows() -> None:
    results = ROOT / "benchmarks" / "results"
    page = (ROOT / "README.md").read_text()
    assert table.written(page, table.table(results)) == page, "`rondo bench table` writes it"
    page = (ROOT / "docs" / "speed.md").read_text()
    assert table.written(page, on_gpu.table(results / "gpu.json")) == page, "`rondo bench table` writes it"
    names = {name for name, _ in table.ROWS} | {"gpu"}
    parts = {"trl_pretrained", "experts_gap", "experts_memory", "lora_pretrained", "dashboard_beside", "track_mlflow"}
    parts |= {"recipes_real"}
    assert (
        {path.stem for path in results.glob("*.json")} <= names <= {*benchmarks(ROOT), *parts}
    )  # parts: kept by themselves


def test_what_adapters_bring_is_told_of_either_base() -> None:
    records = [{"reward_mean": 0.1 * (n // 5), "step_s": 2.0, "log_prob_gap": 1e-7} for n in range(20)]
    found = lora.figures([(records, [0.25, 0.5])])
    assert found["reward_by_step"] == {5: 0.0, 10: 0.1, 15: 0.2, 20: 0.3}
    assert found["seconds_by_step"] == {5: 10.0, 10: 20.0, 15: 30.0, 20: 40.0}
    figures = {"full": found, "lora": found, "full_bytes": 1000, "adapter_bytes": 10}
    rows = dict(table.ROWS)
    for name, base in (("lora", "quick start's base"), ("lora_pretrained", "SmolLM2-135M-Instruct")):
        [(what, figure)] = rows[name](figures)
        assert what.startswith(base) and "20 steps: reward of the last 5" in what
        assert figure == "0.30, 0.25 to 0.50, 2.00 s, 1,000; 0.30, 0.25 to 0.50, 2.00 s, 10"
