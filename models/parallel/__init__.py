"""One model over the ranks of a mesh, in one process too.

sharding     how a model is cut (FSDP2), its precision, layers that are computed again
experts      experts that lie apart, and tokens that come to them
gradients    summed over ranks, scaled, clipped
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "clip_grad_norm": "rondo.models.parallel.gradients",
    "compute_in": "rondo.models.parallel.sharding",
    "discard_gradients": "rondo.models.parallel.gradients",
    "scale_gradients": "rondo.models.parallel.gradients",
    "set_last": "rondo.models.parallel.gradients",
    "shard": "rondo.models.parallel.sharding",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
