"""One machine with 8 GPUs of 80 GB: adapters of Qwen3-Omni-30B-A3B's thinker on the data of `nextqa_qwen3_omni_30b.py`.

    rondo check examples/full_size/nextqa_qwen3_omni_30b_lora.py --devices 8 --device-gib 80 --memory-gib 1000 \\
        --set model.path=FOLDER

Four devices generate and four train, as in `qwen3_omni_30b_lora.py`; all else is as with the whole model.
"""

from __future__ import annotations

from nextqa_qwen3_omni_30b import config as whole
from qwen3_30b_a3b_lora import on_one_machine

config = on_one_machine(whole, "nextqa_qwen3_omni_30b_lora", publish="merged")
