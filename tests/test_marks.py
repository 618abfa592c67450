"""The covers mark: a name that is no row stops the run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def inner_run(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    covers(name): row\n")


def test_a_mark_that_names_a_row_is_accepted(pytester: pytest.Pytester) -> None:
    """Systems go by their name, concepts by the prefix `concept: `."""
    pytester.makepyfile("""
        import pytest

        @pytest.mark.covers("Kafka")
        @pytest.mark.covers("concept: replay")
        def test_it(): pass
    """)
    pytester.runpytest("-p", "tests.rigs.marks").assert_outcomes(passed=1)


def test_a_mark_that_names_no_row_stops_the_run(pytester: pytest.Pytester) -> None:
    """A misspelt row would leave the matrix open without a word."""
    pytester.makepyfile("""
        import pytest

        @pytest.mark.covers("Kafak")
        def test_it(): pass
    """)
    result = pytester.runpytest("-p", "tests.rigs.marks")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no such row in docs/coverage.md*test_it covers 'Kafak'*"])
