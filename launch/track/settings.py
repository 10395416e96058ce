"""Settings of trackers: which services are told of a run, and where they are.

Owns `TrackerConfig`, and what a service needs installed. Does not own its keys: each service reads its own from the environment
or from its own file, so that none is ever saved or shown with the settings.

    trackers=["tensorboard", TrackerConfig(name="wandb", project="sums", offline=True)]
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rondo.runtime.section import Section, may_hold_secret

Service = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "clearml", "otel"]


_PACKAGES = {"otel": "opentelemetry.exporter.otlp.proto.http"}


class TrackerConfig(Section):
    """One service. In a list of trackers its name alone stands for all defaults."""

    name: Service
    """Which service."""
    project: str = Field("rondo", min_length=1, max_length=128)
    """Under which the run stands there; MLflow calls it an experiment, OpenTelemetry a service. TensorBoard has none."""
    run: str | None = None
    """The run's name there; None: that of its directory."""
    url: str | None = None
    """The server of wandb, mlflow or swanlab, or the receiver of otel, to which /v1/metrics and /v1/traces are added. None: the
    service's own settings say it."""
    folder: Path | None = None
    """For what it writes on this machine; None: in the run directory. MLflow, otel and ClearML online write nothing."""
    offline: bool = False
    """Write files that the service's own command uploads later, as TensorBoard and trackio always do."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def refused(self) -> Iterator[str]:
        if self.url is not None and may_hold_secret(self.url):
            yield (
                f"trackers[{self.name}].url must hold no key, since settings are saved and shown, got one with '@', '?' or '#'. "
                "Give the key as the service's environment variable"
            )
        if self.url is not None and self.name in ("tensorboard", "trackio", "clearml"):
            yield (
                f"trackers[{self.name}].url must not be set, since {self.name} takes none here, got {self.url!r}. Remove it"
            )
        if self.offline and self.name == "otel":
            yield (
                "trackers[otel].offline must not be set, since there are no files of OTLP to upload later, got True. Run "
                "`rondo track RUN --to otel` once there is a receiver"
            )
        if self.offline and self.name == "mlflow":
            yield (
                "trackers[mlflow].offline must not be set, since MLflow has no files to upload later, got True. Set "
                "trackers[mlflow].url to a database of its own, such as 'sqlite:///mlflow.db'"
            )


def missing(name: str) -> str | None:
    """What is to be installed for a tracker, as one line; None where all is there."""
    package = _PACKAGES.get(name, name)
    try:
        if name == "tensorboard" or find_spec(package) is not None:  # whose files we write ourselves
            return None
    except ModuleNotFoundError:  # a package that it lies in
        pass
    return f"trackers[{name}] must have the package {package}, which is not installed. Install it: pip install 'rondo-rl[{name}]'"
