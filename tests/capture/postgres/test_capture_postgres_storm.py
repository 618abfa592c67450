"""PostgreSQL captured while clients write, the capture is killed and the server restarted: the log's tables equal the database's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.capture.postgres_storm import PostgresStorm


@pytest.mark.slow
@pytest.mark.covers("Bottled Water")
@pytest.mark.covers("Debezium")
@pytest.mark.service("postgres")
def test_the_log_equals_the_database_after_a_storm(tmp_path: Path) -> None:
    """10,000 changes by 8 clients during the backfill and after it; 6 kills, one of the server."""
    PostgresStorm().rage(tmp_path, seed=7, changes=10_000, kills=6)


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.service("postgres")
@pytest.mark.parametrize("seed", range(3))
def test_the_log_equals_the_database_after_a_long_storm(tmp_path: Path, seed: int) -> None:
    """100,000 changes, 20 kills."""
    PostgresStorm().rage(tmp_path, seed=100 + seed, changes=100_000, kills=20)
