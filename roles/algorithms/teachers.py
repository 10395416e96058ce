"""Settings of distillation: who teaches, what of a teacher's distribution reaches the policy, and with which weight.

Owns which of these contradict each other. Does not own the formulas (`roles/algorithms/distillation.py`) or the role that asks
the teachers (`roles/teacher.py`). Imports no torch.

    DistillationConfig(teacher=TeacherConfig(model=ModelConfig(path="Qwen/Qwen3-32B")), task_coef=0.0)
    DistillationConfig(teachers={"math": ..., "code": ...}, source="domain", form="loss", support="teacher", top_k=64)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

from rondo.models.config import ModelConfig
from rondo.runtime.section import FunctionRef, Section, may_hold_secret

Form = Literal["advantage", "loss"]
Support = Literal["sampled", "teacher", "student", "union"]
Divergence = Literal["reverse", "forward", "jsd"]
Tail = Literal["bucket", "renormalize", "truncate"]
NONE = -1
"""An id of no token, among those that a teacher tells of."""
ONLY = "teacher"
"""The name of a teacher that has none."""


class TeacherConfig(Section):
    """A model that says how probable each token of the policy's samples is to it. Its tokenizer must be the policy's."""

    place = "distillation.teacher"
    model: ModelConfig | None = None
    """Its weights never change. It computes in `train.dtype`, cut over the processes of the teacher's group."""
    urls: tuple[str, ...] = ()
    """Or equal servers that run already ("http://10.0.0.7:30000")."""
    api: Literal["sglang", "vllm"] = "sglang"
    """What the servers speak: SGLang's /generate, or vLLM's /v1/completions with `prompt_logprobs`."""
    served_model: str | None = None
    """What servers that speak as vLLM call the model; None: the first one that they serve."""
    api_key_file: str | None = None
    """A file with the bearer key of `urls`."""
    policy: Literal["initial", "current", "average"] | None = None
    """Or the policy itself, as it was before the first step or with its newest weights: a teacher by what it sees beside, which
    `distillation.context` says. Or the exponential moving average of its versions, from the weights before the first step on."""
    decay: float | None = Field(None, gt=0, lt=1)
    """Of 'average': what of it stays with each version, which gives the rest. Of versions that it did not get, as many times."""
    num_calls: int = Field(64, ge=1)
    """Samples that are at the servers at a time, of each process."""
    call_deadline_s: float = Field(300.0, gt=0)
    """What one call may take."""
    deadline_s: float = Field(3600.0, gt=0)
    """Servers that fail are asked again for so long; then the role fails."""

    @property
    def follows(self) -> bool:
        """Whether it takes the policy's versions."""
        return self.policy in ("current", "average")

    @property
    def begins(self) -> bool:
        """Whether it has the policy's weights of before the first step."""
        return self.policy in ("initial", "average")

    def refused(self) -> Iterator[str]:
        given = [name for name in ("model", "urls", "policy") if getattr(self, name)]
        if len(given) != 1:
            yield (
                "exactly one of distillation.teacher.model, distillation.teacher.urls and distillation.teacher.policy must be "
                f"set, got {' and '.join(given) or 'none'}. Set one of them"
            )
        if (self.policy == "average") != (self.decay is not None):
            yield (
                "distillation.teacher.decay must be set with distillation.teacher.policy 'average', and not without, got "
                f"{self.decay} with {self.policy!r}. Set it, such as to 0.95, or remove it"
            )
        if any(map(may_hold_secret, self.urls)):
            yield (
                "distillation.teacher.urls must hold no password and no query, since settings are saved and shown, got something "
                "before an @ or behind a ?. Put a key into the file of distillation.teacher.api_key_file"
            )
        for name, value in self.changed("api", "served_model", "api_key_file").items() if not self.urls else ():
            yield f"distillation.teacher.{name} must be left out without distillation.teacher.urls, got {value!r}. Remove it"


