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
import math
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from aiohttp import web

from rondo.roles.rollout.serve.desk import Answer, Ask
from rondo.roles.rollout.serve.errors import TurnedDown
from rondo.roles.rollout.serve.fields import Fields, read_body
from rondo.roles.rollout.serve.pieces import pieces_of
from rondo.roles.rollout.serve.sampling import asks_of, encode, read_sglang, token_ids
from rondo.roles.rollout.serve.service import SESSION, Service, json_answer, session_of, stream_events
from rondo.roles.rollout.serve.text import text_of
from rondo.roles.rollout.serve.trajectory import Call
from rondo.runtime.errors import ConfigError

_OFF: dict[str, tuple[Any, ...]] = {
    "input_embeds": (), "image_data": ([],), "video_data": ([],), "audio_data": ([],), "token_ids_logprob": ([],),
    "return_hidden_states": (False,), "return_indexer_topk": (False,), "return_entropy": (False,),
    "return_sampling_mask": (False,), "session_params": ({},), "lora_path": (), "custom_logit_processor": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the answer to one ask is to hold. `prompt` is told where the caller wants it back."""

    log_probs: bool
    texts: bool
    prompt: bool
    experts: bool
    experts_from: int


async def generate(service: Service, request: web.Request) -> web.StreamResponse:
    fields = Fields(await read_body(request), "the body")
    for name, neutral in _OFF.items():
        fields.off(name, *neutral)
    prompts, is_batch = _prompts(service, fields)
    params = fields.take("sampling_params", {})
    samplings = [read_sglang(each) for each in _each(params, len(prompts), "sampling_params")]
    wants = [
        value if isinstance(value, bool) else _no_flag(value)
        for value in _each(fields.take("return_logprob", False), len(prompts), "return_logprob")
    ]
    if fields.integer("logprob_start_len", -1) != -1:
        raise ConfigError("logprob_start_len must be -1, since log-probs of the prompt are not computed. Remove it")
    num_top = fields.integer("top_logprobs_num", 0, least=0)
    stream, priority = fields.flag("stream"), fields.integer("priority", 0)
    session = session_of(request)
    affinity = session or fields.text("session_id")
    wanted = _Wanted(
        False,
        fields.flag("return_text_in_logprobs"),
        fields.flag("return_prompt_token_ids"),
        fields.flag("return_routed_experts"),
        fields.integer("routed_experts_start_len", 0, least=0),
    )
    rids = _rids(fields.take("rid"), len(prompts))
    asks: list[Ask] = []
    wanteds: list[_Wanted] = []
    for rid, prompt, sampling, log_probs in zip(rids, prompts, samplings, wants, strict=True):
        made = asks_of(
            sampling, prompt, rid, tokenizer=service.tokenizer, stop_token_ids=service.stop_token_ids,
            max_length=service.max_length, priority=priority, session=affinity,
        )  # fmt: skip
        if num_top and log_probs:
            made = [replace(ask, params=replace(ask.params, num_top=num_top)) for ask in made]
        asks += made
        wanteds += [replace(wanted, log_probs=log_probs)] * len(made)
    alone = not is_batch and len(asks) == 1

    def shown(index: int, answer: Answer) -> dict[str, Any]:
        found = _answer(service, asks[index], answer, wanteds[index])
        return found if alone else found | {"index": index}

    if stream:

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            async with aclosing(service.desk.parts(asks)) as parts:
                async for index, answer in parts:
                    if answer.finish is not None:
                        _record(service, session, asks[index], answer)
                    yield shown(index, answer)

        return await stream_events(request, events())
    answers = await service.desk.answers(asks)
    for ask, answer in zip(asks, answers, strict=True):
        _record(service, session, ask, answer)
    found = [shown(index, answer) for index, answer in enumerate(answers)]
    return json_answer(found[0] if alone else found, {SESSION: session} if session else None)


def _prompts(service: Service, fields: Fields) -> tuple[list[np.ndarray], bool]:
    """(the prompts, whether they came as a batch)."""
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
        return [encode(service.tokenizer, each, special=True) for each in texts], isinstance(text, list)
    is_batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    return [token_ids(each, "input_ids") for each in (ids if is_batch else [ids])], is_batch


def _each(value: Any, count: int, name: str) -> Sequence[Any]:
    """One value for all prompts, or a list with one each."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} must be one for each of {count} prompts, got {len(value)}. Send one, or as many")
    return value


def _no_flag(value: Any) -> bool:
    raise ConfigError(f"return_logprob must be true or false, got {value!r}. Correct it")


def _rids(value: Any, count: int) -> list[str]:
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    rids = [value] if isinstance(value, str) else value
    if isinstance(value, str) and count > 1:
        rids = [f"{value}_{index}" for index in range(count)]
    if not isinstance(rids, list) or len(rids) != count or not all(isinstance(rid, str) and rid for rid in rids):
        raise ConfigError(f"rid must be text, one for each of {count} prompts, got {value!r:.80}. Correct it")
    if len(set(rids)) < count:
        raise ConfigError(f"rid must be unique in a batch, got {value!r:.80}. Rename one")
    return rids


def _answer(service: Service, ask: Ask, answer: Answer, wanted: _Wanted) -> dict[str, Any]:
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
    if wanted.log_probs:
        texts = list(map(pieces_of(service.tokenizer).alone, tokens)) if wanted.texts else [None] * len(tokens)
        meta["output_token_logprobs"] = list(zip(answer.log_probs.tolist(), tokens, texts, strict=True))
        meta["output_token_logprobs_length"] = len(tokens)
        meta["input_token_logprobs"] = []
        if ask.params.num_top:
            meta["output_top_logprobs"], meta["input_top_logprobs"] = _top(service, answer, wanted.texts), []
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


def _top(service: Service, answer: Answer, texts: bool) -> list[list[tuple[float, int, str | None]]]:
    top = answer.top
    if top is None:
        raise TurnedDown(501, "top_logprobs_num must be 0 with this engine, which does not tell them. Remove it")
    alone = pieces_of(service.tokenizer).alone
    return [
        [
            (value, token, alone(token) if texts else None)
            for value, token in zip(values, ids, strict=True)
            if not math.isnan(value)
        ]
        for values, ids in zip(top.log_probs.tolist(), top.tokens.tolist(), strict=True)
    ]


def _experts(answer: Answer, start: int) -> str:
    """Base64 of little-endian int32 [T + R - 1 - start, layers, top_k]."""
    if answer.routed_experts is None:
        raise TurnedDown(
            501, "return_routed_experts must be false with this engine, which does not tell them. Remove it"
        )
    return base64.b64encode(answer.routed_experts[start:].astype("<i4").tobytes()).decode()


def _record(service: Service, session: str | None, ask: Ask, answer: Answer) -> None:
    if session is not None:
        prompt_text = text_of(service.tokenizer, ask.prompt)
        text = text_of(service.tokenizer, answer.tokens, after=int(ask.prompt[-1]))
        service.trajectories.record(session, Call.of(ask, answer, prompt_text, text))
