from __future__ import annotations

from pathlib import Path

import pytest

from rondo.launch.bench import ROOT, benchmarks, run
from rondo.launch.cli import EXIT_USAGE, main
from rondo.runtime.errors import ConfigError

PROGRAM = '''"""Counts what it is given.

More.
"""
import argparse, sys
if __name__ == "__main__":
    sys.exit(len(sys.argv))
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


def test_a_benchmark_gets_its_options_and_its_exit_code_is_ours(tmp_path: Path) -> None:
    assert run("count", ["--one", "two"], checkout(tmp_path)) == 3


def test_an_unknown_name_and_a_package_without_benchmarks_are_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must lie beside the package"):
        run("count", [], tmp_path)
    with pytest.raises(ConfigError, match=r"NAME must be one of count, got 'cuont'"):
        run("cuont", [], checkout(tmp_path))
    assert main(["bench", "nothing"]) == EXIT_USAGE


def test_what_the_project_measures_says_so_in_a_line() -> None:
    found = benchmarks(ROOT)
    assert {"bus", "ring", "calls"} <= found.keys() and all(found.values())
