"""Run: how a run is doing or how it ended, in words and figures, from its files and, while it lives, from its admin endpoint.

Owns what a page is told of one run. Does not own any number: each is read where it is written, and what `rondo explain` and
`rondo status` say is said by them. Invariants: nothing here writes to a run but its index; a run that does not answer is told
as such, and its files are shown all the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rondo.launch.dashboard.memory import devices, held
from rondo.launch.dashboard.metrics import Metrics
from rondo.launch.dashboard.samples import Samples
from rondo.launch.dashboard.tokens import Tokens
from rondo.launch.report.explain import Processor, Setup, explain
from rondo.launch.report.status import ask, live_record
from rondo.launch.report.steps import critical_path, newest_steps
from rondo.launch.report.summary import read
from rondo.launch.report.timeline import SpanRecord, spans_between
from rondo.launch.rundir import owner, read_json, supervisor_record
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.errors import ConfigError, Refused, RondoError
from rondo.runtime.records.record import last_lines, read_lines
from rondo.runtime.records.tail import Tail

_COUNTED = frozenset({"committed", "autoscale_holds"})
"""Kinds of events that come with every step."""
_NUM_EVENTS = 400
_NUM_STEPS = 50
_RECENT = 20
_NUM_KNOWN, _KNOWN_BYTES = 4000, 4 << 20
_LANE_SPANS = 1500
_FRESH_S = 1.0
_DELAYS_S = 10.0
_ASKED = ("healthz", "roles", "waits", "bus", "weights")
_LOG_LINES, _LOG_BYTES = 400, 256 << 10


class Run:
    """One run directory, `id` among those that are shown. Methods read files and wait for answers: call them in a thread."""

    def __init__(self, id: str, path: Path) -> None:
        self.id, self.path = id, path
        self.metrics, self.samples, self.tokens = Metrics(path), Samples(path), Tokens(path)
        self._lock = threading.Lock()
        self._asked: dict[str, Any] = {}
        self._asked_at = -_FRESH_S
        self._delayed: dict[str, list[tuple[int, float]]] = {}
        self._delayed_at = -_DELAYS_S
        self._forget_events()

    def _forget_events(self) -> None:
        self._tail = Tail(self.path / "events.jsonl")
        self._events: deque[dict[str, Any]] = deque(maxlen=_NUM_EVENTS)
        self._groups: dict[str, dict[str, Any]] = {}
        self._commits: deque[tuple[int, float]] = deque(maxlen=_NUM_EVENTS)

    def close(self) -> None:
        self.metrics.close()
        self.samples.close()

    # ---- what is asked ----------------------------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        """State, step, reward, pace, who waits for whom, in words."""
        self.metrics.advance()
        settings, last, live = read_json(self.path / "config.resolved.json"), self.metrics.last, self.live()
        state, words = self._state(live)
        evaluations, job = self.metrics.evaluations(), settings.get("job", "rl")
        return {
            "id": self.id, "path": str(self.path), "state": state, "words": words, "alive": state in ("live", "starting"),
            "share": self.metrics.share, "num_done": last["step"] + 1 if last else 0, "num_steps": settings.get("num_steps"),
            "figures": self._figures(last), "last_time": last.get("time"), "job": job,
            "evaluations": [{name: each.get(name) for name in ("label", "version", "reward")} for each in evaluations[-5:]],
            "explanation": self._explanation(settings), "mode": settings.get("mode"), "seed": settings.get("seed"),
        }  # fmt: skip

    def glance(self) -> dict[str, Any]:
        """`overview`, or why there is none: others that are shown beside this run do not depend on its directory."""
        try:
            return self.overview()
        except Exception as error:  # noqa: BLE001 - a directory that is gone, or holds what no run writes
            words = str(error) if isinstance(error, RondoError) else f"Its files cannot be read: {error!r}"
            return {
                "id": self.id, "path": str(self.path), "state": "unreadable", "words": words, "alive": False, "share": 1.0,
                "num_done": 0, "num_steps": None, "figures": {}, "evaluations": [], "explanation": None,
            }  # fmt: skip

    def health(self) -> dict[str, Any]:
        """Role groups, restarts, waits, memory and what happened."""
        with self._lock:
            self._read_events()
            events, groups = list(self._events)[::-1], [dict(each) for each in self._groups.values()]
        live, summary = self.live(), self._summary()
        by_name = {each["name"]: each for each in live.get("roles", ())}
        scaled = [each for each in by_name.values() if not each.get("service")]
        processes = [f"{each['name']}.{rank}" for each in scaled for rank in range(len(each.get("pids", ())))]
        memory, cores = summary.get("memory_bytes", {}), summary.get("cores", {})
        is_over = not live and owner(self.path) is None
        for each in groups:
            name = each["name"]
            known = by_name.pop(name, {})
            each |= {n: known[n] for n in ("state", "role", "restarts", "section", "rss_bytes", "pids") if n in known}
            each.setdefault("rss_bytes", memory.get(name))
            each["cores"] = cores.get(name)
            if is_over and each["state"] in ("starting", "ready", "draining"):
                each["state"] = "ended"
        return {
            "groups": groups, "events": events, "waits": live.get("waits", []), "health": live.get("healthz"),
            "processes": processes, "roles": sorted({each.get("role", "") for each in scaled}),
            "unanswered": live.get("error"), "logs": self._logs(), "waits_s": summary.get("waits_s", {}),
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """What each process holds, now or at most, and the devices of a live run's machine."""
        live = self.live()
        return {
            "processes": held(live.get("roles", ())), "devices": devices() if live else [],
            "peak_bytes": self._summary().get("memory_bytes", {}), "unanswered": live.get("error"),
        }  # fmt: skip

    def stacks(self, process: str) -> dict[str, Any]:
        """Where the threads of a live run's process stand. ConfigError for a run that is over, Refused where it does not say."""
        found: dict[str, Any] = ask(live_record(self.path, "to be asked"), f"/stacks?process={quote(process)}")
        return found

    def act(self, what: str, role: str | None, num_replicas: int | None, token: str) -> Any:
        """Asks the run itself, with that token: this process has no say in who may. TurnedDown with its words where it does not
        do so."""
        body: dict[str, Any] = {"reason": "asked in the dashboard"}
        if what != "stop" and role is None:
            raise ConfigError(f"role must be set to {what}, got nothing. Name one of the run's")
        if what.startswith("scale"):
            body["num_replicas"] = num_replicas
        try:
            return ask(
                live_record(self.path, "to be asked"), "/stop" if what == "stop" else f"/{role}/{what}", body, token
            )
        except Refused as error:
            raise TurnedDown(403, str(error)) from None

    def log(self, name: str) -> dict[str, Any]:
        """The end of a log. ConfigError for none of this run's."""
        path = self.path / "logs" / name
        if name not in self._logs() or not path.resolve().is_relative_to((self.path / "logs").resolve()):
            raise ConfigError(f"file must be a log of this run, got {name!r}. See the list of its health")
        return {"file": name, "bytes": path.stat().st_size, "lines": last_lines(path, _LOG_LINES, _LOG_BYTES)}

    def flow(self) -> dict[str, Any]:
        """The bus and the weights: of a live run as its coordinator counts, and what the files know."""
        with self._lock:
            self._read_events()
            commits = list(self._commits)
        live, summary = self.live(), self._summary()
        names = ("admitted", "trained", "lost", "trained_twice", "by_outcome")
        self.metrics.advance()
        staleness, of = self.metrics.last.get("staleness_tokens"), "Staleness of the newest step's tokens"
        if summary:
            staleness, of = summary.get("staleness_histogram"), "Staleness of what was trained"
        return {
            "bus": live.get("bus"), "weights": live.get("weights"), "unanswered": live.get("error"),
            "ledger": {name: summary.get(f"samples_{name}") for name in names} if summary else None,
            "staleness": staleness, "staleness_of": of, "commits": commits, "delays": self._delays(dict(commits)),
        }  # fmt: skip

    def _delays(self, committed: Mapping[int, float]) -> dict[str, list[tuple[int, float]]]:
        """Reader of weights -> (version, seconds from its commit until the reader had it), of the newest steps; looked up in all
        of their spans, and so no more often than every `_DELAYS_S`."""
        if time.monotonic() < self._delayed_at + _DELAYS_S:
            return self._delayed
        self._delayed_at = time.monotonic()
        steps = newest_steps(self.path, _RECENT)
        self._delayed = found = dict[str, list[tuple[int, float]]]()
        for span in spans_between(self.path, round(steps[0].start * 1e9), time.time_ns()) if steps else ():
            version = span.args.get("version", -1)
            if span.name == "load weights" and not span.still and version in committed:
                found.setdefault(span.process, []).append((version, max(0.0, span.end / 1e9 - committed[version])))
        return found

    def timeline(self, step: int | None, num: int) -> dict[str, Any]:
        """What each process did when, from `step` on (by default the newest) over `num` steps, and the parts of those steps. The
        longest spans of each lane, where there are many. "lanes": [[name, seconds from "start", seconds, step], ...] each.
        ConfigError for a step that is not among the newest."""
        known = newest_steps(self.path, _NUM_KNOWN, _KNOWN_BYTES)
        if not known:
            return {"steps": [], "known": None, "lanes": [], "path": [], "num_left_out": 0}
        at = known[-num].step if step is None and len(known) >= num else known[0].step if step is None else step
        steps = [each for each in known if at <= each.step < at + num]
        if not steps:
            raise ConfigError(
                f"step must be one of {known[0].step} to {known[-1].step}, got {step}. Older ones have no spans any more"
            )
        begin, end = steps[0].start, max(each.start + each.step_s for each in steps)
        lanes: dict[tuple[str, str], list[SpanRecord]] = {}
        begin_ns = round(begin * 1e9)  # of which seconds since 1970 keep no more than a quarter of a microsecond
        spans = spans_between(self.path, begin_ns, round(end * 1e9))
        path = critical_path(spans, [each.step for each in steps])
        for span in spans:
            if not span.lane.startswith("waits/"):
                lanes.setdefault((span.process, span.lane), []).append(span)
        longest = {key: sorted(spans, key=lambda s: s.start - s.end)[:_LANE_SPANS] for key, spans in lanes.items()}
        told = [
            {
                "process": process, "lane": lane,
                "spans": [
                    [s.name, (s.start - begin_ns) / 1e9, (s.end - s.start) / 1e9, s.step]
                    for s in sorted(spans, key=lambda s: s.start)
                ],
            }
            for (process, lane), spans in sorted(longest.items())
        ]  # fmt: skip
        return {
            "path": [[name, (start - begin_ns) / 1e9, (end - start) / 1e9] for name, start, end in path],
            "steps": [asdict(each) for each in steps], "known": [known[0].step, known[-1].step], "start": begin,
            "seconds": end - begin, "lanes": told,
            "num_left_out": sum(map(len, lanes.values())) - sum(map(len, longest.values())),
        }  # fmt: skip

    def live(self) -> dict[str, Any]:
        """What the admin endpoint says, by the names of its routes; "error" where it does not answer, empty for a run that is
        over. Not older than a second, or than the answer took, and asked once at a time: for a leader that stands still a page
        waits half of its time at most."""
        with self._lock:
            now = time.monotonic()
            if now - self._asked_at < _FRESH_S:
                return self._asked
            record, told = supervisor_record(self.path), dict[str, Any]()
            if record is not None:
                try:
                    told = {name: ask(record, f"/{name}") for name in _ASKED}
                except RondoError as error:
                    told = {"error": str(error)}
            took_s = time.monotonic() - now
            self._asked, self._asked_at = told, time.monotonic() + took_s
            return told

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _state(self, live: Mapping[str, Any]) -> tuple[str, str]:
        if "healthz" in live:
            told = live["healthz"]
            what = "goes on" if told.get("ready") else "has roles that are starting"
            failing = f"The run is failing: {told.get('failing', 'see its health')}."
            words = f"The run {what}." if told.get("healthy") else failing
            return "live", words
        if "error" in live:
            return "live", f"The run is alive and does not answer: {live['error']}"
        if owner(self.path) is not None:
            return "starting", "The run is starting, or ends."
        summary = self._summary()
        if not summary:
            return "unfinished", "The run ended without a summary: it was killed, or lost its machine."
        code = summary["exit_code"]
        if code == 0:
            return "done", f"The run is done, after {summary['wall_s']:.0f} s."
        if code == 75:
            return "stopped", "The run was stopped, and can be resumed."
        return "failed", f"The run failed: {summary['first_cause'] or f'exit code {code}'}"

    def _logs(self) -> list[str]:
        """The names of its logs, below `logs/`."""
        return sorted(
            str(p.relative_to(self.path / "logs")) for p in (self.path / "logs").glob("*/*.log") if p.is_file()
        )

    def _summary(self) -> dict[str, Any]:
        found = read(self.path)
        return {} if found is None else asdict(found)

    def _figures(self, last: Mapping[str, Any]) -> dict[str, float]:
        """What a glance should see, of the newest step, and the pace of the newest ones."""
        found = {
            name: last[name] for name in ("reward_mean", "loss", "staleness_mean", "entropy", "kl", "grad_norm")
            if isinstance(last.get(name), int | float)
        }  # fmt: skip
        names = ("step_s", "tokens", "num_samples", "time")
        done = last.get("step", 0)
        recent = {
            name: series["mean"]
            for name, series in self.metrics.series(names, done - _RECENT + 1, None, _RECENT).items()
        }
        times = recent.get("time", [])
        if len(times) > 1 and (seconds := times[-1] - times[0]) > 0:
            found["s_a_step"] = seconds / (len(times) - 1)
            for name, shown in (("tokens", "tokens_a_s"), ("num_samples", "samples_a_s")):
                if len(recent.get(name, ())) == len(times):
                    found[shown] = sum(recent[name][1:]) / seconds
        return found

    def _explanation(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `rondo explain` says of the newest steps, but for processors; None before there is one, and of jobs without
        rollouts."""
        steps = newest_steps(self.path, _NUM_STEPS) if settings.get("job", "rl") == "rl" else []
        if not steps:
            return None
        if len(steps) > 2:
            steps = steps[1:] if steps[0].step == 0 else steps
        found = explain(steps, Setup.of(settings, os.cpu_count() or 1), Processor())
        told = asdict(found)
        return {name: told[name] for name in ("first", "last", "step_s", "trainer", "roles", "findings")}

    def _read_events(self) -> None:
        while True:
            lines = self._tail.read()
            if self._tail.shrunk:
                self._forget_events()
                continue
            self._fold(read_lines(lines, self._tail.path))
            if not lines or self._tail.done:
                return

    def _fold(self, records: Iterable[Any]) -> None:
        for record in records:
            if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                continue
            kind, name = record.get("kind"), record.get("group")
            if kind == "committed":
                self._commits.append((record.get("version", 0), record.get("time", 0.0)))
            if kind in _COUNTED:
                continue
            self._events.append(record)
            if not isinstance(name, str):
                continue
            group = self._groups.setdefault(name, {"name": name, "state": "", "incarnation": 0, "deaths": 0})
            if kind in ("starting", "ready", "died", "done", "draining", "given_up"):
                group["state"] = kind
                group["incarnation"] = record.get("incarnation", group["incarnation"])
            if kind == "died":
                group["deaths"] += 1
