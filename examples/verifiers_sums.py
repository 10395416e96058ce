"""The agent of `external_agent.py` as an environment of `verifiers`: three digits are added in two turns of a model.

row {"numbers": "1 3 2"}    "1+3" -> "4"    then, in the same conversation, "4+2" -> "6"

Invariant: it knows of no training. `verifiers_driver.py` plays it for a run; verifiers' own `eval` measures any model with it.
"""

import verifiers.v1 as vf

__all__ = ["Sums", "SumsEnv"]


class SumsData(vf.TaskData):
    numbers: str


class Sum(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace):
        """Half for each answer that is right, and sure."""
        a, b, c = map(int, task.numbers.split())
        said = [message.content for message in trace.assistant_messages]
        return sum(text == str(number) for text, number in zip(said, (a + b, a + b + c), strict=False)) / 2


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(1000):
            digits = " ".join(str(number // unit % 10) for unit in (100, 10, 1))
            yield Sum(SumsData(numbers=digits), self.config.task)


class SumsEnvConfig(vf.EnvConfig):
    adder: vf.AgentConfig = vf.AgentConfig()


class SumsEnv(vf.Env[SumsEnvConfig]):
    async def run(self, task, agents):
        a, b, c = task.data.numbers.split()
        async with agents.adder.interaction(task) as talk:
            first = await talk.turn(f"{a}+{b}")
            if not first.terminated:
                await talk.turn(f"{first.last_reply.rstrip('?')[:2]}+{c}")
