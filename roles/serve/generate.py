"""SGLang's /generate: token ids or text in; token ids, log-probs and the weights of each token out.

Owns the fields of the request and the form of the answer. What SGLang has and this server has not is refused with words, since
leaving it out would change the answer; other unknown names are ignored, as SGLang does.

    {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}, "return_logprob": true, "rid": "g7"}
      -> {"text": "..", "output_ids": [8, 9], "meta_info": {"id": "g7", "finish_reason": {"type": "length", "length": 2},
          "output_token_logprobs": [[-1.2, 8, null], ..], "weight_versions": [{"version": "3", "start": 0, "end": 2}], ..}}

With `logprob_start_len` the prompt's own tokens are scored from there on; with `max_new_tokens` 0 no others are made: so teachers
are asked.
"""

from __future__ import annotations

import base64
import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from rondo.roles.serve.answering import Asked
from rondo.roles.serve.fields import Fields, Name, shown
from rondo.roles.serve.limits import MAX_NAME, MAX_TOPS
from rondo.roles.serve.pieces import pieces_of
from rondo.roles.serve.requests import Answer, Ask
from rondo.roles.serve.sampling import Sampling, Seed, any_seed, require_samples
from rondo.roles.serve.service import ScorePrompt, Service, in_slices
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.errors import ConfigError

_GROWTH = 1.02
"""Each part of a stream repeats all before it, as SGLang's do: the next is told once it has so many times the tokens."""


class _Params(Sampling):
    """`sampling_params`. Unknown names are refused, as there."""

    off: ClassVar = Sampling.off | {
        "min_new_tokens": (0,), "spaces_between_special_tokens": (True,), "custom_params": ({},), "json_schema": (),
        "regex": (), "ebnf": (), "structural_tag": (), "stop_regex": (), "beam_width": (), "watermark": (), "choice": (),
    }  # fmt: skip
    ignored: ClassVar = frozenset({"stream_interval"})
    max_new_tokens: int = Field(128, ge=0)
    seed: Seed = Field(default_factory=any_seed, alias="sampling_seed")


class GenerateBody(Fields):
    off: ClassVar = {
        "input_embeds": (), "image_data": ([],), "video_data": ([],), "audio_data": ([],), "token_ids_logprob": ([],),
        "return_hidden_states": (False,), "return_indexer_topk": (False,), "return_entropy": (False,),
        "return_sampling_mask": (False,), "session_params": ({},), "lora_path": (), "custom_logit_processor": (),
    }  # fmt: skip
    ignored: ClassVar = None
    input_ids: Any = None
    text: Any = None
    rid: Any = None
    sampling_params: Any = Field({})
    stream: bool = False
    priority: int = 0
    session_id: Name | None = None
    return_logprob: Any = False
    logprob_start_len: int = Field(-1, ge=-1)
    top_logprobs_num: int = Field(0, ge=0)
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(0, ge=0)


async def generate(service: Service, session: str | None, given: Any) -> Asked:
    body = GenerateBody.of(given)
    prompts, is_batch = _prompts(body)
    count = len(prompts)
    samplings = [_Params.of(each, "sampling_params") for each in _each(body.sampling_params, count, "sampling_params")]
    require_samples(sum(sampling.n for sampling in samplings))
    wants = _each(body.return_logprob, count, "return_logprob")
    for want in wants:
        if not isinstance(want, bool):
            raise ConfigError(f"return_logprob must be true or false, got {shown(want)}. Correct it")
    rids = _rids(body.rid, count)
    asked = _Native(service, session, body, alone=not is_batch, log_probs=set(itertools.compress(rids, wants)))
    for rid, each, sampling, want in zip(rids, prompts, samplings, wants, strict=True):
        prompt = await asked.prompt_of(each, "input_ids")
        scored = prompt.tokens.size - body.logprob_start_len if want and body.logprob_start_len >= 0 else 0
        _require_scores(service, scored, prompt.tokens.size, body.top_logprobs_num)
        if not sampling.max_new_tokens:
            if not scored:
                raise ConfigError(
                    "max_new_tokens must be at least 1, or 0 with return_logprob and logprob_start_len, got 0. Correct it"
                )
            asked.alone_scored.add(rid)
        asked.ask(
            sampling, prompt, rid, most=sampling.max_new_tokens or 1,
            num_top=body.top_logprobs_num if want and sampling.max_new_tokens else 0, priority=body.priority,
            affinity=body.session_id,
        )  # fmt: skip
    return asked


