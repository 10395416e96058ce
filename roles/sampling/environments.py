"""Environments: who answers the policy between its turns, by the settings `rollout.environment`.

An environment is an object of a class of the user's, one a sample. All of its methods are optional, plain or async:

    class Guess:
        def reset(self, label, **row):                 # the row's columns by name; a text is said behind the prompt
            self.number = int(label)

        def step(self, said):                          # what the policy said: a text, or parts of a message with media, answers
                                                       # it; None ends the episode
            guess = int(said)
            return Step("higher" if guess < self.number else "lower", over=guess == self.number, reward=guess == self.number)

        def close(self): ...                           # however the episode ended

An episode whose replica dies, or whose run is stopped, goes on at the next holder of its lease where the environment says how:

        replays = True                                 # the calls it had are made again, and do the same again; or
        def snapshot(self): ...                        # its state, of types that travel, behind each answer
        def restore(self, state): ...                  # in the place of reset and of the calls before

One without `step` has its public methods as tools, as in TRL's `environment_factory`, beside those of the settings. What a tool
raises is said to the policy as its answer. What `get_reward` returns at the end, or the attribute `reward` holds, is what the
sample is worth.

Owns that protocol, the turns between policy and environment, and statistics. Does not own tokens and budgets (`episode.py`) or
tools as such (`tools.py`).

Invariant: no call holds the event loop, an engine's slot or a lease's deadline. A call ends in one of: its answer, an error, its
deadline. An environment that fails, but as a tool, fails its sample alone; it is closed whatever happens. A plain method runs in
a thread, which nobody can end: beyond the deadline it is left alone, with its environment, and stays one of `max_threads`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.scores import too_large
from rondo.roles.sampling import tools
from rondo.roles.sampling.episode import Episode, Turn
from rondo.roles.sampling.mcp_servers import McpServers
from rondo.roles.sampling.media_tools import takes_media
from rondo.roles.sampling.tools import SETTING, Answer, Call, signature_of
from rondo.roles.sampling.workflow import Client, Context, Workflow
from rondo.runtime.errors import DeadlineExceeded
from rondo.runtime.reference import in_one_line, load_reference
from rondo.runtime.values import encode
from rondo.runtime.waits import waiting


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers: something to say (text; with a chat template a message of the user, or its parts with media),
    what the turn was worth, and whether the episode is over."""

    say: str | list[dict[str, Any]] | None = None
    reward: float | None = None
    over: bool = False


@dataclass(frozen=True, slots=True)
class EnvironmentStats:
    """Of one environment, or tool, since the start: its steps, or calls; seconds of all of its methods; which of them raised, and
    which took longer than they may. Of an MCP server, by its name: how often it was started again."""

    steps: int = 0
    seconds: float = 0.0
    errors: int = 0
    timeouts: int = 0
    restarts: int = 0


class EnvironmentFailed(Exception):
    """An environment has failed, and so has its sample."""


_Answered = tuple[list[dict[str, Any]], float | None, bool]
"""What is said to the policy, in messages; what its turn was worth; and whether the episode is over."""


