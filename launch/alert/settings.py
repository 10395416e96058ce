"""Settings of alerts: who is told of a run, and when.

Owns `AlertsConfig`, and reading the addresses, which are secrets: they stand in a file that its owner alone can read, or in the
variable RONDO_ALERT_URLS, and never in settings, logs or errors.

    alerts=AlertsConfig(urls_file="~/.rondo-alerts", max_gap=0.05, rules=(my_rule,))
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field

from rondo.launch.alert.rules import OURS, Bounds
from rondo.runtime.admin.tokens import require_private
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.section import FunctionRef

VARIABLE = "RONDO_ALERT_URLS"
_INSTALL = "alerts must have the package apprise, which is not installed. Install it: pip install 'rondo-rl[alerts]'"
_MAX_BYTES = 64 << 10


class AlertsConfig(Bounds):
    """The start and the end of a run, a crash and a requeue are told in any case; None leaves a bound out."""

    urls_file: Path | None = None
    """A file (mode 0600) with an address of Apprise's a line. None: they stand in RONDO_ALERT_URLS, one a word."""
    every_s: float = Field(3600.0, gt=0)
    """The same rule tells once in so long; start, end, crash and requeue 20 times each."""
    rules: tuple[FunctionRef, ...] = ()
    """Further ones: functions of a `Recent` (launch/alert/rules.py) that return a message or None."""

    def refused(self) -> Iterator[str]:
        names = [*(rule.__name__ for rule in OURS), *(reference.rpartition(":")[2] for reference in self.rules)]
        for name in names:
            if names.count(name) > 1:
                yield f"alerts.rules must have names of their own, got {name!r} twice. Rename one"


def addresses(config: AlertsConfig) -> list[str]:
    """Whom to tell. ConfigError for none, and for a file that others may read; no error shows any of them."""
    if config.urls_file is None:
        found = os.environ.get(VARIABLE, "").split()
    else:
        text = require_private(config.urls_file.expanduser(), "alerts.urls_file", _MAX_BYTES).decode(errors="replace")
        found = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if not found:
        raise ConfigError(
            f"alerts must know whom to tell, got no address. Set alerts.urls_file, or {VARIABLE} to addresses of Apprise's"
        )
    return found


def services(urls: list[str]) -> list[str]:
    """What Apprise makes of each address, "json" of json://...; "" where it takes it not."""
    from apprise import Apprise

    hush()
    made = [Apprise.instantiate(url, suppress_exceptions=True) for url in urls]
    return ["" if each is None else url.partition(":")[0] for url, each in zip(urls, made, strict=True)]


def hush() -> None:
    """Loggers that may show an address say nothing."""
    for name in ("apprise", "urllib3", "requests"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL + 1)
        logger.propagate = False
        logger.addHandler(logging.NullHandler())


def why_not(config: AlertsConfig) -> str | None:
    """What keeps alerts from being sent, as one line."""
    if find_spec("apprise") is None:
        return _INSTALL
    try:
        known = services(addresses(config))
    except RondoError as error:
        return str(error)
    wrong = ", ".join(str(number) for number, service in enumerate(known, 1) if not service)
    where = f"alerts.urls_file {config.urls_file}" if config.urls_file is not None else VARIABLE
    rule = "must hold addresses of services that Apprise knows (https://appriseit.com)"
    return f"{where} {rule}, got others as number {wrong} of {len(known)}. Correct them" if wrong else None
