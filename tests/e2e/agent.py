"""An agent that asks a run's policy through its endpoint while the run trains it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import openai
import orjson

from rondo.launch.report.status import show_status
from rondo.runtime.admin.tls import client_context
from tests.e2e.runs import Running


def ask_the_policy(process: Running, run: Path, capsys: Any) -> Path:
    """Asks over TLS until newer weights answer, and looks at what the endpoint kept of it. Where the endpoint is written down."""
    [record] = (run / "endpoints").glob("*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    told = orjson.loads(record.read_bytes())
    assert show_status(run) == 0
    assert told["url"] in capsys.readouterr().out
    token = Path(told["token_path"]).read_text().strip()
    secure = openai.DefaultHttpxClient(verify=client_context(Path(told["tls_cert"])))
    assert told["url"].startswith("https://")
    with openai.OpenAI(base_url=f"{told['url']}/v1", api_key=token, max_retries=0, http_client=secure) as client:
        versions = _ask_until_newer(client, process, told["model"])
        with_token = {"Authorization": f"Bearer {token}"}
        kept = client.get(f"{told['url']}/rondo/trajectories/agent", cast_to=object, options={"headers": with_token})
    assert versions == sorted(versions) and versions[0] >= 1 and versions[-1] > versions[0]
    assert isinstance(kept, dict)
    assert [call["policy_versions"] for call in kept["calls"]] and kept["rows"]
    assert sorted({v for call in kept["calls"] for v in call["policy_versions"]}) == sorted(set(versions))
    return record


def _ask_until_newer(client: openai.OpenAI, process: Running, model: str) -> list[int]:
    """The versions of all tokens of the answers, in order."""
    versions: list[int] = []
    while len(set(versions)) < 2:
        assert process.poll() is None
        done = client.completions.create(
            model=model,
            prompt="s31>",
            max_tokens=4,
            extra_headers={"X-Rondo-Session": "agent"},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        versions += (done.choices[0].model_extra or {})["policy_versions"]
    return versions
