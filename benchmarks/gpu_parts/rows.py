"""The docs' table of what `rondo bench gpu` found, with what was not yet run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

Figures = Any
Row = tuple[str, str]
"""(what was measured, the figure)"""
NOT_YET = "not yet run"


def tests(f: Figures) -> Iterator[Row]:
    told = f"{f['passed']}, {f['skipped']}, {len(f['failed'])}"
    yield "tests that need a GPU: passed, skipped for want of another one, failed", told + _named(f["failed"])


def _named(failed: list[str]) -> str:
    return f" ({', '.join(failed)})" if failed else ""


def quick_start(f: Figures) -> Iterator[Row]:
    seconds, summary = f["seconds"], f["summary"]
    yield (
        "quick start: seconds to the first trained step, to the end; reward of sampled answers before and after",
        f"{seconds['first step']:.1f} s, {seconds['ended']:.0f} s; "
        f"{summary['reward_before']:.3f} to {summary['reward_after']:.3f}",
    )


def training(f: Figures) -> Iterator[Row]:
    of = f"{f['parameters'] / 1e9:.1f} billion parameters in the shape of Qwen3-4B, {f['ranks']} GPU(s)"
    peak = f["peak_tflop_s"]
    share = "of a large product's rate, no peak being known" if peak is None else f"of {peak:.0f} TFLOP/s a GPU"
    padded = f["attn"].get("sdpa", {}).get("padded")
    for attn, ways in f["attn"].items():
        if "error" in ways:
            yield f"training, {attn}", f"not done: {ways['error']}"
        for way, row in ways.items() if "error" not in ways else ():
            over = f", {row['tokens_s'] / padded['tokens_s']:.2f}x padded" if padded and way == "packed" else ""
            yield (
                f"training, {attn}, {way}, {of}: tokens/s; share {share}",
                f"{row['tokens_s']:,.0f}{over}; {row['of_product' if peak is None else 'of_peak']:.1%}",
            )
    yield "one large bfloat16 product", f"{f['product_tflop_s']:.0f} TFLOP/s"


def copies(f: Figures) -> Iterator[Row]:
    pinned = "" if f["pinned_gb_s"] is None else f"; {f['pinned_gb_s']:.1f} GB/s"
    yield (
        f"hot snapshot of {f['snapshot']['bytes'] / 1e9:.1f} GB and publication of {f['publication']['bytes'] / 1e9:.1f} GB; a "
        "plain copy into page-locked memory",
        f"{f['snapshot']['gb_s']:.1f} GB/s, {f['publication']['gb_s']:.1f} GB/s{pinned}",
    )
    yield f"part of both that a step of {f['step_s']:.2f} s hides", f"{f['hidden']:.0%}"


def sglang(f: Figures) -> Iterator[Row]:
    asleep = (
        f", {f['sleep_s']:.2f} s, {f['wake_s']:.2f} s ({f['update_s']:.2f} s awake); {f['freed_gib']:.1f} GiB"
        if "sleep_s" in f
        else ""
    )
    yield "SGLang server: start, sleep, wake with new weights; memory given back", f"{f['start_s']:.0f} s{asleep}"
    told = [
        f"{way} {row['total_s']:.2f} s ({row['paused_s']:.2f} s paused, {row['mb'] / row['total_s'] / 1e3:.1f} GB/s)"
        if "error" not in row
        else f"{way} not done: {row['error']}"
        for way, row in f["paths"].items()
    ]
    yield "new weights into it, by path", "; ".join(told)


def gap(f: Figures) -> Iterator[Row]:
    told = [
        f"{name} not done: {f[name]['error']}"
        if "error" in f[name]
        else f"{name} {f[name]['log_prob_gap']:.4f}, {f[name]['log_prob_gap_max']:.3f} nats"
        for name in ("embedded", "sglang")
        if name in f
    ]
    yield "log-probs of the trainer against the engine's, bfloat16, mean and greatest gap", "; ".join(told)


ROWS: dict[str, Callable[[Figures], Iterator[Row]]] = {
    "tests": tests, "quick_start": quick_start, "training": training, "copies": copies, "sglang": sglang, "gap": gap,
}  # fmt: skip


def table(file: Path) -> str:
    """In Markdown, of what `file` keeps; under it on what it was measured."""
    kept = orjson.loads(file.read_bytes()) if file.exists() else {"parts": {}}
    lines = ["| part | what | figure |", "|---|---|---|"]
    for part, rows in ROWS.items():
        found = kept["parts"].get(part)
        if found is None:
            lines.append(f"| `{part}` | | {NOT_YET} |")
            continue
        lines += (
            [f"| `{part}` | {what} | {figure} |" for what, figure in rows(found["figures"])]
            if "figures" in found
            else []
        )
        if "error" in found:
            lines.append(f"| `{part}` | | not done: {_one_line(found['error'])} |")
    return "\n".join([*lines, *(["", _machine(kept)] if kept["parts"] else [])])


def _one_line(error: str) -> str:
    """How it ended, and the last error that it named, or its last words."""
    first, *rest = [line for line in error.replace("|", " ").splitlines() if line.strip()]
    named = [line for line in rest if re.match(r"[\w.]+(Error|Exception|Died|Gone|Exceeded|Refused): ", line)]
    return f"{first}; {(named or rest)[-1].strip()}" if rest else first


def _machine(kept: dict[str, Any]) -> str:
    device = kept["device"]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    if not device["count"]:
        return f"{device['name']}, {kept['cores']} cores; {versions}."
    return (
        f"{device['count']} x {device['name']} ({device['memory_gib']} GiB), driver {device['driver']}, CUDA {device['cuda']}, "
        f"NCCL {device['nccl']}; {kept['processor']}, {kept['cores']} cores; {versions}."
    )
