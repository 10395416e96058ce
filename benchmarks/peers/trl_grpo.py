"""TRL's side of `benchmarks/trl.py`: run by an interpreter that has trl; a JSON line a step, on the file it is given.

    PEERS_VENV/bin/python benchmarks/peers/trl_grpo.py '{"model": "...", "out": "...", "load": "equal", "threads": 2, ...}'

GRPOTrainer with its default generation (transformers' `generate`), or with transformers' continuous batching (`"continuous":
true`). The one change gives every answer its length of the list: a logits processor that forbids the end token before and
forces it there, or a request's own number of tokens and no end token. Seconds are wall, CPU seconds are this process's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = json.loads(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(SPEC["threads"])
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402 - the number of threads comes first
from datasets import Dataset  # type: ignore[import-not-found] # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found] # noqa: E402

from benchmarks import trl_task as task  # noqa: E402


class Ends(LogitsProcessor):  # type: ignore[misc]
    """Row i of a batch ends with its `lengths[i]`-th token, and not before."""

    def __init__(self, lengths: list[int], eos: int) -> None:
        self.due: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            self.due.setdefault(length, []).append(row)
        self.eos = eos
        self.num_tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_tokens += 1
        scores[:, self.eos] = -torch.inf
        for row in self.due.get(self.num_tokens, ()):
            scores[row] = -torch.inf
            scores[row, self.eos] = 0.0
        return scores


class Clock:
    """Wall and CPU seconds of one kind of work, since it was last asked."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self.wall_s += time.perf_counter() - self._began[0]
        self.cpu_s += time.process_time() - self._began[1]

    def take(self) -> tuple[float, float]:
        taken = self.wall_s, self.cpu_s
        self.wall_s = self.cpu_s = 0.0
        return taken


generating, preparing, stepping = Clock(), Clock(), Clock()
rewards: list[float] = []
num_tokens: list[int] = []


class Timed(GRPOTrainer):  # type: ignore[misc]
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with generating:
            return super()._generate(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with preparing:
            made = super()._generate_and_score_completions(inputs)
        num_tokens.append(int(made["completion_mask"].sum() + made["prompt_mask"].sum()))
        return made

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with stepping:
            return super().training_step(*args, **kwargs)


class Told(TrainerCallback):  # type: ignore[misc]
    """Writes a line when an optimizer step has ended."""

    def __init__(self, out: Any) -> None:
        self.out = out

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        generate, prepare, step = generating.take(), preparing.take(), stepping.take()
        line = {
            "time": time.time(), "step": state.global_step - 1, "tokens": num_tokens[-1],
            "reward_mean": sum(rewards) / len(rewards),
            "generate_s": generate[0], "generate_cpu_s": generate[1],
            "score_cpu_s": prepare[1] - generate[1], "train_s": step[0] - prepare[0], "train_cpu_s": step[1] - prepare[1],
        }  # fmt: skip
        rewards.clear()
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


def listed_requests(trainer: GRPOTrainer) -> None:
    """Each request of continuous batching makes as many tokens as the list says; they are numbered in the order of the batch."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    add = ContinuousBatchingManager.add_request

    def listed(self: Any, input_ids: list[int], request_id: str, **others: Any) -> Any:
        row = int(request_id.removeprefix("req_"))
        first = trainer.state.global_step * task.NUM_PROMPTS
        length = task.answer_lengths(SPEC["load"], first + row // task.NUM_SAMPLES)[row % task.NUM_SAMPLES]
        return add(self, input_ids, request_id, **others | {"max_new_tokens": length, "eos_token_id": -1})

    ContinuousBatchingManager.add_request = listed


def reward(completions: list[str], **columns: Any) -> list[float]:
    if SPEC["load"] == task.PRETRAINED:
        answers = [completion[0]["content"] for completion in completions]  # type: ignore[index] # chat in, chat out
        scores = [task.sum_score(answer, label) for answer, label in zip(answers, columns["label"], strict=True)]
    else:
        scores = [task.score(completion) for completion in completions]
    rewards.extend(scores)
    return scores


def main() -> None:
    torch.set_num_threads(SPEC["threads"])
    tokenizer = AutoTokenizer.from_pretrained(SPEC["model"])
    kind = SPEC["dtype"]
    weights = torch.bfloat16 if kind == "bfloat16_weights" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(SPEC["model"], dtype=weights)
    batch = task.NUM_PROMPTS * task.NUM_SAMPLES
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=SPEC["scratch"]), per_device_train_batch_size=SPEC["micro_batch"],
        gradient_accumulation_steps=batch // SPEC["micro_batch"], num_generations=task.NUM_SAMPLES,
        max_completion_length=task.longest(SPEC["load"]), temperature=1.0, learning_rate=SPEC["lr"],
        lr_scheduler_type="constant", adam_beta2=0.95, max_grad_norm=1.0, weight_decay=0.0, loss_type="grpo", beta=0.0,
        max_steps=SPEC["steps"], shuffle_dataset=False, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
        bf16=kind == "bfloat16", gradient_checkpointing=False, disable_tqdm=True, dataloader_pin_memory=False,
        use_transformers_continuous_batching=SPEC["continuous"],
        transformers_continuous_batching_config={"max_memory_percent": 0.1} if SPEC["continuous"] else None,
    )  # fmt: skip
    forced = SPEC["load"] != task.PRETRAINED
    if forced:
        rows = Dataset.from_dict({"prompt": task.prompts(SPEC["steps"] + 2)})
    else:
        asked, answers = zip(*task.sums(SPEC["steps"] + 2), strict=True)
        chats = [[{"role": "user", "content": text}] for text in asked]
        rows = Dataset.from_dict({"prompt": chats, "label": answers})
    with Path(SPEC["out"]).open("a", encoding="utf-8") as out:
        trainer = Timed(
            model=model, reward_funcs=reward, args=arguments, train_dataset=rows, processing_class=tokenizer,
            callbacks=[Told(out)],
        )  # fmt: skip
        generate = model.generate

        def listed(*args: Any, **kwargs: Any) -> Any:
            first = trainer.state.global_step * task.NUM_PROMPTS
            lengths = [n for at in range(task.NUM_PROMPTS) for n in task.answer_lengths(SPEC["load"], first + at)]
            ends = LogitsProcessorList([Ends(lengths, tokenizer.eos_token_id)])
            return generate(*args, **kwargs, logits_processor=ends)

        if forced:
            model.generate = listed
        if forced and SPEC["continuous"]:
            listed_requests(trainer)
        trainer.train()


if __name__ == "__main__":
    main()
