"""Environments of OpenEnv in a server of their own Python (OPENENV_VENV), as environments of samples."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rondo.roles.sampling.openenv import OpenEnv
from rondo.roles.sampling.tools import schemas
from rondo.runtime.errors import ConfigError
from tests.roles.sampling.test_environments import Played, job, played

PYTHON = Path(os.environ.get("OPENENV_VENV", "/no"), "bin", "python")
SERVER = str(Path(__file__).with_name("openenv_server.py"))
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="OPENENV_VENV names no environment: `make test-environments` makes and names it"
)


@contextmanager
def serving() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen([PYTHON, SERVER, str(port)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        assert any("Uvicorn running" in line for line in process.stderr)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as found:
        yield found


class Guess(OpenEnv):
    shows = "hint"


class Whole(OpenEnv):
    async def reset(self, level: int) -> str:  # type: ignore[override]  # a column of the row
        return await super().reset({"seed": level})


class Other(OpenEnv):
    action = "guess"


async def guessed(of: type[OpenEnv], url: str, *turns: str, samples: int = 1) -> Played:
    of.url = url
    return await played(job(factory=of, reward=False), *turns, samples=samples)


async def test_what_the_policy_says_is_an_action_and_observations_rewards_and_the_end_are_the_servers(url: str) -> None:
    found = await guessed(Guess, url, "3", "-2", "0", samples=3)
    for number, made in enumerate(found.made):
        assert (
            made.error is None
            and made.reward == 1.0
            and [worth for _, worth in made.rows[0].rewards] == [0.0, 0.0, 1.0]
        )
        said = "Play.Guess.<|im_end|>\n{a}3<|im_end|>\n{u}lower<|im_end|>\n{a}-2<|im_end|>\n{u}higher<|im_end|>\n{a}0<|im_end|>"
        assert found.text(number).endswith(said.format(a="<|im_start|>assistant\n", u="<|im_start|>user\n"))
    assert found.stats["Guess"].steps == 9


async def test_arguments_of_a_reset_come_from_the_row_and_a_whole_observation_is_told_as_json(url: str) -> None:
    found = await guessed(Whole, url, "1", "2")
    assert found.made[0].reward == 1.0 and '<|im_start|>user\n{"hint":"higher","tries":1}<|im_end|>' in found.text()


async def test_what_the_server_refuses_fails_its_sample_alone_and_the_next_one_plays(url: str) -> None:
    found = await guessed(Guess, url, "one")
    [made] = found.made
    assert made.error is not None and made.reward is None
    assert "says EXECUTION_ERROR: invalid literal for int() with base 10: 'one'" in made.error
    assert (await guessed(Guess, url, "0")).made[0].reward == 1.0


async def test_a_server_that_dies_fails_the_sample_that_it_played() -> None:
    with serving() as there:
        [made] = (await guessed(Guess, there, "die")).made
    assert made.error is not None and made.reward is None
    assert f"the server at {there} must answer step, got the end of its session" in made.error


def test_a_server_that_is_not_there_or_has_no_such_field_is_refused_before_a_run(url: str) -> None:
    Guess.url = "http://127.0.0.1:9"
    with pytest.raises(
        ConfigError, match=r"Guess.url must be the http address of a server of OpenEnv, got 'http://127.0.0.1:9'"
    ):
        schemas(job(factory=Guess))

    Guess.url = url
    assert schemas(job(factory=Guess)) == []
    Other.url = url
    with pytest.raises(
        ConfigError, match=r"Other must name a field of the server's actions, metadata, message, got 'guess'"
    ):
        schemas(job(factory=Other))
