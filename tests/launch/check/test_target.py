"""Other machines than this one: where role groups go, and what they would hold there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rondo.launch.check.estimate import PREFILL, Shape, Traced, at_most, evaluating, generating, held_by, traces
from rondo.launch.check.findings import Facts, Finding
from rondo.launch.check.target import Target, judge_devices, judge_target, place, segment_bytes, tell_hosts
from rondo.launch.check.workspace import WORKSPACE_OF, Heads
from rondo.launch.config import RunConfig, load
from rondo.launch.groups import RoleGroup
from rondo.roles.config import EvalConfig, ReferenceConfig, SGLangConfig
from tests.launch import configs

GIB = 1 << 30
SHAPE = Shape(
    vocab_size=100, keys=4, num_caching=2, decoder_parameters=1000, encoder_parameters=400, trained_decoder=600,
    trained_encoders=100, widths=500,
)  # fmt: skip
TRACED = {
    "actor": Traced(
        "traced", {"parameters": 8 * GIB, "activations": GIB}, {"all-gather": 3 * GIB}, 4, 4096, float(1 << 20)
    ),
    "reference": Traced("traced", {"parameters": 2 * GIB}),
    PREFILL: Traced("traced", {"prompts": GIB}),
}
FACTS = Facts(num_parameters=1400, num_tensors=10, shape=SHAPE, traced=TRACED)


def groups(rollouts: int, ranks: int) -> tuple[RoleGroup, ...]:
    return (
        RoleGroup(name="rollout", roles=("rollout",), replicas=rollouts, devices=1),
        RoleGroup(name="actor", roles=("actor",), processes=ranks, devices=1),
        RoleGroup(name="advantages", roles=("advantages",)),
    )


def placed(rollouts: int, ranks: int, num_nodes: int, num_devices: int = 8) -> dict[str, dict[int, int]] | str:
    found = place(groups(rollouts, ranks), Target(num_nodes, num_devices, 80 * GIB, 500 * GIB))
    return found if isinstance(found, str) else {replica.name: dict(replica.processes) for replica in found}


def config_of(folder: Path, *sets: str) -> RunConfig:
    return load(configs.write(folder), sets)


def on_device(config: RunConfig, at: int) -> RunConfig:
    groups = [
        group.model_copy(update={"devices": 1}) if i == at else group for i, group in enumerate(config.role_groups)
    ]
    return config.model_copy(update={"role_groups": tuple(groups)})


def errors(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.level == "error"]


def test_the_largest_replica_is_placed_first_and_the_others_fill_what_is_left() -> None:
    assert placed(3, 6, num_nodes=2) == {
        "actor-0": {0: 6},
        "rollout-0": {0: 1},
        "rollout-1": {0: 1},
        "rollout-2": {1: 1},
        "advantages-0": {0: 1},
    }


def test_a_group_larger_than_a_node_takes_whole_nodes() -> None:
    found = placed(1, 16, num_nodes=3)
    assert isinstance(found, dict)
    assert (found["actor-0"], found["rollout-0"]) == ({0: 8, 1: 8}, {2: 1})


def test_a_process_of_several_devices_is_one_process_and_on_one_node() -> None:
    group = RoleGroup(name="rollout", roles=("rollout",), replicas=3, devices=4)
    found = place((group,), Target(2, 8, 80 * GIB, 500 * GIB))
    assert [dict(replica.processes) for replica in found if not isinstance(replica, str)] == [{0: 1}, {0: 1}, {1: 1}]
    assert place((group,), Target(8, 2, 80 * GIB, 500 * GIB)) == "rollout-0 finds no node with 4 free"


@pytest.mark.parametrize(
    ("rollouts", "ranks", "num_nodes", "why"),
    [
        (3, 6, 1, "rollout-2 finds no node with 1 free"),
        (1, 16, 1, "actor-0 with 16 takes whole nodes, of which 1 are free"),
        (1, 12, 4, "actor-0 with 12 takes whole nodes, of which 2 are free"),
    ],
)
def test_groups_without_a_place_are_named(rollouts: int, ranks: int, num_nodes: int, why: str) -> None:
    assert placed(rollouts, ranks, num_nodes) == why


def test_devices_that_nodes_do_not_have_are_an_error_with_the_sum(tmp_path: Path) -> None:
    config = config_of(tmp_path, "role_groups.0.devices=1", "role_groups.1.devices=1", "role_groups.1.processes=4")
    (finding,) = judge_target(config, Target(2, 2, 80 * GIB, 64 * GIB), Facts())
    assert finding == Finding(
        "error",
        "role_groups must find their devices on 2 nodes with 2 devices each, got rollout 1 + actor 4 = 5: rollout-0 finds no "
        "node with 1 free. Lower processes or replicas, or use more nodes",
    )


def test_several_nodes_are_noted_as_what_cannot_be_started(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    one, two = (list(judge_target(config, Target(n, 0, 0, 64 * GIB), Facts())) for n in (1, 2))
    assert [finding.level for finding in one] == ["ok"]
    assert [finding.level for finding in two] == ["ok", "ok", "note"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_roles_in_one_process_lie_beside_each_other_and_an_engine_of_one_dtype_uses_the_trainers_weights(
    tmp_path: Path, dtype: str
) -> None:
    config = config_of(tmp_path, f"model.dtype={dtype}")
    alone = [RoleGroup(name="a", roles=(role,)) for role in ("actor", "rollout", "reference")]  # type: ignore[arg-type]
    together = RoleGroup(name="a", roles=("actor", "rollout", "reference"))

    def needed(group: RoleGroup) -> int:
        held = held_by(config, SHAPE, TRACED, group)
        assert held is not None
        return sum(each.needed for each in held)

    copy = generating(config, SHAPE).parts["weights"] if dtype == "float32" else 0
    assert needed(together) + copy == sum(map(needed, alone))


def test_of_a_trainer_that_rests_and_the_engine_in_turn_with_it_the_one_that_takes_more_is_counted(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "model.dtype=bfloat16", "max_staleness=0")
    for devices, chosen, parts in ((1, None, {"parameters", "activations"}), (1, False, None), (0, None, None)):
        each = config.model_copy(update={"train": config.train.model_copy(update={"release_memory": chosen})})
        group = RoleGroup(name="a", roles=("actor", "rollout", "reference"), devices=devices)
        held = held_by(each, SHAPE, TRACED, group)
        assert held is not None and sum(sizes.parts == TRACED["reference"].parts for sizes in held) == 1
        assert (
            len(held) == 4 if parts is None else [*map(set, (held[0].parts, held[1].parts))] == [parts, {"parameters"}]
        )


def test_a_trainer_at_rest_leaves_the_weights_that_it_lends_and_evaluations_take_turns_with_nobody(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "max_staleness=0", "evaluation.every=2", "rollout.num_slots=4000000")
    group = RoleGroup(name="a", roles=("actor", "rollout"), devices=1)
    held = held_by(config, SHAPE, TRACED, group)
    assert held is not None
    lent, generates, prefill, evaluates = held
    assert lent.parts == {"parameters": 8 * GIB} and generates.parts["weights"] == 0
    assert generates.parts["key-value cache"] > 5 * GIB and prefill.parts == {"prompts": GIB}
    assert evaluates == evaluating(config, SHAPE)
    fewer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_slots": 4})})
    held = held_by(fewer, SHAPE, TRACED, group)
    assert held is not None and held[0].parts == TRACED["actor"].parts and len(held) == 3


@pytest.mark.parametrize(("name", "key_heads", "expected"), [
    ("flash_attention_2", 4, 4 * (1000 + 2 * 128) * 4 * (96 + 1)),
    ("flash_attention_2", 2, 4 * (1000 + 2 * 128) * 4 * (96 + 1) + 2 * (2 * 1000 * 4 * 80)),
    ("flex_attention", 2, 1000 * 4 * (4 + 4 + 2 * 80)),
])  # fmt: skip
def test_what_a_kernel_holds_is_computed(name: str, key_heads: int, expected: int) -> None:
    assert WORKSPACE_OF[name](Heads(4, key_heads, 80), tokens=1000, rows=2, width=2) == expected


def test_snapshots_of_a_copy_of_the_model_are_cut_over_its_own_ranks_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path, "role_groups.1.processes=4", "train.mesh.dp_replicate=2")
    assert segment_bytes(config, 1400, 10, SHAPE)["hot snapshots"] == 2 * 4 * (4 * 500 + 8 * 300 + 4 * 400 + 8 * 100)


def test_versions_of_adapters_are_they_alone_and_whole_on_every_rank(tmp_path: Path) -> None:
    shape = replace(SHAPE, adapters=40, adapter_tensors=4)

    def found(publish: str) -> dict[str, int]:
        config = config_of(
            tmp_path, "role_groups.1.processes=4", f'train.lora={{"publish": "{publish}"}}', "train.dtype=float32"
        )
        parts = segment_bytes(config, 1400, 10, shape)
        return {name: parts[name] // 2 for name in ("weight slab", "hot snapshots")}  # two slots each

    assert found("adapter") == {"weight slab": 4 * 40 + 4 * 64, "hot snapshots": 4 * 12 * 40}
    assert found("merged") == {"weight slab": 4 * 1400 + 10 * 64, "hot snapshots": 4 * 12 * 40}


def test_a_device_that_is_too_small_is_told_with_what_a_process_would_hold_and_what_to_change(tmp_path: Path) -> None:
    config = config_of(tmp_path, "role_groups.1.devices=1", "role_groups.1.processes=8")
    (text,) = errors(list(judge_devices(config, FACTS, 8 * GIB)))
    assert text == (
        "a process of actor must fit into the memory of its device, 8.0 GiB, got 10.0 GiB: traced (parameters 8.0 GiB, "
        "activations 1.0 GiB); computed (context 1.0 GiB). Raise the processes of actor"
    )
    told = [finding.text for finding in judge_devices(config, FACTS, 12 * GIB)]
    assert told == [
        "actor takes 10.0 GiB of 12.0 GiB on each device: traced (parameters 8.0 GiB, activations 1.0 GiB); computed (context "
        "1.0 GiB)",
        "actor has room for micro-batches, and so for samples, of up to 6,144 tokens, responses of 6,128 to a prompt of 16: "
        "1 MiB a token, traced",
        "a rank of actor sends 3.0 GiB in a step of 4 micro-batches, and receives as much, traced: all-gather 3.0 GiB",
    ]


def test_processes_that_compute_on_the_cpu_are_told_too(tmp_path: Path) -> None:
    told = [finding.text for finding in tell_hosts(config_of(tmp_path), FACTS)]
    assert told[-1] == "actor takes 9.0 GiB a process: traced (parameters 8.0 GiB, activations 1.0 GiB)"


def test_what_could_not_be_traced_is_not_judged(tmp_path: Path) -> None:
    config = config_of(tmp_path, "role_groups.1.devices=1")
    assert list(judge_devices(config, Facts(shape=SHAPE), GIB)) == []


def test_what_fits_many_times_over_whatever_it_does_needs_no_trace(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert at_most(config, SHAPE) == 4 * (6 * 1400 + 2 * 4096 * 500 + 3 * 2048 * 100)


def test_a_node_whose_memory_does_not_suffice_is_named_with_what_it_would_hold(tmp_path: Path) -> None:
    config = config_of(tmp_path, "role_groups.0.devices=1", "role_groups.1.devices=1", "bus.ring_bytes=4294967296")
    findings = list(judge_target(config, Target(2, 1, 80 * GIB, 5 * GIB), replace(FACTS, traced={})))
    (text,) = errors(findings)
    # Of two that are equally large the first of the list goes first: the ring lies on node 0, the snapshots on node 1.
    assert text.startswith("what runs on node 0 must fit into its memory, 5.0 GiB, got about ")
    assert "rollout rings 4.0 GiB" in text


def test_snapshots_hold_moments_of_what_is_trained_and_whole_encoders_of_each_rank(tmp_path: Path) -> None:
    config = config_of(tmp_path, "role_groups.1.processes=2")
    decoder, encoders = 4 * 1000 + 8 * 600, 4 * 400 + 8 * 100
    assert segment_bytes(config, 1400, 10, SHAPE)["hot snapshots"] == 2 * (decoder + 2 * encoders)
    on_a_node = segment_bytes(config, 1400, 10, SHAPE, {"actor": 1})
    assert on_a_node["hot snapshots"] == decoder + 2 * encoders
    assert (on_a_node["rollout rings"], on_a_node["weight slab"]) == (0, 2 * (1400 * 4 + 640))


def test_the_cache_is_counted_as_the_engine_holds_it(tmp_path: Path) -> None:
    from rondo.launch.check.shape import shape_of
    from rondo.models.load import empty_model, load_model
    from rondo.models.tiny import qwen3
    from rondo.roles.engines.embedded.embedded import slot_engine

    config = config_of(tmp_path)
    qwen3.build(tmp_path / "text")
    shape = shape_of(empty_model(str(tmp_path / "text")))
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    engine = slot_engine(load_model(str(tmp_path / "text")), num_slots=config.rollout.num_slots, max_length=2 * longest)
    expected = 2 * generating(config, shape).parts["key-value cache"]
    assert engine._forward._cache.nbytes == expected  # type: ignore[attr-defined]


def test_beside_servers_only_the_engine_of_evaluations_is_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    group = config.role_groups[0]
    assert group.roles == ("rollout",)
    apart = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"sglang": SGLangConfig(python="p")})}
    )
    assert traces(apart, group) == [] and held_by(apart, SHAPE, TRACED, group) == ()
    every = apart.model_copy(update={"evaluation": EvalConfig(every=2, num_slots=4, max_new_tokens=7)})
    found = evaluating(every, SHAPE)
    assert found.parts["weights of evaluations"] == 4 * SHAPE.parameters  # one copy in float32
    assert found.parts["key-value cache of evaluations"] == 4 * (
        config.rollout.max_prompt_tokens + max(7, config.rollout.max_new_tokens)
    ) * (SHAPE.num_caching * 2 * SHAPE.keys * 4)
    held = held_by(every, SHAPE, TRACED, group)
    assert held is not None and held[-1] == found
    told = [finding.text for finding in judge_devices(on_device(every, 0), FACTS, 8 * GIB)]
    assert "weights of evaluations" in told[0] and "SGLang's cache 7.0 GiB" in told[0]
    assert told[0].endswith("Lower mem-fraction-static of rollout.sglang.arguments, or remove evaluation.every")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--nodes", "2"], "a check for other machines must be told their --devices, --memory-gib, got none. Add it\n"),
        (
            ["--devices", "8", "--memory-gib", "9"],
            "a check for other machines must be told their --device-gib, got none. Add it\n",
        ),
        (
            ["--nodes", "0", "--devices", "0", "--memory-gib", "9"],
            "--nodes and memory must be greater than 0 and --devices at least 0, got nodes 0, devices 0, memory-gib 9. "
            "Correct them\n",
        ),
    ],
)
def test_half_a_description_of_machines_is_refused(
    options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rondo.launch.cli import main

    assert main(["check", "no.py", *options]) == 2
    assert capsys.readouterr().err == error


def test_weights_that_a_restart_needs_of_a_scorer_are_counted_in_shared_memory(tmp_path: Path) -> None:
    what = "averaged teachers, refreshed references"
    config = config_of(tmp_path, "algorithm.kl_coef=0.1", "role_groups.1.roles=['actor', 'reference']")
    assert what not in segment_bytes(config, 1400, 10, SHAPE)
    refreshed = config.model_copy(update={"reference": ReferenceConfig(refresh_every=2)})
    assert segment_bytes(refreshed, 1400, 10, SHAPE)[what] == 2 * 4 * 1400
