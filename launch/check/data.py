"""The data of a run: opened as each of its processes opens them, and rows of them made into prompts as the run makes them.

Owns which rows are looked at and what is told of them: how long they are, which a run would leave out. Does not own opening
(`roles/data/datasets.py`), prompts (`roles/data/prompts.py`) or demonstrations (`roles/training/sft.py`). Imports neither
torch nor a model itself.

As a process of its own it looks at the data before a tokenizer is loaded: reads a resolved config as JSON on stdin, writes
{"errors": [text, ...], "rows": rows to train on, "fingerprints": {...}} on stdout. What user code prints goes to stderr.

    python -m rondo.launch.check.data < runs/latest/config.resolved.json
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rondo.launch.check.findings import Report
from rondo.launch.check.labels import look_at_labels
from rondo.launch.config import RunConfig, resolve, unresolve
from rondo.launch.machine import show_bytes
from rondo.roles.config import PairsConfig, SftConfig
from rondo.roles.data.cursor import Order, Permutation
from rondo.roles.data.datasets import Dataset, Row, RowError, Rows, demonstrations, open_splits, order_of, train_order
from rondo.roles.data.fingerprints import Fingerprint, Fingerprints, sampled
from rondo.roles.data.opening import files_of
from rondo.roles.data.prompts import TooLong, render_prompt, without_media_section
from rondo.roles.data.questions import answered_sets
from rondo.roles.data.row_filters import Filtered
from rondo.roles.data.sources import MADE
from rondo.roles.data.unusable import UnusableRows
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.guard import guarded, module_command
from rondo.runtime.section import settings_at

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig, RewardConfig
    from rondo.roles.training.sft import Prepare

HELD_OUT = "held out"
"""Of a job without rollouts: the rows whose loss is measured."""
_NUM_ROWS = 1024
"""Rows of a data set that are made into prompts, spread over those that the run takes; what share of all is too long is then
known to 1.6 % (one standard error)."""
_NUM_TOKENS = 1 << 22
"""Tokens after which no more rows are: some seconds of work."""
_NUM_MEDIA_ROWS = 4
"""Rows with media, which take longer."""
_FURTHER_S = 20.0
"""How long further rows are looked at where a filter left out all of a sample."""
_NUM_REASONS = 8
_NUM_SCORED = 2
"""Rows of each part that the reward function is tried on."""
_BESIDE_S = 300.0


def main() -> int:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    config, report = unresolve(orjson.loads(sys.stdin.buffer.read())), Report()
    report.look(lambda: look_at_data(config, report, [], []), "data")
    errors = [finding.text for finding in report.findings if finding.level == "error"]
    seen = {"rows": report.facts.num_rows, "fingerprints": report.facts.fingerprints}
    answer.write(orjson.dumps({"errors": errors} | seen))
    answer.close()
    return 0


@dataclass(frozen=True, slots=True)
class Opened:
    """All data of a run, and their fingerprints. No demonstrations where the training rows are answered; nothing else in a job
    without rollouts."""

    train: Rows
    sets: Mapping[str, Rows]
    shown: Rows | None
    fingerprints: Fingerprints

    @staticmethod
    def of(config: RunConfig) -> Opened:
        fingerprints = Fingerprints()
        if config.own is not None:
            shown, held_out = demonstrations(config, fingerprints)
            measured: dict[str, Rows] = {} if held_out is None else {HELD_OUT: held_out}
            if config.group_of("rollout") is not None:
                measured |= answered_sets(config, held_out, fingerprints)
            return Opened(shown, measured, shown, fingerprints)
        train, sets = open_splits(config, fingerprints)
        own = config.sft is not None and config.sft.demonstrate is None
        return Opened(train, sets, demonstrations(config, fingerprints)[0] if own else None, fingerprints)


def is_made(config: RunConfig) -> bool:
    """Whether functions of others make rows: what they give may differ from process to process."""
    made = (
        data.rows is not None or data.transform is not None or (data.path or "").startswith(MADE)
        for data in config.named_data().values()
    )  # fmt: skip
    return any(made) or (config.sft is not None and config.sft.rows is not None)


class DataProcess:
    """A process that looks at the data by itself. A context manager that ends the process."""

    _answer: dict[str, Any] | None = None

    def __init__(self, config: RunConfig) -> None:
        command = guarded(module_command("rondo.launch.check.data"))
        with tempfile.TemporaryFile() as told:
            told.write(orjson.dumps(resolve(config)))
            told.seek(0)
            self._process = subprocess.Popen(command, stdin=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the rows to train on and the fingerprints that the process found. Raises ConfigError with the errors that it
        found, or if it crashed or took longer than `limit_s`."""
        if errors := self.errors(limit_s):
            raise ConfigError("\n".join(errors))
        assert self._answer is not None
        return self._answer

    def errors(self, limit_s: float) -> list[str]:
        """Return the errors that the process found. Raises ConfigError if it crashed or takes longer than `limit_s`, after which
        it can be asked again."""
        if self._answer is not None:
            return list(self._answer["errors"])
        try:
            out, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"data must be opened within {limit_s:g} s, got no end. See what they wait for") from None
        if self._process.returncode != 0:
            last = " | ".join(err.decode(errors="replace").strip().splitlines()[-5:])
            raise ConfigError(
                f"data must be opened without errors, got exit code {self._process.returncode}: {last or 'no output'}. "
                "Run the functions that the settings name by themselves"
            )
        self._answer = orjson.loads(out)
        return self.errors(limit_s)

    def __enter__(self) -> DataProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()


