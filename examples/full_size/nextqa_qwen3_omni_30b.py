"""Two machines with 8 GPUs of 80 GB each: Qwen3-Omni-30B-A3B's thinker on questions about videos; one of them generates.

    rondo check examples/full_size/nextqa_qwen3_omni_30b.py --nodes 2 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

`data.path` names the multiple choice of NExT-QA, `train.csv` of its repository, with `video`, `question`, `answer` and `a0` to
`a4`; `media.root` is the folder with a file `ID.mp4` for each video, as the archive of `lmms-lab/NExTQA` has them. Reward and
prompt are those of `avqa_qwen3_omni_30b.py`, whose devices these are; `nextqa_qwen3_omni_30b_lora.py` takes one machine.
"""

from __future__ import annotations

from avqa_qwen3_omni_30b import LETTER
from avqa_qwen3_omni_30b import config as heard

from rondo.launch.config import RunConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import DataConfig, EvalConfig

config = RunConfig(
    **dict(heard)
    | {
        "name": "nextqa_qwen3_omni_30b",
        "data": DataConfig(
            path="NExTQA/train.csv",
            transform="rondo.roles.data.choices:nextqa",
            media_columns={"video": "video"},
            system=LETTER,
            apply_chat_template=True,
            held_out=256,
        ),
        # 32 frames of 128 tokens are 16 x 512 patches of 6,144 bytes: 50 MB once processed.
        "media": MediaConfig(
            root="NExTQA/NExTVideo",
            fps=1.0,
            video_min_tokens=32,
            video_max_tokens=128,
            max_frames=32,
            num_workers=4,
            max_group_bytes=56 << 20,
        ),
        "evaluation": EvalConfig(num_prompts=256),
        "rollout": heard.rollout.model_copy(update={"prompts_per_step": 32, "max_prompt_tokens": 3072}),
    }
)
