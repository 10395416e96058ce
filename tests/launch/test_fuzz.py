"""Settings that nobody meant: any values in any places, and any `--set`. They are a run's settings, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rondo.launch.config import RunConfig, load, override, resolve, unresolve
from rondo.launch.rundir import read_json
from rondo.runtime.errors import ConfigError
from tests.strength import strength

MANY = settings(max_examples=strength(quick=40, full=3000))
CONFIG = load(Path(__file__).parents[2] / "examples" / "quickstart.py")
TREE = resolve(CONFIG)
NAMES = st.text(max_size=6) | st.sampled_from(["name", "train", "role_groups", "rollout.sglang", "", ".", "0", "\0"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["file.py:f", "rondo.launch.config:load", ":", "a:", "x" * 5000, "\udcff", "1e999", "{}", "[["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a tree."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*above, key)
        yield from places(child, (*above, key))


PLACES = sorted(places(TREE), key=str)
PATHS = [".".join(map(str, place)) for place in PLACES]


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


@MANY
@example([(PLACES[0], deep(200))], [])
@example([(("train",), {"lr": float("nan"), "\0": 10**400})], [])
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), VALUES), max_size=3),
    st.lists(st.tuples(st.sampled_from(PLACES), NAMES, VALUES), max_size=2),
)
def test_any_tree_is_settings_or_refused_in_words(
    changed: list[tuple[tuple[Any, ...], Any]], added: list[tuple[tuple[Any, ...], str, Any]]
) -> None:
    tree = copy.deepcopy(TREE)
    for way, name, value in [*((way[:-1], way[-1], value) for way, value in changed), *added]:
        node: Any = tree
        for key in way:
            node = node[key] if isinstance(node, dict) and key in node else {}
        if isinstance(node, dict) or (isinstance(node, list) and isinstance(name, int) and name < len(node)):
            node[name] = value
    refused_or_settings(lambda: unresolve(tree))


def refused_or_settings(make: Any) -> None:
    try:
        config = make()
    except ConfigError as error:
        assert 10 < len(str(error)) < 20_000
        return
    assert isinstance(config, RunConfig)
    orjson.dumps(resolve(config))  # what is taken can be kept


@MANY
@example(["a=" + "[" * 3000])
@example(["train.lr=" + "9" * 5000])
@example(["role_groups.99999999999999999999.name=x"])
@example(["role_groups.²=1"])
@given(
    st.lists(
        st.builds(
            lambda path, raw: f"{path}={raw}",
            st.sampled_from(PATHS) | st.lists(NAMES, max_size=4).map(".".join),
            st.text(max_size=12) | VALUES.map(repr),
        )
        | st.text(max_size=12),
        max_size=3,
    )
)
def test_any_set_is_settings_or_refused_in_words(sets: list[str]) -> None:
    refused_or_settings(lambda: override(CONFIG, sets))


@MANY
@given(st.integers(0, 400), st.integers(0, 30), st.binary(max_size=20))
def test_a_file_of_settings_with_other_bytes_is_read_or_refused(
    tmp_path_factory: Any, at: int, taken: int, put: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "config.resolved.json"
    whole = orjson.dumps(TREE)
    path.write_bytes(whole[:at] + put + whole[at + taken :])
    refused_or_settings(lambda: unresolve(read_json(path)))