def _require_scores(service: Service, scored: int, length: int, num_top: int) -> None:
    """`scored`: tokens of a prompt that are to be scored, the first of which nothing predicts."""
    if scored and service.scores is None:
        raise TurnedDown(501, "logprob_start_len must be -1 with this engine, which does not score prompts. Remove it")
    if scored < 0 or scored == 1:
        raise ConfigError(
            f"logprob_start_len must leave two of {length} tokens or more of a prompt, got {length - scored}. Lower it"
        )
    if scored * num_top > MAX_TOPS:
        raise ConfigError(
            f"top_logprobs_num of all tokens that are scored must be at most {MAX_TOPS}, got {scored * num_top}. Ask for fewer"
        )


def _prompts(body: GenerateBody) -> tuple[list[Any], bool]:
    """(the prompts, each as text or as a list of ids, whether they came as a batch)."""
    ids, text = body.input_ids, body.text
    if (ids is None) == (text is None):
        raise ConfigError(
            f"input_ids and text must be sent one without the other, got {'neither' if ids is None else 'both'}. "
            "Send input_ids"
        )
    if text is not None:
        found, is_batch = (text, True) if isinstance(text, list) else ([text], False)
        if not found or not all(isinstance(each, str) for each in found):
            raise ConfigError(f"text must be text or a list of texts, got {type(text).__name__}. Correct it")
    else:
        is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        found = ids if is_batch else [ids]
    require_samples(len(found))
    return found, is_batch


