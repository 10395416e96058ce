"""The fused forward of plain Qwen3, about three times fewer operations a layer than the Hugging Face module.

Owns the fused copies of the weights and the key-value cache. Does not own the Hugging Face module, whose parameters stay
the truth: `load` writes them in place and then refreshes the copies, also in place.

Invariant: the logits equal the module's to rounding. What is fused: one product for q, k and v, one for gate and up; decode
rows and new prompts share every product; the residual is added by the product itself; a rotary embedding is one complex
multiplication, because head dimensions are permuted so that a rotated pair is adjacent (q and k alike, so their products
are unchanged); a group of query heads is folded into the query length, so attention reads each key and value once, and where
lengths differ a few rows at a time, so that they are not read up to the longest of all.

    cache [layer, slot, key heads then value heads, position, head_dim]      decode row i is slot i

Legend: N rows (decode tokens, then the tokens of new prompts), n decode rows, H query heads, K key-value heads, G = H / K,
D head_dim, L max_length, T prompt length, V vocab, E hidden size, F feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rondo.models.lora import Adapted, Pair, adapted, load_published
from rondo.roles.engines.embedded.products import Product
from rondo.roles.engines.embedded.slots import Batch, Prefill

KV_BLOCK = 16
"""Positions by which the attended range grows; views of the cache are reused in between."""
ROWS_TOGETHER, WORTH_PARTING = 8, 0.85
"""Decode rows of one attention where lengths differ, and the part of the reads from which on it is not worth the more calls."""


def is_plain_qwen3(model: Any) -> bool:
    """Whether the fused forward computes exactly this module: dense, full attention, no biases, fixed rotary angles."""
    config = model.config
    return bool(
        type(model).__name__ == "Qwen3ForCausalLM"
        and not config.attention_bias
        and config.hidden_act == "silu"
        and set(config.layer_types) == {"full_attention"}
        and config.rope_parameters["rope_type"] in ("default", "linear", "yarn", "llama3")
        and len({(p.device, p.dtype) for p in model.parameters()}) == 1
    )


_Views = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [rows, K, upto, D] of each layer."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Decode rows that attend together."""

    rows: slice
    views: _Views
    mask: torch.Tensor
    """additive [rows, 1, 1, upto]"""


@dataclass(frozen=True, slots=True)
class _Layer:
    module: Any
    qkv: Product
    """[(H + 2K) D, E], rows of q and k permuted within each head"""
    out: Product
    """[E, G K D], columns permuted to the order in which attention leaves its heads"""
    gate_up: Product
    """[2F, E]"""
    down: Product
    qk_norm: torch.Tensor
    """[H + K, D], the q norm's weight for every query head, then the k norm's"""


