from __future__ import annotations

import pytest

from rondo.comm.weights.topology import choose, place


@pytest.mark.parametrize("topology", ["flat", "tree", "chain"])
def test_every_rank_but_the_root_has_one_parent_whose_child_it_is(topology: str) -> None:
    for num_ranks in (1, 2, 3, 5, 8, 33):
        for root in {0, num_ranks // 2, num_ranks - 1}:
            places = [place(topology, num_ranks, rank, root) for rank in range(num_ranks)]  # type: ignore[arg-type]
            assert [rank for rank in range(num_ranks) if places[rank].parent is None] == [root]
            children = [child for each in places for child in each.children]
            assert sorted(children) == [rank for rank in range(num_ranks) if rank != root]
            assert all(places[child].parent == rank for rank in range(num_ranks) for child in places[rank].children)


def test_a_tree_is_as_deep_as_its_logarithm_and_a_chain_has_one_child_each() -> None:
    depth, rank = 0, 30
    while (parent := place("tree", 31, rank, 0).parent) is not None:
        depth, rank = depth + 1, parent
    assert depth == 4
    assert max(len(place("chain", 31, rank, 7).children) for rank in range(31)) == 1


def test_few_receivers_are_flat_many_buckets_a_chain_and_few_buckets_a_tree() -> None:
    assert choose(3, 1000) == "flat"
    assert choose(9, 64) == "chain"
    assert choose(65, 2) == "tree"


def test_what_is_no_topology_or_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="must be flat, tree or chain, got 'ring'"):
        place("ring", 3, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="between 0 and 2, got 0 and 3"):
        place("tree", 3, 3, 0)
