"""Tasks of inspect measure what we serve, from an environment of their own (INSPECT_VENV)."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from rondo.models.tiny.qwen3 import build
from rondo.runtime.admin.tokens import read_token_file
from tests.launch.test_serve import serve
from tests.roles.serve.serving import MODEL, TOKEN, serving

BIN = Path(os.environ.get("INSPECT_VENV", "/no"), "bin")
pytestmark = pytest.mark.skipif(
    not (BIN / "inspect").exists(),
    reason="INSPECT_VENV names no environment: `make test-environments` makes and names it",
)


async def measured(folder: Path, url: str, token: str, model: str, *options: str) -> dict[str, Any]:
    """The log of `inspect eval`."""
    words = ("eval", "inspect_sums.py", "--model", f"openai-api/rondo/{model}", "--model-base-url", url, *options)
    process = await asyncio.create_subprocess_exec(
        str(BIN / "inspect"), *words, "--display", "none", "--log-format", "json", "--log-dir", str(folder / "logs"),
        cwd=Path(__file__).parent, env={**os.environ, "RONDO_API_KEY": token, "HOME": str(folder)},
    )  # fmt: skip
    assert await process.wait() == 0
    [log] = (folder / "logs").glob("*.json")
    told: dict[str, Any] = json.loads(log.read_bytes())
    assert told["status"] == "success", told.get("error")
    return told


async def test_a_task_with_a_tool_is_scored_by_what_the_policy_says(tmp_path: Path) -> None:
    def says(prompt: str) -> str:
        a, b = map(int, re.findall(r"user\n(\d)\+(\d)", prompt)[-1])
        if "tool\n" in prompt:
            return prompt.rsplit("tool\n", 1)[1].split("<")[0] if (a, b) != (3, 3) else "7"
        return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'

    async with serving(says) as at:
        told = await measured(tmp_path, f"{at.url}/v1", TOKEN, MODEL)
    assert told["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(8 / 9)
    assert all(
        [m["role"] for m in each["messages"]][-3:] == ["assistant", "tool", "assistant"] for each in told["samples"]
    )


async def test_a_task_of_inspect_measures_a_served_model(tmp_path: Path) -> None:
    build(tmp_path / "model", hidden_size=32, num_heads=2, num_kv_heads=1)
    with serve(
        str(tmp_path / "model"), "--port", "0", "--served-model-name", "tiny", "--max-length", "1024"
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        found = re.fullmatch(r"serving tiny at (\S+)  token: (\S+)\n", await asyncio.to_thread(process.stdout.readline))
        assert found is not None, process.stderr.read()
        token = read_token_file(Path(found[2]), "the token")
        told = await measured(tmp_path, f"{found[1]}/v1", token, "tiny", "--max-tokens", "16", "-T", "tools=false")
    assert len(told["samples"]) == 9 and told["stats"]["model_usage"]["openai-api/rondo/tiny"]["output_tokens"] > 9
