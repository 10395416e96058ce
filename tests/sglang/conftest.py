"""What the tests against real SGLang share: where it is installed, and one server for all of them.

They run where SGLANG_VENV names an environment that `rondo sglang install` has made; elsewhere they are skipped. `make
test-sglang` sets it. Tests that kill a server start one of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.servers import Served, launch, moe, serve

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="SGLANG_VENV names no environment of SGLang: `make test-sglang` sets it")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("sglang")
            if not os.environ.get("SGLANG_VENV"):
                item.add_marker(absent)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a tiny mixture of experts, which tells its routed experts. Its weights are those it was started with, as
    version -1, when a test begins that leaves them so."""
    folder = tmp_path_factory.mktemp("sglang")
    model = moe(folder / "model")
    with (
        asyncio.Runner() as runner,
        serve(runner, launch(model, {"enable-return-routed-experts": True}), folder) as made,
    ):
        yield made
