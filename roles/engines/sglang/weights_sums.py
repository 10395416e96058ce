"""SGLang's checksum of a tensor, computed here: 64 bits, as `/weights_checker` tells them, in hexadecimal.

A server on the CPU tells the first 8 bytes of the SHA-256 over the tensor's bytes. A server on a GPU tells a hash of its own,
made for many threads: words of 32 bits are mixed with their position and summed over tiles, whose sums are added up.

Owns the two functions. Does not own which tensors the server has (`weights_proof.py`).

    checksum([weight], "cpu")          # "fb54dfdf98e426ab"
    checksum([q, k, v], "cuda")        # of the three behind one another
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

_TILE_WORDS = 8192
_CHUNK_TILES = 32
"""Tiles that are hashed at once: a megabyte, which stays in the cache through the rounds of mixing."""
_SEED_1 = 0x243F6A88
_SEED_2 = ((_SEED_1 * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_POSITION_1, _POSITION_2 = 0x27D4EB2D, 0x165667B1
_MASK = (1 << 64) - 1


def checksum(parts: Iterable[torch.Tensor], device: str) -> str:
    """Of the tensors' bytes, row-major, behind one another. `device` is the server's kind."""
    arrays = (part.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy() for part in parts)
    if device == "cuda":
        return f"{_gpu_hash(np.concatenate(list(arrays))):016x}"
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    return digest.digest()[:8].hex()


def _gpu_hash(data: np.ndarray) -> int:
    """Of `data` uint8 [num_bytes], filled up with zeros to whole words."""
    if data.size % 4:
        data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
    words = data.view("<u4")
    if not words.size:
        return 0
    total = 0
    step = _TILE_WORDS * _CHUNK_TILES
    for start in range(0, words.size, step):
        some = words[start : start + step]
        at = np.arange(start, start + some.size, dtype=np.uint64).astype(np.uint32)
        high = _tiles(some, at, _POSITION_1, _SEED_1, 15, words.size)
        low = _tiles(some, at, _POSITION_2, _SEED_2, 13, words.size)
        total += int(((high << np.uint64(32)) | low).sum(dtype=np.uint64))
    x = total & _MASK
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _MASK
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _tiles(words: np.ndarray, at: np.ndarray, position: int, seed: int, turn: int, num_words: int) -> np.ndarray:
    """The mixed sums of some whole tiles (the last one may be short), uint64 [tiles]."""
    turned = (at << np.uint32(turn)) | (at >> np.uint32(32 - turn))
    mixed = _mix(words ^ ((at * np.uint32(position) + np.uint32(seed)) ^ turned))
    sums = np.add.reduceat(mixed, np.arange(0, mixed.size, _TILE_WORDS), dtype=np.uint32)
    return _mix(sums ^ np.uint32((num_words * 4) & 0xFFFFFFFF)).astype(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The last steps of MurmurHash3, modulo 2**32."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x
