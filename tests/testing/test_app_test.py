"""What users test their applications with: crashes as data, functions on rows, and sentences where a test is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater as hw
from headwater.model.errors import InvalidApp, SchemaMismatch, TopicNotFound
from headwater.testing import CRASH, AppTest, Crash, transform

ROOT = Path(__file__).parents[2]


def shout(word):
    """Without hints: Spark would read them."""
    if word == "poison":
        raise ValueError("poisoned")
    return word.upper()


def loud(words: DataFrame) -> DataFrame:
    return words.select("n", F.udf(shout, "string")("word").alias("word"))


def counts(words: DataFrame) -> DataFrame:
    shouted = F.udf(shout, "string")("word")
    return words.groupBy("word").agg(F.count("*").alias("n"), F.max(shouted).alias("loud"))


def make() -> hw.App:
    app = hw.App("words", log="/nowhere/that/can/be/made", master="spark://nowhere:7077")
    words = app.topic("words", schema="n BIGINT, word STRING", key="n", partitions=2)
    app.stream(words, to="loud", key="n")(loud)
    app.sink(loud, to="./warehouse", name="files")
    app.view(words, key="word")(counts)
    return app


def word(n: int, text: str = "a") -> dict[str, Any]:
    return {"n": n, "word": text}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.covers("Trident", backends=["file"])
def test_an_application_is_killed_behind_a_batch_and_goes_on() -> None:
    """Where the script says its log and its Spark are does not count. What fails for good is raised."""
    with AppTest(make) as test:
        test.feed("words", [word(1), word(2, "b"), Crash(after="files"), word(3)])
        assert [row["n"] for row in test.read("words")] in ([1, 2], [2, 1])
        status = test.run()
        assert {stage.name: stage.state for stage in status.stages} == {
            "loud": "done",
            "files": "done",
            "counts": "done",
        }
        # The batch before the crash was not run a second time by the stages that had noted it, and counted once by the one that had not.
        assert {stage.name: stage.events for stage in status.stages}["counts"] == 3
        assert test.rows("counts") == [{"word": "a", "n": 2, "loud": "A"}, {"word": "b", "n": 1, "loud": "B"}]
        assert sorted(row["word"] for row in test.read("loud")) == ["A", "A", "B"]
        found = pq.read_table(test.folder / "warehouse").to_pylist()
        assert sorted(row["n"] for row in found) == [1, 2, 3]
        test.feed("words", [word(4, "poison")])
        with pytest.raises(InvalidApp, match=r"'counts' failed: .*poisoned"):
            test.run()
        folder = test.folder
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.covers("Kafka Streams", "concept: expiry in a stream–stream join", "concept: time-dependence of joins")
@pytest.mark.parametrize(
    ("example", "tests"), [("clickstream", 2), ("click_through", 1), ("tax_rates", 1), ("property_alerts", 1)]
)
def test_the_examples_tests_pass(example: str, tests: int) -> None:
    """As its users run it: beside the script, with a configuration that is not ours."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", f"test_{example}.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    folder = ROOT / "examples" / example
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert f"{tests} passed" in ended.stdout


@pytest.mark.slow
def test_a_function_gets_rows_tables_and_frames(spark: SparkSession) -> None:
    rows = [word(1), word(2)]
    wanted = [{"n": 1, "word": "A"}, {"n": 2, "word": "A"}]
    frame = spark.createDataFrame(rows, "n BIGINT, word STRING")
    for given in (rows, tuple(rows), frame.toArrow(), frame):
        assert sorted(transform(loud, words=given), key=str) == wanted


@pytest.mark.slow
def test_the_pages_program_runs(spark: SparkSession) -> None:
    """What docs/testing.md shows of functions; its application with crashes is the example's."""
    page = (ROOT / "docs" / "testing.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/testing.md", "exec"), {"__name__": "page"})


def test_a_wrong_test_is_told_so() -> None:
    """Before any process is started."""
    with pytest.raises(InvalidApp, match="not an application"), AppTest(lambda: None):  # type: ignore[arg-type,return-value]
        pass
    with pytest.raises(InvalidApp, match="does not exist"), AppTest("nothing.py"):
        pass
    with AppTest(make()) as test:
        with pytest.raises(TopicNotFound, match="nothing"):
            test.feed("nothing", [])
        with pytest.raises(InvalidApp, match="'nobody'"):
            test.feed("words", [Crash(after="nobody")])
        with pytest.raises(SchemaMismatch):
            test.feed("words", [{"other": 1}])
        test.feed("words", [CRASH])
        assert test.folder.exists()
    assert not test.folder.exists()


def test_what_the_application_refuses_is_raised_here() -> None:
    """It was found out in another process."""
    with AppTest(hw.App("empty")) as test, pytest.raises(InvalidApp, match="'empty' has no stages"):
        test.run()
