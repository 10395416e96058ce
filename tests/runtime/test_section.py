"""Settings: what is refused, and the exact words for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import as_reference, load_file, load_reference, relative_to
from rondo.runtime.section import (
    FREE,
    LEARNT,
    FunctionRef,
    Section,
    changes,
    explain,
    fixed,
    references,
    with_references,
)


class Inner(Section):
    speed: float = Field(1.0, gt=0)
    kind: Literal["fast", "slow"] = "fast"
    function: FunctionRef | None = None

    def refused(self) -> Iterator[str]:
        if self.kind == "slow" and self.speed >= 10:
            yield f"inner.speed must be below 10 when inner.kind is 'slow', got {self.speed}. Lower it"


class Outer(Section):
    count: int = Field(ge=1)
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()


def told(kind: type[Section] = Outer, prefix: str = "", **values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        kind(**values)
    return str(explain(caught.value, "run.py", prefix))


def test_a_value_that_breaks_a_rule_is_told_with_its_path_rule_value_and_place() -> None:
    assert told(count=0) == "count must be greater than or equal to 1, got 0. Change it in run.py."


def test_a_misspelt_field_is_told_with_the_nearest_name() -> None:
    text = told(count=1, inner={"sped": 2.0})
    assert text == "inner.sped must be a field of Inner, got an unknown name. Did you mean 'speed'?"


def test_a_field_that_is_near_to_none_is_told_with_all_known_names() -> None:
    text = told(count=1, inner={"colour": "red"})
    assert text == "inner.colour must be a field of Inner, got an unknown name. Known: function, kind, speed."


def test_a_missing_field_is_told() -> None:
    assert told() == "count must be set, got nothing. Set it in run.py."


def test_a_misspelt_field_that_must_be_set_is_one_mistake() -> None:
    assert told(cont=1) == "cont must be a field of Outer, got an unknown name. Did you mean 'count'?"


def test_a_mistake_inside_a_tuple_is_told_with_its_index() -> None:
    text = told(count=1, many=[{}, {"kind": "medium"}])
    assert text == "many.1.kind must be 'fast' or 'slow', got 'medium'. Change it in run.py."


def test_every_mistake_has_one_line() -> None:
    text = told(count=0, inner={"speed": -1, "sped": 1})
    assert len(text.splitlines()) == 3


def test_a_rule_between_two_settings_keeps_its_own_words() -> None:
    text = told(count=1, inner={"kind": "slow", "speed": 12})
    assert text == "inner.speed must be below 10 when inner.kind is 'slow', got 12.0. Lower it."


def test_a_section_that_is_built_alone_is_told_with_its_prefix() -> None:
    assert told(Inner, "inner", speed=-1) == "inner.speed must be greater than 0, got -1. Change it in run.py."


def test_a_number_that_is_not_finite_is_refused() -> None:
    assert told(count=1, inner={"speed": float("inf")}).startswith("inner.speed must be a finite number, got inf.")


def test_a_section_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Outer(count=1).count = 2  # type: ignore[misc]


def test_a_function_becomes_its_reference_and_comes_back_the_same(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def exact(response, label):\n    return float(response == label)\n")
    function = load_reference(f"{file}:exact", "reward.function")
    reference = Inner(function=function).function
    assert reference == f"{file}:exact"
    assert load_reference(reference, "reward.function") is function


def test_a_function_of_an_installed_module_is_named_by_the_module() -> None:
    assert as_reference(as_reference) == "rondo.runtime.reference:as_reference"


def test_a_lambda_is_refused_since_no_other_process_could_find_it() -> None:
    text = told(Inner, "inner", function=lambda: 1)
    assert text.startswith("inner.function must be a function defined at the top of a module, got ")
    assert text.endswith("give it a `def` of its own.")


def test_text_that_names_no_function_is_refused() -> None:
    assert told(Inner, "", function="rewards") == (
        "function must look like 'module:function' or 'file.py:function', got 'rewards'. "
        "Put the colon before the function's name."
    )


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("{file}:exct", "reward.function must name a function of {file}, got 'exct'. Did you mean 'exact'?"),
        ("{file}.py:exact", "reward.function must name a file that exists, got '{file}.py:exact'. Check the path"),
        (
            "no_such_module_here:f",
            "reward.function must name a function that can be imported, got 'no_such_module_here:f'",
        ),
    ],
)
def test_a_reference_to_nothing_is_told(tmp_path: Path, reference: str, text: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def exact(response, label):\n    return 1.0\n")
    with pytest.raises(ConfigError) as caught:
        load_reference(reference.format(file=file), "reward.function")
    assert str(caught.value).startswith(text.format(file=file))


def test_a_file_can_import_its_neighbours_while_it_loads_and_when_its_functions_are_called(tmp_path: Path) -> None:
    for name in ("neighbour_of_rewards", "late_neighbour_of_rewards"):
        (tmp_path / f"{name}.py").write_text("VALUE = 3\n")
    (tmp_path / "rewards.py").write_text(
        "import neighbour_of_rewards as n\n\n\ndef value():\n    import late_neighbour_of_rewards as late\n\n"
        "    return n.VALUE + late.VALUE\n"
    )
    before = list(sys.path)
    try:
        assert load_reference(f"{tmp_path}/rewards.py:value", "x")() == 6
        assert sys.path == [*before, str(tmp_path)]  # the last: what is installed comes before it
    finally:
        sys.path[:] = before


def test_what_is_installed_sees_no_neighbours_of_a_file_that_loads_and_the_file_sees_them_first(tmp_path: Path) -> None:
    installed, mine = tmp_path / "site-packages", tmp_path / "mine"
    installed.mkdir()
    mine.mkdir()
    (installed / "needed_of_tests.py").write_text("WHERE = 'installed'\n")
    (installed / "library_of_tests.py").write_text("import sched\nfrom needed_of_tests import WHERE\n")
    for name in ("needed_of_tests", "sched", "beside_of_tests"):
        (mine / f"{name}.py").write_text("WHERE = 'beside'\n")
    (mine / "rewards.py").write_text(
        "import library_of_tests, beside_of_tests\n\n\ndef where():\n"
        "    return library_of_tests.WHERE, beside_of_tests.WHERE, library_of_tests.sched.scheduler.__name__\n"
    )
    code = f"""
