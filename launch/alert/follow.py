"""Follow: alerts of one run. Looks at its files, asks the rules, and sends from a queue on the disk.

    RUN/trackers/alerts.json    {"read": {"events.jsonl": 4096, ...}, "told": {"stall": [1760000000.5]}, "queue": [...], ...}

Owns the queue and how often a rule may tell. Does not own the rules, nor the ways to send, which are Apprise's; its process is
kept and its file locked as a tracker's. Invariants: what a rule said is in the queue, and with it how far the files were read, in
one write before anything is sent, and leaves it when it was taken; so none is lost, and one that was sent when this process died
comes twice, with the same number. On a full disk it is sent from memory, and after a death again. No address is in any file or
log.

    python -m rondo.launch.alert.follow RUN alerts        beside a run, as `beside.py` starts it
    rondo alert RUN                                       by hand; `--test` sends one message
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.alert.rules import LIFE, OURS, Recent, Rule
from rondo.launch.alert.settings import AlertsConfig, addresses, hush, services, why_not
from rondo.launch.report.records import goes_back_to, is_record, is_step
from rondo.launch.rundir import existing_run, read_json, write_json
from rondo.launch.track.follow import PERIOD_S, Over, beside, cursor, over_without_owner
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.record import read_lines
from rondo.runtime.records.tail import Tail
from rondo.runtime.records.telling import telling
from rondo.runtime.reference import load_reference, relative_to

NAME = "alerts"
Send = Callable[[int, str, str, str], str | None]
"""(which address, kind, title, text) -> why it was not taken, or None."""
_EVENTS, _METRICS = "events.jsonl", "metrics.jsonl"
_STEPS, _BACK_BYTES = 1000, 4 << 20
_MOST_QUEUED, _MOST_OF_LIFE = 1000, 20
_AGAIN_S, _LONGEST_S, _RULE_S = 10.0, 300.0, 30.0
_DIED = "its supervisor died without a word"
_KINDS = {"start": "info", "end": "success", "crash": "failure"}

log = logging.getLogger("rondo.alerts")


class Alerts:
    """Of one run, for so many addresses. `kept`: what `file` says; `clock` gives seconds since the epoch."""

    def __init__(
        self, run: Path, config: AlertsConfig, file: Path, kept: Mapping[str, Any], num_addresses: int, send: Send,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._run, self._config, self._file, self._num = run, config, file, num_addresses
        self._send, self._clock = send, clock
        own = (load_reference(relative_to(run, each), "alerts.rules") for each in config.rules)
        self._rules: tuple[Rule, ...] = (*OURS, *own)
        self._kept, self._said = dict(kept), b""
        self._is_new = "read" not in kept
        read = kept.get("read", {_EVENTS: 0, _METRICS: 0})
        self._tails = {name: Tail(run / name, offset) for name, offset in read.items()}
        self._told: dict[str, list[float]] = kept.get("told", {})
        self._left_out: dict[str, int] = kept.get("left_out", {})
        self.queue: list[dict[str, Any]] = [each for each in kept.get("queue", ()) if each["to"] < num_addresses]
        self._number: int = kept.get("number", 0)
        self._lives: bool = kept.get("lives", False)
        self._active: float = kept.get("active", clock())
        self._cause: str = kept.get("cause", "")
        self._pauses: dict[
            int, tuple[float, float]
        ] = {}  # address -> when it is tried again, and how long is waited then
        self._steps: deque[dict[str, Any]] = deque(maxlen=_STEPS)
        back = Tail(run / _METRICS, max(0, read[_METRICS] - _BACK_BYTES))
        lines = back.read(read[_METRICS] - back.offset) if read[_METRICS] else []
        self._add(read_lines(lines[back.offset > _BACK_BYTES :], run / _METRICS, is_record))

    def _add(self, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Takes the steps among `records`, which it returns, in the place of those that the run went back behind."""
        found = list[dict[str, Any]]()
        for record in records:
            newest = self._steps[-1]["step"] + 1 if self._steps else 0
            if (back := goes_back_to(record, newest)) is not None:
                for steps in (self._steps, found):
                    while steps and steps[-1]["step"] >= back:
                        steps.pop()
            for steps in (self._steps, found) if is_step(record) else ():
                steps.append(record)
        return found

    def look(self, *, is_over: bool = False) -> None:
        """At what has come, and to whom it is to be told; what is not taken is tried again later, the longer the later."""
        events, steps = list(self._new(_EVENTS)), self._add(self._new(_METRICS))
        if self._is_new:  # what was before this life of the run is nobody's news
            begun = max((at for at, each in enumerate(events) if each["kind"] == "started"), default=0)
            events, self._is_new = events[begun:], False
            steps = [each for each in steps if events and each["time"] >= events[0]["time"]]
        events = list(self._life(events, is_over=is_over))
        self._active = max([self._active, *(each["time"] for each in steps)])
        now = self._clock()
        recent = Recent(
            self._run, list(self._steps), steps, events, now, now - self._active if self._lives else None, self._config
        )
        for rule in self._rules:
            self._ask(rule, recent)
        self._keep()
        self._send_all()

    def _life(self, events: list[dict[str, Any]], *, is_over: bool) -> Iterator[dict[str, Any]]:
        """The events, with the cause of each end; an end that nobody wrote down is told too."""
        gone = {"kind": "finished", "exit_code": None, "cause": _DIED}
        for each in events:
            kind = each["kind"]
            if kind == "started":
                if self._lives:
                    yield gone
                self._lives, self._cause, self._active = True, "", each["time"]
            elif kind == "failed":
                self._cause = each.get("cause") or each.get("why", "")
            elif kind == "finished":
                each, self._lives = each | {"cause": self._cause}, False
            yield each
        if is_over and self._lives:
            self._lives = False
            yield gone

    def _ask(self, rule: Rule, recent: Recent) -> None:
        name, now = rule.__name__, recent.now
        try:
            text = rule(recent) if rule in OURS else _within(_RULE_S, rule, recent)
        except Exception as error:  # noqa: BLE001 - whatever a rule of a user's raises is told
            text = f"has a rule that failed, {name}: {type(error).__name__}: {error}"
        if text is None:
            return
        times = self._told[name] = [each for each in self._told.get(name, ()) if now - each < self._config.every_s]
        if len(times) >= (_MOST_OF_LIFE if rule in LIFE else 1):
            self._left_out[name] = self._left_out.get(name, 0) + (rule in LIFE)
            return
        times.append(now)
        self._number += 1
        if left_out := self._left_out.pop(name, 0):
            text += f" ({left_out} more of {name} were not told)"
        message = {"number": self._number, "rule": name, "text": str(text), "time": now}
        self.queue += [message | {"to": to} for to in range(self._num)]
        if len(self.queue) > _MOST_QUEUED:
            log.warning("%d messages wait, the oldest of them are given up", len(self.queue))
            del self.queue[:-_MOST_QUEUED]

    def _send_all(self) -> None:
        for to in range(self._num):
            at, pause_s = self._pauses.get(to, (0.0, _AGAIN_S))
            for each in [entry for entry in self.queue if entry["to"] == to]:
                if self._clock() < at:
                    break
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"]))
                title = f"rondo: {self._run.name}: {each['rule']}"
                text = f"{self._run.name} {each['text']} ({when}, #{each['number']})"
                why = self._send(to, _KINDS.get(each["rule"], "warning"), title, text)
                if why is not None:
                    log.warning(
                        "address %d did not take #%d: %s; again in %.0f s", to + 1, each["number"], why, pause_s
                    )
                    self._pauses[to] = self._clock() + pause_s, min(2 * pause_s, _LONGEST_S)
                    break
                self._pauses.pop(to, None)
                self.queue.remove(each)
                self._keep()

    def _keep(self) -> None:
        said = {
            "read": {name: tail.offset for name, tail in self._tails.items()}, "told": self._told, "left_out": self._left_out,
            "number": self._number, "lives": self._lives, "active": self._active, "cause": self._cause, "queue": self.queue,
        }  # fmt: skip
        if (text := orjson.dumps(said)) != self._said:
            with telling("the queue of alerts"):  # a full disk is what somebody wants to be told of
                write_json(self._file, self._kept | said)
                self._said = text

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        tail = self._tails[name]
        while lines := tail.read():
            yield from (each for each in read_lines(lines, tail.path, is_record) if "kind" in each)


