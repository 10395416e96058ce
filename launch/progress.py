"""Progress: on a terminal, a line on stderr that moves while something takes its time, and is gone when it is done.

    with at_work("reads the model"):
        ...

Does not own what a run shows while it lasts (`report/view.py`). Elsewhere than on a terminal nothing is written, and stdout is
never touched: what a command prints may be read by a program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """`what` is done in the body, which prints nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    shown = Progress(SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn(), auto_refresh=False)
    shown.add_task(what, total=None)
    with Live(
        shown,
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=2,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield
