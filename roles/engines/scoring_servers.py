"""Servers that tell how probable given tokens are to their model: a teacher somewhere else, whatever runs it.

Owns the request and the answer in two dialects. Does not own who of them is asked, and what becomes of a server that fails
(`equal_servers.py`), what is done with the numbers (`roles/teacher.py`), nor HTTP (`sglang/client.py`).

    sglang   POST /generate        input_ids, logprob_start_len, top_logprobs_num   -> input_token_logprobs, input_top_logprobs
    vllm     POST /v1/completions  prompt (ids), prompt_logprobs                    -> choices[0].prompt_logprobs

    async with ScoringServers(("http://10.0.0.7:30000",), api="sglang") as servers:
        log_probs, compared = await servers.score(tokens, response=512, top_k=32)

Invariant: an answer is for the tokens that were asked about, id by id, or it is none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

from rondo.roles.algorithms.teachers import NONE, TeacherConfig
from rondo.roles.engines.equal_servers import EqualServers, first_model
from rondo.roles.engines.sglang.client import SGLangClient, read_key
from rondo.runtime.errors import ProtocolError

Api = Literal["sglang", "vllm"]
_SETTINGS = "distillation.teacher.urls, .api_key_file, .served_model or .api"
_MODEL = "distillation.teacher.served_model, or another dialect in distillation.teacher.api"
Compared = tuple[np.ndarray, np.ndarray]
"""Ids int32 [R, K] and log-probs float32 [R, K]."""


class ScoringServers:
    """Equal servers at `urls`. `model`: as they call it, where their dialect names it; else the first one that they serve."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api: Api,
        model: str | None = None,
        key: str | None = None,
        call_deadline_s: float = 300.0,
        deadline_s: float = 3600.0,
        num_calls: int = 64,
    ) -> None:
        self._clients = [SGLangClient(url, api_key=key) for url in urls]
        self._servers = EqualServers(
            lambda: self._clients, what="teacher", num_calls=num_calls, deadline_s=deadline_s, settings=_SETTINGS
        )
        self._api, self._model, self._call_deadline_s = api, model, call_deadline_s

    @classmethod
    def of(cls, teacher: TeacherConfig) -> Self:
        """Those of a teacher."""
        return cls(
            teacher.urls, api=teacher.api, model=teacher.served_model,
            key=read_key(teacher.api_key_file, "distillation.teacher.api_key_file"),
            call_deadline_s=teacher.call_deadline_s, deadline_s=teacher.deadline_s, num_calls=teacher.num_calls,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for client in self._clients:
            await client.__aexit__(*error)

    async def score(self, tokens: np.ndarray, response: int, top_k: int = 0) -> tuple[np.ndarray, Compared | None]:
        """(log-probs float32 [R] of the last `response` tokens, -inf of one that has no chance; the `top_k` likeliest at their
        places, NONE for one that has none, or None for 0).

        Raises ConfigError for a request that a server refuses, PeerGone where none answers in time."""
        return await self._servers.ask(functools.partial(self._ask, tokens=tokens, response=response, top_k=top_k))

    async def texts(self, tokens: np.ndarray) -> dict[str, list[str | None]]:
        """URL -> what that server's tokenizer makes of every token but the first; None where it does not say."""
        answers = [await self._call(client, tokens, len(tokens) - 1, 0, texts=True) for client in self._clients]
        return {
            client.url: [text for _, _, text in told] for client, (told, _) in zip(self._clients, answers, strict=True)
        }

    async def _ask(
        self, client: SGLangClient, tokens: np.ndarray, response: int, top_k: int
    ) -> tuple[np.ndarray, Compared | None]:
        told, likeliest = await self._call(client, tokens, response, top_k)
        log_probs = np.array([value for value, _, _ in told], np.float32)
        if not top_k:
            return log_probs, None
        ids = np.array([[token for _, token, _ in place[:top_k]] for place in likeliest], np.int32)
        values = np.array([[value for value, _, _ in place[:top_k]] for place in likeliest], np.float32)
        some = np.isfinite(values)
        return log_probs, (np.where(some, ids, NONE).astype(np.int32), np.where(some, values, 0).astype(np.float32))

    async def _call(
        self, client: SGLangClient, tokens: np.ndarray, response: int, top_k: int, *, texts: bool = False
    ) -> tuple[list[_Told], list[list[_Told]]]:
        """What is told of the last `response` tokens, and of the likeliest at their places, the likeliest first."""
        if self._api == "sglang":
            path, read = "/generate", _of_sglang
            body = {
                "input_ids": tokens, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}, "return_logprob": True,
                "logprob_start_len": len(tokens) - response - 1, "top_logprobs_num": top_k,
                "return_text_in_logprobs": texts,
            }  # fmt: skip
        else:
            if self._model is None:
                self._model = await first_model(client, deadline_s=self._call_deadline_s, setting=_MODEL)
            path, read = "/v1/completions", _of_vllm
            body = {
                "model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k,
            }  # fmt: skip
        answer = await client.post(path, body, deadline_s=self._call_deadline_s)
        asked = tokens[len(tokens) - response :].tolist()
        try:
            told, likeliest = read(answer, asked, top_k)
            whole = [token for _, token, _ in told] == asked and all(value < math.inf for value, _, _ in told)
            whole &= not top_k or [len(place) >= top_k for place in likeliest] == [True] * response
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"the server {client.url} must answer {path} with log-probs of its input, got {answer!s:.200}. "
                "Name the dialect that it speaks"
            ) from error
        if not whole:
            raise ProtocolError(
                f"the server {client.url} must tell of the {response} tokens that it was asked about and {top_k} others at each, "
                f"got {told!s:.200}. Let it allow so many (vLLM: --max-logprobs)"
            )
        return told, likeliest


_Told = tuple[float, int, str | None]
"""Log-prob, id and text of a token."""


def _of_sglang(answer: Any, asked: Sequence[int], top_k: int) -> tuple[list[_Told], list[list[_Told]]]:
    """Triples of log-prob, id and text; the first place, which nothing predicts, has none."""
    meta = answer["meta_info"]
    told = [(_number(value), int(token), text) for value, token, text in meta["input_token_logprobs"][-len(asked) :]]
    places = meta["input_top_logprobs"][-len(asked) :] if top_k else []
    return told, [[(_number(value), int(token), text) for value, token, text in place] for place in places]


def _number(value: Any) -> float:
    """Of a log-prob; JSON has null for one that is -inf."""
    return -math.inf if value is None else float(value)


def _of_vllm(answer: Any, asked: Sequence[int], top_k: int) -> tuple[list[_Told], list[list[_Told]]]:
    """Of each place an object with the likeliest ids, and the one that is there."""
    places = answer["choices"][0]["prompt_logprobs"][-len(asked) :]

    def of(place: Mapping[str, Any], token: int) -> _Told:
        entry = place[str(token)]
        return _number(entry["logprob"]), token, entry.get("decoded_token")

    told = [of(place, token) for place, token in zip(places, asked, strict=True)]
    ranked = [sorted(place.items(), key=lambda entry: int(entry[1]["rank"])) for place in places]
    return told, [[of(place, int(token)) for token, _ in order] for place, order in zip(places, ranked, strict=True)]
