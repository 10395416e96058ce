"""A task of inspect for `test_inspect.py`: small sums, and a tool that the model may call."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int):
        """Adds two numbers.

        Args:
            a: the first
            b: the second
        """
        return str(a + b)

    return execute


@task
def sums(tools=True):
    rows = [Sample(input=f"{a}+{b}", target=str(a + b)) for a in (1, 2, 3) for b in (1, 2, 3)]
    return Task(dataset=rows, solver=[use_tools(add() if tools else []), generate()], scorer=exact())
