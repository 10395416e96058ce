"""What kernels are told of a flat batch: each query sees what its segment is behind, and that up to itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rondo.models.attention import prove
from rondo.models.kernels import FLASH, FLEX, Documents, Varlen
from rondo.models.shared_prefixes import Call, Segment, SharedPrefixes, lay_out, ways
from tests.models import emulated


def drawn(seed: int, most: int = 300) -> list[Segment]:
    """Prompts and answers of all sizes, and what goes on behind answers, some of them empty, in no order."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    for length in rng.integers(1, most, 4):
        prompt = len(segments)
        segments.append(Segment(int(length)))
        segments += [Segment(int(n), prompt) for n in rng.integers(0, most, rng.integers(0, 4))]
    segments += [Segment(int(rng.integers(1, most)), 0), Segment(0), Segment(128, len(segments) + 1)]
    for _ in range(5):
        segments.append(Segment(int(rng.integers(0, most // 2)), int(rng.integers(0, len(segments)))))
    return segments


def places(segments: list[Segment], starts: list[int]) -> torch.Tensor:
    """int64 [queries], of each token in its sequence."""
    found = torch.zeros(sum(one.length for one in segments), dtype=torch.int64)
    for start, one, way in zip(starts, segments, ways(segments), strict=True):
        before = sum(segments[at].length for at in way)
        found[start : start + one.length] = before + torch.arange(one.length)
    return found


def expected(segments: list[Segment], starts: list[int]) -> torch.Tensor:
    """bool [queries, keys]"""
    length = sum(one.length for one in segments)
    sees = torch.zeros(length, length, dtype=torch.bool)
    for start, one, way in zip(starts, segments, ways(segments), strict=True):
        own = slice(start, start + one.length)
        sees[own, own] = torch.ones(one.length, one.length, dtype=torch.bool).tril()
        for at in way:
            sees[own, starts[at] : starts[at] + segments[at].length] = True
    return sees


@pytest.mark.parametrize("seed", range(6))
def test_a_block_mask_is_what_each_query_sees(seed: int) -> None:
    segments = drawn(seed)
    starts, shared = lay_out(segments, FLEX)
    sees = expected(segments, starts)
    (documents,) = shared.parts
    assert isinstance(documents, Documents)
    mask = documents.to("cpu").mask
    assert torch.equal(emulated.visible(mask), sees)
    # No block is listed in vain, and the backward goes through the same blocks.
    made: Any = flex.create_block_mask(lambda b, h, q, k: sees[q, k], 1, 1, *sees.shape, device="cpu")
    assert torch.equal(mask.to_dense(), made.to_dense())
    assert torch.equal(mask.q_num_blocks + mask.full_q_num_blocks, made.q_num_blocks + made.full_q_num_blocks)
    assert int(mask.full_kv_num_blocks.sum()) >= 0.8 * int(made.full_kv_num_blocks.sum())


@pytest.mark.parametrize("window", [1, 40, 128, 300])
def test_a_block_mask_in_a_window_hides_what_is_too_far_and_lists_few_blocks_of_it(window: int) -> None:
    segments = drawn(window)
    starts, shared = lay_out(segments, FLEX)
    place = places(segments, starts)
    sees = expected(segments, starts) & (place[:, None] - place[None] < window)
    (documents,) = shared.parts
    assert isinstance(documents, Documents)
    mask = documents.to("cpu")._in_window(window)
    assert torch.equal(emulated.visible(mask), sees)
    made: Any = flex.create_block_mask(lambda b, h, q, k: sees[q, k], 1, 1, *sees.shape, device="cpu")
    listed = made.to_dense() <= mask.to_dense()
    assert bool(listed.all()) and int(mask.to_dense().sum()) <= (1.5 if window >= 128 else 3) * int(
        made.to_dense().sum()
    )


@pytest.mark.parametrize("seed", range(6))
def test_lengths_of_runs_are_what_each_query_sees(seed: int) -> None:
    segments = drawn(seed, most=40)
    starts, shared = lay_out(segments, FLASH)
    (varlen,) = shared.parts
    assert isinstance(varlen, Varlen)
    sees = torch.zeros(int(varlen.query_ends[-1]), int(varlen.query_ends[-1]), dtype=torch.bool)
    keys = varlen.keys if varlen.keys is not None else torch.arange(len(sees))
    ends = zip(varlen.query_ends[:-1], varlen.query_ends[1:], varlen.key_ends[:-1], varlen.key_ends[1:], strict=True)
    for first, last, key, key_end in (map(int, run) for run in ends):
        sees[first:last, keys[key:key_end]] = emulated.from_the_end(last - first, key_end - key)
    assert torch.equal(sees, expected(segments, starts))


def test_a_prompt_and_its_first_answer_are_one_run_and_no_key_is_copied_for_them() -> None:
    starts, shared = lay_out([Segment(5), Segment(3), Segment(4, 0), Segment(2, 1)], FLASH)
    (varlen,) = shared.parts
    assert isinstance(varlen, Varlen)
    assert starts == [0, 9, 5, 12]
    assert (varlen.query_ends.tolist(), varlen.keys, varlen.most_queries) == ([0, 9, 14], None, 9)
    _, shared = lay_out([Segment(5), Segment(4, 0), Segment(2, 0)], FLASH)
    (varlen,) = shared.parts
    assert isinstance(varlen, Varlen) and varlen.keys is not None
    assert (varlen.query_ends.tolist(), varlen.key_ends.tolist()) == ([0, 9, 11], [0, 9, 16])
    assert varlen.keys.tolist() == [*range(9), *range(5), 9, 10]


def test_torchs_own_flex_attention_gives_what_blocks_of_rows_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(module: Any, q: Any, k: Any, v: Any, mask: Any, *, scaling: Any, dropout: float) -> Any:
        """transformers', but for compiling it."""
        return flex.flex_attention(q, k, v, block_mask=mask, scale=scaling).transpose(1, 2), None

    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, FLEX, eager)
    segments, windows = drawn(1), (None, 60, 700)  # the last is wider than a step of rows
    found = []
    for attn in ("sdpa", FLEX):
        starts, shared = lay_out(segments, attn)
        places = torch.cat(
            [torch.arange(start, start + one.length) for start, one in zip(starts, segments, strict=True)]
        )
        draw = torch.Generator().manual_seed(0)
        inputs = [torch.randn(len(places), 4, 8, generator=draw)[places.argsort()] for _ in range(3)]
        found.append(torch.stack([attended(shared, inputs, window)[places] for window in windows]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


@torch._dynamo.config.patch(recompile_limit=8)
def test_what_is_compiled_for_two_lengths_serves_all_and_no_number_of_variants_ends_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulated.install(monkeypatch, FLEX)
    assert prove(FLEX, {Call(2, 2, 8, 8, None)}, torch.device("cpu"), torch.float32) == ""
    assert torch._dynamo.config.recompile_limit >= 64
    torch._dynamo.reset()
    made: list[Any] = []
    compiled = torch.compile(flex.flex_attention, backend=lambda graph, _: made.append(graph) or graph.forward)
    for seed in range(5):
        _, shared = lay_out(drawn(seed), FLEX)
        (documents,) = shared.parts
        assert isinstance(documents, Documents)
        x = torch.zeros(1, 2, documents.bounds.shape[1], 16)
        with torch.no_grad():
            compiled(x, x, x, block_mask=documents.mask)
    assert len(made) == 2


def attended(shared: SharedPrefixes, inputs: list[torch.Tensor], window: int | None) -> torch.Tensor:
    module = torch.nn.Module()
    how = {"scaling": None, "dropout": 0.0, "window": window}
    with torch.no_grad():
        return torch.cat([part.attend(module, *inputs, **how) for part in shared.parts])
