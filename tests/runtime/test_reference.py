"""What is said of an error in one line."""

from __future__ import annotations

import pytest

from rondo.roles.sampling.episode import Unseen
from rondo.runtime.reference import in_one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (TimeoutError(), "TimeoutError"),
        (Unseen("media must be shown,\ngot none"), "media must be shown, got none"),
        (Unseen(), "Unseen"),
    ],
)
def test_an_error_is_told_with_its_type_unless_it_is_one_of_ours_that_says_what_is_wrong(
    error: Exception, line: str
) -> None:
    assert in_one_line(error) == line
