"""The workflow of a run that names no other: each sample is one answer to the prompt."""

from __future__ import annotations

from rondo.roles.data.datasets import Row
from rondo.roles.sampling.episode import Episode
from rondo.roles.sampling.workflow import Client, Context


async def single_turn(row: Row, client: Client, context: Context) -> None:
    """One answer a sample, all at once."""
    await context.each(client, Episode.generate)
