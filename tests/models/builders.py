"""Tiny models of several families, random sequences, and a training step written out, for the tests beside."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.comm.weights.publication import publish
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.together import Tensors, other_part
from rondo.models import parallel
from rondo.models.config import LoraConfig
from rondo.models.logprobs import response_log_probs
from rondo.models.lora import adapt, canary_of, load_published, published_adapter
from rondo.models.names import disk_dtypes, disk_groups, memory_tensors, to_disk
from rondo.models.optimizer import learning_rate
from rondo.models.packing import Sequence, pack
from rondo.models.published import own_weights
from rondo.models.tiny import qwen3
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.models.units import drop_copies
from tests.comm.memory import MemorySegment

VOCABULARY = 266
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def tiny(family: str, *, tied: bool = True) -> Any:
    """A seeded model of `family`, in float32. Weights are larger than at the usual start, so that log-probs spread."""
    import transformers as hf

    sizes = SIZES | {"tie_word_embeddings": tied, "initializer_range": 0.1}
    torch.manual_seed(5)
    if family == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes))
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **experts))
    if family == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    if family == "windows":
        kinds = ["sliding_attention", "full_attention"]
        return hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**sizes, use_sliding_window=True, sliding_window=20, layer_types=kinds)
        )
    if family == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256))
    if family == "gemma2":
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes))
    raise KeyError(family)


def folder_of(folder: Path, family: str, *, tied: bool = True) -> str:
    """A Hugging Face folder of `tiny(family)` with a tokenizer."""
    tiny(family, tied=tied).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def give_adapters(model: Any) -> None:
    """To attention and experts of a mixture, large ones."""
    settings = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "o_proj", "experts"))
    adapt(model, settings, dtype=torch.float32)
    shapes = {name: tensor.shape for name, tensor in published_adapter(model).items()}
    load_published(model, canary_of(shapes, settings))


def default_folder(folder: Path) -> str:
    folder.mkdir()
    qwen3.build(folder, hidden_size=32, num_layers=2, max_positions=256)
    return str(folder)


def sequences(lengths: Ordered[tuple[int, int]], seed: int = 0) -> list[Sequence]:
    """(tokens, response) each, of random tokens."""
    rng = np.random.default_rng(seed)
    return [Sequence(rng.integers(0, 256, length).astype(np.int32), response) for length, response in lengths]


RAGGED = ((13, 5), (4, 3), (30, 11), (7, 1), (21, 20), (2, 1), (9, 0), (16, 8))


def recorded(one: Sequence, layers: int = 2, top_k: int = 2, num_experts: int = 4) -> Sequence:
    """The sequence with experts that no router chose, of all its tokens but the last; equal tokens get equal ones."""
    draw = np.random.default_rng(one.tokens)
    all_of_them = np.tile(np.arange(num_experts, dtype=np.uint8), (len(one.tokens) - 1, layers, 1))
    return replace(one, experts=draw.permuted(all_of_them, axis=-1)[..., :top_k])


def unpacked(model: Any, one: Sequence, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of one sequence's response through the plain Hugging Face forward."""
    ids = torch.from_numpy(one.tokens.astype(np.int64))
    last = len(ids) - 1
    logits = model(input_ids=ids[None], use_cache=False).logits[0, last - one.response : last].float() / temperature
    everything = torch.log_softmax(logits, -1)
    chosen = everything.gather(1, ids[len(ids) - one.response :, None])[:, 0]
    return chosen, -(everything.exp() * everything).sum(-1)


STEPS = [sequences([(5 + (3 * i + s) % 17, 2 + (i + s) % 3) for i in range(16)], seed=s) for s in range(3)]
"""Three steps of 16 sequences: two micro-batches of 8, which two ranks share evenly."""
LR = 1e-3
EPS = 1e-4
"""Large: with the usual one Adam makes the rounding of tiny gradients visible."""


def train_step(
    model: Any, optimizer: torch.optim.Optimizer, step: int, *, rank: int = 0, world_size: int = 1, replay: bool = False,
    take: bool = True,
) -> list[float]:  # fmt: skip
    """One step over this rank's part of STEPS[step]: [this rank's loss sum, gradient norm]. `replay`: with recorded
    experts of all but a few sequences. Not taken, its gradients are left, neither clipped nor used."""
    total = 0.0
    batches = [STEPS[step][start : start + 8][rank::world_size] for start in (0, 8)]
    num_tokens = sum(one.response for one in STEPS[step])
    model.train()
    for number, batch in enumerate(batches):
        parallel.set_last(model, number == len(batches) - 1)
        found = [recorded(one) if replay and len(one.tokens) % 4 else one for one in batch]
        log_probs, _ = response_log_probs(model, pack(found), temperature=0.9, chunk_tokens=7)
        loss = -log_probs.sum()
        loss.backward()
        total += loss.item()
    parallel.scale_gradients(model, 1 / num_tokens)
    if not take:
        return [total]
    norm = parallel.clip_grad_norm(model, 0.5)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, LR, warmup_steps=2, schedule="cosine", total=3)
    optimizer.step()
    parallel.discard_gradients(model)
    return [total, norm]


def full_tensors(model: Any, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name on disk, whole tensor) on every rank, in `dtype`; of a model in one process and without a cast, its own (collective
    when sharded)."""
    drop_copies(model)
    memory, dtypes = memory_tensors(model), disk_dtypes(model, dtype)
    for group in disk_groups(model):
        parts = {name: memory[name].detach().to(dtypes[name]) for name in group.sources}
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in parts.items()}
        yield from to_disk(model, group, whole).items()


def published(model: Any) -> int:
    """The checksum of a whole model's weights in a slab, as a trainer publishes them."""
    return written(own_weights(model, "bfloat16"), new_slab(model))


def new_slab(model: Any) -> WeightSlab:
    num_bytes = sum(8 * parameter.numel() for parameter in model.parameters())
    return WeightSlab(MemorySegment(slab_bytes(num_bytes, 1000, 1)), 1)


def written(tensors: Tensors, slab: WeightSlab, beside: dist.ProcessGroup | None = None) -> int:
    """Version 1 in slot 0, in many buckets: its checksum, 0 on every rank of `beside` but the first."""
    if beside is not None and dist.get_rank(beside) > 0:
        other_part(slab, tensors, beside, attempt=0, version=1, bucket_bytes=1 << 14)
        return 0
    return publish(slab, 0, attempt=0, version=1, tensors=tensors, bucket_bytes=1 << 14, beside=beside).checksum
