"""View: what a run prints while it lasts. A live picture on a terminal, one `key=value` line an event elsewhere.

Owns the text. Does not own any number: a `Progress` folds the supervisor's events, role groups come from its snapshot.
Nothing here can hold up the run: events are folded in microseconds and drawn four times a second.

    with open_view(name, num_steps, groups) as view:      groups: () -> the supervisor's role groups now
        supervisor = Supervisor(config, view.on_event)
        task_group.create_task(view.run())
"""

from __future__ import annotations

import collections
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rondo.launch.machine import show_bytes
from rondo.launch.report.records import evaluation_figures, is_step, shown_reward
from rondo.runtime.records.telling import tell_every, telling

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rondo.runtime.supervision.spec import GroupView

_REFRESH_S = 0.25
_NUM_EVENTS = 6
_NUM_EVALUATIONS = 5
_RECENT_STEPS = 10
_SPARK = " ▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_COUNTED = frozenset({"metrics", "committed", "autoscale_holds"})
"""Kinds of records that come with every step: counted, not told one by one."""
_HIDDEN = frozenset({"time", "source", "kind", "sample"})


Groups = Callable[[], "Sequence[GroupView]"]


@dataclass(slots=True)
class Progress:
    """What the events so far add up to."""

    num_steps: int
    num_done: int = 0
    """Committed steps."""
    last: dict[str, Any] = field(default_factory=dict)
    """The newest step's record, with the critic's newest figures."""
    critic: dict[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    step_times: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=_RECENT_STEPS + 1))
    evaluations: dict[int, str] = field(default_factory=dict)
    """Policy version -> its reward, as it is shown."""
    events: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=_NUM_EVENTS))

    def add(self, record: Mapping[str, Any]) -> str | None:
        """Folds one record; the line to print for it, or None for one that is only counted."""
        if "critic" in record:
            self.critic = {name: record["critic"][name] for name in _OF_CRITIC if name in record["critic"]}
        if is_step(record):
            self.num_done = record["step"] + 1
            # A step that is repeated after a restart takes the place of what it repeats.
            del self.rewards[record["step"] :]
            self.rewards.append(record["reward_mean" if "reward_mean" in record else "loss"])
            self.step_times.append(record["time"])
            self.last = {**record, **self.critic}
            return f"{_clock(record)} {step_line(self.last, self.num_steps)}"
        if "evaluation" in record:
            evaluation = record["evaluation"]
            told = pairs(evaluation.get("figures", {})) or shown_reward(evaluation.get("reward"), evaluation)
            self.evaluations[evaluation["version"]] = told
            figures = {name.replace(" ", "."): value for name, value in evaluation_figures(evaluation).items()}
            line = f"{_clock(record)} evaluation {pairs({**evaluation, **figures})}"
        elif record.get("kind") in _COUNTED:
            return None
        else:
            shown = {name: value for name, value in record.items() if name not in _HIDDEN}
            line = f"{_clock(record)} {record.get('kind', 'event')} source={record.get('source', '-')} {pairs(shown)}"
        self.events.append(line.rstrip())
        return line.rstrip()

    def seconds_left(self) -> float | None:
        """From the pace of the last steps; None before there is one."""
        if len(self.step_times) < 2:
            return None
        pace = (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)
        return max(pace, 0.0) * (self.num_steps - self.num_done)


def open_view(
    name: str, num_steps: int, groups: Groups, *, plain: bool = False, console: Console | None = None
) -> LiveView | PlainView:
    """The live view on a terminal, plain lines elsewhere or where asked for. `on_event` of both takes the supervisor's records;
    `run` draws until it is cancelled."""
    if plain or (console is None and (sys.stdout is None or not sys.stdout.isatty())):
        return PlainView(num_steps)
    from rich.console import Console

    console = console or Console()
    return LiveView(name, num_steps, groups, console) if console.is_terminal else PlainView(num_steps)


