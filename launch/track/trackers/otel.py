"""OpenTelemetry: metrics and spans to any receiver of OTLP over HTTP, a collector say.

A receiver says neither what it has nor which run it has it of. So all that comes again after a death of ours is the same to the
bit: a metric's point has the time of its record, a span an id that follows from what it is, and whoever keeps them keeps one.
Address, headers, certificates, compression and time limits are OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_...).

    train/reward_mean            -> gauge rondo.reward_mean
    rollout-0/waits_s/call lease -> nothing: waits are spans
    rollout-0/engine/num_running -> gauge rondo.engine.num_running {process: rollout-0}
    a span of a step             -> in the trace of that step; of no step: in the trace of its process and minute
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from rondo.launch.metrics.descriptions import describe
from rondo.launch.report.timeline import SpanRecord
from rondo.launch.track.follow import Run
from rondo.launch.track.points import Point
from rondo.launch.track.settings import TrackerConfig
from rondo.runtime.errors import RondoError

_SERIES = ("train", "critic", "evaluation")
_UNITS = {"s": "s", "bytes": "By", "ratio": "1", "1": "1"}
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_MOST_SPANS = 500
_MINUTE_NS = 60 * 10**9


class OpenTelemetry:
    """A receiver; `url` is its address without /v1/metrics and /v1/traces."""

    last = None

    def __init__(self, run: Run, config: TrackerConfig) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        base = None if config.url is None else config.url.rstrip("/")
        self._metrics = OTLPMetricExporter(None if base is None else f"{base}/v1/metrics")
        self._spans = OTLPSpanExporter(None if base is None else f"{base}/v1/traces")
        self._id, self._scope = run.id, InstrumentationScope("rondo")
        told: dict[str, Any] = {"service.name": config.project, "service.instance.id": run.id, "rondo.run": run.name}
        self._resource = Resource(told | {f"rondo.{name}": value for name, value in run.settings.items()})
        self._points: list[Point] = []
        self._pending: list[Any] = []

    def log(self, point: Point) -> None:
        self._points.append(point)

    def span(self, record: SpanRecord) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        of: tuple[Any, ...] = ("step", record.step)
        if record.step is None:
            of = (record.process, record.incarnation, record.start // _MINUTE_NS)
        trace, span = self._number(of, 16), self._number((*record.key, record.step), 8)
        told = {"process": record.process, "lane": record.lane, "incarnation": record.incarnation}
        told |= {"open": True} if record.still else {}
        told |= {} if record.step is None else {"step": record.step}
        args = {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in record.args.items()
        }
        self._pending.append(ReadableSpan(
            record.name, SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(1)), attributes={**args, **told},
            resource=self._resource, start_time=record.start, end_time=record.end, instrumentation_scope=self._scope,
        ))  # fmt: skip

    def _number(self, of: tuple[Any, ...], size: int) -> int:
        """The same for the same thing of the run, and never 0."""
        return int.from_bytes(blake2b(orjson.dumps([self._id, *of]), digest_size=size).digest()) or 1

    def flush(self) -> bool:
        if self._points:
            self._sent(self._metrics.export(self._as_metrics()))
            self._points.clear()
        while self._pending:
            self._sent(self._spans.export(self._pending[:_MOST_SPANS]))
            del self._pending[:_MOST_SPANS]
        return True

    @staticmethod
    def _sent(result: Any) -> None:
        if result.name != "SUCCESS":
            raise RondoError("OpenTelemetry's receiver must take what was sent, got an error, which stands above")

    def _as_metrics(self) -> Any:
        from opentelemetry.sdk.metrics import export as sdk

        by_name: dict[tuple[str, str, str, bool], list[Any]] = {}
        for point in self._points:
            at = int(point.time * 1e9)
            for name, value in point.values.items():
                key, labels = named(name)
                by_name.setdefault(key, []).append(sdk.NumberDataPoint(labels, 0, at, value))
        metrics = [
            sdk.Metric(name, text, unit, self._data(points, counts=counts))
            for (name, text, unit, counts), points in by_name.items()
        ]
        scopes = [sdk.ScopeMetrics(self._scope, metrics, "")]
        return sdk.MetricsData([sdk.ResourceMetrics(self._resource, scopes, "")])

    @staticmethod
    def _data(points: list[Any], *, counts: bool) -> Any:
        from opentelemetry.sdk.metrics import export as sdk

        return sdk.Sum(points, sdk.AggregationTemporality.CUMULATIVE, True) if counts else sdk.Gauge(points)

    def close(self) -> None:
        self._metrics.shutdown()
        self._spans.shutdown()


def named(name: str) -> tuple[tuple[str, str, str, bool], Mapping[str, str]]:
    """Name, description, unit and whether it counts, and the attributes, of a number by its name in a point."""
    series, _, rest = name.partition("/")
    path = rest if series not in ("critic", "evaluation") else name
    if series == "evaluation" and "@" in rest:  # points leave out the name of an only set
        of, _, figure = rest.rpartition("/")
        path = f"evaluation/sets/{of or 'all'}/{figure}"
    process = {} if series in _SERIES else {"process": series}
    if (found := describe(path)) is None:
        return (_NO_NAME.sub("_", f"rondo.{path.replace('/', '.')}"), "", "", False), process
    entry, labels = found
    parts = [part for part in re.sub(r"_?{\w+}_?", "/", entry.name).replace("@", "/").split("/") if part]
    unit = _UNITS.get(entry.unit, f"{{{entry.unit}}}")
    return (".".join(("rondo", *parts)), entry.text, unit, entry.counts), {**labels, **process}


open = OpenTelemetry
