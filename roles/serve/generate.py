"""SGLang's /generate: token ids or text in; token ids, log-probs and the weights of each token out.

Owns the fields of the request and the form of the answer. What SGLang has and this server has not is refused with words, since
leaving it out would change the answer; other unknown names are ignored, as SGLang does.

    {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}, "return_logprob": true, "rid": "g7"}
      -> {"text": "..", "output_ids": [8, 9], "meta_info": {"id": "g7", "finish_reason": {"type": "length", "length": 2},
          "output_token_logprobs": [[-1.2, 8, null], ..], "weight_versions": [{"version": "3", "start": 0, "end": 2}], ..}}
"""

from __future__ import annotations

import base64
import itertools
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rondo.roles.serve.answering import Asked, prompt_of
from rondo.roles.serve.answers import likeliest
from rondo.roles.serve.errors import TurnedDown
from rondo.roles.serve.fields import Fields
from rondo.roles.serve.fields import shown as quoted
from rondo.roles.serve.limits import MAX_NAME
from rondo.roles.serve.pieces import pieces_of
from rondo.roles.serve.requests import Answer, Ask
from rondo.roles.serve.sampling import read_sglang, require_samples
from rondo.roles.serve.service import Service, in_slices
from rondo.runtime.errors import ConfigError

_OFF: dict[str, tuple[Any, ...]] = {
    "input_embeds": (), "image_data": ([],), "video_data": ([],), "audio_data": ([],), "token_ids_logprob": ([],),
    "return_hidden_states": (False,), "return_indexer_topk": (False,), "return_entropy": (False,),
    "return_sampling_mask": (False,), "session_params": ({},), "lora_path": (), "custom_logit_processor": (),
}  # fmt: skip

_GROWTH = 1.02
"""Each part of a stream repeats all before it, as SGLang's do: the next is told once it has so many times the tokens."""


