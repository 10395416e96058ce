"""Random weights of a published shape, what a step over them computes at least, and the rates that chips are sold with.

Owns the sizes, and how floating-point operations are counted. Weights repeat a few million random numbers: a folder of gigabytes
is written at the rate of the disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rondo.models.hf_folder import write_folder
from rondo.models.names import disk_groups
from rondo.models.tiny.tokenizer import build_tokenizer

PEAKS = {
    "B200": 2250e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100 PCIe": 756e12, "GH200": 989e12, "H200": 989e12,
    "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12,
    "A40": 150e12, "A30": 165e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
"""Words of a device's name, the first that are in it -> dense bfloat16 products with float32 sums, operations a second, as
NVIDIA's data sheets have them (half of what they say with sparsity)."""


def peak_of(device: str) -> float | None:
    """Of one GPU of that name; None where it is not known."""
    return next((rate for name, rate in PEAKS.items() if re.search(rf"\b{name}\b", device)), None)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def of(self, layers: int) -> Shape:
        return replace(self, layers=layers)

    @property
    def layer_parameters(self) -> int:
        """Of the products in a layer; norms are not worth counting."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * queries + 2 * keys + 3 * self.feed_forward)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    def step_flops(self, prompt: int, answers: list[int]) -> float:
        """Forward and backward over one prompt and its answers, at the least: the prompt once, no padding, nothing again, logits
        of answers alone; two operations a parameter forward and four backward, and the same of scores and values."""
        tokens, queries = prompt + sum(answers), self.heads * self.head_dim
        seen = prompt**2 / 2 + sum(prompt * answer + answer**2 / 2 for answer in answers)
        products = self.layers * self.layer_parameters * tokens + self.hidden * self.vocab * sum(answers)
        return 6 * products + 12 * self.layers * queries * seen


QWEN3_4B = Shape(2560, 9728, 36, 32, 8, 128, 151_936)
TINY = Shape(64, 128, 2, 4, 2, 16, 512)


def write_model(folder: Path, shape: Shape, *, sharpness: float = 1.0) -> Path:
    """A folder with bfloat16 weights. `sharpness`: of the last norm; logits of random weights are nearly equal else."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    aside = folder.with_name(f"{folder.name}.empty")
    for written in (build_tokenizer(), config):
        written.save_pretrained(aside)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in ((name, size) for group in disk_groups(model) for name, size in group.shapes.items()):
            if len(size) == 1:
                yield name, torch.full(size, sharpness if name == "model.norm.weight" else 1.0, dtype=torch.bfloat16)
                continue
            wanted = torch.Size(size).numel()
            yield name, numbers.repeat(-(-wanted // len(numbers)))[:wanted].view(size)

    write_folder(folder, model, str(aside), "bfloat16", tensors())
    return folder
