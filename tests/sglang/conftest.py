"""What the tests against real SGLang share: where it is installed, and one server for all of them.

They run where SGLANG_VENV names an environment that `rondo sglang install` has made; elsewhere they are skipped, and say why.
`make test-sglang` makes and names it. Tests that kill a server start one of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.launch.sglang_env import has_sglang
from rondo.roles.rollout.sglang.owned import FOLDER
from tests.sglang.servers import Served, launch, moe, python, serve

_HERE = Path(__file__).parent
_LIMIT_S = 1200
"""Of a test and what it shares with others, which on two busy cores takes minutes to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if _HERE in item.path.parents]
    why = missing() if mine else None
    for item in mine:
        item.add_marker("sglang")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def missing() -> str | None:
    """Why there is no SGLang to test against."""
    folder = os.environ.get("SGLANG_VENV")
    if not folder:
        return "SGLANG_VENV names no environment of SGLang: `make test-sglang` sets it"
    if not Path(python()).exists() or has_sglang(python()) is None:
        return f"SGLANG_VENV names {folder}, which has no SGLang: `rondo sglang install` has not built it, and says why"
    return None


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a tiny mixture of experts, which tells its routed experts and knows priorities. Its weights are those it was
    started with, as version -1, when a test begins that leaves them so."""
    folder = tmp_path_factory.mktemp("sglang")
    model = moe(folder / "model")
    with (
        asyncio.Runner() as runner,
        serve(
            runner, launch(model, {"enable-return-routed-experts": True, "enable-priority-scheduling": True}), folder
        ) as made,
    ):
        yield made
    left = [path.name for path in FOLDER.glob(f"*rondo_server_{os.getpid()}_*")]
    assert not left, "what servers name in shared memory goes with them"