@dataclass(frozen=True, slots=True)
class _Told:
    """`Form` of one request. `alone`: one prompt, not in a batch; `log_probs`: the `rid`s that want them; `prompt`: it is told
    too."""

    service: Service
    asks: Sequence[Ask]
    alone: bool
    log_probs: Collection[str]
    texts: bool
    prompt: bool
    experts: bool
    experts_from: int
    told: dict[int, int] = field(default_factory=dict)
    """Of each sample of a stream, how many tokens it told."""

    async def whole(self, answers: Sequence[Answer]) -> Any:
        found = [await self._shown(index, answer) for index, answer in enumerate(answers)]
        return found[0] if self.alone and len(found) == 1 else found

    async def part(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        if answer.finish is None and len(answer.tokens) < self.told.get(index, 0) * _GROWTH:
            return []
        self.told[index] = len(answer.tokens)
        return [await self._shown(index, answer)]

    def end(self, answers: Sequence[Answer]) -> list[Any]:
        return []

    def reply(self, answer: Answer) -> None:
        """Of bare text there is none."""

    async def _shown(self, index: int, answer: Answer) -> dict[str, Any]:
        found = await _answer(self, self.asks[index], answer)
        return found if self.alone and len(self.asks) == 1 else found | {"index": index}


async def generate(service: Service, session: str | None, fields: Fields) -> tuple[Asked, _Told]:
    for name, neutral in _OFF.items():
        fields.off(name, *neutral)
    given, is_batch = _prompts(fields)
    count = len(given)
    params = fields.take("sampling_params", {})
    samplings = [read_sglang(each) for each in _each(params, count, "sampling_params")]
    require_samples(sum(sampling.num_samples for sampling in samplings))
    wants = [
        value if isinstance(value, bool) else _no_flag(value)
        for value in _each(fields.take("return_logprob", False), count, "return_logprob")
    ]
    if fields.integer("logprob_start_len", -1) != -1:
        raise ConfigError("logprob_start_len must be -1, since log-probs of the prompt are not computed. Remove it")
    num_top = fields.integer("top_logprobs_num", 0, least=0)
    asked = Asked(session, fields.flag("stream"))
    priority, affinity = fields.integer("priority", 0), fields.text("session_id")
    rids = _rids(fields.take("rid"), count)
    told = _Told(
        service,
        asked.asks,
        not is_batch,
        {rid for rid, log_probs in zip(rids, wants, strict=True) if log_probs},
        fields.flag("return_text_in_logprobs"),
        fields.flag("return_prompt_token_ids"),
        fields.flag("return_routed_experts"),
        fields.integer("routed_experts_start_len", 0, least=0),
    )
    for rid, each, sampling, log_probs in zip(rids, given, samplings, wants, strict=True):
        prompt = await prompt_of(service, session, each, "input_ids")
        top = num_top if log_probs else 0
        asked.ask(service, sampling, prompt, rid, num_top=top, priority=priority, affinity=affinity)
    return asked, told


def _prompts(fields: Fields) -> tuple[list[Any], bool]:
    """(the prompts, each as text or as a list of ids, whether they came as a batch)."""
    ids, text = fields.take("input_ids"), fields.take("text")
    if (ids is None) == (text is None):
        raise ConfigError(
            f"input_ids and text must be sent one without the other, got {'neither' if ids is None else 'both'}. "
            "Send input_ids"
        )
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
            raise ConfigError(f"text must be text or a list of texts, got {type(text).__name__}. Correct it")
        found, is_batch = texts, isinstance(text, list)
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


def _no_flag(value: Any) -> bool:
    raise ConfigError(f"return_logprob must be true or false, got {quoted(value)}. Correct it")


def _rids(value: Any, count: int) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = [value] if isinstance(value, str) else value
    if isinstance(value, str) and count > 1:
        rids = [f"{value}_{index}" for index in range(count)]
    if (
        not isinstance(rids, list)
        or len(rids) != count
        or not all(isinstance(rid, str) and 1 <= len(rid) <= MAX_NAME for rid in rids)
    ):
        raise ConfigError(
            f"rid must be text of at most {MAX_NAME} characters, one for each of {count} prompts, got {quoted(value)}. "
            "Correct it"
        )
    if len(set(rids)) < count:
        raise ConfigError(f"rid must be unique in a batch, got {quoted(value)}. Rename one")
    return rids


async def _answer(wanted: _Told, ask: Ask, answer: Answer) -> dict[str, Any]:
    service = wanted.service
    tokens = answer.tokens.tolist()
    meta: dict[str, Any] = {
        "id": ask.rid,
        "finish_reason": _finish(answer),
        "prompt_tokens": int(ask.prompt.size),
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "num_retractions": answer.num_retractions,
        "weight_version": str(answer.policy_versions[-1] if len(tokens) else service.engine.version),
    }
    if ask.rid in wanted.log_probs:
        texts = list(map(pieces_of(service.tokenizer).alone, tokens)) if wanted.texts else [None] * len(tokens)
        drawn = list(zip(answer.log_probs.tolist(), tokens, texts, strict=True))
        meta["output_token_logprobs"] = await in_slices(drawn, tuple)
        meta["output_token_logprobs_length"] = len(tokens)
        meta["input_token_logprobs"] = []
        if ask.params.num_top:
            meta["output_top_logprobs"], meta["input_top_logprobs"] = await _top(service, answer, wanted.texts), []
    if answer.finish is not None:
        meta["e2e_latency"] = answer.seconds
        meta["weight_versions"] = spans(answer.policy_versions)
        if wanted.experts:
            meta["routed_experts"] = _experts(answer, wanted.experts_from)
    found: dict[str, Any] = {"text": answer.text, "output_ids": tokens, "meta_info": meta}
    if wanted.prompt:
        found["prompt_token_ids"] = ask.prompt.tolist()
    return found


def _finish(answer: Answer) -> dict[str, Any] | None:
    finish = answer.finish
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": len(answer.tokens)}
    return {"type": "abort", "message": "Aborted by request or pause", "status_code": None, "err_type": None}


def spans(versions: np.ndarray) -> list[dict[str, Any]]:
    """Policy versions, int32 [R], as spans of equal ones that follow each other."""
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        {"version": str(versions[start]), "start": start, "end": end}
        for start, end in itertools.pairwise(cuts)
        if end > start
    ]


async def _top(service: Service, answer: Answer, texts: bool) -> orjson.Fragment:
    if answer.top is None:
        raise TurnedDown(501, "top_logprobs_num must be 0 with this engine, which does not tell them. Remove it")
    alone = pieces_of(service.tokenizer).alone

    def told(place: int) -> list[tuple[float, int, str | None]]:
        return [(value, token, alone(token) if texts else None) for token, value in likeliest(answer, place)]

    return await in_slices(range(len(answer.tokens)), told)


def _experts(answer: Answer, start: int) -> str:
    """Base64 of little-endian int32 [T + R - 1 - start, layers, top_k]."""
    if answer.routed_experts is None:
        raise TurnedDown(
            501, "return_routed_experts must be false with this engine, which does not tell them. Remove it"
        )
    return base64.b64encode(answer.routed_experts[start:].astype("<i4").tobytes()).decode()
