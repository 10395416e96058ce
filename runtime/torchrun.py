"""torchrun, loaded in less time: `python -m rondo.runtime.torchrun`, in the place of `python -m torch.distributed.run`.

Owns nothing of it but how it is loaded: without the garbage collector, and for good, so that neither loading nor the end of the
process walks all that torch has brought. A role group starts and comes back sooner by some half a
second of a core.
"""

from __future__ import annotations

import gc

from rondo.runtime.reference import uncollected

with uncollected():
    from torch.distributed.run import main

if __name__ == "__main__":
    gc.freeze()
    main()
