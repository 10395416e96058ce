"""What the tests against real SGLang share: where it is installed, and one server for all of them.

They run where SGLANG_VENV names an environment that `rondo sglang install` has made, and those of the public router where
SGLANG_ROUTER_VENV names one of its own; elsewhere they are skipped, and say why. `make test-sglang` makes and names both. With CI
set, an environment that is named and cannot be used ends the tests. Tests that kill a server start one of their own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.launch.sglang_env import has_sglang
from rondo.roles.engines.sglang.shared_memory import FOLDER
from tests.sglang.servers import Served, environment, launch, moe, serve

_HERE = Path(__file__).parent
_LIMIT_S = 1200
"""Of a test and what it shares with others, which on two busy cores takes minutes to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if _HERE in item.path.parents]
    why = {name: missing(name) for name in {environment_of(item) for item in mine}}
    unusable = [reason for name, reason in why.items() if reason is not None and os.environ.get(name)]
    if unusable and os.environ.get("CI"):
        pytest.exit(f"tests of SGLang must run where CI is set, got: {'; '.join(unusable)}", returncode=1)
    for item in mine:
        item.add_marker("sglang")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))
        reason = why[environment_of(item)]
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def environment_of(item: pytest.Item) -> str:
    """The variable that names what a test needs."""
    return "SGLANG_ROUTER_VENV" if item.path.name == "test_router.py" else "SGLANG_VENV"


def missing(name: str) -> str | None:
    """Why there is nothing to test against in the environment that `name` names."""
    folder = os.environ.get(name)
    if not folder:
        return f"{name} names no environment: `make test-sglang` makes and names it"
    found = Path(folder, "bin", "python")
    if not found.exists() or (name == "SGLANG_VENV" and has_sglang(str(found)) is None):
        return f"{name} names {folder}, where it is not installed: `make test-sglang` could not build it, and says why"
    return None


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a tiny mixture of experts, which tells its routed experts and knows priorities. Its weights are those it was
    started with, as version -1, when a test begins that leaves them so."""
    folder = tmp_path_factory.mktemp("sglang")
    model = moe(folder / "model")
    tells = {"enable-return-routed-experts": True, "enable-priority-scheduling": True}
    how = launch(model, tells, environment=environment(forks=False))
    with asyncio.Runner() as runner, serve(runner, how, folder) as made:
        yield made
    left = [path.name for path in FOLDER.glob(f"*rondo_server_{os.getpid()}_*")]
    assert not left, "what servers name in shared memory goes with them"
