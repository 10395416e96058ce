from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import orjson
import pytest

from rondo.launch.check import sglang as check_sglang
from rondo.launch.check.child import Report, look_at_model
from rondo.launch.check.sglang import look_at_sglang
from rondo.launch.config import load
from rondo.launch.sglang_env import VERSION, commands, has_sglang, install
from rondo.models.media.config import MediaConfig
from rondo.roles.config import SGLangConfig
from rondo.runtime.errors import ConfigError, RondoError
from tests.launch.configs import write


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_sglang, "_ANSWER_S", 120.0)


def looked_at(folder: Path, *, media: MediaConfig | None = None, **settings: object) -> list[tuple[str, str]]:
    config = load(write(folder), [])
    rollout = config.rollout.model_copy(update={"sglang": SGLangConfig.model_validate(settings)})
    config = config.model_copy(update={"rollout": rollout, "media": media})
    return [(found.level, found.text) for found in look_at_sglang(config)]


def environment(folder: Path, version: str) -> str:
    """An interpreter that says it has SGLang of this version."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return str(python)


def test_an_environment_for_sglang_is_built_in_these_steps() -> None:
    gpu = [" ".join(command) for command in commands(Path("E"), cpu=False)]
    assert gpu == [f"{sys.executable} -P -m venv E", f"E/bin/python -P -m pip install --quiet sglang=={VERSION}"]
    cpu = [list(command) for command in commands(Path("E"), cpu=True)]
    assert "--no-deps" in cpu[-1]
    lists = [Path(command[-1]).read_text() for command in cpu[2:]]
    assert f"sglang=={VERSION}\n" in lists[1] and "transformers==" in lists[0]


def test_an_environment_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment(tmp_path, VERSION)
    assert install(tmp_path, cpu=True) == 0
    assert f"has SGLang {VERSION} already" in capsys.readouterr().out


def test_a_folder_of_something_else_is_not_made_into_one(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="PATH must be a new folder or a virtual environment"):
        install(tmp_path, cpu=True)


def test_a_step_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo.launch.sglang_env.commands", lambda path, cpu: [["false"]])
    with pytest.raises(RondoError, match="got a failure of `false`"):
        install(tmp_path / "new", cpu=True)


def test_an_interpreter_tells_its_sglang_or_that_there_is_none(tmp_path: Path) -> None:
    assert has_sglang(environment(tmp_path, "0.5.10")) == "0.5.10"
    assert has_sglang(sys.executable) is None
    assert looked_at(tmp_path, python=environment(tmp_path / "a", "0.5.21")) == [
        ("ok", f"{tmp_path}/a/bin/python has SGLang 0.5.21")
    ]


@pytest.mark.parametrize(
    ("python", "problem"),
    [(sys.executable, "which has none"), ("/no/such/python", "an interpreter that runs, got /no/such/python")],
)
def test_an_interpreter_without_sglang_is_found_before_the_run_with_the_line_that_builds_one(
    tmp_path: Path, python: str, problem: str
) -> None:
    [(level, text)] = looked_at(tmp_path, python=python)
    assert level == "error" and problem in text and "`rondo sglang install PATH`" in text


def test_an_old_sglang_is_found_before_the_run(tmp_path: Path) -> None:
    [(level, text)] = looked_at(tmp_path, python=environment(tmp_path, "0.5.9"))
    assert level == "error" and "must be 0.5.10 or newer" in text and "got 0.5.9" in text


def test_an_sglang_that_is_too_old_for_media_is_found_before_the_run(tmp_path: Path) -> None:
    for version, levels in (("0.5.10", ["ok", "error"]), ("0.5.16", ["ok"])):
        found = looked_at(tmp_path, media=MediaConfig(), python=environment(tmp_path / version, version))
        assert [level for level, _ in found] == levels
        assert len(found) == 1 or "must be 0.5.16 or newer for media" in found[1][1]


def test_a_model_that_sglang_cannot_serve_is_found_before_the_run(tmp_path: Path) -> None:
    file = write(
        tmp_path, ("models.tiny.qwen3:build", "models.tiny.qwen3_omni:build"), ('"hidden_size": 32', '"whole": False')
    )
    for sglang, num_errors in (("null", 0), ("{'python': 'python'}", 1)):
        report = Report()
        look_at_model(load(file, [f"rollout.sglang={sglang}"]), tmp_path / "model", report, [])
        errors = [each.text for each in report.findings if each.level == "error"]
        assert len(errors) == num_errors and all("must be a whole Qwen3-Omni for SGLang" in text for text in errors)


def test_a_server_that_runs_already_and_tells_no_experts_or_takes_too_few_tokens_is_found_before_the_run(
    tmp_path: Path,
) -> None:
    told: dict[str, object] = {"version": "0.5.22", "max_req_input_len": 20}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(orjson.dumps(told))

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        config = load(write(tmp_path), ["train.router_replay=r3", f"rollout.sglang={{'urls': ['{url}']}}"])
        [finding] = look_at_sglang(config)
        assert finding.level == "error" and "--enable-return-routed-experts" in finding.text and url in finding.text
        told["enable_return_routed_experts"] = True
        assert [finding.level for finding in look_at_sglang(config)] == ["ok"]
        told["max_req_input_len"] = 19
        [_, finding] = look_at_sglang(config)
        assert finding.text.startswith(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens must be at most 23, what SGLang of {url} takes"
        )
        adapting = load(write(tmp_path), ["train.lora={}", f"rollout.sglang={{'urls': ['{url}']}}"])
        [finding] = look_at_sglang(adapting)
        assert finding.level == "error" and "--max-lora-rank 16 --max-loras-per-batch 4" in finding.text
        told |= {"enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 4, "max_req_input_len": 20}
        assert [finding.level for finding in look_at_sglang(adapting)] == ["ok"]
        server.shutdown()


def test_servers_that_run_already_are_asked(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = self.headers["Authorization"] == "Bearer secret"
            self.send_response(200 if good else 401)
            self.end_headers()
            self.wfile.write(b'{"version": "0.5.22"}' if good else b"{}")

        def log_message(self, *_: object) -> None:
            return

    key = tmp_path / "key"
    key.write_text("secret\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert looked_at(tmp_path, urls=[url], api_key_file=str(key)) == [("ok", f"SGLang 0.5.22 answers at {url}")]
        [(level, text)] = looked_at(tmp_path, urls=[url])
        assert level == "error" and "401" in text
        server.shutdown()
    [(level, text)] = looked_at(tmp_path, urls=[url])
    assert level == "error" and f"of {url}. Start it" in text
    [(level, text)] = looked_at(tmp_path, urls=[url], api_key_file=str(tmp_path / "none"))
    assert level == "error" and "api_key_file must be a file to read" in text
