"""Which checkpoints stay, which is the best, and the user's function after each save."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.launch.keeping import Keeper, Values
from rondo.launch.rundir import checkpoint_of
from rondo.roles.config import AfterSaveConfig, BestConfig, TrainConfig
from rondo.runtime.checkpoints import MARKER, folder_of
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.pool import _Worker


def saved(path: str, step: int) -> None:
    """The function after each save: writes down what it is given, and fails, hangs or dies where its run says so."""
    run = Path(path).parent.parent
    with (run / "calls").open("a") as file:
        file.write(f"{step} {(Path(path) / MARKER).is_file()}\n")
    what = (run / f"on_{step}").read_text() if (run / f"on_{step}").exists() else ""
    if what == "raise":
        raise OSError("the bucket is gone")
    if what == "die":
        os._exit(3)
    while what == "hang":
        (run / "hangs").touch()
        asyncio.run(asyncio.sleep(1))


def save(run: Path, *versions: int) -> None:
    for version in versions:
        folder = folder_of(run / "checkpoints", version)
        folder.mkdir(parents=True)
        (folder / MARKER).write_text("{}\n")


def left(run: Path) -> list[int]:
    return sorted(int(folder.name[5:]) for folder in (run / "checkpoints").glob("step_*"))


def evaluated(version: int, **figures: float) -> dict[str, Any]:
    return {
        "evaluation": {
            "version": version,
            "sets": {"held_out": {name.replace("_", "@"): x for name, x in figures.items()}},
        }
    }


def stepped(version: int, **figures: float) -> dict[str, Any]:
    return {"step": version - 1, "version": version, "reward_mean": 0.5, **figures}


def keeper(run: Path, told: list[tuple[str, Mapping[str, Any]]], every: int | None = 2, **train: Any) -> Keeper:
    config = TrainConfig(save_every=2, **train)
    return Keeper(run, config, lambda kind, data: told.append((kind, data)), evaluates_every=every, load_s=600.0)


@pytest.mark.parametrize(("mode", "best"), [("max", 4), ("min", 2)])
def test_the_best_is_never_removed_survives_a_restart_and_of_equal_ones_the_earlier_is_it(
    tmp_path: Path, mode: Any, best: int
) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    best_config = BestConfig(metric="pass@1", mode=mode)
    one = keeper(tmp_path, told, keep_checkpoints=1, best=best_config)
    values = {2: 0.25, 4: 0.75, 6: 0.75, 8: 0.5, 10: 0.25}
    with (tmp_path / "metrics.jsonl").open("wb", buffering=0) as metrics:
        for version, value in values.items():
            for record in (stepped(version), evaluated(version, pass_1=value)):
                metrics.write(orjson.dumps(record) + b"\n")
                one.on_event(record)
            save(tmp_path, version)
            one._keep()
            if version == 6:
                one = keeper(tmp_path, told, keep_checkpoints=1, best=best_config)
    assert left(tmp_path) == [best, 10]
    assert str((tmp_path / "best").readlink()) == f"checkpoints/step_{best:06d}"
    record = {"metric": "pass@1", "mode": mode, "step": best, "value": values[best]}
    assert json.loads((tmp_path / "best.json").read_bytes()) == record
    assert [data["step"] for kind, data in told if kind == "best_checkpoint"] == ([2, 4] if mode == "max" else [2])
    (tmp_path / "config.resolved.json").write_text("{}")
    for source, name in ((tmp_path, "best"), (tmp_path / "best", None), (tmp_path, str(best))):
        assert checkpoint_of(source, name) == (tmp_path, folder_of(tmp_path / "checkpoints", best))
    assert checkpoint_of(tmp_path)[1].name == "step_000010"
    with pytest.raises(
        ConfigError, match=rf"--checkpoint must name one of step_00000{best}, step_000010, best of .* got 'beat'"
    ):
        checkpoint_of(tmp_path, "beat")


def test_one_that_is_still_evaluated_stays_until_it_or_a_later_one_has_a_result(tmp_path: Path) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    one = keeper(tmp_path, told, keep_checkpoints=1, best=BestConfig(metric="pass@1"))
    save(tmp_path, 2, 4, 6, 8)
    one._keep()
    assert left(tmp_path) == [2, 4, 6, 8] and not (tmp_path / "best").exists()
    one.on_event({"evaluation": evaluated(8, pass_1=0.25)["evaluation"] | {"label": "end"}})
    one._keep()
    assert left(tmp_path) == [2, 4, 6, 8]
    one.on_event(evaluated(4, pass_1=0.5))
    one._keep()
    assert left(tmp_path) == [4, 6, 8]
    one.on_event({"kind": "evaluation_skipped", "version": 6})
    one._keep()
    assert left(tmp_path) == [4, 8]


def test_one_whose_evaluation_goes_on_while_that_of_the_next_is_skipped_is_waited_for(tmp_path: Path) -> None:
    one = keeper(tmp_path, [], keep_checkpoints=1, best=BestConfig(metric="pass@1"))
    save(tmp_path, 2, 4, 6)
    one.on_event({"kind": "evaluation_skipped", "version": 4})
    one._keep()
    assert left(tmp_path) == [2, 6]
    one.on_event(evaluated(2, pass_1=0.5))
    one._keep()
    assert left(tmp_path) == [2, 6] and json.loads((tmp_path / "best.json").read_bytes())["step"] == 2


def test_a_figure_of_the_only_set_may_be_named_with_the_set(tmp_path: Path) -> None:
    [name] = evaluated(2, pass_1=0.5)["evaluation"]["sets"]
    for metric in ("pass@1", f"{name}.pass@1"):
        values = Values(metric)
        values.add(evaluated(2, pass_1=0.5))
        assert values.by_version == {2: 0.5}


def test_what_was_known_of_versions_that_are_made_again_is_forgotten() -> None:
    values = Values("reward_mean")
    for version, reward in ((1, 0.1), (2, 0.9), (3, 0.8)):
        values.add(stepped(version, reward_mean=reward))
    values.add(stepped(2, reward_mean=0.3))
    assert values.by_version == {1: 0.1, 2: 0.3}
    values.add(stepped(3, reward_mean=float("nan")))
    assert values.by_version == {1: 0.1, 2: 0.3}


def test_a_metric_that_no_step_has_is_told_once(tmp_path: Path) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    one = keeper(tmp_path, told, best=BestConfig(metric="rewardmean"))
    one.on_event(stepped(2))
    save(tmp_path, 2)
    for _ in range(2):
        one._keep()
    why = "train.best.metric must be a metric of the run, got 'rewardmean' among reward_mean, step, version"
    assert told == [("no_best", {"why": why})]


async def test_the_function_is_called_once_for_every_save_and_whatever_it_does_is_told_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    hook, workers, now_ns, run = AfterSaveConfig(function=saved, deadline_s=600.0), [], time.monotonic_ns, _Worker.run

    async def noted(self: _Worker, *what: Any) -> Any:
        workers.append(self)
        return await run(self, *what)

    monkeypatch.setattr(_Worker, "run", noted)
    for step, what in ((4, "raise"), (6, "hang"), (8, "die")):
        (tmp_path / f"on_{step}").write_text(what)
    save(tmp_path, 2, 4, 6, 8)
    one = keeper(tmp_path, told, keep_checkpoints=1, after_save=hook)
    one._keep()
    assert left(tmp_path) == [2, 4, 6, 8]  # what it has not seen stays
    stepping = asyncio.create_task(one._step())
    while not (tmp_path / "hangs").exists():  # noqa: ASYNC110 - a file of another process
        await asyncio.sleep(0.01)
    with monkeypatch.context() as later:
        later.setattr(time, "monotonic_ns", lambda: now_ns() + 601 * 10**9)
        workers[-1]._check_deadline()
    await stepping
    kinds = [(kind, data["step"], data.get("num_failed")) for kind, data in told]
    assert kinds == [
        ("after_save", 2, None), ("after_save_failed", 4, 1), ("after_save_failed", 6, 2), ("after_save_failed", 8, 3),
    ]  # fmt: skip
    assert "the bucket is gone" in told[1][1]["why"] and "must return within 600 s" in told[2][1]["why"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["2 True", "4 True", "6 True", "8 True", "8 True"]  # one that dies is tried once more
    assert left(tmp_path) == [8]
    again = keeper(tmp_path, told, keep_checkpoints=1, after_save=hook)
    await again._step()
    assert (tmp_path / "calls").read_text().splitlines() == calls


async def test_a_call_that_a_stop_cuts_off_is_made_again_when_the_run_goes_on(tmp_path: Path) -> None:
    told: list[tuple[str, Mapping[str, Any]]] = []
    (tmp_path / "on_2").write_text("hang")
    save(tmp_path, 2)
    one = keeper(tmp_path, told, after_save=AfterSaveConfig(function=saved))
    running = asyncio.create_task(one.run())
    await one.finish(running, (tmp_path / "hangs").exists)
    await asyncio.gather(running, return_exceptions=True)
    assert [kind for kind, _ in told] == ["after_save_cut_off"]
    (tmp_path / "on_2").unlink()
    again = keeper(tmp_path, told, after_save=AfterSaveConfig(function=saved))
    ending = asyncio.create_task(again.run())
    await again.finish(ending, lambda: False)
    assert told[1:] == [("after_save", {"step": 2})] and ending.done()
    assert (tmp_path / "calls").read_text().splitlines() == ["2 True", "2 True"]
