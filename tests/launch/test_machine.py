"""What this machine offers: ports, folders."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rondo.launch.machine import folder_problem, port_problem, show_bytes

GIB = 1 << 30


def test_a_port_that_is_listened_on_is_a_problem_and_0_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert port_problem("127.0.0.1", server.getsockname()[1]) == "Address already in use"
    assert port_problem("127.0.0.1", 0) is None
    assert port_problem("192.0.2.1", 0) == "Cannot assign requested address"


def test_a_file_in_the_way_of_a_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    assert folder_problem(tmp_path / "runs" / "demo") == f"{tmp_path / 'runs'} is a file"
    assert folder_problem(tmp_path / "new" / "demo") is None


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "512 bytes"), (11 << 10, "11 KiB"), (64 << 20, "64 MiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_bytes_are_shown_in_round_units(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
