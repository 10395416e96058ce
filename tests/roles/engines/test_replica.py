from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers as hf

from rondo.models.tiny import qwen3
from rondo.roles.config import DataConfig, JobConfig, ModelConfig, RewardConfig, RolloutConfig
from rondo.roles.engines.replica import Replica
from tests.roles.engines.engines import request, run


def rows() -> list[dict[str, str]]:
    return []


def test_the_engine_of_a_run_samples_no_id_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    qwen3.build(tmp_path, hidden_size=32, num_layers=1)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = model.config.vocab_size
    model.resize_token_embeddings(tokens + 6, mean_resizing=False)
    with torch.no_grad():  # the likeliest of all
        padding = model.get_output_embeddings().weight[tokens:]
        padding[::2], padding[1::2] = 2.0, -2.0
    model.save_pretrained(tmp_path)
    config = JobConfig(
        name="padded", num_steps=1, model=ModelConfig(path=str(tmp_path)), data=DataConfig(rows=rows, label="x"),
        reward=RewardConfig(function="exact"),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=16, max_new_tokens=16),
    )  # fmt: skip
    job = SimpleNamespace(config=config, model_path=str(tmp_path), device="cpu")
    slots = Replica(cast(Any, None), cast(Any, job))._build(4, evaluates=False)
    found = run(slots, [request(str(seed), 3, 16) for seed in range(4)])
    assert max(int(each.tokens.max()) for each in found.values()) < tokens
