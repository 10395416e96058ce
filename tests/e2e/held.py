"""A rollout in which new weights find samples in flight, however fast its trainer is: those of later steps have a token and no
end until the first step, which has all that it needs, has made its version."""

from __future__ import annotations

import time
from typing import Any

from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.replica import Replica
from rondo.roles.rollout import RolloutRole


class HeldReplica(Replica):
    def _build(self, num_slots: int, **options: Any) -> SlotEngine:
        slots = super()._build(num_slots, **options)
        step, num_first = slots.step, self._job.config.rollout.prompts_per_step

        def held() -> Any:
            if slots.version == 0 and (tokens := slots.progress()) and min(tokens.values()) > 0:
                groups = [int(name.partition(".")[0]) for name in (*tokens, *slots._waiting._line_of)]
                if min(groups) >= num_first:
                    time.sleep(0.005)
                    return []
            return step()

        slots.step = held  # type: ignore[method-assign]
        return slots


class HeldRollout(RolloutRole):
    open_replica = HeldReplica
