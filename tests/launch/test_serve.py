"""`rondo serve` as a process: it loads a model, says where it listens, answers, and ends cleanly."""

from __future__ import annotations

import gc
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from rondo.launch.serve import ServeOptions, _load
from rondo.models.tiny.qwen3 import build
from rondo.runtime.admin.tls import client_context
from tests.runtime.admin.certificates import CERT, KEY

LIMIT_S = 120.0


@contextmanager
def serve(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "rondo.launch.cli", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_model_is_served_and_a_signal_lets_what_is_in_flight_be_answered(tmp_path: Path) -> None:
    build(tmp_path / "model", hidden_size=32, num_heads=2, num_kv_heads=1)
    for name, text in (("cert", CERT), ("key", KEY)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    secure = ("--tls-cert", str(tmp_path / "cert"), "--tls-key", str(tmp_path / "key"))
    sizes = ("--served-model-name", "tiny", "--max-length", "512")
    with serve(str(tmp_path / "model"), "--port", "0", *sizes, *secure) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving tiny at (https://127\.0\.0\.1:\d+)  token: (\S+)\n", line)
        assert found is not None, process.stderr.read()
        token_path = Path(found[2])
        assert stat.S_IMODE(token_path.stat().st_mode) == 0o600
        token = token_path.read_text().strip()
        trusting = openai.DefaultHttpxClient(verify=client_context(tmp_path / "cert"))
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key=token, max_retries=0, http_client=trusting) as client:
            assert client.models.list().data[0].id == "tiny"
            asked: Any = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"}
            asked |= {"extra_body": {"ignore_eos": True}, "max_tokens": 400}
            chunks = client.chat.completions.create(**asked, stream=True)
            first = next(iter(chunks))
            process.send_signal(signal.SIGTERM)
            rest = list(chunks)
        assert first.choices[0].delta.role == "assistant" and rest[-1].choices[0].finish_reason == "length"
        _, told = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0 and "ends: answers what is in flight" in told and "Traceback" not in told
        assert not token_path.exists()


def test_what_was_loaded_is_never_walked_by_the_garbage_collector_again(tmp_path: Path) -> None:
    build(tmp_path / "model", hidden_size=32, num_heads=2, num_kv_heads=1)
    gc.unfreeze()
    try:
        _load(ServeOptions("tiny", num_slots=1, max_length=16), str(tmp_path / "model"))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no/such/folder/here",), "model.path must be a folder that exists"),
        (("{model}", "--host", "0.0.0.0"), "--token-file must be given when --host is not loopback"),
        (("{model}", "--token-file", "{open}"), "--token-file must have mode 0600, got 0644"),
        (("{model}", "--tls-key", "{open}"), "--tls-cert and --tls-key must be set together, got None and "),
        (("{model}", "--max-length", "99999"), "--max-length must be 2 to 2048, the model's positions, got 99999"),
        (("{model}", "--dtype", "int8"), "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        (("{run}",), "RUN must have a whole checkpoint, got "),
    ],
    ids=["no model", "open host", "open token", "half of tls", "too long", "no dtype", "no checkpoint"],
)
def test_what_cannot_be_served_is_told_in_a_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    from rondo.launch.cli import main

    build(tmp_path / "model", hidden_size=32, num_heads=2, num_kv_heads=1)
    (tmp_path / "open").write_text("x" * 32)
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.resolved.json").write_bytes(orjson.dumps({}))
    names = {name: str(tmp_path / name) for name in ("model", "open", "run")}
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr.write", told.append)
        assert main(["serve", *(argument.format(**names) for argument in arguments), "--port", "0"]) == 2
    assert words in "".join(told)


def test_help_names_every_option_of_serving() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rondo.launch.cli", "serve", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--host", "--port", "--dtype", "--device", "--num-slots", "--max-length", "--token-file"):
        assert option in done.stdout
