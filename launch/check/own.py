"""The user's own roles, filter, and parts of the algorithm, tried before the run on a dummy batch; and the sandbox.

Owns what they are given and what is refused: what takes other arguments, gives another shape or what is not finite, a loss
without a gradient, and one that depends on which samples share a micro-batch. Runs in the check's child: needs torch and runs
user code.

    look_at_own(config, report)   ->   ok algorithm.policy_loss works on a dummy batch
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rondo.launch.alert.rules import Recent
from rondo.launch.alert.settings import AlertsConfig
from rondo.launch.check.findings import Report
from rondo.launch.config import RunConfig
from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.training.hooks import AFTER, BEFORE
from rondo.runtime.config import SandboxConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import load_reference
from rondo.runtime.sandbox.sandbox import Sandbox

_MASKS = tuple(np.array(mask, np.uint8) for mask in ([1, 1, 1], [1, 0, 1, 1], [1]))
"""Three samples, of which one has a token that does not train."""
_RELATIVE = 1e-4


def look_at_own(config: RunConfig, report: Report) -> None:
    """One finding for each."""
    for setting, attempt in _attempts(config):

        def look(setting: str = setting, attempt: Callable[[], None] = attempt) -> None:
            attempt()
            report.add("ok", f"{setting} works on a dummy batch")

        report.look(look, setting)
    train, saved = config.train, "train.after_save.function"
    for setting, reference, names in (
        (saved, train.after_save.function if train.after_save is not None else None, ("path", "step")),
        (BEFORE, train.before_step, ("step",)),
        (AFTER, train.after_step, ("step", "metrics")),
    ):
        if reference is not None:
            report.look(partial(_load, setting, reference, *names), setting)
    if config.sandbox != SandboxConfig() or _asks_for_a_sandbox(config):
        report.look(partial(_try_sandbox, config, report), "sandbox")


def _asks_for_a_sandbox(config: RunConfig) -> bool:
    named = config.reward.function
    environment = config.rollout.environment
    functions = [*([named] if isinstance(named, str) else named.values()), *(environment.tools if environment else ())]
    return any(
        each.rpartition(":")[2] in ("code", "python", "shell") and each.startswith("rondo.") for each in functions
    )


def _try_sandbox(config: RunConfig, report: Report) -> None:
    box = Sandbox(**config.sandbox.settings)

    async def tried() -> str:
        ran = await box.run({"try": b"6"}, ["cat", "try", "-"], b"7")
        if (ran.output, ran.exit) != ("67", 0):
            raise ConfigError(
                f"sandbox must run `cat try -` in a folder with that file, got exit code {ran.exit}: "
                f"{ran.errors[-500:].strip()}. Correct sandbox.command"
            )
        return "as you say" if box.command or box.url else await box.isolates()

    isolation = asyncio.run(tried())
    if isolation == "limits":
        report.add(
            "note",
            "sandbox has limits alone: code of the policy sees the files of this machine that its user may read, and the "
            "network. A kernel with user namespaces, sandbox.command or sandbox.url keeps it away",
        )
    else:
        report.add("ok", f"sandbox runs commands ({isolation})")


def _attempts(config: RunConfig) -> Iterator[tuple[str, Callable[[], None]]]:
    algorithm = config.loss()
    if ":" in algorithm.advantage:
        yield "algorithm.advantage", partial(_try_advantage, algorithm.advantage)
    if config.reward.postprocess is not None:
        yield "reward.postprocess", partial(_try_postprocess, config)
    if ":" in algorithm.policy_loss:
        alone = algorithm.model_copy(update={"correction": None, "tis_high": None})
        yield "algorithm.policy_loss", partial(_try_loss, alone, "algorithm.policy_loss", algorithm.policy_loss)
    if algorithm.correction is not None:
        alone = algorithm.model_copy(update={"policy_loss": "ppo_clip"})
        yield "algorithm.correction", partial(_try_loss, alone, "algorithm.correction", algorithm.correction)
    if config.rollout.keep is not None:
        yield "rollout.keep", partial(_try_keep, config.rollout.keep)
    for at, reference in enumerate(config.alerts.rules if config.alerts is not None else ()):
        yield f"alerts.rules.{at}", partial(_try_rule, f"alerts.rules.{at}", reference)
    for role, reference in config.roles.items():
        yield f"roles.{role}", partial(_try_role, role, reference)


def _load(setting: str, reference: str, *names: str) -> Callable[..., Any]:
    """The function, which can be called with these."""
    function = load_reference(reference, setting)
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise ConfigError(
            f"{setting} must take ({', '.join(names)}), got {reference} ({error}). Change its parameters"
        ) from error
    return function


def _try_advantage(reference: str) -> None:
    from rondo.roles.algorithms.advantages import of_tokens

    compute = _load("algorithm.advantage", reference, "rewards", "masks")
    for rewards in ([0.0, 1.0, 0.5], [1.0, 1.0, 1.0]):
        of_tokens(compute, rewards, _MASKS)


def _try_postprocess(config: RunConfig) -> None:
    from rondo.roles.algorithms.postprocess import SETTING, Rewarded, process_of

    assert config.reward.postprocess is not None
    _load(SETTING, config.reward.postprocess, "rewards", "samples")
    process, source = process_of(config.reward.postprocess), next(iter(config.data.sources), "")
    for rewards in ([0.0, 1.0, 0.5], [1.0, 1.0, 1.0], [0.5]):
        parts = dict.fromkeys(config.components, 0.5)
        samples = [Rewarded(at // 2, at % 2, 3, "stop", parts, source) for at in range(len(rewards))]
        process(np.array(rewards, np.float32), samples)


def _try_loss(algorithm: AlgorithmConfig, setting: str, reference: str) -> None:
    import torch

    from rondo.roles.algorithms.losses import policy_sums

    _load(setting, reference, "batch", "algorithm")
    lengths = [len(mask) for mask in _MASKS]
    draw = torch.Generator().manual_seed(0)
    columns = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy", "advantages")
    drawn = {name: torch.randn(sum(lengths), generator=draw) * 0.3 - 1 for name in columns}
    drawn["mask"] = torch.from_numpy(np.concatenate(_MASKS))

    def tried(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The undivided loss of some of the samples, and its gradient."""
        begin, end = sum(lengths[:first]), sum(lengths[:last])
        part = {name: tensor[begin:end] for name, tensor in drawn.items()}
        part["log_probs"] = own = part["log_probs"].clone().requires_grad_()
        loss = policy_sums(algorithm, **part, lengths=lengths[first:last]).loss
        if not loss.requires_grad:
            raise ConfigError(f"{setting} must depend on batch.log_probs, got a loss without a gradient. Correct it")
        loss.backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    loss, gradient = tried(0, len(lengths))
    if not (loss.isfinite() and gradient.isfinite().all()):
        raise ConfigError(f"{setting} must give finite losses and gradients, got {float(loss):g}. Correct it")
    alone = [tried(at, at + 1) for at in range(len(lengths))]
    cut = torch.cat([gradient for _, gradient in alone])
    if not torch.allclose(cut, gradient, rtol=_RELATIVE, atol=_RELATIVE):
        raise ConfigError(
            f"{setting} must be the same whichever samples share a micro-batch, got other gradients for each alone. Let what it "
            "gives a token depend on the token's own sample"
        )