import sys
sys.path.insert(0, {str(installed)!r})
from rondo.runtime.reference import load_reference
print(load_reference({f"{mine}/rewards.py:where"!r}, "x")(), load_reference("beside_of_tests:str", "x") is str)
"""
    (mine / "beside_of_tests.py").write_text("WHERE = 'beside'\nstr = str\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=mine, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "('installed', 'beside', 'scheduler') True\n", done.stderr


WRAPPED = """
import functools


def exact(response):
    return float(response == "1")


def length_penalty(function):
    @functools.wraps(function)
    def scored(response):
        return function(response) - len(response)

    return scored


def score(response):
    return 1.0


first, penalized = score, length_penalty(exact)


def score(response):
    return 0.0


@length_penalty
def decorated(response):
    return 1.0
"""


def test_a_function_that_its_own_name_does_not_find_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(WRAPPED)
    module = load_file(str(tmp_path / "rewards.py"))
    for other, name in ((module.penalized, "exact"), (module.first, "score")):
        text = told(Inner, "inner", function=other)
        assert text.startswith(
            f"inner.function must be what its name finds, got another object that bears the name {name} of "
        )
        assert text.endswith("give it a `def` of its own.")
    for same in (module.exact, module.score, module.decorated):
        assert load_reference(as_reference(same), "reward.function") is same


def test_a_file_that_two_threads_ask_for_at_once_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(
        "import os, contextlib, threading\n"
        "os.meeting[0] += 1\n"
        "with contextlib.suppress(threading.BrokenBarrierError):\n    os.meeting[1].wait(0.2)\n"
    )
    os.meeting = [0, threading.Barrier(2)]  # type: ignore[attr-defined]
    try:
        with ThreadPoolExecutor(2) as threads:
            one, other = threads.map(load_file, [str(tmp_path / "meeting.py")] * 2)
        assert one is other and os.meeting[0] == 1  # type: ignore[attr-defined]
    finally:
        del os.meeting  # type: ignore[attr-defined]


def test_every_reference_of_the_settings_can_be_changed(tmp_path: Path) -> None:
    outer = Outer(count=1, inner=Inner(function="a.py:f"))
    assert references(outer) == [("inner.function", "a.py:f")]
    moved = with_references(outer, lambda path, reference: relative_to(Path("/run"), reference))
    assert moved.inner.function == "/run/a.py:f"
    assert relative_to(Path("/run"), "package.module:f") == "package.module:f"
    assert relative_to(Path("/run"), "/b.py:f") == "/b.py:f"
    assert with_references(outer, lambda path, reference: reference) is outer


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_admin_endpoint_on_loopback_needs_no_token_file(host: str) -> None:
    assert AdminConfig(host=host).token_file is None


def test_the_admin_endpoint_elsewhere_needs_a_token_file() -> None:
    assert told(AdminConfig, "admin", host="0.0.0.0").startswith(
        "admin.token_file must be set when admin.host is not loopback, got host '0.0.0.0' without a token."
    )


KEPT = fixed("it is said once")


class Marked(Section):
    free: Annotated[int, FREE] = 0
    kept: Annotated[str | None, KEPT] = None
    plain: float = 0.0
    inner: Inner = Inner()
    whole: Annotated[Inner | None, FREE] = None
    named: dict[str, Inner] = Field(default_factory=dict)


class Tree(Section):
    marked: Marked = Marked()
    all_free: Annotated[Marked, FREE] = Marked()


@pytest.mark.parametrize(
    "tree, path, was, now, mark",
    [
        ({"marked": {"free": 1}}, "marked.free", 0, 1, FREE),
        ({"marked": {"kept": "a"}}, "marked.kept", None, "a", KEPT),
        ({"marked": {"plain": 1.5}}, "marked.plain", 0.0, 1.5, LEARNT),  # what nobody has marked
        ({"marked": {"inner": {"speed": 2}}}, "marked.inner.speed", 1.0, 2.0, LEARNT),
        ({"marked": {"whole": {}}}, "marked.whole", None, Inner(), FREE),
        ({"marked": {"named": {"a": {}}}}, "marked.named.a", None, Inner(), LEARNT),
        ({"all_free": {"kept": "a"}}, "all_free.kept", None, "a", FREE),  # the section's mark is that of all in it
    ],
)
def test_a_changed_setting_has_the_mark_of_its_section_or_its_own_and_else_changes_what_is_learnt(
    tree: dict[str, object], path: str, was: object, now: object, mark: object
) -> None:
    (found,) = changes(Tree(), Tree.model_validate(tree))
    assert (found.path, found.was, found.now, found.on_resume) == (path, was, now, mark)
    assert list(changes(Tree(), Tree())) == []
