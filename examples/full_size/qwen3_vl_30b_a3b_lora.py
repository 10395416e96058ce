"""One machine with 8 GPUs of 80 GB: adapters of Qwen3-VL-30B-A3B on questions about a picture; half generates, half trains.

    rondo check examples/full_size/qwen3_vl_30b_a3b_lora.py --devices 8 --device-gib 80 --memory-gib 1000 \\
        --set model.path=FOLDER

As `qwen3_30b_a3b_lora.py`, with data, reward and lengths of `qwen3_vl_30b_a3b.py`; adapters are on the language model alone.
"""

from __future__ import annotations

from qwen3_30b_a3b_lora import on_one_machine
from qwen3_vl_30b_a3b import config as whole

config = on_one_machine(whole, "qwen3_vl_30b_a3b_lora")
