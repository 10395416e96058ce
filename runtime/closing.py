"""Closing: `with` lets go of what has a `close`, which may be called twice.

class Ledger(Closing):
    def close(self) -> None: ...
"""

from __future__ import annotations

from typing import Self


class Closing:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
