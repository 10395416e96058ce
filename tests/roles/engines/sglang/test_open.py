from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rondo.models.config import LoraConfig
from rondo.roles.config import JobConfig, SGLangConfig
from rondo.roles.engines.sglang.client import read_key
from rondo.roles.engines.sglang.open import connect_engine, launch_of, one_engine, releases_memory
from rondo.roles.engines.sglang.restarts import kept
from rondo.roles.engines.sglang.server import SGLangServer
from rondo.roles.engines.sglang.weights_distributed import DistributedTransfer
from rondo.runtime.errors import ConfigError
from tests.roles.engines.sglang.pretender import launch
from tests.roles.engines.sglang.test_restarts import Rig, in_flight, request
from tests.roles.engines.sglang.weights_server import version, write_model


async def test_a_server_killed_under_two_of_them_costs_no_request_and_comes_back_with_the_newest_weights(
    tmp_path: Path,
) -> None:
    rigs = [Rig(tmp_path / str(number)) for number in range(2)]
    for rig in rigs:
        rig.newest = 1
    async with kept([rig.engine for rig in rigs]):
        engine = one_engine([rig.engine for rig in rigs], newest=rigs[0].newest_weights)
        await engine.update_weights(1, {})
        for rig in rigs:
            rig.hold.touch()
        asking = [asyncio.create_task(engine.generate(request(f"r{n}", 40))) for n in range(12)]
        for rig in rigs:
            await in_flight(rig)
        rigs[0].kill()
        rigs[1].hold.unlink()
        done = await asyncio.gather(*asking)
        assert {len(each.tokens) for each in done} == {40}
        assert {version for each in done for version in each.policy_versions.tolist()} == {1}
        async with asyncio.timeout(60):
            await rigs[0].came.wait()
            while rigs[0].engine.version != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert rigs[0].given == [1, 1]
        await engine.close()


def job(**sglang: object) -> JobConfig:
    return JobConfig.model_validate(
        {
            "name": "test", "num_steps": 1, "model": {"path": "model", "dtype": "bfloat16"}, "data": {"path": "rows.jsonl"},
            "reward": {"function": "rewards:exact"},
            "rollout": {
                "prompts_per_step": 4, "samples_per_prompt": 8, "max_prompt_tokens": 16, "max_new_tokens": 48, "num_slots": 10,
                "sglang": {"python": "python", **sglang},
            },
        }
    )  # fmt: skip


def test_the_servers_of_a_replica_take_its_devices_in_order() -> None:
    config = job(num_servers=2, tensor_parallel=2)
    settings = config.rollout.sglang
    assert settings is not None
    found = [launch_of(config, settings, "/model", "cuda:4", index) for index in range(2)]
    assert [(each.first_device, each.tensor_parallel) for each in found] == [(4, 2), (6, 2)]
    assert {each.dtype for each in found} == {"bfloat16"} and {each.max_running for each in found} == {10}


def test_a_server_on_the_processor_has_room_for_its_slots() -> None:
    config = job()
    assert config.rollout.sglang is not None
    found = launch_of(config, config.rollout.sglang, "/model", "cpu", 0)
    assert found.first_device is None and found.max_tokens is not None and found.max_tokens >= 10 * (16 + 48)


def test_a_server_is_told_what_it_needs_for_the_versions_of_an_adapter(tmp_path: Path) -> None:
    model = str(write_model(tmp_path, version(0)))
    config = job(arguments={"max_lora_rank": 64})
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"lora": LoraConfig(targets=("q_proj",))})}
    )
    assert config.rollout.sglang is not None and config.max_staleness == 1
    for device, more in (("cpu", {"lora-backend": "torch_native"}), ("cuda:1", {"enable-weights-cpu-backup": True})):
        found = launch_of(config, config.rollout.sglang, model, device, 0, releases=True).settings(1, "key")
        # Three versions, and none; the user's own rank wins.
        assert found.items() >= {"enable-lora": True, "max-lora-rank": 64, "max-loras-per-batch": 4, **more}.items()
        assert found["lora-target-modules"] == ["k_proj", "q_proj", "v_proj"]
    merged = config.train.model_copy(update={"lora": LoraConfig(publish="merged")})
    plain = launch_of(config.model_copy(update={"train": merged}), config.rollout.sglang, model, "cpu", 0)
    assert plain.arguments == {"max_lora_rank": 64}