def _within(seconds: float, rule: Rule, recent: Recent) -> str | None:
    """TimeoutError of one that takes longer. On the main thread."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"a rule must answer within {seconds:g} s, got none")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return rule(recent)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def through_apprise(urls: list[str]) -> Send:
    """Of what Apprise says of a failure the status alone is told, since the rest may show an address."""
    from apprise import Apprise, LogCapture

    hush()
    ways = [Apprise(url) for url in urls]

    def send(to: int, kind: str, title: str, text: str) -> str | None:
        with LogCapture(level=logging.WARNING) as said:
            taken = ways[to].notify(body=text, title=title, notify_type=kind)
            status = re.search(r"error=(\d{3})\b", said.getvalue())
        return None if taken else f"status {status[1]}" if status else "no answer"

    return send


def follow(run: Path, config: AlertsConfig, over: Over) -> None:
    """Until `over` says that the run has ended, and all is sent. ConfigError where nobody can be told, or
    another process tells."""
    if (line := why_not(config)) is not None:
        raise ConfigError(line)
    urls = addresses(config)
    with cursor(run, NAME, {}) as (file, kept):
        alerts = Alerts(run, config, file, kept, len(urls), through_apprise(urls))
        is_over = False
        while not is_over or alerts.queue:
            if is_over:
                time.sleep(PERIOD_S)
            is_over = over(0)  # before the look, which then sees all
            alerts.look(is_over=is_over)
            if not is_over:
                over(PERIOD_S)


def of_run(run: Path) -> AlertsConfig:
    found = read_json(run / "config.resolved.json").get("alerts")
    if found is None:
        raise ConfigError(f"RUN must have alerts in its settings, got none in {run}. Set them: --set 'alerts={{}}'")
    return AlertsConfig.model_validate(found)


def by_hand(path: Path, *, test: bool) -> int:
    """`rondo alert`. RUN: a run, or with `test` a config too. 1 where an address did not take the test."""
    if not test:
        run = existing_run(path)
        follow(run, of_run(run), over_without_owner(run))
        print(f"all is told of {run.name}")
        return 0
    if path.is_file():
        from rondo.launch.config import load

        config, name = load(path).alerts, path.name
        if config is None:
            raise ConfigError(
                f"CONFIG must have alerts in its settings, got none in {path}. Add alerts=AlertsConfig(...)"
            )
    else:
        config, name = of_run(existing_run(path)), path.resolve().name
    if (line := why_not(config)) is not None:
        raise ConfigError(line)
    urls, failed = addresses(config), 0
    send = through_apprise(urls)
    for to, service in enumerate(services(urls)):
        why = send(to, "info", f"rondo: {name}: test", f"This is what an alert of {name} looks like.")
        failed += why is not None
        print(
            f"address {to + 1} of {len(urls)} ({service}): {'taken' if why is None else f'not taken: {why}'}",
            flush=True,
        )
    return int(failed > 0)


if __name__ == "__main__":
    watched = Path(sys.argv[1])
    beside(NAME, lambda over: follow(watched, of_run(watched), over))
