"""Who waits at the coordinator for what, and which events can give it to them.

Owns the waiting and the rule whose question is asked again; not the answers. A question names the topics that its answer depends
on, an event the topics that it can help; an event that is not listed here helps everybody, so that forgetting one costs time
and not a lost wake-up.

    put of a whole group      -> rounds/actor_fwd (its inputs are there), lease/rollout-0 (its holder may have another one)
    put of one sample of it   -> nobody, or whoever waits for room in that ring
    commit                    -> everybody

Questions are asked again on the loop's stack and not by the tasks that wait: a vain one costs a call, and what a put gives to
whoever waits for it is known before the loop turns.

A plan that was made in vain is noted under the topics that could help it (`in_vain`), and not made again before one of them was
woken: of 64 ranks that wait for the same rounds, one finds out.

Invariant: a question is listed in the same turn of the loop in which it found no answer, so no event falls in between; it is
asked once more after every event that can help it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from rondo.comm.bus.journal import Event
from rondo.runtime.errors import NotYet

SLOTS, WEIGHTS, EVALUATIONS = "slots", "weights", "evaluations"
_EVERYBODY, _ANYTHING = "*", "?"


def lease(member: str) -> str:
    """The topic of work for one member: what it may be given, and room in its rings for what it makes of it."""
    return f"lease/{member}"


def rounds(stream: str, step: int | None) -> str:
    """The topic of rounds of a stream, of one step where they are asked for by the step."""
    return f"rounds/{stream}" if step is None else f"rounds/{stream}/{step}"


def helped(event: Event) -> tuple[str, ...]:
    """The topics that an event can help, but for those that the index has news of."""
    match event["event"]:
        case "put" | "ack" | "admit" | "grant" | "hold":
            return ()
        case "proved":
            return lease(event["reader"].partition("/")[0]), SLOTS
        case "let_go":
            return (SLOTS,)
        case "publishing" | "published":
            return (WEIGHTS,)
    return (_EVERYBODY,)


class Wakes:
    """The questions that have no answer yet, on the loop that they wait on."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[_Question, None]] = {}
        self._waiting: dict[_Question, None] = {}
        self._woken: dict[_Question, None] = {}  # to be asked again, in order
        self._asking = False
        self._old: list[_Question] = []  # those that waited at the last `send_back`
        self._vain: dict[str, set[Hashable]] = {}  # topic -> plans that only it, or another of theirs, can help

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, ask: Callable[[], Any], *topics: str) -> Any:
        """What `ask` gives, or raises, when it is not None; asked again after what helps one of the topics, without any, after
        anything."""
        question = _Question(ask)
        topics = topics or (_ANYTHING,)
        self._waiting[question] = None
        for topic in topics:
            self._by_topic.setdefault(topic, {})[question] = None
        try:
            return await question.answer
        finally:
            del self._waiting[question]
            self._woken.pop(question, None)
            for topic in topics:
                waiting = self._by_topic[topic]
                del waiting[question]
                if not waiting:
                    del self._by_topic[topic]

    def in_vain(self, plan: Hashable, *topics: str) -> None:
        """This plan came to nothing, and will until one of the topics is woken."""
        for topic in topics:
            self._vain.setdefault(topic, set()).add(plan)

    def is_vain(self, plan: Hashable, *topics: str) -> bool:
        return not [topic for topic in topics if plan not in self._vain.get(topic, ())]

    def wake(self, topics: Iterable[str]) -> None:
        """Have those asked again that these topics help: by `ask`, which the loop calls too."""
        named = {*topics, _ANYTHING}
        if len(named) == 1:
            return
        if _EVERYBODY in named:
            self.wake_all()
            return
        for topic in named:
            self._vain.pop(topic, None)
            if topic in self._by_topic:
                self._wake(self._by_topic[topic])

    def wake_all(self) -> None:
        self._vain.clear()
        self._wake(self._waiting)

    def send_back(self) -> None:
        """Tell those that waited at the call before this one too that there is nothing yet: they ask again, and who has gone away
        unnoticed does not."""
        for question in self._old:
            question.fail(NotYet("there must be something to answer, got nothing yet. Ask again"))
        self._old = list(self._waiting)

    def _wake(self, questions: dict[_Question, None]) -> None:
        if questions and not self._woken and not self._asking:
            asyncio.get_running_loop().call_soon(self.ask)
        self._woken.update(questions)

    def ask(self, topics: Iterable[str] = ()) -> None:
        """Ask everybody again who was woken, or is by these topics, and who is by the answers of those."""
        self._asking = True
        try:
            self.wake(topics)
            while self._woken:
                question = next(iter(self._woken))
                del self._woken[question]
                question.ask_again()
        finally:
            self._asking = False


class _Question:
    __slots__ = ("_ask", "answer")

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def ask_again(self) -> None:
        if self.answer.done():
            return
        try:
            found = self._ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to whoever asked
            self.fail(error)
            return
        if found is not None:
            self.answer.set_result(found)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
