"""Which tokens several sequences have in common from their beginning: a tree, each of whose tokens is computed once.

Owns how the tree is found. Does not own what its nodes see (`shared_prefixes.py`), nor what a batch holds (`packing.py`).

    aaaBBB  aaaBBC  aaaD  aaa        aaa -+- BBB         nodes, each before those behind it; the path of each sequence:
                                          |- BBC         (0, 1) (0, 2) (0, 3) (0,)
                                          `- D

A token is the same in two sequences where all before it is, the media that lie there are, and the experts that were recorded for
it. Media are whole: a node ends where they begin or behind them. Two sequences of which one goes on where the other ends have one
path. A beginning is a node of its own where that spares a few tokens; where it spares fewer, each sequence has it by itself.

Invariant: the nodes on a path, behind each other, are the tokens of its sequence, and perhaps more behind the last one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_NONE = np.zeros((0, 1, 1), np.uint8)
_FEWEST = 8
"""Tokens that a node spares at least. Another node is another call of attention where it goes by blocks."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is computed of a sequence: its first `length` tokens, integers; `media`, as (first token, how many, key), in their
    order; `experts`, integers [recorded tokens, layers, top_k] from the first on."""

    tokens: np.ndarray
    length: int
    media: tuple[tuple[int, int, str], ...] = ()
    experts: np.ndarray | None = None


class Node(NamedTuple):
    """The tokens `begin` to `end` of the sequence `line`, behind the node `parent`."""

    line: int
    begin: int
    end: int
    parent: int | None


@dataclass(slots=True, eq=False)
class _Grown:
    line: int
    begin: int
    end: int
    parent: _Grown | None
    children: list[_Grown] = field(default_factory=list)
    into: _Grown | None = None
    """Has its tokens in its place."""


def tree_of(lines: Sequence[Line]) -> tuple[list[Node], list[tuple[int, ...]]]:
    """The nodes, depth first, and of each line those that its tokens lie in."""
    root = _Grown(0, 0, 0, None)
    leaves = [_added(root, lines, number) for number in range(len(lines))]
    for node in reversed(_depth_first(root)):
        if node.children and (len(node.children) - 1) * (node.end - node.begin) < _FEWEST:
            _dissolve(node)
    order = _depth_first(root)
    at = {id(node): index for index, node in enumerate(order)}
    nodes = [Node(node.line, node.begin, node.end, at.get(id(node.parent))) for node in order]
    paths = []
    for leaf, line in zip(leaves, lines, strict=True):
        index, path = at.get(id(leaf.into or leaf)), list[int]()
        while index is not None:
            path.append(index)
            index = nodes[index].parent
        paths.append(tuple(index for index in path[::-1] if nodes[index].begin < line.length))
    return nodes, paths


def _depth_first(root: _Grown) -> list[_Grown]:
    found, waiting = list[_Grown](), root.children[::-1]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].children[::-1]
    return found


def _added(root: _Grown, lines: Sequence[Line], number: int) -> _Grown:
    """The node that the last token of a line lies in, which is made where it was not there."""
    line, node, begin = lines[number], root, 0
    while begin < line.length:
        for child in node.children:
            end = _common(lines[child.line], line, begin, min(child.end, line.length))
            if end > begin:
                break
        else:
            leaf = _Grown(number, begin, line.length, node)
            node.children.append(leaf)
            return leaf
        if end < min(child.end, line.length):  # they part within it
            head = _Grown(child.line, begin, end, node, [child])
            node.children[node.children.index(child)] = head
            child.begin, child.parent = end, head
            child = head
        node, begin = child, end
    return node


def _common(one: Line, other: Line, begin: int, end: int) -> int:
    """Where two lines part that are the same up to `begin`, `end` at the latest."""
    if one.tokens[begin] != other.tokens[begin]:
        return begin
    end = begin + _first(one.tokens[begin:end] != other.tokens[begin:end])
    if one.media or other.media:
        end = min([end, *(at for at, _, _ in set(one.media) ^ set(other.media) if at >= begin)])
        end = min([end, *(at for at, count, _ in one.media if at < end < at + count)])
    told, told_other = (_NONE if each.experts is None else each.experts for each in (one, other))
    both, most = sorted((len(told), len(told_other)))
    if begin < both:
        differ = (told[begin : min(end, both)] != told_other[begin : min(end, both)]).any((1, 2))
        end = begin + _first(differ) if differ.any() else end
    return end if both == most or begin >= most else min(end, max(begin, both))


def _first(differ: np.ndarray) -> int:
    """The place of the first True, bool [T]; T where there is none."""
    return int(differ.argmax()) if differ.any() else len(differ)


def _dissolve(node: _Grown) -> None:
    """Its tokens become those of each of its children."""
    parent = node.parent
    assert parent is not None
    for child in node.children:
        child.begin, child.parent = node.begin, parent
    place = parent.children.index(node)
    parent.children[place : place + 1] = node.children
    node.into = node.children[0]