class PlainView:
    """One line an event on stdout, for files, pipes and schedulers."""

    def __init__(self, num_steps: int) -> None:
        self.progress = Progress(num_steps)

    def on_event(self, record: Mapping[str, Any]) -> None:
        line = self.progress.add(record)
        if line is not None:
            say(line)

    async def run(self) -> None:
        """Nothing to draw: lines are printed as events come."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LiveView:
    """A picture that stays in place. On leaving, the last one stays on the screen and the cursor is back."""

    def __init__(
        self,
        name: str,
        num_steps: int,
        groups: Groups,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.live import Live

        self.progress = Progress(num_steps)
        self._name = name
        self._groups = groups
        self._clock = clock
        self._started = clock()
        # Drawn from the event loop only: the state is not locked.
        self._live = Live(console=console, auto_refresh=False, get_renderable=self.render)

    def on_event(self, record: Mapping[str, Any]) -> None:
        self.progress.add(record)

    async def run(self) -> None:
        await tell_every("view", _REFRESH_S, self._live.refresh)

    def __enter__(self) -> LiveView:
        with telling("view"):
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with telling("view"):
            self._live.stop()

    def render(self) -> RenderableType:
        """The picture now: progress, reward, role groups, last events."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self.progress
        left = progress.seconds_left()
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self._name, style="bold"),
            Text(f"step {progress.num_done}/{progress.num_steps}"),
            ProgressBar(total=progress.num_steps, completed=progress.num_done, width=24),
            Text(duration(self._clock() - self._started)),
            Text(f"{duration(left)} left" if left is not None else "", style="dim"),
        )
        roles = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("role group", "state", "restarts", "memory"):
            roles.add_column(title, justify="right" if title in ("restarts", "memory") else "left")
        for group in self._groups():
            state = str(getattr(group.state, "value", group.state)).lower()
            style = {"running": "green", "ready": "green", "failed": "red", "dead": "red"}.get(state, "yellow")
            roles.add_row(group.name, Text(state, style=style), str(group.restarts), show_bytes(group.rss_bytes))
        parts: list[RenderableType] = [head]
        if progress.rewards:
            what = "reward" if "reward_mean" in progress.last else "loss"
            reward = shown_reward(progress.rewards[-1], progress.last)
            parts.append(Text(f"{what} {reward} {sparkline(progress.rewards)}", no_wrap=True))
            parts.append(Text(pairs({k: progress.last[k] for k in _FIGURES if k in progress.last}), overflow="fold"))
        if progress.evaluations:
            newest = list(progress.evaluations.items())[-_NUM_EVALUATIONS:]
            shown = "  ".join(f"version {version}: {reward}" for version, reward in newest)
            parts.append(Text(f"held-out {'loss' if 'job' in progress.last else 'reward'}  {shown}", style="bold"))
        parts.append(roles)
        parts.extend(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in progress.events)
        return Group(*parts)


_OF_CRITIC = ("explained_variance", "value_loss")
_FIGURES = (
    "loss", "grad_norm", "lr", "staleness_mean", "staleness_max", "step_s", "train_s", "wait_s", "longest_wait_s", "tokens", "kl",
    "clip_fraction", "log_prob_gap", *_OF_CRITIC,
)  # fmt: skip


def say(text: str) -> None:
    """Prints a line; where nobody reads it any more (`rondo train | head -1`), the run goes on, and its files tell the rest."""
    with telling("printed lines"):
        print(text, flush=True)


def step_line(record: Mapping[str, Any], num_steps: int) -> str:
    """A step as one line: `step=3/40 reward=0.412 loss=...`."""
    figures = {name: record[name] for name in _FIGURES if name in record}
    reward = f" reward={shown_reward(record['reward_mean'], record)}" if "reward_mean" in record else ""
    return f"step={record['step'] + 1}/{num_steps}{reward} {pairs(figures)}".rstrip()


def pairs(values: Mapping[str, Any]) -> str:
    """`key=value` text; numbers to four digits, nested values and empty ones left out."""
    return " ".join(f"{name}={_value(value)}" for name, value in values.items() if isinstance(value, str | int | float))


def sparkline(values: Sequence[float]) -> str:
    """The course of the values in a few characters, each the mean of its part, between their extremes."""
    num_parts = min(_SPARK_WIDTH, len(values))
    edges = [len(values) * index // num_parts for index in range(num_parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_SPARK[1 + round((mean - low) / span * (len(_SPARK) - 2))] for mean in means)


def duration(seconds: float) -> str:
    """ "42 s", "3 min 05 s", "2 h 07 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if any(c.isspace() for c in text) or not text else text


def _clock(record: Mapping[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(record.get("time", time.time())))
