from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from rondo.launch.bench import ROOT, benchmarks, run
from rondo.launch.cli import EXIT_USAGE, main
from rondo.runtime.errors import ConfigError

PROGRAM = '''"""Counts what it is given.

More.
"""
import argparse, json, sys
if __name__ == "__main__":
    print("working")
    print(json.dumps({"counted": len(sys.argv)}))
    sys.exit("--fail" in sys.argv)
'''


def checkout(folder: Path) -> Path:
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "count.py").write_text(PROGRAM)
    (folder / "benchmarks" / "pieces.py").write_text('"""Not a program."""\n')
    return folder


def test_without_a_name_every_benchmark_is_listed_with_what_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(None, [], checkout(tmp_path)) == 0
    assert capsys.readouterr().out.split("\n")[0].split(maxsplit=1) == ["count", "Counts what it is given."]
    assert "pieces" not in benchmarks(tmp_path)


def test_the_figures_of_a_benchmark_are_kept_with_its_command_and_machine(tmp_path: Path) -> None:
    assert run("count", ["--python", "/somewhere/bin/python"], checkout(tmp_path)) == 0
    kept = orjson.loads((tmp_path / "benchmarks" / "results" / "count.json").read_bytes())
    assert kept["figures"] == {"counted": 3} and kept["command"] == "rondo bench count --python PEERS_VENV/bin/python"
    assert kept["processor"] and kept["cores"] >= 1 and len(kept["load_before"]) == 3 and kept["versions"]["orjson"]


def test_figures_of_other_options_are_kept_under_a_name_of_their_own(tmp_path: Path) -> None:
    assert run("count", ["--as", "count_long", "--rounds", "9 of 9"], checkout(tmp_path)) == 0
    results = tmp_path / "benchmarks" / "results"
    assert [path.name for path in results.iterdir()] == ["count_long.json"]
    kept = orjson.loads((results / "count_long.json").read_bytes())
    assert kept["command"] == "rondo bench count --as count_long --rounds '9 of 9'" and kept["figures"] == {
        "counted": 3
    }
    with pytest.raises(ConfigError, match=r"--as must be a name of letters, digits and _, got '../x'"):
        run("count", ["--as", "../x"], tmp_path)


def test_a_benchmark_that_fails_gives_its_exit_code_and_keeps_the_figures_of_before(tmp_path: Path) -> None:
    run("count", [], checkout(tmp_path))
    assert run("count", ["--fail"], tmp_path) == 1
    assert orjson.loads((tmp_path / "benchmarks" / "results" / "count.json").read_bytes())["figures"] == {"counted": 1}


def test_an_unknown_name_and_a_package_without_benchmarks_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must lie beside the package"):
        run("count", [], tmp_path)
    with pytest.raises(ConfigError, match=r"NAME must be one of count, got 'cuont'"):
        run("cuont", [], checkout(tmp_path))
    assert main(["bench", "nothing"]) == EXIT_USAGE


def test_what_the_project_measures_says_so_in_a_line() -> None:
    found = benchmarks(ROOT)
    assert {"bus", "ring", "calls"} <= found.keys() and all(found.values())
