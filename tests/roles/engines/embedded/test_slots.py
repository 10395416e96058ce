from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.media.inputs import MediaInputs
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.roles.engines.embedded.slots import Failed, SlotEngine
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.runtime.errors import ConfigError, CorruptData
from tests.models.builders import full_tensors
from tests.roles.engines.engines import gap, prompt_of, qwen3, ragged, request, run


@pytest.fixture(scope="module")
def model() -> Any:
    """Read only: tests that load weights build their own."""
    return qwen3()


def engine_for(model: Any, num_slots: int = 4, max_length: int = 64, **options: Any) -> SlotEngine:
    return slot_engine(model, num_slots=num_slots, max_length=max_length, **options)


def same_sample(one: Completion, other: Completion) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and np.allclose(one.log_probs, other.log_probs, atol=2e-5)


def test_every_request_gets_its_tokens_whatever_the_number_of_slots(model: Any) -> None:
    requests = ragged(17)
    done = run(engine_for(model), requests)
    assert {name: each.tokens.size for name, each in done.items()} == {
        each.id: each.params.max_new_tokens for each in requests
    }
    assert {each.finish_reason for each in done.values()} == {"length"}
    assert all(
        [str(column.dtype) for column in (each.tokens, each.log_probs, each.policy_versions)]
        == ["int32", "float32", "int32"]
        for each in done.values()
    )


def test_a_free_slot_is_filled_at_the_very_next_step(model: Any) -> None:
    engine = engine_for(model, num_slots=2)
    for name, num_new in (("long", 6), ("a", 2), ("b", 2), ("c", 2)):
        engine.add(request(name, 3, num_new))
    ended = [[each.request_id for each in engine.step()] for _ in range(6)]
    assert [sorted(each) for each in ended] == [[], ["a"], [], ["b"], [], ["c", "long"]]
    assert not engine.has_work


def test_a_sample_does_not_depend_on_slot_order_or_company(model: Any) -> None:
    requests = ragged(12)
    together = run(engine_for(model, num_slots=5), requests)
    reversed_order = run(engine_for(model, num_slots=3), requests[::-1])
    for each in requests:
        alone = run(engine_for(model, num_slots=1), [each])[each.id]
        assert same_sample(alone, together[each.id])
        assert same_sample(alone, reversed_order[each.id])


@pytest.mark.parametrize("forward", ["fused", "hf"])
def test_fixed_shapes_make_a_sample_the_same_to_the_bit(model: Any, forward: Any) -> None:
    requests = ragged(9)
    together = run(engine_for(model, num_slots=4, forward=forward, fixed_shapes=True), requests)
    for each in requests[::4]:
        alone = run(engine_for(model, num_slots=4, forward=forward, fixed_shapes=True), [each])[each.id]
        assert alone.log_probs.tobytes() == together[each.id].log_probs.tobytes()
    assert gap(model, requests, together) < 2e-5


def test_samples_of_a_prompt_share_one_prefill(model: Any) -> None:
    group = [request(f"g/{number}", prompt_of(11), 9) for number in range(4)]
    engine = engine_for(model)
    done = run(engine, group)
    assert (engine.stats().prefill_tokens, engine.stats().shared_prompt_tokens) == (11, 33)
    for each in group:
        assert same_sample(done[each.id], run(engine_for(model), [each])[each.id])
    assert len({done[each.id].tokens.tobytes() for each in group}) == 4  # each has its own seed


def test_a_sample_that_comes_later_copies_the_prompt_of_one_in_flight(model: Any) -> None:
    engine = engine_for(model, num_slots=2)
    group = [request(f"g/{number}", prompt_of(7), num_new) for number, num_new in enumerate((12, 3, 5, 4))]
    other = request("other", 5, 6)
    done = run(engine, [*group, other])
    assert engine.stats().prefill_tokens == 7 + 5
    assert gap(model, [*group, other], done) < 2e-5
    for each in group:
        assert same_sample(done[each.id], run(engine_for(model), [each])[each.id])


def test_samples_of_several_prompts_in_flight_each_copy_their_own(model: Any) -> None:
    engine = engine_for(model, num_slots=6)
    first = [request(f"{name}/0", prompt_of(length), 9) for name, length in (("a", 4), ("b", 7), ("c", 5))]
    later = [request(f"{name}/1", prompt_of(length), 9) for name, length in (("c", 5), ("a", 4), ("b", 7))]
    for each in first:
        engine.add(each)
    engine.step()
    done = run(engine, later)
    assert (engine.stats().prefill_tokens, engine.stats().shared_prompt_tokens) == (16, 16)
    assert gap(model, [*first, *later], done) < 2e-5


