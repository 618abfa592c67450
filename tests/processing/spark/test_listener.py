"""The listener: one question says which queries have done something."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headwater.processing.spark import listener
from headwater.processing.spark.listener import Listener

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLD_S_MAX = 120.0


def test_a_query_that_has_done_something_is_named_once(spark: SparkSession, tmp_path: Path) -> None:
    """Its batches and its end count. What was said is not said again."""
    with closing(Listener(spark)) as heard:
        assert heard.changed() == set()
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "lines").write_text("one\n")
        lines = spark.readStream.text(str(tmp_path / "in")).writeStream.format("noop").trigger(availableNow=True)
        query = lines.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.awaitTermination()
        found: set[str] = set()
        deadline = time.monotonic() + TOLD_S_MAX
        while str(query.id) not in found and time.monotonic() < deadline:
            found |= heard.changed() or set()
        assert found == {str(query.id)}
        spark._jsparkSession.sparkContext().listenerBus().waitUntilEmpty()  # type: ignore[attr-defined]
        heard.changed()
        assert heard.changed() == set()


def test_where_nobody_can_listen_every_query_may_have_done_something(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Spark that lacks some part of it still works."""

    def compiled(jvm: Any) -> Any:
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(listener, "_compiled", compiled)
    with closing(Listener(spark)) as heard:
        assert heard.changed() is None