def ranges(positions: np.ndarray) -> list[tuple[int, int]]:
    """(end, positions to attend to) of each part of the decode rows, in their order, for their positions int64 [n], n > 0.

    One part where all are about as long; else `ROWS_TOGETHER` rows a part, so that each is read up to its own longest.
    """
    upto = (positions // KV_BLOCK + 1) * KV_BLOCK
    starts = np.arange(0, len(upto), ROWS_TOGETHER)
    longest = np.maximum.reduceat(upto, starts)
    ends = np.append(starts[1:], len(upto))
    if (longest * (ends - starts)).sum() > WORTH_PARTING * len(upto) * longest.max():
        return [(len(upto), int(longest.max()))]
    return list(zip(ends.tolist(), longest.tolist(), strict=True))


_Reordered = Callable[[torch.Tensor], torch.Tensor]


def _fused(
    modules: Sequence[Any], rows: Sequence[_Reordered | None] = (), columns: _Reordered | None = None
) -> Pair | None:
    """The adapters of products whose weights lie behind each other in one; None where none has any. rows, columns: how their
    weights were reordered."""
    found = [(at, module) for at, module in enumerate(modules) if isinstance(module, Adapted)]
    if not found:
        return None
    narrow = torch.cat([module.lora_A.weight for _, module in found])
    blocks = []
    for at, module in enumerate(modules):
        wide = module.lora_B.weight if isinstance(module, Adapted) else module.weight[:, :0]
        reorder = rows[at] if rows and isinstance(module, Adapted) else None
        blocks.append(wide if reorder is None else reorder(wide))
    return Pair(narrow if columns is None else columns(narrow), torch.block_diag(*blocks), found[0][1].scaling)


class Qwen3Forward:
    """`Forward` for a `Qwen3ForCausalLM` that `is_plain_qwen3`. Float32, bfloat16 and float16, any device."""

    def __init__(self, model: Any, *, num_slots: int, max_length: int, fixed_shapes: bool = False) -> None:
        config = model.config
        weight = model.model.embed_tokens.weight
        self._model = model
        self._device, self._dtype = weight.device, weight.dtype
        self._num_q, self._num_kv = config.num_attention_heads, config.num_key_value_heads
        self._dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._num_slots = num_slots
        self._length = -(-max_length // KV_BLOCK) * KV_BLOCK
        self._fixed_shapes = fixed_shapes
        self._adapts = bool(adapted(model))
        shape = (config.num_hidden_layers, num_slots, 2 * self._num_kv, self._length, self._dim)
        with torch.inference_mode():
            self._cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
            self._flat = list(self._cache.view(shape[0], -1, self._dim).unbind(0))
            self._mask = torch.full((num_slots, self._length), -torch.inf, dtype=self._dtype, device=self._device)
            self._layers = [self._built(layer) for layer in model.model.layers]
            self._head = Product(model.lm_head.weight, num_slots)
            self._adapt()
            positions = torch.arange(self._length, device=self._device)[None]
            cos, sin = model.model.rotary_emb(torch.zeros(1, device=self._device), positions)
            half = self._dim // 2
            self._turn = torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        heads = 2 * self._num_kv
        self._row_of_slot = (np.arange(num_slots) * heads * self._length)[:, None] + np.arange(heads) * self._length
        self._views: dict[tuple[int, int, int], _Views] = {}

    modalities: tuple[str, ...] = ()
    held = False
    keeps_prefixes = True

    @property
    def vocab_size(self) -> int:
        return int(self._model.model.embed_tokens.num_embeddings)

    def __call__(self, batch: Batch) -> torch.Tensor:
        num_decode, prompts = len(batch.tokens), batch.prompts
        tokens, positions = batch.tokens, batch.positions
        cache_rows = self._row_of_slot[:num_decode] + positions[:, None]
        if prompts:
            spans = [np.arange(prompt.tokens.size) for prompt in prompts]
            tokens = np.concatenate([tokens, *(prompt.tokens for prompt in prompts)])
            positions = np.concatenate([positions, *spans])
            prompt_rows = [
                self._row_of_slot[prompt.slot] + span[:, None] for prompt, span in zip(prompts, spans, strict=True)
            ]
            cache_rows = np.concatenate([cache_rows, *prompt_rows])
            for prompt in prompts:
                self._show(prompt.slot, prompt.tokens.size)
        device = self._device
        x_NE = F.embedding(torch.from_numpy(tokens).to(device), self._model.model.embed_tokens.weight)
        at_N = torch.from_numpy(positions).to(device)
        turn_N1d = self._turn.index_select(0, at_N)[:, None]
        parts = self._attended(num_decode, batch.positions, at_N)
        rows = torch.from_numpy(cache_rows).to(device)
        for index, layer in enumerate(self._layers):
            x_NE = self._layer(index, layer, x_NE, turn_N1d, rows, num_decode, parts, prompts)
        if prompts:
            last = num_decode - 1 + np.cumsum([prompt.tokens.size for prompt in prompts])
            keep = np.concatenate([np.arange(num_decode), last])
            x_NE = x_NE.index_select(0, torch.from_numpy(keep).to(device))
        norm = self._model.model.norm.weight
        return self._head(F.rms_norm(x_NE, norm.shape, norm, self._eps))

    def copy(self, source: int, target: int, length: int) -> None:
        self._cache[:, target, :, :length].copy_(self._cache[:, source, :, :length])
        self._show(target, length)

    def clear(self, slot: int | None = None) -> None:
        (self._cache if slot is None else self._cache[:, slot]).zero_()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_published(self._model, tensors)
        if self._adapts:
            self._adapt()
        else:
            self.refresh()

    def _layer(
        self,
        index: int,
        layer: _Layer,
        x_NE: torch.Tensor,
        turn_N1d: torch.Tensor,
        rows: torch.Tensor,
        num_decode: int,
        parts: list[_Part],
        prompts: tuple[Prefill, ...],
    ) -> torch.Tensor:
        num_rows, num_q, num_kv, dim = len(x_NE), self._num_q, self._num_kv, self._dim
        group = num_q // num_kv
        norm = layer.module.input_layernorm.weight
        heads_NAD = layer.qkv(F.rms_norm(x_NE, norm.shape, norm, self._eps)).view(num_rows, -1, dim)
        qk_NBD = heads_NAD[:, : num_q + num_kv]
        normed = F.rms_norm(qk_NBD.float(), (dim,), None, self._eps).mul_(layer.qk_norm)
        turned = torch.view_as_complex(normed.view(num_rows, -1, dim // 2, 2)).mul_(turn_N1d)
        qk_NBD.copy_(torch.view_as_real(turned).view(num_rows, -1, dim))
        self._flat[index].index_put_((rows,), heads_NAD[:, num_q:])
        q_NHD = heads_NAD[:, :num_q]
        if not prompts and len(parts) == 1:
            seen_NX = self._decoded(index, parts[0], q_NHD).reshape(num_rows, -1)
        else:
            seen_NGKD = x_NE.new_empty(num_rows, group, num_kv, dim)
            for part in parts:
                seen_NGKD[part.rows] = self._decoded(index, part, q_NHD)
            start = num_decode
            for prompt in prompts:
                end = start + prompt.tokens.size
                # Key-value heads are the batch, so that a group reads its keys and values through a stride of 0.
                q, k, v = heads_NAD[start:end].split((num_q, num_kv, num_kv), 1)
                q_KGTD = q.view(-1, num_kv, group, dim).permute(1, 2, 0, 3)
                k_KGTD = k.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
                v_KGTD = v.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
                seen = F.scaled_dot_product_attention(q_KGTD, k_KGTD, v_KGTD, is_causal=True)
                seen_NGKD[start:end] = seen.permute(2, 1, 0, 3)
                start = end
            seen_NX = seen_NGKD.view(num_rows, -1)
        x_NE = layer.out.add(x_NE, seen_NX)
        norm = layer.module.post_attention_layernorm.weight
        gate_up = layer.gate_up(F.rms_norm(x_NE, norm.shape, norm, self._eps))
        gate, up = gate_up.chunk(2, -1)
        return layer.down.add(x_NE, F.silu(gate).mul_(up))

    def _decoded(self, index: int, part: _Part, q_NHD: torch.Tensor) -> torch.Tensor:
        """What rows of a part see in a layer: [rows, G, K, D]."""
        keys, values = part.views[index]
        q = q_NHD[part.rows].view(-1, self._num_kv, self._num_q // self._num_kv, self._dim)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=part.mask).transpose(1, 2)

    def _attended(self, num_decode: int, positions: np.ndarray, at_N: torch.Tensor) -> list[_Part]:
        """The decode rows in parts, each with the positions of the cache that its longest row attends to."""
        if not num_decode:
            return []
        mask = self._mask[:num_decode]
        mask.scatter_(1, at_N[:num_decode, None], 0.0)
        ends = [(num_decode, self._length)] if self._fixed_shapes else ranges(positions)
        parts, start = [], 0
        for end, upto in ends:
            views = self._views_of(start, end, upto)
            parts.append(_Part(slice(start, end), views, mask[start:end, None, None, :upto]))
            start = end
        return parts

    def _views_of(self, start: int, end: int, upto: int) -> _Views:
        key = start, end, upto
        if key not in self._views:
            if len(self._views) > self._num_slots * self._length // KV_BLOCK:
                self._views.clear()
            keys, values = self._cache[:, start:end, :, :upto].split(self._num_kv, 2)
            self._views[key] = list(zip(keys.unbind(0), values.unbind(0), strict=True))
        return self._views[key]

    def _show(self, slot: int, length: int) -> None:
        """Lets a slot's later tokens attend to its first `length` positions and to no other."""
        self._mask[slot, :length] = 0.0
        self._mask[slot, length:] = -torch.inf

    def _fuse(self, module: Any) -> tuple[torch.Tensor, ...]:
        """The weights of a layer's products, computed from the module's parameters, and the norm of q and k."""
        attention, mlp, adjacent = module.self_attn, module.mlp, self._adjacent
        num_q, num_kv = self._num_q, self._num_kv
        qkv = torch.cat([adjacent(attention.q_proj.weight), adjacent(attention.k_proj.weight), attention.v_proj.weight])
        out = self._as_seen(attention.o_proj.weight)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        q_norm, k_norm = adjacent(attention.q_norm.weight), adjacent(attention.k_norm.weight)
        return qkv, out, gate_up, torch.cat([q_norm.expand(num_q, -1), k_norm.expand(num_kv, -1)]).float()

    def _adjacent(self, weight: torch.Tensor) -> torch.Tensor:
        """Rows of each head reordered so that dimension j lies beside its rotation partner j + D / 2."""
        return weight.view(-1, 2, self._dim // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)

    def _as_seen(self, weight: torch.Tensor) -> torch.Tensor:
        """Columns reordered to the order in which attention leaves its heads."""
        heads = weight.view(-1, self._num_kv, self._num_q // self._num_kv, self._dim)
        return heads.transpose(1, 2).reshape(weight.shape)

    @torch.inference_mode()
    def _adapt(self) -> None:
        """Takes the module's adapters over, fused as the products are."""
        for layer in self._layers if self._adapts else ():
            attention, mlp = layer.module.self_attn, layer.module.mlp
            qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
            layer.qkv.adapt(_fused(qkv, rows=(self._adjacent, self._adjacent, None)))
            layer.out.adapt(_fused((attention.o_proj,), columns=self._as_seen))
            layer.gate_up.adapt(_fused((mlp.gate_proj, mlp.up_proj)))
            layer.down.adapt(_fused((mlp.down_proj,)))

    def _built(self, module: Any) -> _Layer:
        qkv, out, gate_up, qk_norm = self._fuse(module)
        down, rows = module.mlp.down_proj.weight, self._num_slots
        return _Layer(
            module, Product(qkv, rows), Product(out, rows), Product(gate_up, rows), Product(down, rows), qk_norm
        )

    @torch.inference_mode()
    def refresh(self) -> None:
        """Takes the module's parameters over after they changed."""
        for layer in self._layers:
            qkv, out, gate_up, qk_norm = self._fuse(layer.module)
            layer.qkv.set(qkv)
            layer.out.set(out)
            layer.gate_up.set(gate_up)
            layer.down.set(layer.module.mlp.down_proj.weight)
            layer.qk_norm.copy_(qk_norm)
        self._adapt()
        self._head.set(self._model.lm_head.weight)
