"""Columnar reading: what Python has read is given to Spark in columns, as Arrow has them, and not row by row.

Spark takes Parquet in columns. What a data source in Python gives it takes apart into rows first, writes each of them down twice and
counts every hundred: half of what Java does where a query only reads. The batches are columns when they arrive. So in the Java process
that we start, streams of our source are planned by `HeadwaterColumns.java`, compiled by Janino, which Spark has for the code that it
generates: the same workers, the same rows, taken as columns. Where some part of that is missing, or tasks run in other processes
than this program's, everything stays as Spark has it, and is slower.
"""

from __future__ import annotations

import logging
from importlib import resources
from typing import Any

from pyspark.sql import SparkSession

_NAME = "HeadwaterColumns"
_say = logging.getLogger("headwater.processing")


def read_in_columns(spark: SparkSession) -> None:
    """Lets Spark take the batches of our streams in columns from now on."""
    jvm = spark._jvm
    assert jvm is not None
    try:
        planner = spark._jsparkSession.experimental()
        found = list(jvm.scala.jdk.javaapi.CollectionConverters.asJava(planner.extraStrategies()))
        if all(each.getClass().getName() != _NAME for each in found):
            strategies = jvm.java.util.ArrayList()
            for each in [*found, _strategy(jvm)]:
                strategies.add(each)
            getattr(planner, "extraStrategies_$eq")(
                jvm.scala.jdk.javaapi.CollectionConverters.asScala(strategies).toSeq()
            )
    except Exception as error:  # noqa: BLE001 - the bridge to Java has errors of its own, and all of them mean no
        _say.debug("Spark takes what Python has read row by row: %s", error)


def _strategy(jvm: Any) -> Any:
    """How our streams are planned; defined once in a Java process, where all that run tasks in it find it."""
    loader = jvm.java.lang.Class.forName("org.apache.spark.sql.SparkSession").getClassLoader()
    try:
        return loader.loadClass(_NAME).newInstance()
    except Exception:  # noqa: BLE001 - Java's word for a class that is not there yet
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(loader)
        compiler.cook(_source())
        own = compiler.getClassLoader().loadClass(_NAME).newInstance()
        return own.definedIn(loader, compiler.getBytecodes())


def _source() -> str:
    return (resources.files("headwater.processing.spark") / f"{_NAME}.java").read_text()