class Environments:
    """The workflow of a run with `rollout.environment`. Opened before it is called; all methods belong to one event loop, on the
    main thread. ConfigError for what the settings name and cannot be loaded."""

    def __init__(self, config: JobConfig, *, load_deadline_s: float) -> None:
        settings = config.rollout.environment
        assert settings is not None
        self._config, self._settings, self._load_deadline_s = config, settings, load_deadline_s
        self._factory = None if settings.factory is None else load_reference(settings.factory, f"{SETTING}.factory")
        named = [(load_reference(each, f"{SETTING}.tools"), each) for each in settings.tools]
        self._tools = {tool.__name__: (tool, reference) for tool, reference in named}
        self._schemas = tools.schemas(config)
        self._servers = McpServers(settings.model_dump()["mcp"], settings.deadline_s)
        self._tools |= {name: (tool, "") for name, tool in self._servers.tools.items()}
        self._name = (settings.factory or "").rpartition(":")[2]
        self._threads = asyncio.Semaphore(settings.max_threads)
        self._began = dict[object, float]()  # when each thread that has a place did
        self._stats = dict[str, list[Any]]()  # by name, in the order of `EnvironmentStats`

    def workflow(self, tokenizer: Any) -> Workflow:
        """These, as the workflow of a policy with this tokenizer. ConfigError for a chat template that cannot show the tools."""
        if self._schemas:
            tools.check_template(tokenizer.chat_template)
        return self

    async def __aenter__(self) -> Environments:
        settings, media = self._settings, self._config.media
        plain = {name: each for name, (tool, each) in self._tools.items() if not inspect.iscoroutinefunction(tool)}
        self._plain = UserFunction(
            "rondo.roles.sampling.tools:open_tools", {"tools": plain, "limits": media and media.limits()}, work="tool",
            source=f"{SETTING}.tools", num_workers=settings.num_workers, deadline_s=settings.deadline_s,
            load_deadline_s=self._load_deadline_s,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._servers)
            stack.push_async_callback(self._plain.close)
            if plain:
                await self._plain.start()
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def stats(self) -> dict[str, EnvironmentStats]:
        """By the name of the class, function or MCP server that is asked."""
        restarts = {name: EnvironmentStats(restarts=number) for name, number in self._servers.restarts().items()}
        return restarts | {name: EnvironmentStats(*each) for name, each in self._stats.items()}

    async def __call__(self, row: Row, client: Client, context: Context) -> None:
        """Makes the samples of a row, each with an environment of its own."""
        await context.each(client, functools.partial(self._play, row, context))

    async def _play(self, row: Row, context: Context, episode: Episode) -> None:
        async with self._environment(context) as environment:
            past = _Past(self, environment, context, episode)
            if (reset := getattr(environment, "reset", None)) is not None:
                columns = await asyncio.to_thread(self._columns, row, reset)
                said = await past.answer(functools.partial(self._call, context, self._name, reset, **columns))
                await self._begin(said, context, episode)
            told = over = False
            while not (over or episode.over):
                turn = await episode.generate()
                if turn.finish_reason != "stop":
                    break
                calls = (
                    tools.calls_of(turn.text, context.tokenizer.chat_template, self._schemas) if self._schemas else []
                )
                if not calls and getattr(environment, "step", None) is None:
                    break  # nobody is asked
                asked = functools.partial(self._answer, environment, context, turn, calls)
                said, reward, over = await past.answer(asked)
                if reward is not None:
                    episode.reward(reward)
                    told = True
                if said and not over:
                    await self._say(context, episode, said)
            await past.restored()
            if episode.num_turns and not told and (reward := await self._reward(environment, context)) is not None:
                episode.reward(_number(reward))

    async def _reward(self, environment: Any, context: Context) -> Any:
        """What an environment says at the end that its sample is worth, None where it does not."""
        if (get_reward := getattr(environment, "get_reward", None)) is not None:
            return await self._call(context, self._name, get_reward)
        reward = getattr(environment, "reward", None)
        return None if callable(reward) else reward

    async def _begin(self, said: Any, context: Context, episode: Episode) -> None:
        """What an environment says at the beginning stands at the end of the prompt, in the same message where that is text."""
        if said is not None and not isinstance(said, str):
            raise EnvironmentFailed(f"reset must return a text or None, got {type(said).__name__}")
        if said and context.chat is None:
            await episode.say(said)
        elif said:
            *before, last = episode.messages
            if last["role"] != "user" or not isinstance(last["content"], str):
                before, last = episode.messages, {"role": "user", "content": ""}
            await episode.new_context([*before, {**last, "content": last["content"] + said}])

    async def _answer(self, environment: Any, context: Context, turn: Turn, calls: list[Call]) -> _Answered:
        """To a turn. What tools answer is a message each."""
        if calls:
            answers = [(call.name, await self._tool(environment, context, call)) for call in calls]
        else:
            found = await self._call(context, self._name, environment.step, turn.text)
            found = Step(over=True) if found is None else found if isinstance(found, Step) else Step(found)
            say = found.say if isinstance(found.say, str | None) else await asyncio.to_thread(tools.parts_of, found.say)
            if say is None and found.say is not None:
                raise EnvironmentFailed(
                    f"step must return a text, parts of a message with media, a Step of these or None, got "
                    f"{type(found.say).__name__}"
                )
            worth = None if found.reward is None else _number(found.reward)
            return [] if say is None else [{"role": "user", "content": say}], worth, found.over
        return [{"role": "tool", "name": name, "content": each.content} for name, each in answers], None, False

    async def _say(self, context: Context, episode: Episode, said: list[dict[str, Any]]) -> None:
        """Messages, or without a chat template a text as it is. Media that are no good fail the sample alone."""
        [(first, *_), has_media] = said, any(not isinstance(each["content"], str) for each in said)
        if context.chat is None and not has_media:
            return await episode.say(first["content"])
        try:
            with context.elsewhere():
                await episode.say(said)
        except RowError as error:
            if has_media:
                raise EnvironmentFailed(str(error)) from error
            raise

    async def _tool(self, environment: Any, context: Context, call: Call) -> Answer:
        names = [each["function"]["name"] for each in self._schemas]
        if not call.name:
            text = " ".join(call.arguments.split())
            return Answer(f"Error: the call {text:.80} could not be read. Write it as shown", failed=True)
        tool, _ = self._tools.get(call.name, (getattr(environment, call.name, None), ""))
        if call.name not in names or tool is None:
            return Answer(f"Error: there is no tool {call.name!r}. There are: {', '.join(names)}", failed=True)
        whose = call.name if call.name in self._tools else self._name
        arguments = tools.arguments_of(call, tool)
        if isinstance(arguments, Answer):
            self._count(whose, errors=1)
            return arguments
        if whose == self._name or inspect.iscoroutinefunction(tool):
            try:
                value = await self._call(context, whose, tool, **arguments)
                return (
                    tools.answered(value) if isinstance(value, str) else await asyncio.to_thread(tools.answered, value)
                )
            except _Raised as error:
                return tools.failed(error.raised)
            except EnvironmentFailed as error:
                if whose == self._name:  # what state it is in, nobody knows
                    raise
                return Answer(f"Error: {error}", failed=True)
        began = time.monotonic()
        with context.elsewhere():
            item: list[Any] = [call.name, arguments]
            if takes_media(tool):
                item.append([[ref.kind, ref.source] for ref in context.originals])
            [outcome] = await self._plain.run([encode(item)])
        answer = Answer(f"Error: {outcome.brief}", True) if outcome.error else Answer(*outcome.value)
        errors = answer.failed and not outcome.timed_out
        self._count(whose, time.monotonic() - began, errors=errors, timeouts=outcome.timed_out)
        return answer

    @asynccontextmanager
    async def _environment(self, context: Context) -> AsyncIterator[Any]:
        """One of a sample, None where there are tools alone; closed at the end."""
        if self._factory is None:
            yield None
            return
        plain = getattr(self._factory, "__init__", None) is object.__init__  # which a thread would take longer to begin
        environment = self._factory() if plain else await self._call(context, self._name, self._factory)
        try:
            yield environment
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                with suppress(EnvironmentFailed):  # it is counted; the sample is what it is
                    await self._call(context, self._name, close)

    async def _call(
        self, context: Context, whose: str, method: Callable[..., Any], /, *args: Any, **keywords: Any
    ) -> Any:
        """A method of an environment, what makes one, or an async tool, counted as `whose`. EnvironmentFailed beyond its
        deadline, and for what it raises (`_Raised`)."""
        limit_s, name = self._settings.deadline_s, getattr(method, "__name__", "")
        what = whose if whose == name else f"{whose}.{name}"
        is_step = method is not self._factory and name not in tools.NO_TOOLS
        call, errors, late = functools.partial(method, *args, **keywords), False, False
        is_async = inspect.iscoroutinefunction(method)
        with context.elsewhere():
            has_place = not is_async and await self._place()
            if not (is_async or has_place or name == "close"):  # which may be what lets the others go
                self._count(whose, steps=is_step, timeouts=True)
                raise EnvironmentFailed(
                    f"{what} must have one of {self._settings.max_threads} threads (environment.max_threads), got none: all are "
                    f"in methods that did not return within {limit_s:g} s. Give what they wait for a deadline of its own"
                )
            began = time.monotonic()
            try:
                async with waiting("environment", peer=what, deadline_s=limit_s):
                    return await (call() if is_async else self._in_thread(call, has_place=has_place))
            except DeadlineExceeded as error:
                late = True
                raise EnvironmentFailed(f"{what} must return within {limit_s:g} s, got no end") from error
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                    raise  # not its own
                errors = True
                raise _Raised(f"{what} failed: {in_one_line(error)}", error) from error
            finally:
                self._count(whose, time.monotonic() - began, steps=is_step, errors=errors, timeouts=late)

    async def _place(self) -> bool:
        """Takes one for a thread, when there is one; False where all are taken by methods beyond their deadline."""
        most, limit_s = self._settings.max_threads, self._settings.deadline_s
        while self._threads.locked():
            now = time.monotonic()
            youngest = max(self._began.values()) if len(self._began) == most else now  # else one is being handed over
            if youngest + limit_s <= now:
                return False
            with suppress(DeadlineExceeded):
                async with waiting("environment thread", peer=self._name, deadline_s=youngest + limit_s - now):
                    return await self._threads.acquire()
        return await self._threads.acquire()

    async def _in_thread(self, call: Callable[[], Any], *, has_place: bool) -> Any:
        """In a thread of its own, which the end of this process does not wait for, and which gives its place back at its end."""
        loop, key = asyncio.get_running_loop(), object()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def tell(value: Any, error: BaseException | None) -> None:
            if has_place:
                del self._began[key]
                self._threads.release()
            if not answer.done():
                answer.set_result((value, error))

        def work() -> None:
            try:
                found: tuple[Any, BaseException | None] = (call(), None)
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                found = (None, error)
            with suppress(RuntimeError):  # nobody waits in a loop that is closed
                loop.call_soon_threadsafe(tell, *found)

        if has_place:
            self._began[key] = time.monotonic()
        try:
            threading.Thread(target=work, name="environment", daemon=True).start()
        except RuntimeError as refused:  # the machine has none left
            tell(None, refused)
        value, error = await answer
        if error is not None:  # one that ends tasks or processes would be taken for ours
            raise error if isinstance(error, Exception) else RuntimeError(in_one_line(error)) from error
        return value

    def _columns(self, row: Row, reset: Callable[..., Any]) -> dict[str, Any]:
        """Of a row, as the user's data name them, those that `reset` has parameters for; what it does to them no sibling sees."""
        function = getattr(reset, "__func__", reset)
        parameters = [*signature_of(function).parameters.values()][function is not reset :]  # without self
        every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        taken = {each.name for each in parameters}
        named = row.named(self._config.data)
        return copy.deepcopy({name: named[name] for name in named if every or name in taken})

    def _count(self, name: str, seconds: float = 0.0, *, steps: int = 1, errors: int = 0, timeouts: int = 0) -> None:
        had = self._stats.setdefault(name, [0, 0.0, 0, 0])
        for at, more in enumerate((steps, seconds, errors, timeouts)):
            had[at] += more


