"""`rondo bench gpu`: every part's code on the CPU and small sizes, so that no mistake waits for the first machine with a GPU; and
what becomes of parts that fail."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu import Options
from benchmarks.gpu_parts import copies, gap, packages, quick_start, ranks, rows, shapes, tests, training
from rondo.launch.bench import ROOT
from rondo.launch.config import load
from tests.strength import LONG

CPU = Options("cpu", tiny=True)
ABOUT = {
    "processor": "P", "cores": 2, "versions": {"torch": "2"},
    "device": {"name": "G", "count": 1, "memory_gib": 80.0, "driver": "1", "cuda": "13", "nccl": "2.1"},
}  # fmt: skip


def measured(part: Any) -> dict[str, Any]:
    """The figures that a part told last, which are JSON."""
    told = list[str]()
    part.measure(CPU, lambda figures: told.append(json.dumps(figures)))
    found: dict[str, Any] = json.loads(told[-1])
    return found


def table(folder: Path, parts: dict[str, Any]) -> list[str]:
    gpu.write(folder / "gpu.json", ABOUT | {"parts": parts})
    return rows.table(folder / "gpu.json").splitlines()


# ---- the parts ----------------------------------------------------------------------------------------------------------


def test_training_is_timed_packed_and_padded_for_every_attention(tmp_path: Path) -> None:
    found = measured(training)
    assert found["attn"]["flash_attention_2"] == {"error": "flash-attn is not installed"}
    packed, padded = (found["attn"]["sdpa"][way] for way in ("packed", "padded"))
    assert packed["tokens_s"] > 0 and packed["micro_batches"] < padded["micro_batches"]
    assert packed["of_peak"] is None and packed["of_product"] > 0  # of a CPU no peak is known
    lines = table(tmp_path, {"training": {"figures": found}})
    (told,) = [line for line in lines if line.startswith("| `training` | training, sdpa, packed, 0.0 billion")]
    assert " GPU(s): tokens/s; share of a large product's rate" in told and "x padded; " in told
    assert "| `training` | training, flash_attention_2 | not done: flash-attn is not installed |" in lines


def test_snapshot_and_publication_are_timed_alone_and_beside_a_step(tmp_path: Path) -> None:
    found = measured(copies)
    assert found["snapshot"]["bytes"] == pytest.approx(12 * found["parameters"], rel=0.02)  # weights and two moments
    assert found["publication"]["bytes"] == pytest.approx(2 * found["parameters"], rel=0.02)
    assert 0 <= found["hidden"] <= 1 and found["pinned_gb_s"] is None
    assert any("hot snapshot of 0.0 GB" in line for line in table(tmp_path, {"copies": {"figures": found}}))


def test_the_gap_is_told_of_each_engine_that_is_there(tmp_path: Path) -> None:
    found = measured(gap)
    assert 0 < found["embedded"]["log_prob_gap"] < 0.1 and found["embedded"]["log_prob_gap_tokens"] == 4 * 16
    assert found["sglang"]["error"].startswith("RuntimeError: SGLang must be installed, got no .venv-sglang")
    (line,) = [each for each in table(tmp_path, {"gap": {"figures": found}}) if "`gap`" in each]
    assert "; sglang not done: RuntimeError: SGLang must be installed" in line


@pytest.mark.parametrize(
    ("num_devices", "placed"),
    [
        (0, {}),
        (1, {"actor": 1}),
        (2, {"rollout": 1, "actor": 1}),
        (3, {"rollout": 1, "actor": 1}),
        (8, {"rollout": 1, "actor": 1, "reference": 1, "actor_fwd": 1}),
    ],
)
def test_the_quick_start_is_placed_on_the_gpus_that_there_are(num_devices: int, placed: dict[str, int]) -> None:
    config = load(ROOT / "examples" / "quickstart.py", quick_start.sets(num_devices))
    assert {group.name: group.devices for group in config.role_groups if group.devices} == placed
    assert sum(placed.values()) <= num_devices


@pytest.mark.skipif(not LONG, reason="a whole run, and two ranks: RONDO_TEST_LONG=1")
def test_the_quick_start_and_several_ranks_run(tmp_path: Path) -> None:
    found = measured(quick_start)
    assert found["seconds"]["ended"] > found["seconds"]["first step"] > 0 and found["summary"]["samples_lost"] == 0
    folder = shapes.write_model(tmp_path / "model", shapes.TINY)
    shape = {"shape": asdict(shapes.TINY)}
    settings = shape | {"attn": "sdpa", "micro_batch_tokens": 256}
    assert ranks.run(training.work, CPU, folder, settings, num_ranks=2)["packed"]["tokens_s"] > 0
    assert ranks.run(copies.work, CPU, folder, shape | {"tokens": 256}, num_ranks=2)["publication"]["gb_s"] > 0


def test_marked_tests_are_found_and_counted(tmp_path: Path) -> None:
    names = {path.name for path in tests.marked(ROOT / "tests")}
    assert {"test_ipc.py", "test_groups_gpu.py", "test_forwards.py"} <= names
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # the root that its names are told from
    (tmp_path / "conftest.py").write_text(
        "def pytest_configure(config):\n config.addinivalue_line('markers', 'cuda: x')\n"
    )
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.cuda\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_few(n):\n"
        "    pytest.skip('one') if n == 0 else None\n"
        "    assert n < 3\n"
        "def test_other(): raise RuntimeError\n"
    )
    assert tests.run([file]) == {"passed": 2, "skipped": 1, "failed": ["test_three::test_few[3]"]}


# ---- sizes --------------------------------------------------------------------------------------------------------------


def test_the_peak_of_a_device_is_that_of_its_name_and_an_unknown_one_has_none() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA RTX A4000")
    assert [shapes.peak_of(name) for name in names] == [989e12, 756e12, 312e12, 362e12, None]


def test_a_step_counts_products_scores_and_logits_of_answers_with_the_prompt_once() -> None:
    shape = shapes.Shape(4, 8, 2, 2, 1, 2, 10)
    assert shape.layer_parameters == 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8
    assert shape.parameters == 2 * 144 + 40
    products = 2 * 144 * (3 + 2 + 4) + 40 * 6
    scores = 9 / 2 + (6 + 2) + (12 + 8)
    assert shape.step_flops(3, [2, 4]) == 6 * products + 12 * 2 * 4 * scores


def test_the_published_shape_has_the_published_size_and_less_memory_holds_fewer_layers() -> None:
    assert shapes.QWEN3_4B.parameters == pytest.approx(4.02e9, rel=1e-3)
    assert copies.largest(4 << 30).layers == 1 and copies.largest(1 << 40).layers == 12


def test_packages_that_could_not_be_installed_are_named(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text("[options]\ninstall_requires =\n    numpy>=2.0,<3\n    no-such-thing[x]>=1\n")
    missing, there = packages.lacking(tmp_path / "setup.cfg")
    assert missing == ["no-such-thing[x]>=1"] and there[0].startswith("numpy>=2.0,<3 (2.")
    assert packages.lacking()[0] == []


# ---- what becomes of parts ----------------------------------------------------------------------------------------------


def test_a_part_that_fails_or_hangs_keeps_what_it_found_and_says_how_it_ended() -> None:
    def ran(body: str, deadline_s: float = 60.0) -> dict[str, Any]:
        found = gpu.one([sys.executable, "-c", f"from benchmarks.gpu import tell\n{body}"], deadline_s)
        assert {"at", "seconds"} < found.keys()
        return {name: found[name] for name in ("figures", "error") if name in found}

    assert ran("tell({'a': 1}); tell({'a': 2})") == {"figures": {"a": 2}}
    failed = ran("tell({'a': 1}); print('why'); raise SystemExit(3)")
    assert failed == {"figures": {"a": 1}, "error": "exit code 3\nwhy"}
    assert ran("pass") == {"error": "exit code 0"}
    hung = ran("tell({'a': 1}); import time; time.sleep(3600)", deadline_s=12.0)
    assert hung == {"figures": {"a": 1}, "error": "ended after 12 s"}


def test_one_part_that_fails_stops_no_other_and_what_was_found_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = tmp_path / "gpu.json", list[list[str]]()

    def one(command: list[str], deadline_s: float) -> dict[str, Any]:
        kept.append(list(json.loads(out.read_text())["parts"]) if out.exists() else [])
        part = command[command.index("benchmarks.gpu") + 1]
        assert deadline_s == gpu.PARTS[part] < 600
        return {"seconds": 1.0} | ({"error": "exit code 1\nno"} if part == "copies" else {"figures": {part: len(kept)}})

    monkeypatch.setattr(gpu, "one", one)
    monkeypatch.setattr(gpu, "device", lambda options: {"name": options.device, "count": 0})
    assert gpu.run(["training", "copies", "gap"], CPU, out) == 1
    assert kept == [[], ["training"], ["training", "copies"]]
    assert gpu.run(["training"], CPU, out) == 0
    found = json.loads(out.read_text())["parts"]
    assert found["training"]["figures"] == {"training": 4} and found["gap"]["figures"] == {"gap": 3}
    assert gpu.run(["gap"], Options("other"), out) == 0
    assert json.loads(out.read_text())["parts"].keys() == {
        "gap"
    }  # what another machine has found is not kept beside it


def test_a_failure_stands_in_the_table_with_its_first_and_last_words(tmp_path: Path) -> None:
    lines = table(tmp_path, {"copies": {"error": "exit code 1\nTraceback\nOutOfMemoryError: a | b\nended"}})
    assert "| `copies` | | not done: exit code 1; OutOfMemoryError: a   b |" in lines
    assert "| `gap` | | not yet run |" in lines and lines[-1].startswith("1 x G (80.0 GiB), driver 1, CUDA 13")
