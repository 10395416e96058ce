"""Overlap: prompts of evaluation sets that are trained on, word for word or nearly.

Owns what counts as the same prompt, and a search that is bounded in time and memory. Does not own rows (`roles/data/`).

    Exactly: the same words and signs, whatever their case, spaces and punctuation, and the same media.
    Nearly:  shingles of five words, of which the two prompts share at least 0.8 of those that either has (Jaccard; Broder, On the
             resemblance and containment of documents, 1997), and the same media. Numbers and signs count as words.

    overlaps(train, {"evaluation": held_out})["evaluation"].exact   ->   [("test.jsonl:3", "train.jsonl:17"), ...]

What many training prompts have in common says nothing of two of them: shingles that more than a hundredth of them have, a
template's, do not count, and prompts without others are the same only where their labels and metadata are, too.

Of two prompts that share so much, each misses few shingles of the other: of any n - ceil(0.8 n) + k of one with n, they have k in
common (prefix filtering; Chaudhuri et al., A Primitive Operator for Similarity Joins, ICDE 2006). The rarest so many of every
evaluation prompt are looked up for each training row, a batch of rows at a time; only rows that have k are compared.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.roles.data.datasets import Dataset, Row, RowError
from rondo.roles.data.fingerprints import digest_of, sampled

_SHARE = 0.8
_WORDS = 5
_LEAST = 3
"""Shingles beside a template's without which prompts are not compared by them."""
_MOST_WORDS = 2048
"""Of a prompt; what comes behind does not count."""
_MOST_ROWS, _MOST_PROMPTS, _MOST_SAMPLED = 1_000_000, 10_000, 4096
"""Training rows, prompts of a set, and training rows by which templates are known: of more, so many are taken, evenly spread."""
_MOST_S = 60.0
"""Of the search, as long as the first rows tell; of more than these, a sample is taken. A quarter of it is for each of templates
and prompts."""
_BATCH_ROWS, _BATCH_WORDS, _SAMPLED_WORDS = 1024, 1 << 18, 1 << 22
_SHARED = 4
"""k, where a prompt has so many."""
_COMMON, _FEW = 0.01, 4
"""A template's shingle is one that more training prompts have than this share, and than so many."""
_BITS = 22
_WORD = re.compile(r"\w+|[^\w\s.,;:!?'\"`\u2018\u2019\u201c\u201d\u3001\u3002\uff0c]")
"""A word, a number, or a sign that is no punctuation."""
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
"""Scripts of which each sign is a word."""
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Odd, one for each place of a shingle."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one evaluation set, how many prompts and training rows were looked at, and which of the prompts are trained on: its
    row's name, the training row's."""

    num_prompts: int
    num_rows: int
    exact: list[tuple[str, str]]
    near: list[tuple[str, str]]


@dataclass(slots=True)
class _Asked:
    """A prompt of an evaluation set, and the training rows that it was found to be; `name` once its row was read."""

    data: Dataset
    index: int
    shingles: np.ndarray
    name: str = ""
    exact: str | None = None
    near: str | None = None


def overlaps(train: Dataset, sets: Mapping[str, Dataset], most_s: float = _MOST_S) -> dict[str, Overlap]:
    """By set. Rows that cannot be read have no part in it."""
    began = time.monotonic()
    templates = _Templates(train, began + most_s / 4)
    in_time = int(most_s * templates.num_rows / (time.monotonic() - began))
    asked: dict[str, list[_Asked]] = {}
    by_text: dict[str, list[_Asked]] = {}
    until = time.monotonic() + most_s / 4
    for name, data in sets.items():
        mine = asked[name] = []
        for batch in _batches(data, sampled(len(data), _MOST_PROMPTS), until):
            for place, (index, text) in enumerate(zip(batch.indices, batch.texts, strict=True)):
                mine.append(_Asked(data, index, templates.without(batch.of(place))))
                by_text.setdefault(text, []).append(mine[-1])
    search = _Search(train, templates, [each for mine in asked.values() for each in mine], by_text)
    num_rows = search.through(sampled(len(train), max(2, min(_MOST_ROWS, in_time))), time.monotonic() + most_s)
    return {
        name: Overlap(
            len(mine),
            num_rows,
            [(each.name, each.exact) for each in mine if each.exact],
            [(each.name, each.near) for each in mine if each.near and not each.exact],
        )
        for name, mine in asked.items()
    }


@dataclass(frozen=True, slots=True)
class _Batch:
    """Prompts of some rows: their words, and in `shingles`, uint64, those that begin at each word of one behind the other."""

    indices: list[int]
    texts: list[str]
    ends: np.ndarray
    shingles: np.ndarray

    def of(self, place: int) -> np.ndarray:
        """Sorted, each once."""
        begin = int(self.ends[place - 1]) if place else 0
        return np.unique(self.shingles[begin : max(begin, int(self.ends[place]) - _WORDS + 1)])


def _batches(data: Dataset, indices: Sequence[int], until: float) -> Iterator[_Batch]:
    """Those that can be read before that time."""
    read, texts, ends, words = list[int](), list[str](), list[int](), list[int]()
    for index in indices:
        if time.monotonic() > until:
            break
        try:
            text = _text_of(data.prompt(index)).casefold()
        except RowError:
            continue
        found = _WORD.findall(text if text.isascii() else _UNSPACED.sub(r" \g<0> ", text))[:_MOST_WORDS]
        read.append(index)
        texts.append(" ".join(found))
        words.extend(map(hash, found))
        ends.append(len(words))
        if len(read) == _BATCH_ROWS or len(words) > _BATCH_WORDS:
            yield _Batch(read, texts, np.array(ends), _shingles(words))
            read, texts, ends, words = [], [], [], []
    if read:
        yield _Batch(read, texts, np.array(ends), _shingles(words))


def _shingles(words: list[int]) -> np.ndarray:
    hashes, number = np.array(words, np.int64).view(np.uint64), max(0, len(words) - _WORDS + 1)
    found = np.zeros(number, np.uint64)
    for place, factor in enumerate(_FACTORS):
        found += hashes[place : place + number] * np.uint64(factor)
    return found


def _text_of(prompt: str | list[dict[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") for message in prompt)
    parts = (part for each in contents for part in (each if isinstance(each, list) else [{"text": each}]))
    return "\n".join(str(part.get("text") or "") for part in parts)


class _Templates:
    """How many of a sample of training prompts have a shingle."""

    def __init__(self, train: Dataset, until: float) -> None:
        texts, found, num_words = set[str](), [np.zeros(0, np.uint64)], 0
        self.num_rows = 0
        for batch in _batches(train, sampled(len(train), _MOST_SAMPLED), until):
            for place, text in enumerate(batch.texts):
                if text not in texts:
                    texts.add(text)
                    found.append(batch.of(place))
            num_words += len(batch.shingles)
            self.num_rows += len(batch.indices)
            if num_words > _SAMPLED_WORDS:
                break
        self._every, self._counts = np.unique(np.concatenate(found), return_counts=True)
        self._common = self._every[self._counts > max(_FEW, _COMMON * len(texts))]

    def without(self, shingles: np.ndarray) -> np.ndarray:
        """Those that are none of a template, the rarest first."""
        own = np.setdiff1d(shingles, self._common, assume_unique=True)
        if not len(self._every):
            return own
        at = np.minimum(np.searchsorted(self._every, own), len(self._every) - 1)
        return own[np.argsort(np.where(self._every[at] == own, self._counts[at], 0), kind="stable")]


class _Search:
    """Training rows, one batch after another, against all that is asked."""

    def __init__(
        self, train: Dataset, templates: _Templates, asked: Sequence[_Asked], by_text: Mapping[str, list[_Asked]]
    ) -> None:
        self._train, self._templates, self._asked, self._by_text = train, templates, asked, by_text
        self._same: dict[tuple[str, bool], dict[str, list[_Asked]]] = {}
        shares = [math.ceil(_SHARE * len(each.shingles)) if len(each.shingles) >= _LEAST else 0 for each in asked]
        self._needed = np.minimum(shares, _SHARED)
        kept = [
            len(each.shingles) - share + min(share, _SHARED) if share else 0
            for each, share in zip(asked, shares, strict=True)
        ]
        rare = np.concatenate(
            [each.shingles[:most] for each, most in zip(asked, kept, strict=True)] or [np.zeros(0, np.uint64)]
        )
        order = np.argsort(rare)
        self._rare, self._owners = rare[order], np.repeat(np.arange(len(asked)), kept)[order]
        self._may = np.zeros(1 << _BITS, bool)  # most shingles are none of these, by their first bits
        self._may[self._rare >> np.uint64(64 - _BITS)] = True

    def through(self, indices: Sequence[int], until: float) -> int:
        """How many rows were looked at before that time."""
        num_rows = 0
        for batch in _batches(self._train, indices, until):
            candidates = self._candidates(batch)
            for place in sorted(
                candidates.keys() | {at for at, text in enumerate(batch.texts) if text in self._by_text}
            ):
                self._compare(batch, place, candidates.get(place, set()))
                if time.monotonic() > until:
                    return num_rows + place + 1
            num_rows += len(batch.indices)
        return num_rows

    def _candidates(self, batch: _Batch) -> dict[int, set[int]]:
        """Place in the batch -> numbers of prompts that may be like it."""
        hits = np.flatnonzero(self._may[batch.shingles >> np.uint64(64 - _BITS)])
        begins = np.searchsorted(self._rare, batch.shingles[hits])
        counts = np.searchsorted(self._rare, batch.shingles[hits], "right") - begins
        places = np.repeat(np.searchsorted(batch.ends, hits, side="right"), counts)
        # Every owner of each hit: their places in `_owners` from `begins` on.
        at = np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)
        pairs, shared = np.unique(places * max(1, len(self._asked)) + self._owners[at], return_counts=True)
        found: dict[int, set[int]] = {}
        for pair, number in zip(pairs.tolist(), shared.tolist(), strict=True):
            place, owner = divmod(pair, len(self._asked))
            if number >= self._needed[owner]:
                found.setdefault(place, set()).add(owner)
        return found

    def _compare(self, batch: _Batch, place: int, candidates: set[int]) -> None:
        text, own = batch.texts[place], self._templates.without(batch.of(place))
        like = [
            each for number in candidates if not (each := self._asked[number]).near and _are_like(each.shingles, own)
        ]
        if not like and text not in self._by_text:
            return
        try:
            row = self._train.row(batch.indices[place])
        except RowError:
            return
        is_whole = len(own) < _LEAST
        for each in self._same_text(text, is_whole=is_whole).get(_apart(row, is_whole=is_whole), ()):
            each.exact = each.exact or row.name
        for each in like:
            if self._apart_of(each, is_whole=False) == _apart(row, is_whole=False):
                each.near = row.name

    def _same_text(self, text: str, *, is_whole: bool) -> dict[str, list[_Asked]]:
        """What is asked with this text, by what is not text of it."""
        if (text, is_whole) not in self._same:
            found = self._same[text, is_whole] = {}
            for each in self._by_text.get(text, ()):
                found.setdefault(self._apart_of(each, is_whole=is_whole), []).append(each)
        return self._same[text, is_whole]

    @staticmethod
    def _apart_of(asked: _Asked, *, is_whole: bool) -> str:
        try:
            row = asked.data.row(asked.index)
        except RowError as error:
            return str(error)
        asked.name = row.name
        return _apart(row, is_whole=is_whole)


def _are_like(one: np.ndarray, other: np.ndarray) -> bool:
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both > 0 and both >= _SHARE * (len(one) + len(other) - both)


def _apart(row: Row, *, is_whole: bool) -> str:
    """Of what is not its text: its media; is_whole: label and metadata, too."""
    media = [(ref.kind, ref.source, ref.use_audio) for ref in row.media]
    return digest_of(lambda _: (media, (row.label, row.metadata) if is_whole else ()), [0])