class _Past:
    """What an earlier holder of the lease was answered in an episode, by an environment that is not asked again: one with
    snapshots, or none but tools. Of one that replays nothing is kept but what the policy said, of any other not even that."""

    def __init__(self, asks: Environments, environment: Any, context: Context, episode: Episode) -> None:
        self._asks, self._name, self._environment = asks, asks._name, environment
        self._context, self._episode = context, episode
        self._state = list[Any]()  # the newest that was kept, where the environment is not in it yet
        snapshots = hasattr(environment, "snapshot") and hasattr(environment, "restore")
        self._keeps = (environment is None or snapshots) and context.turns is not None
        if context.turns is not None:
            context.turns.keeps = self._keeps or getattr(environment, "replays", False)

    async def answer(self, asked: Callable[[], Awaitable[Any]]) -> Any:
        """What was answered here before, else what is answered now."""
        if not self._keeps or (turns := self._context.turns) is None:
            return await asked()
        name, place = self._episode.at
        if (kept := turns.answer(place)) is not None:
            found, *self._state = kept
            return found
        await self.restored()
        found, state = await asked(), []
        if self._environment is not None:
            state = [await self._asks._call(self._context, self._name, self._environment.snapshot)]
        turns.add_answer(name, place, [found, *state])
        return found

    async def restored(self) -> None:
        """The environment is in the state of its last answer."""
        if self._state:
            await self._asks._call(self._context, self._name, self._environment.restore, self._state.pop())


class _Raised(EnvironmentFailed):
    """With what the environment's own code raised."""

    def __init__(self, text: str, raised: BaseException) -> None:
        super().__init__(text)
        self.raised = raised


def _number(reward: Any) -> float:
    if not math.isfinite(value := float(reward)):
        raise EnvironmentFailed(f"a reward must be a finite number, got {value}")
    if (problem := too_large(value, "a reward")) is not None:
        raise EnvironmentFailed(problem)
    return value