def look_at_order(fingerprints: Mapping[str, Fingerprint], beside: DataProcess) -> None:
    """Rows that functions make must be the same, in the same order, in another process: by their places rows are held out."""
    theirs = beside.answer(_BESIDE_S)["fingerprints"]
    for name, found in fingerprints.items():
        if (other := Fingerprint(**theirs[name])) != found:
            raise ConfigError(
                f"{name} must be the same rows in the same order in every process, got {found} in one and {other} in another. "
                "Let the function sort what comes out of a set, and draw with a seed of its own; where it is not yours, "
                "start with PYTHONHASHSEED=0"
            )


def look_at_data(config: RunConfig, report: Report, tokenizers: Sequence[Any], usable: list[Row]) -> None:
    """Opens all data, and makes prompts of what the run takes of each part, or of a sample. A run leaves out what cannot be used:
    an error where none can, or where the settings allow none to be too long. `usable` gets a few prompts of each that can."""
    opened = Opened.of(config)
    report.facts.fingerprints = opened.fingerprints.found
    report.facts.num_rows = len(opened.train)
    held_out = {HELD_OUT: opened.sets.get(HELD_OUT, ())} if config.own is not None else opened.sets
    report.facts.num_held_out = sum(map(len, held_out.values()))
    make = _Maker(config, report, tokenizers)
    parts: list[_Part] = []
    if config.job == "rl":
        order, most = train_order(config, opened.train), config.num_steps * config.rollout.prompts_per_step
        parts.append(_Part("data", opened.train, config.data, order, most, make.prompt))
    own_place = f"{config.own.place}.data" if config.own is not None and config.own.data is not None else "data"
    for name, rows in opened.sets.items():
        if name == HELD_OUT:
            continue
        assert config.evaluation is not None
        section = f"evaluation.sets.{name}" if config.evaluation.sets else "evaluation"
        settings = config.evaluation.named_sets()[name]
        other = settings.data
        every = Order(len(rows), config.seed, shuffle=False)
        at, place = (section, own_place) if other is None else (f"{section}.data",) * 2
        scored = settings.reward is None
        parts.append(_Part(at, rows, other or config.data, every, len(rows), make.prompt, scored, place))
    if (own := config.shown) is not None and tokenizers:
        shown, source = opened.shown or demonstrations(config)[0], config.demonstrated()
        name = f"{own.place}.data" if own.data is not None else own.place
        taken = order_of(source, shown, config.seed, own.epochs)
        most, place = own.num_steps(len(shown)) * own.batch_size, name if own.data is not None else "data"
        parts.append(_Part(name, shown, source, taken, most, make.demonstration, False, place))
    chats = tokenizers if config.model.path is not None else ()  # one that is built here is trained on no chats
    failed = set[str]()
    for part in parts:
        if part.place in failed and part.name.startswith("evaluation"):
            continue  # what is wrong with these settings is told
        num_errors = sum(finding.level == "error" for finding in report.findings)
        report.look(lambda part=part: usable.extend(_look_at_part(part, report, chats, config.reward)), part.name)  # type: ignore[misc]
        if sum(finding.level == "error" for finding in report.findings) > num_errors:
            failed.add(part.place)
    for text in (*_long_warm_ups(config, opened), *(_doubts(config, opened) if config.job == "rl" else ())):
        report.add("note", text)
    for name, each in config.named_data().items():
        if files := [file.name for file in files_of(each)]:
            names = ", ".join(files[:_NUM_REASONS])
            report.add("ok", f"{name}.path {each.path}: {len(files)} files are read, the first of them {names}")
    num_held_out = (config.data if config.own is None else config.demonstrated()).held_out
    num_evaluated = report.facts.num_held_out
    evaluated = "" if num_evaluated == num_held_out else f"; an evaluation takes {num_evaluated} rows"
    report.add("ok", f"{len(opened.train)} rows to train on, {num_held_out} held out{evaluated}")


