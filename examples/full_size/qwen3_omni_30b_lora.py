"""One machine with 8 GPUs of 80 GB: adapters of Qwen3-Omni-30B-A3B's thinker on pictures, sounds and videos.

    rondo check examples/full_size/qwen3_omni_30b_lora.py --devices 8 --device-gib 80 --memory-gib 1000 \\
        --set model.path=FOLDER

As `qwen3_30b_a3b_lora.py`, with data, reward and lengths of `qwen3_omni_30b.py`; adapters are on the language model alone. The
servers get whole weights, into which they are merged: SGLang takes no adapters of a model that hears.
"""

from __future__ import annotations

from qwen3_30b_a3b_lora import on_one_machine
from qwen3_omni_30b import config as whole

config = on_one_machine(whole, "qwen3_omni_30b_lora", publish="merged")