class DistillationConfig(Section):
    """On-policy distillation: the policy samples, and a teacher says of every token what it would have done."""

    place = "distillation"
    teacher: TeacherConfig | None = None
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Or several by name; each row of the data has one of them."""
    source: str = "source"
    """With `teachers`: the key of a row's metadata (`data.metadata`) that names its teacher."""
    form: Form = "advantage"
    """'advantage': log pi_teacher - log pi_policy of each sampled token is part of its advantage. 'loss': a divergence between
    both is added to the loss of each token."""
    coef: float = Field(1.0, gt=0)
    """Weight of the teacher."""
    task_coef: float = Field(1.0, ge=0)
    """Weight of the advantages that rewards give. 0: the teacher alone is learnt from, and `reward` may be left out."""
    support: Support = "sampled"
    """The tokens that are compared at each place: the sampled one alone; the `top_k` likeliest to the teacher; to the policy, as
    `actor_fwd` finds them; or both of these."""
    top_k: int | None = Field(None, ge=1, le=1024)
    """8 bytes a token for each of them lie on the bus, for 'union' of both."""
    divergence: Divergence = "reverse"
    """'reverse' is KL(policy || teacher), 'forward' KL(teacher || policy), 'jsd' the generalised Jensen-Shannon divergence."""
    beta: float = Field(0.5, gt=0, lt=1)
    """The teacher's part in the mixture of 'jsd': towards 0 it acts as the forward KL, towards 1 as the reverse."""
    tail: Tail = "bucket"
    """What becomes of the probability outside of the compared tokens: it is compared as one more token, or left out, with the
    others scaled to a sum of 1 ('renormalize') or as they are ('truncate')."""
    forward_above_entropy: float | None = Field(None, ge=0)
    """In nats: where the teacher's entropy over the compared tokens is greater, the forward KL is added to the reverse one."""
    context: FunctionRef | None = None
    """`def context(sample, siblings)`: the prompt that a teacher sees in the place of a sample's own, such as one with the answer
    or with feedback on the sample; None for its own. See `roles/sampling/teaching.py`."""
    max_context_tokens: int | None = Field(None, ge=1)
    """Of such a prompt."""
    min_log_prob: float | None = Field(None, lt=0)
    """A teacher's log-probs count as no lower, so that no token has all the say."""

    def refused(self) -> Iterator[str]:
        if (self.teacher is None) == (not self.teachers):
            yield (
                "distillation.teacher and distillation.teachers must be set one without the other, got "
                f"{'neither' if self.teacher is None else 'both'}. Set distillation.teacher=TeacherConfig(model=...)"
            )
        for name in self.teachers:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                yield f"distillation.teachers must have names of letters, digits, _ and -, got {name!r}. Rename it"
        for name, value in self.changed("support", "divergence").items() if self.form == "advantage" else ():
            yield (
                f"distillation.{name} must be left out with distillation.form 'advantage', which estimates the reverse KL at "
                f"the sampled token, got {value!r}. Set distillation.form to 'loss', or remove it"
            )
        if (self.support == "sampled") != (self.top_k is None):
            yield (
                "distillation.top_k must be set with distillation.support 'teacher', 'student' or 'union', and not with "
                f"'sampled', got {self.top_k} and {self.support!r}. Change one of them"
            )
        if (self.context is None) != (self.max_context_tokens is None):
            yield (
                "distillation.context and distillation.max_context_tokens must be set together, got "
                f"{self.context!r} and {self.max_context_tokens}. Set both"
            )
        if self.context is None and any(teacher.policy == "current" for teacher in self.named().values()):
            yield (
                "distillation.context must be set with a teacher that is the current policy, which else says the same as the "
                "policy itself, got None. Set it, or name another teacher"
            )
        if self.asks_policy and any(teacher.urls for teacher in self.named().values()):
            yield (
                "distillation.support must be 'sampled' or 'teacher' with a teacher behind urls, since servers tell of their own "
                f"likeliest tokens alone, got {self.support!r}. Change it"
            )
        compares = self.top_k is not None
        for name, has_effect, meant in (
            ("beta", self.divergence == "jsd", "divergence 'jsd'"), ("tail", compares, "top_k"),
            ("forward_above_entropy", compares and self.divergence == "reverse", "top_k and divergence 'reverse'"),
        ):  # fmt: skip
            for value in self.changed(name).values() if not has_effect else ():
                yield f"distillation.{name} must be left out without {meant}, where it has no effect, got {value!r}. Remove it"
        if self.divergence == "jsd" and self.top_k is None:
            yield (
                "distillation.top_k must be set with distillation.divergence 'jsd', which the sampled token alone does not tell, "
                "got None. Set distillation.support and distillation.top_k"
            )

    @property
    def num_compared(self) -> int:
        """Tokens whose log-probs lie on the bus for each place, beside the sampled one."""
        return (self.top_k or 0) * (2 if self.support == "union" else 1)

    @property
    def asks_policy(self) -> bool:
        """Whether the policy's likeliest tokens must be known before a teacher is asked."""
        return self.support in ("student", "union")

    @property
    def teacher_top_k(self) -> int:
        """How many of the likeliest tokens a teacher finds itself."""
        return (self.top_k or 0) if self.support in ("teacher", "union") else 0

    def named(self) -> Mapping[str, TeacherConfig]:
        """Name -> teacher, in their order, by which rows name them on the bus."""
        return {ONLY: self.teacher} if self.teacher is not None else self.teachers
