"""OpenTelemetry: a real receiver over HTTP decodes what a run's files say, each point and span once, whoever is killed when."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.track import follow as following
from rondo.launch.track.beside import Beside
from rondo.launch.track.follow import follow
from rondo.launch.track.settings import TrackerConfig
from rondo.launch.track.spans import Spans
from rondo.runtime.errors import RondoError
from rondo.runtime.records.timeline import FOLDER, Timeline
from tests.launch.track.test_follow import made_run, over
from tests.launch.track.test_points import step

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Receiver(ThreadingHTTPServer):
    """Takes OTLP. `points`: how often each (name, attributes, time, value) came, `spans` each (trace, span); `told` is called
    with the number of requests so far before each is answered, and says the status."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.points: Counter[Any] = Counter()
        self.spans: Counter[Any] = Counter()
        self.metrics: dict[str, Any] = {}
        self.named: dict[Any, Any] = {}
        self.resources: list[dict[str, Any]] = []
        self.requests = 0
        self.status = 200
        self.hear: Any = lambda number: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        data = self.rfile.read(int(self.headers["Content-Length"]))
        coding = self.headers.get("Content-Encoding")
        data = gzip.decompress(data) if coding == "gzip" else zlib.decompress(data) if coding == "deflate" else data
        to = self.server
        to.requests += 1
        if to.status == 200 and self.path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(data).resource_metrics:
                to.resources.append(_attributes(resource.resource.attributes))
                for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
                    to.metrics[metric.name] = metric
                    for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
                        labels = tuple(sorted(_attributes(point.attributes).items()))
                        to.points[metric.name, labels, point.time_unix_nano, point.as_double] += 1
        elif to.status == 200 and self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                for span in (each for scope in resource.scope_spans for each in scope.spans):
                    to.spans[span.trace_id, span.span_id] += 1
                    to.named[span.trace_id, span.span_id] = span
        to.hear(to.requests)
        self.send_response(to.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def _attributes(found: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found}


@contextmanager
def receiving() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def with_timeline(run: Path, num_spans: int = 5) -> Path:
    """Spans of steps, one without a step, and one that was open when its process died."""
    now = [10**9]
    timeline = Timeline(run, "actor-0", clock=lambda: now[0])
    for number in range(num_spans):
        with timeline.span("train", "actor", number, rows=64):
            now[0] += 10**6
    with timeline.span("save", "actor/checkpoint"):
        now[0] += 10**6
    hung = timeline.span("load", "actor").__enter__()
    now[0] += 2 * 10**9
    timeline.flush()
    assert hung.name == "load"
    return run


def config(receiver: Receiver) -> TrackerConfig:
    return TrackerConfig(name="otel", url=receiver.url)


def test_points_become_metrics_with_unit_and_words_and_spans_traces_of_their_steps(tmp_path: Path) -> None:
    run = with_timeline(made_run(tmp_path / "run"))
    with (run / "metrics.jsonl").open("a") as file:
        told = {"time": 9.5, "source": "rollout-0", "engine": {"tokens_generated": 7}, "waits_s": {"call x": 1.0}}
        file.write(json.dumps(told) + "\n" + json.dumps(step(6, log_prob_gap_image=0.5, my_own=2.0)) + "\n")
    with receiving() as receiver:
        follow(run, config(receiver), over)
        values = {(name, labels): value for name, labels, _, value in receiver.points}
        assert values["rondo.log_prob_gap", (("kind", "image"),)] == 0.5
        assert values["rondo.engine.tokens_generated", (("process", "rollout-0"),)] == 7.0
        assert values["rondo.my_own", ()] == 2.0 and values["rondo.evaluation.reward", ()] == 0.25
        gap, tokens = receiver.metrics["rondo.log_prob_gap"], receiver.metrics["rondo.engine.tokens_generated"]
        assert (gap.unit, gap.description) == ("{nats}", "the mean over samples of one kind")
        assert tokens.HasField("sum") and tokens.sum.is_monotonic and tokens.unit == "{tokens}"
        assert sorted(each[2] for each in receiver.points if each[0] == "rondo.loss") == [
            number * 10**9 for number in range(6)
        ]
        assert set(receiver.points.values()) == set(receiver.spans.values()) == {1}
        spans = list(receiver.named.values())
        assert Counter(span.name for span in spans) == {"train": 5, "save": 1, "load": 1}
        assert len({span.trace_id for span in spans if span.name == "train"}) == 5
        (load,) = (span for span in spans if span.name == "load")
        assert _attributes(load.attributes)["open"] is True
        assert load.end_time_unix_nano - load.start_time_unix_nano == 2 * 10**9
        train = next(span for span in spans if span.name == "train")
        assert _attributes(train.attributes) == {
            "rows": 64, "process": "actor-0.0", "lane": "actor", "incarnation": 0, "step": 0
        }  # fmt: skip
        assert receiver.resources[0]["rondo.train.lr"] == 1e-5 and receiver.resources[0]["service.name"] == "rondo"
        follow(run, config(receiver), over)  # nothing has come since
        assert set(receiver.points.values()) == set(receiver.spans.values()) == {1}


def test_a_receiver_that_refuses_loses_nothing(tmp_path: Path) -> None:
    run = with_timeline(made_run(tmp_path / "run"))
    with receiving() as receiver:
        receiver.status = 400
        with pytest.raises(RondoError, match="receiver must take"):
            follow(run, config(receiver), over)
        receiver.status = 200
        follow(run, config(receiver), over)
        assert len(receiver.spans) == 7 and set(receiver.points.values()) == {1}
        assert sum(name == "rondo.loss" for name, *_ in receiver.points) == 6


async def test_whoever_is_killed_while_it_is_told_has_all_and_what_comes_again_is_the_same(tmp_path: Path) -> None:
    """SIGKILL while the receiver has a request and has not answered it, and in front of others."""
    whole = made_run(tmp_path / "whole", num_steps=40)
    with_timeline(whole, num_spans=1200)
    run = made_run(tmp_path / "run", num_steps=40)
    (run / FOLDER).symlink_to(whole / FOLDER)
    with receiving() as expected:
        follow(whole, config(expected), over)
    with receiving() as receiver:
        settings = {"name": "demo", "trackers": [config(receiver).model_dump(mode="json")]}
        (run / "config.resolved.json").write_text(json.dumps(settings))
        told: list[str] = []
        beside = Beside(run, {"otel": following.__name__}, lambda kind, data: told.append(kind), first_pause_s=0.01)

        def hear(number: int) -> None:
            if number in (1, 2, 4, 6):
                os.kill(beside.pids()["otel"], signal.SIGKILL)

        receiver.hear = hear
        running = asyncio.create_task(beside.run())
        while receiver.requests < 6 and not running.done():
            await asyncio.wait([running], timeout=0.05)
        await beside.finish(running, lambda: False)
        assert told.count("tracker_died") == 4
        assert receiver.points.keys() == expected.points.keys(), (
            "nothing is lost, and nothing comes with another value or time"
        )
        assert len(receiver.spans) == len(expected.spans) == 1202 and max(receiver.spans.values()) <= 3


def test_a_span_that_is_open_comes_with_its_end_or_when_its_process_lives_again(tmp_path: Path) -> None:
    now = [10**9]
    timeline = Timeline(tmp_path, "a-0", clock=lambda: now[0])
    span = timeline.span("long", "a").__enter__()
    now[0] += 2 * 10**9
    timeline.flush()
    spans = Spans(tmp_path / FOLDER)
    assert spans.read(is_over=False) == []
    spans = Spans(tmp_path / FOLDER, json.loads(json.dumps(spans.state())))
    span.__exit__(None, None, None)
    timeline.span("dies", "a").__enter__()
    now[0] += 2 * 10**9
    timeline.flush()
    (ended,) = spans.read(is_over=False)
    assert (ended.name, ended.still, ended.end - ended.start) == ("long", False, 2 * 10**9)
    assert spans.read(is_over=False) == []
    Timeline(tmp_path, "a-0", incarnation=1, clock=lambda: now[0]).flush()
    (died,) = spans.read(is_over=False)
    assert (died.name, died.still) == ("dies", True)
    supervisor = Timeline(tmp_path, "supervisor", clock=lambda: now[0])
    supervisor.span("run", "supervisor").__enter__()
    now[0] += 2 * 10**9
    supervisor.flush()
    assert spans.read(is_over=True, living="supervisor.0") == spans.read(is_over=True, living="supervisor.0") == []
    assert [each.name for each in spans.read(is_over=True)] == ["run"]
    assert spans.read(is_over=True) == []
