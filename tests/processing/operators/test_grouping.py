"""Which values of a column differ, and which rows have them; however far the values are apart."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest

from headwater.processing.operators.grouping import Groups, distinct

COLUMNS = {
    "near": (pa.int64(), range(-5, 40)),
    "with gaps": (pa.int64(), range(-500, 500, 7)),
    "far": (pa.int64(), (-(2**63), 0, 2**63 - 1, 17)),
    "one": (pa.int64(), (2**63 - 1,)),
    "narrow": (pa.int16(), (1, 2, -3)),
    "texts": (pa.string(), ("", "a", "ab")),
    "with null": (pa.int64(), (None, 1, 2)),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_each_row_has_its_value_among_those_that_differ(kind: str) -> None:
    """No value is there twice, and none that no row has."""
    type_, some = COLUMNS[kind]
    random = Random(3)
    rows = [random.choice(list(some)) for _ in range(400)]
    if None not in rows:
        values, code = distinct(pa.array(rows, type_))
        told = values.to_pylist()
        assert sorted(told) == sorted(set(rows))
        assert [told[number] for number in code.tolist()] == rows
    groups = Groups.of([pa.chunked_array([pa.array(rows, type_)])], len(rows))
    assert [rows[groups.one[number]] for number in groups.row.tolist()] == rows and len(groups) == len(set(rows))


def test_no_rows_have_no_values() -> None:
    values, code = distinct(pa.array([], pa.int64()))
    assert not len(values) and not len(code)
