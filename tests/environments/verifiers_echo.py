"""Tasks of one turn for `test_verifiers.py`: say the word. The last one cannot be scored."""

import verifiers.v1 as vf

__all__ = ["Echo"]


class Word(vf.TaskData):
    word: str


class Say(vf.Task[Word, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.75)
    async def said(self, task, trace):
        if task.word == "broken":
            raise ValueError("no rubric for this one")
        return float(trace.last_reply == task.word)

    @vf.reward(weight=0.25)
    async def short(self, trace):
        return float(len(trace.last_reply) < 6)


class Echo(vf.Taskset[Say, vf.TasksetConfig]):
    def load(self):
        for word in ("one", "two", "broken"):
            yield Say(Word(prompt=f"Say {word}.", system_prompt="Short.", word=word), self.config.task)