def _try_keep(reference: str) -> None:
    from rondo.roles.rewards.worker import in_worker
    from rondo.roles.sampling.filters import Ended, open_keep

    keep = in_worker(f"{open_keep.__module__}:{open_keep.__name__}", {"function": reference})
    for rewards in ([0.0, 1.0], [1.0, 1.0], [None, 0.5]):
        keep([Ended(reward, "stop", 3)._asdict() for reward in rewards])


def _try_rule(setting: str, reference: str) -> None:
    said = _load(setting, reference, "recent")(Recent(Path.cwd(), (), (), (), 0.0, None, AlertsConfig()))
    if not isinstance(said, str | None):
        raise ConfigError(f"{setting} must return a message or None, got {said!r} before the first step. Correct it")


def _try_role(role: str, reference: str) -> None:
    made = _load(f"roles.{role}", reference, "context")
    if not inspect.isclass(made) or not inspect.iscoroutinefunction(getattr(made, "run", None)):
        raise ConfigError(
            f"roles.{role} must be a class with `async def run(self)`, got {reference}. Derive it from ours"
        )
    if getattr(made, "role", None) != role:
        raise ConfigError(
            f"roles.{role} must be a class whose `role` is {role!r}, got {getattr(made, 'role', None)!r}. Derive it from ours"
        )