def test_a_prompt_is_computed_again_once_no_sample_holds_it(model: Any) -> None:
    engine = engine_for(model)
    run(engine, [request("first", 6, 3)])
    again = request("second", 6, 3)
    done = run(engine, [again])
    assert (engine.stats().prefill_tokens, engine.stats().shared_prompt_tokens) == (12, 0)
    assert gap(model, [again], done) < 2e-5


def test_new_prompts_are_bounded_per_step_but_one_always_goes(model: Any) -> None:
    engine = engine_for(model, max_prefill_tokens=10)
    for name, num_prompt in (("a", 14), ("b", 6), ("c", 5), ("d", 2)):
        engine.add(request(name, num_prompt, 9))
    running = []
    for _ in range(4):
        engine.step()
        running.append(engine.stats().num_running)
    assert running == [1, 2, 4, 4]


def test_a_stop_token_ends_a_sample_and_is_its_last(model: Any) -> None:
    free = run(engine_for(model), [request("a", 5, 20)])["a"]
    stop = int(free.tokens[8])
    first = free.tokens.tolist().index(stop)
    stopped = run(engine_for(model), [request("a", 5, 20, stop_token_ids=(95, stop))])["a"]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()


def test_stop_tokens_belong_to_their_own_request(model: Any) -> None:
    everything = tuple(range(97))
    requests = [request("one", 5, 9, stop_token_ids=everything), request("all", 5, 9), request("two", 6, 9)]
    done = run(engine_for(model, num_slots=1), requests)
    assert [done[each.id].tokens.size for each in requests] == [1, 9, 9]


def test_a_cancelled_sample_keeps_what_it_has_and_disturbs_nobody(model: Any) -> None:
    requests = [request(name, num_prompt, 12) for name, num_prompt in (("a", 4), ("b", 9), ("c", 6), ("d", 3))]
    whole = run(engine_for(model), requests)
    engine = engine_for(model, num_slots=3)
    for each in requests:
        engine.add(each)
    for _ in range(5):
        engine.step()
    waiting, running = engine.cancel("d"), engine.cancel("a")
    assert waiting is not None
    assert running is not None
    assert (waiting.tokens.size, waiting.finish_reason) == (0, "cancelled")
    assert (running.tokens.tolist(), running.finish_reason) == (whole["a"].tokens[:5].tolist(), "cancelled")
    assert engine.cancel("a") is None
    rest = run(engine)
    assert sorted(rest) == ["b", "c"]
    assert all(same_sample(rest[name], whole[name]) for name in rest)
    assert (engine.stats().num_completed, engine.stats().num_cancelled) == (2, 2)


def test_weights_flip_between_steps_and_each_token_names_its_version() -> None:
    engine = engine_for(qwen3(0), version=3)
    asked = request("a", 6, 10)
    before = run(engine, [asked])["a"]
    engine.add(asked)
    for _ in range(4):
        engine.step()
    engine.load_weights(7, dict(full_tensors(qwen3(1))))
    flipped = run(engine)["a"]
    assert flipped.policy_versions.tolist() == [3] * 4 + [7] * 6
    assert flipped.tokens[:4].tolist() == before.tokens[:4].tolist()
    assert flipped.tokens.tolist() != before.tokens.tolist()
    after = run(engine, [asked])
    assert gap(qwen3(1), [asked], after) < 2e-5


def test_a_prompt_of_older_weights_is_not_shared() -> None:
    engine = engine_for(qwen3(0))
    engine.add(request("old", 6, 9))
    engine.step()
    engine.load_weights(1, dict(full_tensors(qwen3(1))))
    new = request("new", 6, 9)
    done = run(engine, [new])
    assert engine.stats().shared_prompt_tokens == 0
    assert gap(qwen3(1), [new], done) < 2e-5


def test_tensors_of_another_model_are_refused_and_change_nothing() -> None:
    model = qwen3()
    engine = engine_for(model)
    good = dict(full_tensors(qwen3(1)))
    wrong = good | {"model.norm.weight": torch.zeros(31)}
    del wrong["model.embed_tokens.weight"]
    asked = request("a", 5, 6)
    before = run(engine, [asked])["a"]
    with pytest.raises(ConfigError, match=r"1 missing \(model.embed_tokens.weight\)"):
        engine.load_weights(1, wrong)
    with pytest.raises(ConfigError, match="1 unknown"):
        engine.load_weights(1, good | {"model.extra": torch.zeros(1)})
    assert engine.version == 0
    assert run(engine, [asked])["a"].log_probs.tobytes() == before.log_probs.tobytes()