def _each(value: Any, count: int, name: str) -> Sequence[Any]:
    """One value for all prompts, or a list with one each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} must be one for each of {count} prompts, got {len(value)}. Send one, or as many")
    return value


def _rids(value: Any, count: int) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = value
    if isinstance(value, str):
        rids = [value] if count == 1 else [f"{value}_{index}" for index in range(count)]
    if (
        not isinstance(rids, list)
        or len(rids) != count
        or not all(isinstance(rid, str) and 1 <= len(rid) <= MAX_NAME for rid in rids)
    ):
        raise ConfigError(
            f"rid must be text of at most {MAX_NAME} characters, one for each of {count} prompts, got {shown(value)}. "
            "Correct it"
        )
    if len(set(rids)) < count:
        raise ConfigError(f"rid must be unique in a batch, got {shown(value)}. Rename one")
    return rids


class _Native(Asked):
    """`alone`: one prompt, not in a batch; `log_probs`: the `rid`s that want them."""

    def __init__(
        self, service: Service, session: str | None, body: GenerateBody, *, alone: bool, log_probs: set[str]
    ) -> None:
        super().__init__(service, session, stream=body.stream)
        self._body = body
        self._alone = alone
        self._log_probs = log_probs
        self.alone_scored: set[str] = set()  # the `rid`s for which nothing is generated
        self._scored: dict[str, dict[str, Any]] = {}  # of each prompt, what its samples share
        self._told: dict[int, int] = {}  # of each sample of a stream, how many tokens it told

    async def whole(self, answers: Sequence[Answer]) -> Any:
        found = [await self._shown(index, answer) for index, answer in enumerate(answers)]
        return found[0] if self._alone and len(found) == 1 else found

    async def part(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        num_tokens = len(answer.sampled.tokens)
        if answer.finish is None and num_tokens < self._told.get(index, 0) * _GROWTH:
            return []
        self._told[index] = num_tokens
        return [await self._shown(index, answer)]

    async def _shown(self, index: int, answer: Answer) -> dict[str, Any]:
        ask, body, sampled = self.asks[index], self._body, answer.sampled
        nothing = ask.rid in self.alone_scored
        tokens = [] if nothing else sampled.tokens.tolist()
        meta: dict[str, Any] = {
            "id": ask.rid,
            "finish_reason": {"type": "length", "length": 0} if nothing else _finish(answer),
            "prompt_tokens": int(ask.prompt.size),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "num_retractions": answer.num_retractions,
            "weight_version": str(sampled.policy_versions[-1] if tokens else self.service.engine.version),
        }
        if ask.rid in self._log_probs:
            meta |= await self._likely(ask, answer, tokens)
        if answer.finish is not None:
            meta |= {"e2e_latency": answer.seconds, "weight_versions": spans(sampled.policy_versions)}
            if body.return_routed_experts:
                meta["routed_experts"] = _experts(answer, body.routed_experts_start_len)
        found: dict[str, Any] = {"text": "" if nothing else answer.text, "output_ids": tokens, "meta_info": meta}
        if body.return_prompt_token_ids:
            found["prompt_token_ids"] = ask.prompt.tolist()
        if not self._alone or len(self.asks) > 1:
            found["index"] = index
        return found

    async def _likely(self, ask: Ask, answer: Answer, tokens: Sequence[int]) -> dict[str, Any]:
        """The log-probs of what was drawn, and of others where they were asked for."""
        alone = pieces_of(self.service.tokenizer).alone

        def told(value: float, token: int) -> tuple[float, int, str | None]:
            return value, token, alone(token) if self._body.return_text_in_logprobs else None

        values = answer.sampled.log_probs.tolist()
        found: dict[str, Any] = {
            "output_token_logprobs": await in_slices(range(len(tokens)), lambda at: told(values[at], tokens[at])),
            "output_token_logprobs_length": len(tokens),
            "input_token_logprobs": [],
        }
        if ask.params.num_top:
            found["output_top_logprobs"] = await in_slices(
                range(len(tokens)), lambda at: [told(value, token) for token, value in answer.likeliest(at)]
            )
            found["input_top_logprobs"] = []
        if answer.finish is not None and self._body.logprob_start_len >= 0 and self.service.scores is not None:
            if ask.rid not in self._scored:
                self._scored[ask.rid] = await self._score(self.service.scores, ask.prompt, told)
            found |= self._scored[ask.rid]
        return found

    async def _score(
        self, scores: ScorePrompt, prompt: np.ndarray, told: Callable[[float, int], Any]
    ) -> dict[str, Any]:
        """Of the prompt's tokens from `logprob_start_len` on, the first without a log-prob."""
        start, num_top = self._body.logprob_start_len, self._body.top_logprobs_num
        values, top_ids, tops = await scores(prompt, prompt.size - start - 1, num_top)
        tokens = prompt[start:].tolist()

        def own(at: int) -> Any:
            if at:
                return told(float(values[at - 1]), tokens[at])
            return (None, tokens[0], told(0.0, tokens[0])[2])

        def likeliest(at: int) -> Any:
            pairs = zip(tops[at - 1].tolist(), top_ids[at - 1].tolist(), strict=True)
            return [told(value, token) for value, token in pairs] if at else None

        places = range(len(tokens))
        found: dict[str, Any] = {"input_token_logprobs": await in_slices(places, own)}
        if num_top:
            found["input_top_logprobs"] = await in_slices(places, likeliest)
        return found


def _finish(answer: Answer) -> dict[str, Any] | None:
    finish = answer.finish
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": len(answer.sampled.tokens)}
    return {"type": "abort", "message": "Aborted by request or pause", "status_code": None, "err_type": None}


def spans(versions: np.ndarray) -> list[dict[str, Any]]:
    """Policy versions, int32 [R], as spans of equal ones that follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        {"version": str(versions[start]), "start": start, "end": end}
        for start, end in itertools.pairwise(cuts)
        if end > start
    ]


def _experts(answer: Answer, start: int) -> str:
    """Base64 of little-endian int32 [T + R - 1 - start, layers, top_k]."""
    experts = answer.sampled.routed_experts
    if experts is None:
        raise TurnedDown(
            501, "return_routed_experts must be false with this engine, which does not tell them. Remove it"
        )
    return base64.b64encode(experts[start:].astype("<i4").tobytes()).decode()
