"""One machine with 8 GPUs of 80 GB: Qwen3-VL-8B on questions about a picture; all eight devices generate, then all eight train.

    rondo check examples/full_size/qwen3_vl_8b_colocate.py --devices 8 --device-gib 80 --memory-gib 1000 --set model.path=FOLDER

On-policy: each process has a server of SGLang on its device, whose memory is given to the trainer and back. Data, reward and
lengths are those of `qwen3_vl_8b.py`.
"""

from __future__ import annotations

from qwen3_vl_8b import TRAIN
from qwen3_vl_8b import config as apart

from rondo.launch.config import RunConfig
from rondo.launch.modes import colocate
from rondo.roles.config import full_size

config = RunConfig(
    **dict(apart)
    | {
        "name": "qwen3_vl_8b_colocate",
        "max_staleness": 0,
        "role_groups": colocate(processes=8, devices=1),
        "train": full_size(8.8e9, ranks=8, **TRAIN),
    }
)