@pytest.mark.parametrize("forward", ["fused", "hf"])
def test_weights_with_a_nan_fail_every_request_and_leave_no_trace(forward: Any) -> None:
    model = qwen3()
    engine = engine_for(model, forward=forward)
    good = {name: tensor.clone() for name, tensor in full_tensors(model)}
    for version, name in enumerate(("model.norm.weight", "model.layers.0.input_layernorm.weight"), 1):
        engine.load_weights(version, good | {name: torch.full((32,), torch.nan)})
        for each in "abc":
            engine.add(request(each, 30, 30))
        ended = {each.request_id: each for each in engine.step()}
        assert sorted(ended) == ["a", "b", "c"] and not engine.has_work
        failed = ended["a"]
        assert isinstance(failed, Failed) and isinstance(failed.error, CorruptData)
        assert str(failed.error).startswith(
            f"the log-probs of request 'a' under policy version {version} must be finite, got a NaN."
        )
    engine.load_weights(3, good)
    requests = ragged(6)
    assert gap(model, requests, run(engine, requests)) < 2e-5


@pytest.mark.parametrize("forward", ["fused", "hf"])
def test_a_sequence_whose_numbers_go_wrong_ends_alone_and_leaves_no_trace(forward: Any) -> None:
    poison = 13
    sound, model = qwen3(), qwen3()
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    engine = engine_for(model, num_slots=3, forward=forward)
    others = [
        request(name, np.arange(20, 20 + size, dtype=np.int32), 12) for name, size in (("a", 4), ("b", 9), ("c", 40))
    ]
    bad = [request(name, np.array([7, poison, 8] * 10, np.int32), 5) for name in ("x", "y")]
    done = run(engine, [others[0], bad[0], bad[1], *others[1:]])
    assert {name for name, each in done.items() if isinstance(each, Failed)} == {"x", "y"}
    assert not any(poison in done[each.id].tokens for each in others)
    assert gap(sound, others, done) < 2e-5
    assert engine.stats().num_completed == 3


def refused(engine: SlotEngine, asked: Request) -> str:
    with pytest.raises(ConfigError) as caught:
        engine.add(asked)
    return str(caught.value)


def test_requests_that_can_never_run_are_refused_with_the_reason(model: Any) -> None:
    engine = engine_for(model, max_length=20)
    assert refused(engine, request("long", 9, 12)) == (
        "prompt and max_new_tokens of request 'long' must fit into max_length 20, got 9 + 12. "
        "Shorten the prompt, ask for fewer tokens or raise the engine's max_length."
    )
    strange = Request("odd", np.array([1, 97], np.int32), SamplingParams(2), 0)
    assert refused(engine, strange).startswith("the tokens of request 'odd' must be in [0, 97), got 97.")
    seen = dataclasses.replace(request("seen", 2, 2), media=MediaInputs("one", {"pixel_values": np.zeros((4, 12))}))
    assert refused(engine, seen).startswith(
        "the media of request 'seen' must be of kinds that the model takes, none, got image."
    )
    engine.add(request("twice", 2, 2))
    assert refused(engine, request("twice", 3, 2)).startswith("the id of a request must be unique")
    engine.step()
    assert refused(engine, request("twice", 3, 2)).startswith("the id of a request must be unique")
    engine.add(request("fits", 9, 11))
    assert sorted(run(engine)) == ["fits", "twice"]


def test_a_sequence_may_fill_its_slot_to_the_last_position(model: Any) -> None:
    asked = request("a", 9, 11)
    done = run(engine_for(model, num_slots=1, max_length=20), [asked])
    assert gap(model, [asked], done) < 2e-5


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
        ({"num_slots": 3, "fixed_shapes": True}, "num_slots must be at least 4, got 3"),
        ({"max_length": 1}, "max_length must be at least 2, got 1"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be at least 1, got 0"),
    ],
)
def test_an_engine_that_could_not_run_is_refused(model: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        engine_for(model, **options)


def test_stats_are_a_frozen_snapshot_that_adds_up(model: Any) -> None:
    engine = engine_for(model, num_slots=2)
    for name in "abc":
        engine.add(request(name, 4, 3))  # one prompt: the names differ, the lengths do not
    engine.step()
    snapshot = engine.stats()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.tokens_generated) == (2, 1, 2)
    assert (snapshot.decode_steps, snapshot.prefill_tokens, snapshot.shared_prompt_tokens) == (0, 4, 4)
    run(engine)
    assert snapshot.num_running == 2
    last = engine.stats()
    assert (last.num_running, last.num_waiting, last.num_completed, last.tokens_generated) == (0, 0, 3, 9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.version = 1  # type: ignore[misc]


def test_greedy_takes_the_likeliest_token_at_every_position(model: Any) -> None:
    asked = request("a", 8, 12, temperature=0.0)
    tokens = run(engine_for(model), [asked])["a"].tokens
    ids = torch.from_numpy(np.concatenate([asked.prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        likeliest = model(input_ids=ids).logits[0].argmax(-1)
    assert tokens.tolist() == likeliest[7:-1].tolist()
