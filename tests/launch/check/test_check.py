"""The check: what would stop a run is found before it starts, in words that say what to do."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from rondo.launch.check import child as check_child
from rondo.launch.check.check import Facts, inspect, judge, memory_order
from rondo.launch.check.estimate import PREFILL, Shape, Traced, generating, held_by, routed_bytes
from rondo.launch.check.findings import Finding
from rondo.launch.check.target import group_bytes, segment_bytes
from rondo.launch.config import RunConfig, load, resolve
from rondo.launch.plan import coordinator_config
from rondo.launch.rundir import RunDir
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.data.datasets import Row
from rondo.roles.streams import media_bytes, row_bytes
from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.nursery import Nursery
from tests.e2e.shell import Kept
from tests.launch import configs
from tests.models.builders import default_folder

GIB = 1 << 30
FACTS = Facts(num_parameters=1_000_000, num_tensors=30, max_positions=512, num_devices=0, num_rows=32, num_held_out=8)
Make = Callable[..., RunConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(*sets: str) -> RunConfig:
        return load(configs.write(tmp_path), [f"run_dir={tmp_path}/runs", *sets])

    return made


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    kept = Kept()
    yield kept
    Nursery.close(kept)


def errors(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.level == "error"]


def judged(config: RunConfig, facts: Facts = FACTS, memory: tuple[int, str] = (8 * GIB, "the cgroup")) -> list[str]:
    return errors(judge(config, facts, memory))


def test_settings_that_fit_have_no_errors(make: Make) -> None:
    assert judged(make()) == []


def test_a_batch_that_cannot_fill_the_ranks_is_told(make: Make) -> None:
    config = make("role_groups.1.processes=17")
    assert judged(config) == [
        "rollout.prompts_per_step * rollout.samples_per_prompt must be at least the processes that train, "
        "17 in 'actor', got 4 * 4 = 16. Raise rollout.prompts_per_step, or lower the group's processes"
    ]
    assert judged(make("role_groups.1.processes=16")) == []


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            (),
            "the engine's, and the loss has no importance weight: the embedded engine and the trainer both compute in float32",
        ),
        (("max_staleness=0",), "the trainer's own, and the loss has no importance weight: the embedded engine and"),
        (
            ("model.dtype=bfloat16",),
            "the trainer's own, and the loss is weighted with pi_old / pi_engine within 0 and 2.0: the embedded engine in "
            "bfloat16 and the trainer in float32 do not give equal log-probs",
        ),
        (
            ("rollout.sglang.python=PYTHON", "train.num_mini_batches=4"),
            "the trainer's own, by a forward more for 3 of 4 mini-batches, before the first optimizer step, and the loss is "
            "weighted with pi_old / pi_engine within 0 and 2.0: SGLang in float32",
        ),
        (
            ("model.dtype=bfloat16", "algorithm.old_log_probs=rollout"),
            "the engine's, and the loss has no importance weight: algorithm.old_log_probs is 'rollout'",
        ),
    ],
)
def test_what_ratios_compare_with_is_said_with_the_reason(make: Make, sets: tuple[str, ...], said: str) -> None:
    told = judge(make(*sets), FACTS, (8 * GIB, "the cgroup"))
    [text] = [finding.text for finding in told if finding.text.startswith("old log-probs are ")]
    assert text.removeprefix("old log-probs are ").startswith(said)


def test_samples_that_are_drawn_from_a_part_of_the_vocabulary_are_told(make: Make) -> None:
    for sets, cut in (
        (("rollout.top_p=0.9",), "rollout.top_p 0.9"),
        (("rollout.top_k=50",), "rollout.top_k 50"),
        ((), None),
    ):
        told = judge(make(*sets), FACTS, (8 * GIB, "the cgroup"))
        notes = [
            each.text for each in told if each.level == "note" and "draws from a part of the vocabulary" in each.text
        ]
        assert [text.split(" draws")[0] for text in notes] == ([cut] if cut else [])


def test_a_ring_that_cannot_hold_one_prompt_group_is_told(make: Make) -> None:
    config = make("bus.ring_bytes=1048576", "bus.column_ring_bytes=1048576", "rollout.samples_per_prompt=1000")
    row, needed = row_bytes(config), 1000 * row_bytes(config)
    assert judged(config) == [
        f"bus.ring_bytes must hold one prompt group, 1000 samples of up to {row} bytes = {needed}, got 1048576. "
        f"Raise bus.ring_bytes to {needed} or more"
    ]
    assert (
        judged(make(f"bus.ring_bytes={needed}", "bus.column_ring_bytes=1048576", "rollout.samples_per_prompt=1000"))
        == []
    )


def test_room_for_the_experts_of_every_token_is_counted_only_where_they_are_replayed(
    make: Make, tmp_path: Path
) -> None:
    build = ("model.build_args={'hidden_size': 32, 'num_experts': 4}",)
    report = check_child.Report()
    check_child.look_at_model(make(*build, "train.router_replay=r3"), tmp_path / "model", report, [])
    assert errors(report.findings) == []
    shape = report.facts.shape
    assert shape.routed_bytes == 2 * 2  # layers x experts of a token, one byte each
    told, plain = make("train.router_replay=r3"), make()
    assert (routed_bytes(told, shape), routed_bytes(plain, shape), routed_bytes(told, None)) == (4, 0, 0)
    wide = replace(shape, routed_bytes=1 << 20)
    facts = replace(FACTS, shape=wide)
    needed = 4 * row_bytes(told, wide.routed_bytes)
    assert needed > 4 * 24 << 20 and judged(plain, facts) == []
    assert judged(make("train.router_replay=r3", f"bus.ring_bytes={needed}"), facts) == []
    [error] = judged(make("train.router_replay=r3", f"bus.ring_bytes={needed - 64}"), facts)
    assert error.startswith("bus.ring_bytes must hold one prompt group, 4 samples")
    rules = coordinator_config(told, 10, wide.routed_bytes).rules
    assert rules.row_bytes == row_bytes(told, wide.routed_bytes) and "routed_experts" in rules.base_columns
    for cost, config in ((wide.routed_bytes, told), (0, plain)):
        held = held_by(config, wide, {"actor": Traced("traced", {})}, config.role_groups[1])
        assert held is not None
        found = sum(each.parts.get("routed experts", 0) for each in held)
        assert found == cost * config.train.micro_batch_tokens
        assert generating(config, wide).parts.get("routed experts", 0) == cost * config.rollout.num_slots * 24


def test_routes_of_the_log_prob_pass_are_columns_of_actor_fwd_and_need_a_forward_before_the_losss_own(
    make: Make,
) -> None:
    trains = "{'name': 'actor', 'roles': ['actor', 'advantages', 'actor_fwd']}"
    groups = f"role_groups=[{{'name': 'rollout', 'roles': ['rollout']}}, {trains}]"
    told = make("train.router_replay=r2", groups, "algorithm.old_log_probs=actor_fwd")
    wide = Shape(256, 32, 2, 1000, 0, 1000, 0, 100, routed_bytes=1 << 10)
    rules = coordinator_config(told, 10, wide.routed_bytes).rules
    assert rules.row_bytes == row_bytes(told) and "routed_experts" not in rules.base_columns
    streams = {stream.name: stream for stream in rules.streams}
    assert "routed_experts" in streams["actor_fwd"].outputs and "routed_experts" in streams["actor"].inputs
    assert streams["actor_fwd"].sample_bytes == {"routed_experts": 1 << 10}
    [error] = judged(told, replace(FACTS, shape=replace(wide, routed_bytes=1 << 20)))
    assert error.startswith(
        "bus.column_ring_bytes must hold what actor_fwd puts of a micro-batch, with train.router_replay 'r2'"
    )
    with pytest.raises(
        ConfigError, match=r"train\.router_replay must not be 'r2' where a row goes through one forward alone"
    ):
        make("train.router_replay=r2")
    make("train.router_replay=r2", "train.passes=2")


def test_a_model_without_experts_cannot_replay_them(make: Make, tmp_path: Path) -> None:
    report = check_child.Report()
    check_child.look_at_model(make("train.router_replay=r3"), tmp_path / "model", report, [])
    [error] = errors(report.findings)
    assert error.startswith("train.router_replay must be 'off' for a model without routers") and "Qwen3ForC" in error


def test_experts_that_are_not_there_cannot_be_shared_out(make: Make, tmp_path: Path) -> None:
    report = check_child.Report()
    check_child.look_at_model(make("role_groups.1.processes=2", "train.mesh.ep=2"), tmp_path / "model", report, [])
    [error] = errors(report.findings)
    assert error == "train.mesh.ep must be 1 for a model without experts, got 2 with Qwen3ForCausalLM. Remove it"


def test_weights_that_are_not_the_models_are_told_before_any_is_read(make: Make, tmp_path: Path) -> None:
    path = default_folder(tmp_path / "given")
    weights = load_file(f"{path}/model.safetensors") | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)}
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    report = check_child.Report()
    check_child.look_at_model(make(f"model={{'path': {path!r}}}"), tmp_path, report, [])
    [error] = errors(report.findings)
    assert "got 1 that it has no place for (model.layers.0.self_attn.q_proj.bias)" in error
    assert report.facts.num_tensors == len(weights) - 1  # the rest is looked at all the same


def test_a_folder_without_weights_is_an_error_for_a_run_on_this_machine(make: Make, tmp_path: Path) -> None:
    path = default_folder(tmp_path / "given")
    assert judged(make(), replace(FACTS, model_path=path)) == []
    (tmp_path / "given" / "model.safetensors").unlink()
    assert judged(make(), replace(FACTS, model_path=path)) == [
        f"model.path must be a folder with weights, got {path} without model*.safetensors and pytorch_model*.bin. Download them, "
        "or name the folder that has them"
    ]


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("gemma2", {}, "Gemma2ForCausalLM must return what its output layer gives, got logits that it scales or caps"),
        (
            "jamba",
            {},
            "JambaForCausalLM must compute tokens one by one as it computes them together for the embedded engine",
        ),
        (
            "llama",
            {
                "max_position_embeddings": 20,
                "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            },
            "a sequence must have at most 20 tokens with LlamaForCausalLM, which rotates longer ones",
        ),
    ],
)
def test_a_model_that_would_not_train_or_generate_right_is_told(
    make: Make, kind: str, settings: dict[str, object], sentence: str
) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](num_hidden_layers=8, hidden_size=128, **settings))
    with pytest.raises(ConfigError) as caught:
        check_child.look_at_family(make(), check_child.Report(), model)
    assert str(caught.value).startswith(sentence)


def test_the_attention_of_a_run_is_told_and_one_that_its_devices_or_its_model_cannot_have_is_refused(
    make: Make,
) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def told(kind: str, *sets: str) -> str:
        layers = {"layer_types": ["linear_attention", "full_attention"]} if kind == "qwen3_next" else {}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                CONFIG_MAPPING[kind](num_hidden_layers=2, hidden_size=128, **layers)
            )
        report = check_child.Report()
        check_child.look_at_family(make(*sets), report, model)
        return next(finding.text for finding in report.findings if finding.text.startswith("attention"))

    gpu = "role_groups.1.devices=1"
    assert told("llama").startswith("attention is sdpa: the device is a CPU. Each process proves it")
    assert told("llama", gpu).startswith("attention is flex_attention: torch compiles it for this GPU")
    assert told("mistral", gpu).startswith("attention is flex_attention")  # its windows too
    assert told("qwen3_next", gpu).startswith("attention is sdpa: nothing better takes this model")
    assert told("llama", "model.attn=eager").startswith("attention is eager: model.attn names it")
    with pytest.raises(ConfigError, match='got "flex_attention" on cpu: it has no backward on a CPU'):
        told("llama", "model.attn=flex_attention")
    with pytest.raises(
        ConfigError, match='sequences of Qwen3NextForCausalLM apart, got "flex_attention": its layers are linear'
    ):
        told("qwen3_next", "model.attn=flex_attention", gpu)


def test_a_ring_must_also_hold_the_media_of_a_prompt_group(make: Make) -> None:
    config = make("media.max_group_bytes=67108864")
    samples, row, media = 4, row_bytes(config), media_bytes(config)
    needed = samples * row + media
    assert media > 64 << 20
    assert judged(config) == [
        f"bus.ring_bytes must hold one prompt group, 4 samples of up to {row} bytes and media of up to {media} = {needed}, "
        f"got 67108864. Raise bus.ring_bytes to {needed} or more, or lower media.max_group_bytes"
    ]
    assert judged(make("media.max_group_bytes=67108864", f"bus.ring_bytes={needed}")) == []
    [said] = judged(make("media.max_turn_bytes=20971520", "rollout.workflow=own:turns"))
    assert "4 samples of up to 209" in said and said.endswith("or lower media.max_turn_bytes")


def test_more_ranks_than_devices_are_told(make: Make) -> None:
    config = make(
        "role_groups.0.devices=1", "role_groups.0.replicas=2", "role_groups.1.devices=1", "role_groups.1.processes=4"
    )
    assert judged(config) == [
        "role_groups must ask for at most the devices of this machine, 0, got rollout 2 + actor 4 = 6. "
        "Lower processes or replicas, or set devices=0 to compute on the CPU; a run on several machines cannot be started"
    ]
    assert judged(config, replace(FACTS, num_devices=6)) == []


def test_devices_of_this_machine_that_are_too_small_are_an_error(make: Make) -> None:
    config = make("role_groups.0.devices=1")
    shape = Shape(
        vocab_size=100, keys=4, num_caching=2, decoder_parameters=1000, encoder_parameters=0, trained_decoder=1000,
        trained_encoders=0, widths=100,
    )  # fmt: skip
    facts = replace(FACTS, num_devices=1, shape=shape, traced={PREFILL: Traced("traced", {"prompts": GIB})})
    small, large = (replace(facts, device_bytes=n * GIB) for n in (2, 3))
    [error] = judged(config, small)
    assert error.startswith(
        "a process of rollout must fit into the memory of its device, 2.0 GiB, got 2.0 GiB: traced ("
    )
    assert judged(config, large) == []


def test_samples_longer_than_the_models_positions_are_told(make: Make) -> None:
    assert judged(make(), replace(FACTS, max_positions=23)) == [
        "rollout.max_prompt_tokens + rollout.max_new_tokens must be at most the model's positions, 23, "
        "got 16 + 8 = 24. Lower one of them"
    ]
    assert judged(make(), replace(FACTS, max_positions=24)) == []
    assert judged(make("evaluation.max_new_tokens=9"), replace(FACTS, max_positions=24)) == [
        "rollout.max_prompt_tokens + evaluation.max_new_tokens must be at most the model's positions, 24, "
        "got 16 + 9 = 25. Lower one of them"
    ]


def test_samples_longer_than_what_a_server_takes_of_the_models_positions_are_told(make: Make) -> None:
    python = "/no/such/python"  # which is told too
    told = judged(make(f"rollout.sglang={{'python': '{python}'}}"), replace(FACTS, max_positions=25))
    assert told[0] == (
        "rollout.max_prompt_tokens + rollout.max_new_tokens must be at most what SGLang takes of the model's positions, 23, "
        "got 16 + 8 = 24. Lower one of them"
    )
    for context in ("", ", 'arguments': {'context-length': 26}"):
        sets, positions = f"rollout.sglang={{'python': '{python}'{context}}}", 512 if context else 26
        assert all(python in text for text in judged(make(sets), replace(FACTS, max_positions=positions)))


def test_shared_memory_that_does_not_fit_is_told_with_the_numbers(make: Make) -> None:
    facts = replace(FACTS, num_parameters=100 * (1 << 20), num_tensors=0)
    (text,) = judged(make(), facts, (2 * GIB, "the cgroup"))
    assert text == (
        "shared memory must fit into what is free of the cgroup's memory, 2.0 GiB, got 3.2 GiB (rollout rings 64 MiB, "
        "column rings 8 MiB, weight slab 800 MiB, hot snapshots 2.3 GiB, one step of the longest samples 32 KiB). "
        "Lower bus.ring_bytes, set train.hot_snapshot=False, end what else runs here, or use a machine with more memory"
    )
    assert judged(make("train.hot_snapshot=False"), facts, (2 * GIB, "the cgroup")) == []


def test_a_checkpoint_that_is_written_beside_training_is_counted_once(make: Make) -> None:
    found = segment_bytes(make("train.save_every=2"), 1000, 0)
    assert found["checkpoint being written"] == 12 * 1000 == found["hot snapshots"] / 2
    assert "trainer at rest" not in found
    group = "[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages'], 'devices': 1}]"
    turns = make(f"role_groups={group}", "max_staleness=0", "algorithm.kl_coef=0")
    assert segment_bytes(turns, 1000, 0)["trainer at rest"] == 12 * 1000


def test_segments_are_counted_for_every_rank_that_writes(make: Make) -> None:
    config = make("role_groups.0.replicas=3", "role_groups.1.processes=2")
    assert segment_bytes(config, 0, 0) == {
        "rollout rings": 3 * config.bus.ring_bytes,
        "column rings": config.bus.column_ring_bytes,
        "weight slab": 0,
        "hot snapshots": 0,
        "one step of the longest samples": config.rollout.prompts_per_step * group_bytes(config, 0),
    }


def test_a_port_in_use_is_told(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert judged(make(f"admin.port={port}")) == [
            f"admin.port must be free, got 127.0.0.1:{port} (Address already in use). "
            "Set admin.port=0 for a free port on admin.host='127.0.0.1'"
        ]


def test_every_port_the_token_and_the_certificate_of_an_endpoint_are_looked_at(make: Make, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        found = judged(make(f"rollout.endpoint.port={port}"))
        assert found == [
            f"rollout.endpoint.port must be free, one port a replica, got 127.0.0.1:{port} (Address already in use). "
            "Set rollout.endpoint.port=0 for free ones"
        ]
    for of in ("admin", "rollout.endpoint"):
        [untold] = judged(make(f"{of}.tls_cert={tmp_path}/none", f"{of}.tls_key={tmp_path}/none"))
        assert untold.startswith(f"{of}.tls_key must be readable, got {tmp_path}/none (No such file or directory)")
        with pytest.raises(ConfigError, match=rf"{of}\.tls_cert and {of}\.tls_key must be set together"):
            make(f"{of}.tls_cert={tmp_path}/none")
    missing = judged(make(f"rollout.endpoint.token_file={tmp_path}/none"))
    assert missing == [
        f"rollout.endpoint.token_file must be readable, got {tmp_path}/none (No such file or directory). Check the path"
    ]
    with pytest.raises(ConfigError, match=r"token_file must be set when rollout\.endpoint\.host is not loopback"):
        make("rollout.endpoint.host=0.0.0.0")


def test_a_name_whose_run_is_alive_is_told_with_its_pid(make: Make, tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from rondo.launch.rundir import RunDir\n"
        "with RunDir.create(Path(sys.argv[1]), 'demo', {}): print('held', flush=True); sys.stdin.read()"
    )
    line = [sys.executable, "-c", hold, str(tmp_path / "runs")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        (text,) = judged(make())
        other.communicate(timeout=60)
    assert f"must have no other owner, got a live run with pid {other.pid}" in text
    assert judged(make()) == []
    with RunDir.create(tmp_path / "runs", "demo", {}):
        assert judged(make()) == []  # a run that resumes has claimed it


def test_a_run_directory_that_cannot_be_made_is_told(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert judged(make(f"run_dir={tmp_path}/file")) == [
        f"run_dir must be a folder to write to, got {tmp_path}/file: {tmp_path}/file is a file. Choose another"
    ]


def test_a_run_directory_that_takes_no_files_is_told_whatever_its_permissions_say(make: Make, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for sets, why in (
        ([], f"{tmp_path}/runs: {tmp_path}/runs/demo is a file"),
        ([f"run_dir={tmp_path}/gone"], f"{tmp_path}/gone: {tmp_path}/gone is a link to nothing"),
        (["run_dir=/proc/runs"], "/proc/runs: /proc takes no files: No such file or directory"),
    ):
        assert judged(make(*sets)) == [f"run_dir must be a folder to write to, got {why}. Choose another"]


def test_cheap_errors_are_told_all_at_once_before_a_process_looks_at_the_model(
    make: Make, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def in_child(*_: object, **__: object) -> check_child.Report:
        events.append("a process with torch")
        return check_child.Report([Finding("error", "of the model")])

    monkeypatch.setattr("rondo.launch.check.check._in_child", in_child)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "label": "2"}\n')
    config = make(
        "data.rows=null", f"data.path={tmp_path}/rows.jsonl", "data.prompt=qestion", "data.held_out=0", "evaluation=null",
        "name=latest", "role_groups.1.processes=17",
    )  # fmt: skip
    findings = inspect(config, nursery=nursery, tell=lambda found: events.extend(each.text for each in found))
    [batch, name, column, child] = events
    assert batch.startswith("rollout.prompts_per_step * rollout.samples_per_prompt must be at least the processes that")
    assert name.startswith("name must not be 'latest'")
    assert column.endswith("got 'question', 'label'. Did you mean 'question'?") and child == "a process with torch"
    assert {batch, name, "of the model"} <= set(errors(findings))


def test_data_are_looked_at_without_torch_or_a_tokenizer(make: Make, tmp_path: Path) -> None:
    config = make("data.apply_chat_template=True", "data.prompt=qestion")
    code = "import sys\nfrom rondo.launch.check import data\ndata.main()\nprint({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], input=orjson.dumps(resolve(config)), capture_output=True, check=True
    )
    [column] = orjson.loads(done.stdout)["errors"]
    assert "must have the column 'qestion' that data.prompt names, got 'prompt', 'label'." in column
    assert done.stderr.splitlines()[-1] == b"set()"


def test_the_name_latest_is_refused(make: Make) -> None:
    assert judged(make("name=latest"))[0].startswith("name must not be 'latest'")


def test_this_machine_keeps_the_order_of_shared_memory() -> None:
    assert memory_order().level == "ok"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def reward(response): return 1.0", "reward.function must take (response, label, *, prompt, metadata), got "),
        ("def rewards(): ...", "reward.function must name a function of "),
        ("class reward(dict): ...", "reward.function must be a function, got the class "),
        (
            "raise OSError('no disk')",
            "reward.function must load without errors, got OSError: no disk ({file}:1). Correct it",
        ),
        ("exit(4)", "reward.function must load without errors, got SystemExit: 4"),
        (
            "import os; os._exit(9)",
            "reward.function must load without ending its process, got its process exit code 9. ",
        ),
        (
            "def reward(r, l, *, prompt, metadata): 1 / 0",
            "reward.function must score the answer '' to row 1, got ZeroDivisionError: division by zero ({file}:1). Correct it",
        ),
        (
            "def reward(r, l, *, prompt, metadata): yield 1.0",
            "reward must return a number or a dict with 'score', got a generator. Use return in the place of yield. "
            "It was given the answer '' to row 1",
        ),
        (
            "from rondo.roles.rewards.scores import RewardError\n"
            "def reward(r, l): raise RewardError('reward must know it. Known: turns.')",
            "reward must know it. Known: turns. It was given the answer '' to row 1",
        ),
        (
            "from rondo.roles.rewards.scores import RewardError\n"
            "def reward(r, l): raise RewardError('reward must know it. Is it difficulty?')",
            "reward must know it. Is it difficulty? It was given the answer '' to row 1",
        ),
        (
            "def reward(r, l, *, prompt, metadata):\n while True: pass",
            "reward must return within 0.3 s, got no end. Its worker was killed, at the answer '' to row 1. Raise reward.dead",
        ),
    ],
)
def test_a_reward_function_that_cannot_work_is_told(make: Make, tmp_path: Path, code: str, error: str) -> None:
    file = tmp_path / "broken_rewards.py"
    file.write_text(code + "\n")
    limit_s = 0.3 if "within" in error else 60
    ((level, text),) = tried(make(f"reward.function={file}:reward", f"reward.deadline_s={limit_s}"))
    assert level == "error" and text.startswith(error.format(file=file)) and "\n" not in text


@pytest.mark.parametrize(
    ("code", "level", "start"),
    [
        ("async def reward(r, l, *, prompt, metadata): return r == l", "ok", "the reward of 6 dummy answers is 0, 1"),
        (
            "def reward(r, l, *, prompt, metadata): return 0",
            "note",
            "the reward of 6 dummy answers is 0, also where the answer is the label itself. See that a right answer gets",
        ),
        (
            "def reward(r, l, *, prompt, metadata): return int(r)",
            "note",
            "reward.function fails for 2 of 6 dummy answers, and such samples fail in a run; the first, the answer '' to row 1: "
            "ValueError: invalid literal",
        ),
        (
            "def reward(r, l, *, prompt, metadata): return [each == l for each in r]\nPER = 'group'",
            "ok",
            "the reward of 6 dummy answers is 0, 1",
        ),
    ],
)
def test_a_reward_function_is_tried_with_dummy_answers(
    make: Make, tmp_path: Path, code: str, level: str, start: str
) -> None:
    file = tmp_path / "own_rewards.py"
    file.write_text(code + "\n")
    per = "group" if "PER" in code else "response"
    ((found, text),) = tried(make(f"reward.function={file}:reward", f"reward.per={per}", "reward.deadline_s=60"))
    assert found == level and text.startswith(start)


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        (
            ["reward.function={file}:plus"],
            "reward.function must score the answer '' to row 2 of source 'b', got KeyError: 'of_a'",
        ),
        (
            ["reward.function={{'a': '{file}:works', 'b': '{file}:fails'}}", "reward.by=which"],
            "reward.function must score the answer '' to row 2 of source 'b' with which 'b', got ZeroDivisionError: ",
        ),
    ],
)
def test_a_reward_that_fails_on_all_answers_to_one_source_is_an_error(
    make: Make, tmp_path: Path, sets: list[str], error: str
) -> None:
    (file := tmp_path / "rewards.py").write_text(
        "def works(response, label): return 1.0\n"
        "def fails(response, label): 1 / 0\n"
        "def plus(response, label, **columns): return columns['of_a']\n"
    )
    rows = [
        Row("row 1", "p", "1", {"which": "a"}, source="a", columns={"of_a": 1}),
        Row("row 2", "p", "2", {"which": "b"}, source="b"),
    ]
    [(level, text)] = tried(make(*(each.format(file=file) for each in sets)), rows)
    assert level == "error" and text.startswith(error)


def test_a_workflow_that_cannot_be_loaded_or_called_is_told(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "own_sampling.py"
    file.write_text("def once(row, client, context): ...\n")
    report = check_child.Report()
    for changes in ([f"rollout.workflow={file}:once"], [f"rollout.workflow={file}:twice"], []):
        config = make(*changes)
        report.look(lambda config=config: check_child.look_at_workflow(config), "rollout.workflow")  # type: ignore[misc]
    assert [each.text.partition(", got ")[0] for each in report.findings] == [
        "rollout.workflow must be an async function of (row, client, context)",
        f"rollout.workflow must name a function of {file}",
    ]


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        ("def reset(self, colour=1, **row): ...", ""),
        ("def reset(self, hue): ...", ""),
        (
            "def reset(self, hues): ...",
            "rollout.environment.factory must have a `reset` whose parameters are columns of the data, got 'hues' for row 1. "
            "Did you mean 'hue'? Rename it, or give it a default",
        ),
        ("def __init__(self): 1 / 0", "rollout.environment.factory must load without errors, got ZeroDivisionError"),
        ("def close(self): 1 / 0", ""),
    ],
)
def test_an_environment_is_made_once_and_its_reset_can_be_called(
    make: Make, tmp_path: Path, code: str, finding: str
) -> None:
    (file := tmp_path / "own_world.py").write_text(f"class World:\n    def step(self, said): ...\n    {code}\n")
    report, rows = check_child.Report(), [Row("row 1", "p", "1", {}, columns={"hue": 3})]
    config = make(f"rollout.environment.factory={file}:World", "rollout.max_turns=2")
    report.look(lambda: check_child.look_at_environment(config, report, rows), "rollout.environment.factory")
    assert [each.text[: len(finding)] for each in report.findings] == ([finding] if finding else [])


def test_tools_that_look_at_media_are_noted_where_none_may_be_shown(make: Make) -> None:
    report = check_child.Report()
    check_child.look_at_environment(make("rollout.environment.tools=['zoom']", "rollout.max_turns=2"), report, [])
    assert [each.text.partition(":")[0] for each in report.findings] == [
        "rollout.environment.tools look at media, and cannot show any"
    ]


def test_a_script_of_an_agent_must_exist(make: Make, tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    for command, is_refused in (
        (["python3", "-u", "/nofile.py"], True),
        (["python3", str(tmp_path / "agent.py")], False),
        (["python3", "-m", "agent"], False),
        (["sh", "-c", "python3 elsewhere.py"], False),
    ):
        report, config = check_child.Report(), make(f"rollout.agent.command={command}", "rollout.max_turns=2")
        report.look(functools.partial(check_child.look_at_workflow, config), "agent")
        assert [each.text.startswith("rollout.agent.command must name a script") for each in report.findings] == (
            [True] * is_refused
        )


def test_a_template_that_rewrites_earlier_turns_is_told_also_where_only_tools_make_it(make: Make) -> None:
    tokenizer, row = build_tokenizer(), Row("row 9", "2+2?", 4, {}, tools=[{"name": "add"}])
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}{{ tools or '' }}{% endif %}{{ m.content }}</s>{% endfor %}"
    )
    chats = make("rollout.workflow=m:f", "rollout.max_rows=3", "data.apply_chat_template=true")
    single = make("data.apply_chat_template=true")
    for config, rows, told in ((chats, [], 0), (chats, [row], 1), (single, [row], 0)):
        report = check_child.Report()
        check_child.look_at_turns(config, report, [tokenizer], rows)
        assert len(report.findings) == told
        assert all("of which a sample may have 3 (rollout.max_rows)" in each.text for each in report.findings)


def tried(config: RunConfig, rows: Sequence[Row] = ()) -> list[tuple[str, str]]:
    """(level, text) of what the look at the reward finds."""
    report, rows = check_child.Report(), rows or [Row(f"row {label}", "p", label, {}) for label in "12"]
    report.look(lambda: check_child.look_at_reward(config, report, lambda: rows), "reward.function")
    return [(finding.level, finding.text) for finding in report.findings]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (None, "data.path must "),
        ([], "data must have rows, got none in "),
        ([{"question": "1", "label": "2"}], "row"),
    ],
)
def test_data_that_cannot_be_used_are_told(make: Make, tmp_path: Path, lines: list[object] | None, error: str) -> None:
    file = tmp_path / "rows.jsonl"
    if lines is not None:
        file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    report = check_child.Report()
    config = make("data.rows=null", f"data.path={file}")
    report.look(lambda: check_child.look_at_data(config, report, [], []), "data")
    (finding,) = report.findings
    assert finding.level == "error"
    assert str(file.name) in finding.text


def test_rows_that_a_run_would_leave_out_are_told_with_their_share(make: Make, tmp_path: Path) -> None:
    (tmp_path / "some_rows.py").write_text(
        "def rows():\n    return [{'prompt': '1', 'label': {'a': print} if i % 4 == 3 else '1'} for i in range(8)]\n\n"
        "many = rows\n\n"
        "def none():\n    return [{'prompt': '1', 'label': [1, print]}] * 3\n"
    )
    for name, level, start in (
        (
            "rows",
            "note",
            "data: 2 of 8 rows that were looked at cannot be used, and a run leaves such rows out; the first: ",
        ),
        (
            "many",
            "error",
            'data must have at most 1 % unusable rows, got 25 % of 8 rows that were looked at: 2 as in "',
        ),
        ("none", "error", "data: no row can be used of 3 rows that were looked at; the first: "),
    ):
        report = check_child.Report()
        allowed = ["data.max_bad_rows=0.25"] if name == "rows" else []
        config = make(f"data.rows={tmp_path}/some_rows.py:{name}", "data.held_out=0", "evaluation=null", *allowed)
        report.look(lambda config=config, report=report: check_child.look_at_data(config, report, [], []), "data")  # type: ignore[misc]
        finding = report.findings[0]
        assert finding.level == level and finding.text.startswith(start), finding
        assert "column 'label'[" in finding.text and "got builtin_function_or_method. " in finding.text


def measured(make: Make, tmp_path: Path, rows: str, *sets: str) -> list[Finding]:
    """What is told of rows that a function with this body returns, by the tiny tokenizer: a token a byte."""
    file = tmp_path / f"rows_{len(list(tmp_path.iterdir()))}.py"
    file.write_text(f"def rows():\n    return {rows}\n")
    report = check_child.Report()
    config = make(f"data.rows={file}:rows", *sets)
    report.look(lambda: check_child.look_at_data(config, report, [build_tokenizer()], []), "data")
    return report.findings


def test_a_filter_that_keeps_few_rows_is_no_error_and_what_is_held_out_and_evaluated_is_told(
    make: Make, tmp_path: Path
) -> None:
    (folder := tmp_path / "some").mkdir()
    (folder / "a.jsonl").write_text("".join(f'{{"prompt": "{at}", "label": "1"}}\n' for at in range(200)))
    (folder / ".b.jsonl").write_text("no JSON\n")
    (tmp_path / "few.py").write_text("def few(row):\n    return int(row['prompt']) % 25 == 0\n")

    def told(*sets: str) -> list[Finding]:
        report = check_child.Report()
        config = make("data.rows=null", f"data.path={folder}", "num_steps=2", "data.shuffle=False", *sets)
        report.look(lambda: check_child.look_at_data(config, report, [], []), "data")
        return report.findings

    alone = ("data.held_out=0", "evaluation=null")
    filtered = told(f"data.filter={tmp_path}/few.py:few", *alone)
    assert [each.text for each in filtered if each.level == "error"] == []
    assert any(each.text.endswith("a.jsonl") and ".b" not in each.text for each in filtered)
    assert told("data.held_out=8", "evaluation.num_prompts=4")[-1].text == (
        "192 rows to train on, 8 held out; an evaluation takes 4 rows"
    )
    (tmp_path / "none.py").write_text("def none(row):\n    return False\n")
    found = told(f"data.filter={tmp_path}/none.py:none", "data.held_out=8", "evaluation.num_prompts=4")
    [error] = [each.text for each in found if each.level == "error"]
    assert error.startswith("data: no row can be used of 192 rows")


LONG = "[{'prompt': 'x' * (40 if i % 3 else 8), 'label': ''} for i in range(150)]"


@pytest.mark.parametrize(
    ("too_long", "level", "fate"),
    [
        ("drop", "note", "a run leaves them out (too_long='drop')"),
        ("error", "error", "none may be (too_long='error')"),
        ("truncate", "note", "the beginning of their prompts is cut off (too_long='truncate')"),
    ],
)
def test_the_share_of_prompts_that_are_too_long_is_told_with_what_becomes_of_them(
    make: Make, tmp_path: Path, too_long: str, level: str, fate: str
) -> None:
    whole = ("data.held_out=0", "evaluation=null", "num_steps=100")
    told, ok, _ = measured(make, tmp_path, LONG, *whole, f"data.too_long={too_long}")
    assert (told.level, told.text) == (
        level,
        "data: 100 of 150 rows that were looked at (66.7%) are too long, up to 40 tokens: "
        f"{fate}; the first: {told.text.rpartition('the first: ')[2]}",
    )
    assert told.text.endswith(
        "prompt must have 1 to 16 tokens, got 40. Raise rollout.max_prompt_tokens, or shorten or remove the row"
    )
    assert ok.text == "data: 150 of 150 rows were looked at, and take up to 8 tokens of rollout.max_prompt_tokens 16"


def test_only_rows_that_the_run_takes_are_looked_at_and_many_by_a_sample(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unshuffled = ("data.held_out=0", "evaluation=null", "data.shuffle=False")
    rows = "[{'prompt': 'x' * (8 if i < 16 else 40), 'label': ''} for i in range(150)]"
    found = measured(make, tmp_path, rows, *unshuffled)  # 4 steps of 4 prompts
    assert [finding.level for finding in found] == ["ok", "ok"] and "data: 16 of 150 rows" in found[0].text
    monkeypatch.setattr("rondo.launch.check.data._NUM_ROWS", 30)
    found = measured(make, tmp_path, LONG, *unshuffled, "num_steps=100")
    assert "of 30 rows that were looked at" in found[0].text
    monkeypatch.setattr("rondo.launch.check.data._NUM_TOKENS", 100)
    found = measured(make, tmp_path, "[{'prompt': 'x' * 8, 'label': ''}] * 150", *unshuffled, "num_steps=100")
    assert found[0].text.startswith("data: 13 of 150 rows were looked at")  # 104 tokens


def test_demonstrations_are_measured_with_their_answers(make: Make, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "def rows():\n    return [{'prompt': 'x' * 9, 'answer': 'y' * (9 if i else 90)} for i in range(10)]\n"
    )
    shown = f"sft={{'rows': '{tmp_path}/shown.py:rows', 'steps': 3, 'batch_size': 10, 'micro_batch_tokens': 32}}"
    found = [
        f for f in measured(make, tmp_path, "[{'prompt': 'x', 'label': ''}] * 40", shown) if f.text.startswith("sft")
    ]
    assert [finding.level for finding in found] == ["note", "ok"]
    assert found[0].text.startswith(
        "sft: 1 of 10 rows that were looked at (10.0%) are too long, up to 100 tokens: a run leaves"
    )
    assert found[1].text == "sft: 10 of 10 rows were looked at, and take up to 19 tokens of sft.micro_batch_tokens 32"


def test_what_is_seldom_meant_is_a_note(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "1", "label": "1"}\n' * 40)
    for sets, note in (
        (
            ["data.held_out=39"],
            "data has 1 rows to train on behind data.held_out 39, fewer than the 4 of rollout.prompts_per_step",
        ),
        ([f"evaluation.data={{'path': '{file}'}}"], "evaluation.data has the rows that are trained on"),
        (
            [f"evaluation.data={{'path': '{file}', 'limit': 9, 'apply_chat_template': True}}"],
            "evaluation.data has prompts that are written in another way than those of data: apply_chat_template differ",
        ),
        (
            [
                f"evaluation.data={{'path': '{file}', 'limit': 9, 'apply_chat_template': True, 'system': 'S'}}",
                "rollout.agent.command=['true']",
            ],
            "evaluation.data has prompts that are written in another way than those of data: system differ",
        ),
    ):
        report = check_child.Report()
        config = make("data.rows=null", f"data.path={file}", *sets)
        report.look(lambda config=config, report=report: check_child.look_at_data(config, report, [], []), "data")  # type: ignore[misc]
        assert any(each.level == "note" and each.text.startswith(note) for each in report.findings), report.findings


def test_rows_whose_order_depends_on_the_process_are_told_before_a_run_holds_some_out(
    make: Make, nursery: Nursery, tmp_path: Path
) -> None:
    (tmp_path / "unordered_rows.py").write_text(
        "def rows():\n    return [{'prompt': p, 'label': p} for p in set('0123456789')] * 4\n"
    )
    (text,) = errors(inspect(make(f"data.rows={tmp_path}/unordered_rows.py:rows"), nursery=nursery))
    assert text.startswith("data must be the same rows in the same order in every process, got 40 rows with digest ")


def test_a_tokenizer_without_a_chat_template_is_told_where_one_is_asked_for(make: Make, nursery: Nursery) -> None:
    config = make("data.apply_chat_template=True", 'model.build_args={"hidden_size": 32, "chat_template": False}')
    (text,) = errors(inspect(config, nursery=nursery))
    assert "chat template" in text


def test_code_that_kills_the_child_is_an_error_like_any_other(make: Make, nursery: Nursery, tmp_path: Path) -> None:
    file = tmp_path / "crash.py"
    file.write_text("import os, sys\nprint('last words', file=sys.stderr, flush=True)\nos._exit(9)\n")
    (text,) = errors(inspect(make(f"sft.rows={file}:rows", "sft.steps=1", "sft.batch_size=1"), nursery=nursery))
    assert text.startswith("looking at model, data and reward must end with exit code 0, got 9: last words.")


def test_the_check_itself_imports_neither_torch_nor_the_users_data() -> None:
    code = (
        "import sys, rondo.launch.check.check, rondo.launch.check.target, rondo.launch.check.child\n"
        "print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_a_warm_up_as_long_as_the_run_is_a_note(make: Make, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("def rows():\n    return [{'prompt': '1', 'answer': '2'}] * 8\n")
    sft = f"sft={{'rows': '{tmp_path}/shown.py:rows', 'epochs': 1, 'batch_size': 4, 'warmup_steps': 9}}"
    rows = "[{'prompt': str(i), 'label': ''} for i in range(80)]"
    findings = measured(make, tmp_path, rows, "num_steps=4", "train.warmup_steps=4", sft)
    texts = [finding.text for finding in findings if finding.level == "note"]
    assert "train.warmup_steps 4 is not less than its 4 steps: the rate rises until the last of them" in texts
    assert "sft.warmup_steps 9 is not less than its 2 steps: the rate rises until the last of them" in texts
    findings = measured(make, tmp_path, rows, "num_steps=5", "train.warmup_steps=4")
    assert not [finding for finding in findings if "warmup_steps" in finding.text]


def test_plain_prompts_of_a_model_with_a_chat_template_are_a_note(make: Make, tmp_path: Path) -> None:
    path, note = (
        "model={'path': 'a'}",
        "data: prompts are given to the model as they are, and its tokenizer has a chat template",
    )
    for row, sets, told in (
        ("{'prompt': '1', 'label': ''}", (path,), True),
        ("{'prompt': '1', 'label': ''}", (path, "data.apply_chat_template=True"), False),
        ("{'prompt': '<|im_start|>user', 'label': ''}", (path,), False),
        ("{'prompt': '1', 'label': ''}", (), False),
    ):
        findings = measured(make, tmp_path, f"[{row}] * 80", *sets)
        assert any(finding.text.startswith(note) for finding in findings) is told, (row, sets)


def test_rows_that_a_short_run_does_not_take_count_among_those_that_cannot_be_used(make: Make, tmp_path: Path) -> None:
    rows = "[{'prompt': '1', 'label': ''} if i < 40 else {'prompt': 7, 'label': ''} for i in range(80)]"
    unshuffled = ("data.held_out=0", "evaluation=null", "data.shuffle=False")  # 4 steps of 4 prompts
    findings = measured(make, tmp_path, rows, *unshuffled)
    (told,) = [finding.text for finding in findings if finding.level == "error"]
    assert told.startswith(
        "data must have at most 1 % unusable rows, got 50 % of 80 rows that were looked at: 40 as in "
    )
    assert told.endswith("Correct the rows, or raise data.max_bad_rows to have them left out")
