"""How the whole suite runs: what hypothesis tries, which files come first, what needs GPUs, what the garbage collector leaves
alone, and that nothing which tests start outlives them.

Owns nothing of any test. Examples are the same in every run and have no time limit, so that neither chance nor a busy machine
decides whether the suite passes; RONDO_HYPOTHESIS=random looks for new ones. How many there are: `strength.py`.

    RONDO_HYPOTHESIS=random pytest tests/comm/ring/test_records.py
    RONDO_TEST_LONG=1 pytest tests/comm                             # as `make test-long`
    pytest -m cuda                                                  # what skips without a GPU; `make gpu` runs it
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.runs import over_behind_it
from tests.e2e.shell import Rondo, shell

LONGEST = (
    "e2e/test_runs.py", "models/test_fsdp.py", "parity/test_parity.py", "test_docs.py", "models/test_fsdp_media.py",
    "launch/check/test_trace.py", "chaos/test_run.py", "e2e/test_evaluated.py", "e2e/test_omni.py", "e2e/test_updates.py",
    "roles/data/test_media.py", "roles/training/test_ranks.py", "runtime/supervision/test_supervisor.py",
    "e2e/test_explained.py", "e2e/test_routed.py", "launch/check/test_full_size.py", "launch/check/test_check.py",
    "chaos/test_bus.py", "comm/groups/test_groups.py", "comm/bus/test_crash_points.py",
    "comm/bus/test_model.py", "roles/rewards/test_pool.py",
    "sglang/test_adapters.py", "sglang/test_weights.py", "sglang/test_dispatch.py",
)  # fmt: skip
"""Files that take longest, longest first: begun last, one of them would keep a single core busy at the end."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, and what was collected is never walked again: modules and tests stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)  # what tests write may change within its second
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they come. Stable, so that each file stays in one piece. What needs more GPUs than
    there are is skipped."""
    place = {f"tests/{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
    for item, marker in ((item, item.get_closest_marker("cuda")) for item in items):
        wanted = 0 if marker is None else (*marker.args, 1)[0]
        if wanted > (found := num_gpus() if wanted else 0):
            item.add_marker(pytest.mark.skip(reason=f"computes on {wanted} GPU{'s' * (wanted > 1)}, found {found}"))


@functools.cache
def num_gpus() -> int:
    """That torch sees. Many tests need no torch."""
    import torch

    return torch.cuda.device_count()


@pytest.fixture(autouse=True)
def _runs_are_over_with_their_test() -> Iterator[None]:
    with over_behind_it():
        yield


@pytest.fixture(autouse=True)
def _draws_are_the_same_whatever_ran_before() -> None:
    """Of whoever draws without a seed of its own: which tests share a process, and in which order, is a matter of time."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def rondo() -> Iterator[Rondo]:
    """Runs `rondo` with some words: (exit code, output)."""
    with shell() as found:
        yield found


_SESSION = "RONDO_TEST_SESSION"


def pytest_configure() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` runs would not hear one, and some are sent one
    os.environ.setdefault(_SESSION, str(os.getpid()))  # whatever the tests start inherits it, workers of pytest first
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # who crashes says where each of its threads was
    sys.dont_write_bytecode = False  # until all is collected: else each worker compiles hypothesis and all tests anew
    from hypothesis import HealthCheck, settings

    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile("steady", deadline=None, derandomize=True, database=None, suppress_health_check=health)
    settings.register_profile("random", settings.get_profile("steady"), derandomize=False)
    settings.load_profile(os.environ.get("RONDO_HYPOTHESIS", "steady"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Processes that the tests have left behind are a failure of the session."""
    if os.environ[_SESSION] != str(os.getpid()):
        return  # a worker of pytest; who started it looks
    _, going = psutil.wait_procs([each for each in psutil.process_iter() if _started_by_tests(each)], timeout=10)
    left = [each for each in going if _started_by_tests(each)]  # and not only unreaped
    if left:
        print("\nthe tests must leave no process behind, got", *left, sep="\n    ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _started_by_tests(process: psutil.Process) -> bool:
    try:
        inside = process.pid != os.getpid() and process.environ().get(_SESSION) == str(os.getpid())
        helps = inside and "multiprocessing.resource_tracker" in " ".join(
            process.cmdline()
        )  # and is over with this process
    except psutil.Error:
        return False
    return inside and not helps
