"""The part of the check that needs torch, transformers, datasets or the user's code, in a process of its own.

A job of the nursery. Reads a resolved config as JSON in FOLDER/question.json, and whether memory is to be traced where there is
plenty, writes one JSON object to FOLDER/answer.json: the `Report`. Owns no rule about numbers: it reports facts, and `check.py`
judges them.

    Job("rondo.launch.check.child:main", (FOLDER,), environment, log)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rondo.launch.check.data import look_at_data
from rondo.launch.check.estimate import JUDGE, PREFILL, at_most, teaching, traces
from rondo.launch.check.findings import Facts, Report
from rondo.launch.check.genrm import look_at_judge, try_judge, try_scorer
from rondo.launch.check.own import look_at_own
from rondo.launch.check.teachers import look_at_teachers
from rondo.launch.config import RunConfig, unresolve
from rondo.models.config import MeshConfig
from rondo.roles.config.data import NO_REWARD
from rondo.roles.config.genrm import SCORER
from rondo.roles.data.datasets import Row
from rondo.roles.sampling.media_tools import takes_media
from rondo.roles.sampling.tools import SETTING, check_template, with_tools
from rondo.runtime.errors import ConfigError
from rondo.runtime.memory.free import free_memory_bytes
from rondo.runtime.reference import in_one_line, load_reference, uncollected
from rondo.runtime.sandbox.sandbox import use
from rondo.runtime.section import nearest, settings_at

QUESTION = "question.json"
ANSWER = "answer.json"

if TYPE_CHECKING:
    from rondo.launch.check.trace import Tracer
    from rondo.models.families.family import Family

_PLENTY, _FLOAT = 10, 4
_ANSWERS = ("", "1")
"""What the reward function is given as answers to the rows that it is tried on, beside their labels."""


def main() -> None:
    folder = Path(sys.argv[1])
    question = orjson.loads((folder / QUESTION).read_bytes())
    config, report = unresolve(question["config"]), Report()
    if any(group.devices for group in config.role_groups):
        import torch

        report.facts.num_devices = num = torch.cuda.device_count()
        if num:
            report.facts.device_bytes = min(torch.cuda.get_device_properties(i).total_memory for i in range(num))

    use(config.sandbox.settings)
    if config.job == "rl":
        shown = list[RunConfig]()
        report.look(lambda: shown.append(with_tools(config)), "rollout.environment")
        config = shown[0] if shown else config
    rows: list[Row] = []

    def look_at_rows() -> list[Row]:
        tokenizers: list[Any] = []
        report.look(lambda: look_at_model(config, folder / "model", report, tokenizers), "model")
        if config.job == "rl" and config.distillation is not None:
            report.look(lambda: look_at_teachers(config, folder / "teachers", report, tokenizers), "distillation")
        for name, judge in config.judges.items():
            if judge.model is not None:
                look = functools.partial(look_at_judge, config, name, folder / name, report)
                report.look(look, f"{name}.model")
        report.look(lambda: look_at_data(config, report, tokenizers, rows), "data")
        if config.job == "rl":
            report.look(lambda: look_at_turns(config, report, tokenizers, rows), "data.chat_template_args")
        if question["traces"] or not plenty(config, report.facts):
            look_at_memory(config, report)
        return rows

    if config.job == "rl":
        report.look(lambda: look_at_reward(config, report, look_at_rows), "reward.function")
        if config.genrm is not None:
            report.look(lambda: try_judge(config, report, rows), "genrm")
        if config.scorer is not None:
            report.look(lambda: try_scorer(config, report, rows), "scorer")
        report.look(lambda: look_at_workflow(config), "rollout.workflow")
        report.look(lambda: look_at_environment(config, report, rows), "rollout.environment.factory")
        look_at_own(config, report)
    elif config.group_of("rollout") is not None and config.reward.function != NO_REWARD:
        report.look(lambda: look_at_reward(config, report, look_at_rows), "reward.function")
    else:
        look_at_rows()
    (folder / ANSWER).write_bytes(orjson.dumps(report))


def look_at_reward(config: RunConfig, report: Report, look_at_rows: Callable[[], Sequence[Row]]) -> None:
    """The function scores dummy answers to a few rows, in a worker and under a deadline as in the run. What finds the rows is
    called in any case, in a thread, while that worker starts."""
    from rondo.roles.rewards.pool import RewardItem, RewardPool, RewardResult

    reward, rows = config.reward, list[Row]()

    async def scored() -> list[tuple[str, str, RewardResult]]:
        load_s = config.supervision.load_s
        found: list[tuple[str, str, RewardResult]] = []
        looking = asyncio.create_task(asyncio.to_thread(look_at_rows))
        try:
            async with RewardPool(
                reward.function, by=reward.by, args=reward.args, per=reward.per, components=reward.components,
                deadline_s=reward.deadline_s, load_deadline_s=load_s,
            ) as pool:  # fmt: skip
                rows.extend(await looking)
                tried: list[tuple[Row, Sequence[str]]] = [(row, _answers_to(row)) for row in rows]
                if reward.per == "response":
                    tried = [(row, [answer]) for row, answers in tried for answer in answers]
                for row, answers in tried:
                    asked = [
                        RewardItem(
                            each, row.label, row.prompt, row.metadata, turns=[{"role": "assistant", "content": each}],
                            transcript=each, columns=row.columns,
                        )
                        for each in answers
                    ]  # fmt: skip
                    results = await pool.score(asked)
                    places = [f"the answer {answer!r} to {row.name}" for answer in answers]
                    found += [(_scorer_of(row, reward.by), *each) for each in zip(places, results, strict=True)]
                    if results[-1].timed_out:  # others would last as long
                        break
        finally:
            await looking
        return found

    found = asyncio.run(scored())
    if reward.function == NO_REWARD:
        return
    failed = [(where, result) for _, where, result in found if result.score is None]
    works = {scorer for scorer, _, result in found if result.score is not None}
    broken = [(f"{where}{scorer}", result) for scorer, where, result in found if scorer not in works]
    if broken or (found and found[-1][-1].timed_out):
        where, result = failed[-1] if found[-1][-1].timed_out else broken[0]
        if result.timed_out:
            raise ConfigError(f"{result.brief}, at {where}. Raise reward.deadline_s, or see what it waits for")
        if result.brief == result.error:  # a sentence
            raise ConfigError(f"{(result.brief or '').removesuffix('.')}. It was given {where}".replace("?. ", "? "))
        raise ConfigError(f"reward.function must score {where}, got {result.brief}. Correct it")
    if failed:
        where, result = failed[0]
        report.add(
            "note",
            f"reward.function fails for {len(failed)} of {len(found)} dummy answers, and such samples fail in a run; the first, "
            f"{where}: {result.brief}",
        )
    elif found:
        scores = dict.fromkeys(f"{result.score:g}" for _, _, result in found)
        told = f"the reward of {len(found)} dummy answers is {', '.join(scores)}"
        if len(scores) > 1 or all(_answers_to(row) == _ANSWERS for row in rows):
            report.add("ok", told)
        else:
            report.add(
                "note", f"{told}, also where the answer is the label itself. See that a right answer gets another"
            )


def _scorer_of(row: Row, by: str | None) -> str:
    """Return the source of a row and the function that its metadata or columns name, as words behind its name."""
    chosen = None if by is None else row.metadata.get(by, row.columns.get(by))
    return (f" of source {row.source!r}" if row.source else "") + ("" if chosen is None else f" with {by} {chosen!r}")


def look_at_workflow(config: RunConfig) -> None:
    """It can be loaded and called."""
    from rondo.roles.sampling.workflow import open_workflow

    open_workflow(config.rollout.workflow)
    if config.rollout.agent is not None:
        from rondo.roles.sampling.agents import check_command

        check_command(config.rollout.agent)


def look_at_environment(config: RunConfig, report: Report, rows: Sequence[Row]) -> None:
    """An environment is made once, as for each sample, and rows have what its `reset` needs; tools can show media."""
    settings, media = config.rollout.environment, config.media
    tools = [] if settings is None else [load_reference(each, f"{SETTING}.tools") for each in settings.tools]
    if any(map(takes_media, tools)) and (media is None or not media.max_turn_bytes):
        report.add(
            "note", f"{SETTING}.tools look at media, and cannot show any: media.max_turn_bytes is 0. Set it, if they do"
        )
    if settings is None or settings.factory is None:
        return
    factory = load_reference(settings.factory, f"{SETTING}.factory")
    if inspect.iscoroutinefunction(factory):
        return
    made = factory()
    reset, close = getattr(made, "reset", None), getattr(made, "close", None)
    needed = [] if reset is None else [
        each.name
        for each in inspect.signature(reset).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]  # fmt: skip
    if close is not None and not inspect.iscoroutinefunction(close):
        with contextlib.suppress(Exception):  # as in a run
            close()
    for row in rows:
        columns = row.named(config.data)
        if missing := [name for name in needed if name not in columns]:
            raise ConfigError(
                f"{SETTING}.factory must have a `reset` whose parameters are columns of the data, got {missing[0]!r} for "
                f"{row.name}. {nearest(missing[0], [*columns])} Rename it, or give it a default"
            )


def look_at_turns(config: RunConfig, report: Report, tokenizers: Sequence[Any], rows: Sequence[Row]) -> None:
    """What the chat template rewrites of earlier turns, where a sample may have several; with the tools of a row that has any."""
    from rondo.roles.data.chat import Chat, rewrites

    rollout, single = config.rollout, type(config.rollout).model_fields["workflow"].default
    one_turn = rollout.workflow == single and rollout.environment is None and rollout.agent is None
    if one_turn or not config.data.apply_chat_template or not tokenizers:
        return
    if "tools" in config.data.chat_template_args:
        check_template(tokenizers[0].chat_template)
    row = Row("the template", "U", None, {}, tools=next((each.tools for each in rows if each.tools), ()))
    chat = Chat.of(tokenizers[0], row, config.data)
    if chat is not None and (found := rewrites(chat)):
        report.add(
            "note",
            f"the chat template rewrites what came before behind {', and behind '.join(found)}: a turn that follows is a row of "
            f"its own, of which a sample may have {rollout.max_rows} (rollout.max_rows)",
        )


def _answers_to(row: Row) -> tuple[str, ...]:
    """Dummy answers, and the label itself where that is a text or a number."""
    return (*_ANSWERS, str(row.label)) if isinstance(row.label, str | int | float) else _ANSWERS


def look_at_model(config: RunConfig, folder: Path, report: Report, tokenizers: list[Any]) -> None:
    """Its shape without its weights, its tokenizer, and whether parts and media that the settings name are its own."""
    with uncollected():
        import torch

        from rondo.launch.check.shape import shape_of
        from rondo.models.families import family_of
        from rondo.models.load import check_weights, empty_model, load_tokenizer, prepare
        from rondo.models.names import disk_shapes
        from rondo.models.parallel.experts import check_experts
        from rondo.models.value_head import check_scores, give_value_head

    path = prepare(config.model, folder)
    model = empty_model(path)
    report.facts.model_path = path
    if config.job == "reward_model":
        give_value_head(model)
        report.look(lambda: check_scores(model), "model")
    report.look(lambda: check_weights(path, model), "model")
    if config.job == "rl" and config.rollout.sglang is not None and config.rollout.sglang.python is not None:
        from rondo.roles.engines.sglang.model_folder import check_served

        report.look(lambda: check_served(path), "model")
    report.look(lambda: look_at_family(config, report, model), "model")
    report.facts.max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    shapes = disk_shapes(model)
    report.facts.num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    report.facts.num_tensors = len(shapes)
    report.look(lambda: look_at_media(config, path, model.config.model_type, family_of(model)), "media")
    report.look(
        lambda: look_at_frozen(config, report, model), "train.freeze" if config.train.lora is None else "train.lora"
    )
    if config.train.mesh.ep > 1:
        report.look(lambda: check_experts(model, config.train.mesh.ep), "train.mesh.ep")
    report.look(lambda: look_at_routers(config, report, model), "train.router_replay")
    report.facts.shape = shape_of(model)
    if config.critic is not None and (config.critic.lora is not None or config.critic.path is not None):
        report.look(lambda: look_at_critic(config, report, path), "critic")
    needs_template = any(data.apply_chat_template for data in config.named_data().values())
    tokenizers.append(load_tokenizer(path, needs_chat_template=needs_template))
    if config.job == "rl":
        report.look(lambda: look_at_stops(config, path, report, tokenizers[0]), "rollout.stop")


def look_at_memory(config: RunConfig, report: Report) -> None:
    """What processes would hold, traced; a note says what cannot be."""
    if report.facts.model_path is None or report.facts.shape is None:
        return
    from rondo.launch.check.ledger import PARAMETERS
    from rondo.launch.check.trace import Tracer
    from rondo.models.load import DTYPES

    policy = Tracer(config, report.facts.model_path)
    named = config.distillation.named() if config.distillation is not None else {}
    teachers = {teaching(name): (name, teacher.model or config.model) for name, teacher in named.items()}
    for group in config.role_groups:
        for name in traces(config, group):
            if name in report.facts.traced or (name in (JUDGE, SCORER) and name not in report.facts.judge_paths):
                continue  # an error says why
            num_ranks, tracer = 1 if name == PREFILL else group.processes, policy
            try:
                if name == SCORER:
                    tracer, num_ranks = scorer(config, report), num_ranks if group.roles == (SCORER,) else 1
                if name in teachers:
                    teacher, model = teachers[name]
                    if teacher not in report.facts.teacher_paths:  # an error says why
                        continue
                    whole = config.train.model_copy(update={"mesh": MeshConfig()})
                    changed = config.model_copy(update={"model": model, "train": whole})
                    tracer = Tracer(changed, report.facts.teacher_paths[teacher])
                found = tracer.of(name, num_ranks, on_device=bool(group.devices))
                if name in teachers and named[teacher].decay is not None and config.train.lora is None:
                    average = found.parts[PARAMETERS] * _FLOAT // DTYPES[config.train.dtype].itemsize
                    found = replace(found, parts={**found.parts, "average": average})
                report.facts.traced[name] = found
            except Exception as error:  # noqa: BLE001 - code of any family, which may look at values that no fake tensor has
                report.add(
                    "note", f"the memory of {group.name} is not judged: {name} cannot be traced ({in_one_line(error)})"
                )


def scorer(config: RunConfig, report: Report) -> Tracer:
    from rondo.launch.check.trace import Tracer

    judge = config.scorer
    assert judge is not None
    own = {
        "mesh": MeshConfig(),
        "dtype": judge.model.dtype,
        "micro_batch_tokens": judge.max_prompt_tokens,
        "lora": None,
    }
    changed = {"model": judge.model, "train": config.train.model_copy(update=own)}
    return Tracer(config.model_copy(update=changed), report.facts.judge_paths[SCORER], values=True)


def plenty(config: RunConfig, facts: Facts) -> bool:
    """Whether nothing needs a trace: even more than it could take fits many times over."""
    if facts.shape is None:
        return True
    most = at_most(config, facts.shape) + _FLOAT * (facts.teacher_parameters + facts.judge_parameters)
    on_host = sum(group.replicas * group.processes for group in config.role_groups if not group.devices)
    free, _ = free_memory_bytes()
    devices = facts.device_bytes is None or _PLENTY * most <= facts.device_bytes
    return devices and _PLENTY * most * on_host <= free


def look_at_stops(config: RunConfig, path: str, report: Report, tokenizer: Any) -> None:
    """Each can be in a sample, and what ends one is told."""
    from rondo.roles.engines.stops import stops_of

    stops = stops_of(path, tokenizer, config.rollout.stop, config.rollout.max_new_tokens)
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(stops.ids))]
    texts = f", and where it has {' or '.join(map(repr, stops.texts))}" if stops.texts else ""
    if tokens or texts:
        report.add("ok", f"a sample ends at {' or '.join(tokens) or 'no token'}{texts}")
    else:
        report.add(
            "note", "no token ends a sample: each has rollout.max_new_tokens tokens. Set rollout.stop, or eos_token"
        )


def look_at_family(config: RunConfig, report: Report, model: Any) -> None:
    """It trains, and generates on the engine of this run: asked of a small model of the same config, which has weights."""
    from rondo.models.acceptance import accept
    from rondo.models.families import family_of
    from rondo.models.load import attention
    from rondo.models.rotations import check_length, longest_alike
    from rondo.models.shared_prefixes import other_attention, why_apart
    from rondo.models.stand_in import stand_in
    from rondo.models.trials import Failed
    from rondo.roles.engines.embedded.hf_forward import check_generation

    rollout, name = config.rollout, type(model).__name__
    check_length(name, longest_alike(model), rollout.max_prompt_tokens + rollout.max_new_tokens)
    small = stand_in(model.config, attention(config.model.attn))
    if small is None and family_of(model) is not None:  # families with media are known
        look_at_attention(config, report, name, other_attention(model))
        return
    try:
        if small is None:
            raise Failed("transformers builds none")
        way = accept(small)
    except Failed as error:
        report.add("note", f"no small {name} could be tried ({error}): whether it trains is seen when the run starts")
        return
    if config.job == "rl" and rollout.sglang is None:
        check_generation(small)
    look_at_attention(config, report, name, why_apart(small))
    if not way.share_prefixes:
        how = "rows that several samples share" if way.share_rows else "a row of its own, as long as the longest"
        report.add("note", f"{name} computes a prompt for each of its samples again, in {how}")


def look_at_attention(config: RunConfig, report: Report, model_name: str, apart: str) -> None:
    """What the actor will attend with, as far as it is known here. `apart`: why the model takes no flat batches, "" where it
    does."""
    from rondo.models.attention import candidates, not_for
    from rondo.models.kernels import KERNELS

    actor = config.group_of("actor")
    assert actor is not None
    found = candidates(config.model.attn, "cuda" if actor.devices else "cpu", config.train.dtype)
    takes = [choice for choice in found if not apart or choice.name not in KERNELS]
    if not takes:
        raise ConfigError(not_for(config.model.attn, model_name, apart))
    report.add("ok", f"attention is {takes[0].name}: {takes[0].why}. Each process proves it when it opens the model")


def look_at_routers(config: RunConfig, report: Report, model: Any) -> None:
    """It has the experts, and routers as they are needed, that the settings speak of."""
    from rondo.models.routing import Routing, routers_of
    from rondo.roles.training.balance import look_at

    if not look_at(model, config.train) or config.train.router_replay == "off":
        return
    routing = Routing.of(model)
    assert routing is not None
    report.add(
        "ok",
        f"{len(routers_of(model))} layers send each token to {routing.top_k} of {routing.num_experts} experts: "
        f"{routing.token_bytes} bytes a token to record",
    )


def look_at_critic(config: RunConfig, report: Report, path: str) -> None:
    """Check that its weights, if they are not the policy's, and the targets of its adapters are its model's own."""
    from rondo.models.load import check_weights, empty_model
    from rondo.models.lora import adapt
    from rondo.models.names import adapter_tensors
    from rondo.models.value_head import give_value_head

    critic = config.critic
    assert critic is not None and report.facts.shape is not None
    model = empty_model(critic.path or path)
    give_value_head(model, whole=True)
    if critic.path is not None:
        check_weights(critic.path, model)
    if critic.lora is None:
        return
    try:
        adapt(model, critic.lora)
    except ConfigError as error:
        raise ConfigError(settings_at("critic.lora", str(error), critic.lora.place)) from error
    trained = sum(tensor.numel() for tensor in adapter_tensors(model).values())
    report.facts.shape = replace(report.facts.shape, critic_adapters=trained)
    report.add("ok", f"{trained:,} parameters of the critic are trained, in its adapters and its head")


def look_at_frozen(config: RunConfig, report: Report, model: Any) -> None:
    """Parts, patterns and targets are the model's own, and leave something to train."""
    from rondo.models.lora import adapt, published_adapter
    from rondo.models.names import disk_shapes
    from rondo.models.parts import freeze

    train = config.train
    if train.lora is not None:
        adapt(model, train.lora)
        adapters = published_adapter(model).values()
        if config.adapts_engines and config.rollout.sglang is not None:
            from rondo.roles.engines.sglang.adapter_folder import check_media, completed

            if config.media is not None:
                check_media(model.config.model_type)
            completed(published_adapter(model), disk_shapes(model))
        trained = sum(tensor.numel() for tensor in adapters)
        report.add(
            "ok", f"{trained:,} parameters are trained, in adapters of {len(adapters) // 2} products; the model's stay"
        )
        return
    names = freeze(
        model, train.freeze, freeze_parameters=train.freeze_parameters, train_parameters=train.train_parameters
    )
    if train.freeze or train.freeze_parameters or train.train_parameters:
        trained = sum(model.get_parameter(name).numel() for name in names)
        report.add("ok", f"{trained:,} parameters are trained, the others stay as they are")


def look_at_media(config: RunConfig, path: str, model_type: str, family: Family | None) -> None:
    """The settings of media name what the model takes."""
    takes: tuple[str, ...] = () if family is None else family.modalities
    model = f"the model of type {model_type!r} at {path}"
    for name, data in config.named_data().items():
        beyond = [kind for kind in data.media_columns if kind not in takes]
        if beyond:
            raise ConfigError(
                f"{name}.media_columns must name media that the model takes, {', '.join(takes) or 'which is of text alone'}, "
                f"got {', '.join(beyond)} with {model}. Remove them, or set model.path to another model"
            )
        if data.use_audio_in_video is not None and "audio" not in takes:
            raise ConfigError(
                f"{name}.use_audio_in_video must be left out for a model without audio, got {data.use_audio_in_video!r} with "
                f"{model}. Remove it, or set model.path to another model"
            )
    if config.media is not None and not takes:
        raise ConfigError(
            f"media must be left out for a model of text, got it with {model}. Remove it, or set model.path to another model"
        )
    if family is None and config.train.encoders != "replicate":
        raise ConfigError(
            f"train.encoders must be left out for a model without encoders, got {config.train.encoders!r} with {model}. "
            "Remove it"
        )