def test_servers_are_told_to_record_experts_for_router_replay_alone() -> None:
    for replay in ("off", "r2", "r3"):
        config = job(arguments={"mem-fraction-static": 0.5})
        config = config.model_copy(update={"train": config.train.model_copy(update={"router_replay": replay})})
        assert config.rollout.sglang is not None
        found = launch_of(config, config.rollout.sglang, "/model", "cpu", 0)
        expected = {"enable-return-routed-experts": True} if replay == "r3" else {}
        assert found.arguments == {"mem-fraction-static": 0.5} | expected
    off = job(arguments={"enable_return_routed_experts": False}).model_dump()
    with pytest.raises(
        ValueError, match=r"must not turn enable-return-routed-experts off with train\.router_replay 'r3'"
    ):
        JobConfig.model_validate(off | {"train": {"router_replay": "r3"}})


async def test_a_server_that_does_not_do_what_the_run_needs_is_refused(tmp_path: Path) -> None:
    """It tells no experts where they are replayed, or takes no prompt that is as long as the run's."""
    server = SGLangServer(
        launch(tmp_path, {"max-req-input-len": 20}), log=tmp_path / "log", folder=tmp_path, grace_s=0.2
    )
    client = await server.start(60)
    try:
        with pytest.raises(
            ConfigError, match=r"train\.router_replay must not be 'r3' .* --enable-return-routed-experts"
        ):
            await connect_engine(
                client, settings=SGLangConfig(urls=(client.url,)), folder=tmp_path / "weights", model_path="",
                processed_media=False, tells_experts=True,
            )  # fmt: skip
        with pytest.raises(ConfigError, match=r"max_prompt_tokens must be at most 19, what SGLang of .* got 20"):
            await connect_engine(
                client, settings=SGLangConfig(urls=(client.url,)), folder=tmp_path / "weights", model_path="",
                processed_media=False, max_prompt_tokens=20,
            )  # fmt: skip
    finally:
        await client.__aexit__()
        await server.close()


@pytest.mark.parametrize(
    ("device", "takes_turns", "settings", "releases"),
    [
        ("cuda:0", True, {}, True),
        ("cpu", True, {}, False),
        ("cpu", True, {"release_memory": True}, True),
        ("cuda:0", True, {"release_memory": False}, False),
        ("cuda:0", False, {}, False),
        ("cuda:0", True, {"python": None, "urls": ("http://h:1",)}, False),
    ],
)
def test_a_server_gives_its_memory_to_a_trainer_that_it_shares_a_device_with(
    device: str, takes_turns: bool, settings: dict[str, Any], releases: bool
) -> None:
    config = job(**settings)
    of_process = SimpleNamespace(config=config, device=device, takes_turns=takes_turns)
    assert releases_memory(of_process) is releases  # type: ignore[arg-type]
    if settings.get("urls") is None:
        assert config.rollout.sglang is not None
        found = launch_of(config, config.rollout.sglang, "/model", device, 0, releases=releases)
        assert ("enable-memory-saver" in found.arguments) is (releases and device != "cpu")


def test_the_key_of_servers_that_run_already_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert read_key(str(file)) == "secret" and read_key(None) is None
    file.write_text("")
    with pytest.raises(ConfigError, match="must hold a key"):
        read_key(str(file))
    with pytest.raises(ConfigError, match="must be a file to read"):
        read_key(str(tmp_path / "none"))


def test_servers_are_started_or_found_and_not_both() -> None:
    with pytest.raises(ValueError, match="one without the other, got both"):
        SGLangConfig(python="python", urls=("http://h:1",))


def test_a_process_group_to_a_server_on_a_gpu_sends_from_a_device_of_this_process() -> None:
    how: Any = {"client": None, "tensor_parallel": 1, "bucket_bytes": 1, "deadline_s": 1.0}
    with pytest.raises(ConfigError, match=r"where this process has none, got 'distributed'.*devices=1"):
        DistributedTransfer(device="cpu", on_device=True, **how)
    assert DistributedTransfer(device="cuda:3", on_device=True, **how)._device == "cuda:3"
    assert DistributedTransfer(device="cuda:3", on_device=False, **how)._device == "cpu"
