"""What sequences begin with is found: every token of every sequence, once where it is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.models import prefix_tree
from rondo.models.prefix_tree import Line, tree_of
from tests.strength import strength

MEDIA = ((0, 3, "a"), (2, 4, "b"), (2, 4, "c"), (7, 2, "b"))


@st.composite
def lines(draw: Any) -> list[Line]:
    """Of few tokens, media and experts, so that they have much in common."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        tokens = np.array(draw(st.lists(st.integers(0, 1), min_size=1, max_size=14)), np.int32)
        media, end = [], 0
        for at, count, key in MEDIA:
            if at >= end and at + count <= len(tokens) and draw(st.booleans()):
                media.append((at, count, key))
                end = at + count
        told = draw(st.sampled_from((None, 0, 1)))
        experts = None if told is None else np.full((draw(st.integers(0, len(tokens))), 2, 1), told, np.uint8)
        found.append(Line(tokens, len(tokens) - draw(st.integers(0, min(1, len(tokens) - 1))), tuple(media), experts))
    return found


def told_of(line: Line, token: int) -> tuple[Any, ...]:
    """All that one token is computed from, but for those before it."""
    experts = None if line.experts is None or token >= len(line.experts) else line.experts[token].tobytes()
    return int(line.tokens[token]), experts, [(at, key) for at, count, key in line.media if at <= token < at + count]


@pytest.mark.parametrize("fewest", [1, 8])
def test_the_nodes_on_a_path_are_the_tokens_of_its_sequence(fewest: int) -> None:
    @settings(max_examples=strength(quick=25, full=2000), deadline=None, database=None)
    @given(lines())
    def holds(lines: list[Line]) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(prefix_tree, "_FEWEST", fewest)
            nodes, paths = tree_of(lines)
        assert all(node.parent is None or node.parent < index for index, node in enumerate(nodes))
        for line, path in zip(lines, paths, strict=True):
            parents = [nodes[index].parent for index in path]
            assert parents == [None, *path[:-1]]
            places = [(index, token) for index in path for token in range(nodes[index].begin, nodes[index].end)]
            assert [token for _, token in places] == list(range(len(places))) and len(places) >= line.length
            for index, token in places[: line.length]:
                assert told_of(lines[nodes[index].line], token) == told_of(line, token)
            for index in path:
                assert not any(at < nodes[index].begin < at + count for at, count, _ in line.media)
        plain = [Line(line.tokens, line.length) for line in lines]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(prefix_tree, "_FEWEST", fewest)
            found = sum(node.end - node.begin for node in tree_of(plain)[0])
        distinct = {line.tokens[:end].tobytes() for line in plain for end in range(1, line.length + 1)}
        assert found == len(distinct) if fewest == 1 else len(distinct) <= found <= sum(line.length for line in plain)

    holds()


def test_turns_that_go_on_are_one_node_and_a_short_beginning_is_in_each() -> None:
    tokens = np.arange(100)
    nodes, paths = tree_of([Line(tokens, length) for length in (40, 100, 7)])
    assert ([node[1:] for node in nodes], paths) == ([(0, 100, None)], [(0,)] * 3)
    others = [np.concatenate([tokens[:number], [200 + number], tokens]) for number in (3, 60)]
    nodes, paths = tree_of([Line(each, len(each)) for each in (tokens, *others)])
    assert [node[1:] for node in nodes] == [(0, 60, None), (60, 100, 0), (60, 161, 0), (0, 104, None)]
    assert paths == [(0, 1), (3,), (0, 2)]