@dataclass(frozen=True, slots=True)
class _Made:
    """What a row became: its tokens, those that it may have and by which setting, and the bytes of its media."""

    num_tokens: int
    limit: int
    setting: str
    media_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that a run takes in one way, the first `num_taken` places of an order."""

    name: str
    rows: Rows
    settings: DataConfig
    order: Order
    num_taken: int
    make: Callable[[Row, DataConfig], _Made | None]
    """Raises RowError, TooLong among them; None without a tokenizer."""
    is_scored: bool = True
    place: str = "data"
    """The section of its settings."""

    def sample(self) -> list[int]:
        """Rows to look at, so that the first of them are spread over all, too."""
        places = sampled(min(self.num_taken, self.order.num_rows), _NUM_ROWS)
        mixed = Permutation(len(places), "look")
        return [self.order.locate(places[mixed(i)]).row for i in range(len(places))]


@dataclass(slots=True)
class _Seen:
    """What the rows of a part that were looked at are like."""

    made: list[_Made] = field(default_factory=list)
    usable: list[Row] = field(default_factory=list)
    too_long: list[TooLong] = field(default_factory=list)
    broken: UnusableRows = field(default_factory=UnusableRows)
    """Of all rows that were read, also those that were not made into prompts."""
    filtered: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_broken: int = 0
    """Of these."""
    num_read: int = 0
    num_media: int = 0
    num_tokens: int = 0


def _see(part: _Part) -> _Seen:
    seen = _Seen()
    # Every row that is too long is counted, whatever becomes of it in the run.
    settings = part.settings.model_copy(update={"too_long": "drop"})
    looked_at, sample, end = set[int](), part.sample(), time.monotonic() + _FURTHER_S
    every = (part.order.locate(place).row for place in range(part.order.num_rows))
    for number, index in enumerate(itertools.chain(sample, every)):
        # The next row takes the place of one that a filter leaves out.
        is_seen = number >= len(sample) and (seen.usable or not seen.filtered or time.monotonic() > end)
        if is_seen or seen.num_tokens > _NUM_TOKENS:
            break
        if index in looked_at:
            continue
        try:
            row = part.rows.row(index)
            if row.media and seen.num_media == _NUM_MEDIA_ROWS:
                continue
            seen.num_media += bool(row.media)
            made = part.make(row, settings)
            if made is not None:
                seen.made.append(made)
                seen.num_tokens += made.num_tokens
            seen.usable.append(row)
        except TooLong as error:
            seen.too_long.append(error)
            seen.num_tokens += error.num_tokens
        except Filtered as error:
            seen.filtered[error.reason] += 1
        except RowError as error:
            seen.broken.add(settings_at(part.place, str(error), "data"))
            seen.num_broken += 1
        seen.num_rows += 1
        looked_at.add(index)
    others = () if (settings.path or "").startswith(MADE) else sampled(len(part.rows), _NUM_ROWS)
    others = [index for index in others if index not in looked_at]
    for index in others:  # a run that is short would not come upon them
        try:
            part.rows.row(index)
        except Filtered:
            continue
        except RowError as error:
            seen.broken.add(settings_at(part.place, str(error), "data"))
    seen.num_read = seen.num_rows + len(others)
    return seen


_FATE = {
    "drop": "a run leaves them out (too_long='drop')",
    "error": "none may be (too_long='error')",
    "truncate": "the beginning of their prompts is cut off (too_long='truncate')",
}


def _look_at_part(part: _Part, report: Report, tokenizers: Sequence[Any], reward: RewardConfig) -> list[Row]:
    """A few rows that the reward function can be tried on."""
    seen, name = _see(part), part.name
    looked_at = f"{seen.num_rows} rows that were looked at"
    reasons = ", ".join(f"{count} x {why}" for why, count in seen.filtered.most_common(_NUM_REASONS))
    left_out = [*filter(None, [seen.broken.first]), *map(str, seen.too_long[:1]), f"{part.place}.filter says {reasons}"]
    num_left_out = seen.num_broken + seen.filtered.total()
    num_left_out += len(seen.too_long) if part.settings.too_long == "drop" else 0
    if num_left_out == seen.num_rows:
        raise RowError(f"{name}: no row can be used of {looked_at}; the first: {left_out[0]}")
    most, where = part.settings.max_bad_rows, "rows that were looked at"
    if refusal := seen.broken.refusal(name, f"{part.place}.max_bad_rows", most, seen.num_read, where):
        report.add("error", refusal)
    elif seen.broken:
        report.add(
            "note",
            f"{name}: {len(seen.broken)} of {seen.num_read} rows that were looked at cannot be used, and a run leaves such rows "
            f"out; the first: {seen.broken.first}",
        )
    if seen.filtered:
        report.add(
            "note", f"{name}: {seen.filtered.total()} of {looked_at} are left out by {part.place}.filter: {reasons}"
        )
    if seen.too_long:
        share, longest = len(seen.too_long) / seen.num_rows, max(error.num_tokens for error in seen.too_long)
        report.add(
            "error" if part.settings.too_long == "error" else "note",
            f"{name}: {len(seen.too_long)} of {looked_at} ({share:.1%}) are too long, up to {longest} tokens: "
            f"{_FATE[part.settings.too_long]}; the first: {seen.too_long[0]}",
        )
    if _lacks_template(part, seen.usable, tokenizers):
        report.add(
            "note",
            f"{name}: prompts are given to the model as they are, and its tokenizer has a chat template, which a model that was "
            f"trained on chats expects. Set {part.place}.apply_chat_template to True, unless it is a "
            "base model",
        )
    if isinstance(part.rows, Dataset) and part.rows.left_out:
        report.add(
            "note",
            f"{name}: {len(part.rows.left_out)} rows cannot be read, and {part.place}.transform does not get them; the first: "
            f"{part.rows.left_out[0]}",
        )
    if seen.made:
        longest_made = max(seen.made, key=lambda made: made.num_tokens)
        most = max(made.media_bytes for made in seen.made)
        media = f" and media up to {show_bytes(most)}" if most else ""
        report.add(
            "ok",
            f"{name}: {seen.num_rows} of {len(part.rows)} rows were looked at, and take up to {longest_made.num_tokens} tokens "
            f"of {longest_made.setting} {longest_made.limit}{media}",
        )
        _fit_positions(name, longest_made, report)
    if part.is_scored:
        look_at_labels(name, part.settings.label, seen.usable, reward, report)
    return seen.usable[:_NUM_SCORED] if part.is_scored else []


def _lacks_template(part: _Part, rows: Sequence[Row], tokenizers: Sequence[Any]) -> bool:
    """Whether prompts are plain text, without tokens of a template in them, of a model that has a template."""
    if part.settings.apply_chat_template or not rows or not tokenizers or not tokenizers[0].chat_template:
        return False
    tokens = tokenizers[0].all_special_tokens
    return not any(token in row.prompt for row in rows for token in tokens)


def _fit_positions(name: str, longest: _Made, report: Report) -> None:
    positions = report.facts.max_positions
    if positions is not None and longest.num_tokens > positions:
        raise ConfigError(
            f"{name} must have rows within the model's positions, {positions}, got one of {longest.num_tokens} tokens. "
            f"Set {longest.setting} to {positions} or less"
        )


class _Maker:
    """Makes rows into what the run makes of them."""

    def __init__(self, config: RunConfig, report: Report, tokenizers: Sequence[Any]) -> None:
        self._config = config
        self._report = report
        self._tokenizer = tokenizers[0] if tokenizers else None
        self._opened: Prepare | None = None

    def prompt(self, row: Row, settings: DataConfig) -> _Made | None:
        from rondo.roles.rewards.pool import problem_of

        columns = {settings.prompt: row.prompt, settings.label: row.label, settings.metadata: row.metadata}
        if problem := problem_of({f"column {name!r}": value for name, value in columns.items()}):
            raise RowError(f"{row.name}: {problem}")
        limit, setting = self._config.rollout.max_prompt_tokens, "rollout.max_prompt_tokens"
        if self._tokenizer is None:
            return None
        if not row.media:
            return _Made(len(render_prompt(self._tokenizer, row, settings, limit)), limit, setting)
        tokens, media = self._prepare(row, settings, limit, setting)
        return _Made(len(tokens), limit, setting, media.num_bytes if media is not None else 0)

    def demonstration(self, row: Row, settings: DataConfig) -> _Made | None:
        from rondo.roles.training.preference import pair_encoder
        from rondo.roles.training.sft import encoder

        own = self._config.shown
        if isinstance(own, PairsConfig):
            pair = pair_encoder(self._tokenizer, own, settings, prepare=self._prepare)(row)
            longest = max(len(pair.chosen.tokens), len(pair.rejected.tokens))
            media_bytes = pair.chosen.media.num_bytes if pair.chosen.media is not None else 0
            return _Made(2 * longest, own.micro_batch_tokens, f"{own.place}.micro_batch_tokens", media_bytes)
        assert isinstance(own, SftConfig)
        encode = encoder(
            self._tokenizer, own, settings, max_prompt_tokens=self._config.prompt_limit(), prepare=self._prepare
        )
        made = encode(row).sequence
        media_bytes = made.media.num_bytes if made.media is not None else 0
        return _Made(len(made.tokens), own.micro_batch_tokens, "sft.micro_batch_tokens", media_bytes)

    def _prepare(self, row: Row, settings: DataConfig, limit: int, setting: str) -> Any:
        """In this process: a medium that ends it ends the child, which is told like any crash."""
        if self._config.media is None:
            raise ConfigError(str(without_media_section(row)))
        if self._opened is None:
            from rondo.roles.data.media import preparer

            assert self._report.facts.model_path is not None
            self._opened = preparer(self._report.facts.model_path, self._config.media)
        return self._opened(row, settings, limit, setting)


def _long_warm_ups(config: RunConfig, opened: Opened) -> Iterator[str]:
    trained: dict[str, tuple[Any, int]] = {}
    if config.job == "rl":
        trained |= {"train": (config.train, config.num_steps), "critic": (config.critic, config.num_steps)}
    if (shown := config.shown) is not None:
        trained[shown.place] = (shown, shown.num_steps(len(opened.shown or ())))
    for name, (optimizer, num_steps) in trained.items():
        if optimizer is not None and optimizer.warmup_steps >= max(1, num_steps):
            fact = f"{name}.warmup_steps {optimizer.warmup_steps} is not less than its {num_steps} steps"
            yield f"{fact}: the rate rises until the last of them"


def _doubts(config: RunConfig, opened: Opened) -> Iterator[str]:
    """What is allowed, and seldom meant."""
    num_rows, needed = len(opened.train), config.rollout.prompts_per_step
    if num_rows < needed:
        held_out = f" behind data.held_out {config.data.held_out}" if config.data.held_out else ""
        yield (
            f"data has {num_rows} rows to train on{held_out}, fewer than the {needed} of rollout.prompts_per_step: a step takes "
            "some more than once"
        )
    found = opened.fingerprints.found
    for name, each in config.named_data().items():
        if name == "data" or name.startswith("data.sources."):
            continue
        if name.startswith("evaluation") and (
            found[name] == found["data"]
            or any(_same_files(each, config.data.of(source)) for source in config.data.sources or ("",))
        ):
            yield (
                f"{name} has the rows that are trained on, so that its rewards say nothing about others. Name other rows, or "
                "set data.held_out"
            )
        differing = [one for one in each.OF_PROMPTS if getattr(each, one) != getattr(config.data, one)]
        if config.rollout.agent is not None and (each.apply_chat_template or name.startswith("evaluation")):
            differing = [
                one for one in differing if one != "apply_chat_template"
            ]  # which programs' prompts always have
        if differing:
            yield f"{name} has prompts that are written in another way than those of data: {', '.join(differing)} differ"


def _same_files(one: DataConfig, other: DataConfig) -> bool:
    if one.path is None or other.path is None or one.transform != other.transform:
        return False
    return one.path == other.path or Path(one.path).resolve() == Path(other.path).resolve()


if __name__ == "__main__":
    sys.exit(main())
