"""How many rows a data set may lose, and what is said of them."""

from __future__ import annotations

from rondo.roles.data.unusable import UnusableRows


def counted(*errors: str) -> UnusableRows:
    unusable = UnusableRows()
    for error in errors:
        unusable.add(error)
    return unusable


def test_rows_are_refused_beyond_the_share_that_is_allowed_and_not_at_it() -> None:
    one = counted("a.jsonl:7: 'info' must be an object or null, got int. Correct the row")
    assert one.refusal("data", "data.max_bad_rows", 0.01, 100) is None
    assert one.refusal("data", "data.max_bad_rows", 0.01, 99) == (
        "data must have at most 1 % unusable rows, got 1.01 % of 99 rows: 1 as in \"a.jsonl:7: 'info' must be an object or null, "
        'got int. Correct the row". Correct the rows, or raise data.max_bad_rows to have them left out'
    )
    assert counted().refusal("data", "data.max_bad_rows", 0, 9) is None
    assert counted(*[one.first] * 29).refusal("data", "data.max_bad_rows", 0.29, 100) is None


def test_reasons_are_counted_whatever_the_row_and_its_values_and_the_most_frequent_come_first() -> None:
    errors = [f"b.jsonl:{at}: row must be JSON, got b'{at}' (at {at}). Correct it" for at in range(3)]
    errors += [
        f"{at}.parquet row {at} must have the column 'x' that data.prompt names, got '{at}'. Known: a"
        for at in range(5)
    ]
    text = counted(*errors).refusal("data", "data.max_bad_rows", 0, 9)
    assert text is not None
    assert text.partition(": ")[2].startswith("5 as in \"0.parquet row 0 must have the column 'x'")
    assert '; 3 as in "b.jsonl:0: row must be JSON' in text
