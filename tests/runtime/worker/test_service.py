"""What the process of a service does beside its work."""

from __future__ import annotations

import gc
from collections.abc import Callable

from rondo.runtime.worker.service import walk_all_seldom


def walks(settle: Callable[[], None]) -> int:
    """How often the garbage collector walks everything while many small things come and stay."""
    before, seen = gc.get_threshold(), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(1)

    gc.freeze()
    gc.collect()  # what tests before held, frozen now, counts no more: a full walk waits for a quarter of what it saw last
    settle()
    gc.callbacks.append(note)
    try:
        held = [[number] for number in range(200_000)]
        return len(seen) if held else 0
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_all_that_a_service_holds_is_not_walked_again_and_again_as_it_grows() -> None:
    assert gc.isenabled() and walks(lambda: None) > 1
    assert walks(walk_all_seldom) == 0
