"""What is trained.

in and out     config, load, filling (each rank reads its part), names (on disk), checkpoint, tiny/ (built without a download)
media          media/ (from references to what a model takes), families/ (what rondo knows of multimodal ones), parts
computing      packing (and prefix_tree, shared_prefixes: what rows begin with, once), logprobs, routing (router replay), mesh
               (the ranks), parallel/ (FSDP2 and experts over them), optimizer, state (what a snapshot holds)
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "ModelConfig": "rondo.models.config",
    "load_model": "rondo.models.load",
    "load_tokenizer": "rondo.models.load",
    "pack": "rondo.models.packing",
    "response_log_probs": "rondo.models.logprobs",
    "shard": "rondo.models.parallel.sharding",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
