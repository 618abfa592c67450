"""The listener: which queries of a session have done something, in one question to the JVM for all of them.

Asking each query for its progress, several times a second, takes more of a processor than an application that has nothing to do may
take in all. Spark tells its listeners of every batch and of every end; ours notes the queries in the JVM. It is compiled as
`HeadwaterColumns.java` is (see `columnar`). Where it cannot be, every query counts as one that has done something.

Spark drops what it would tell when too much is queued. So whoever uses this looks at all queries now and then as well.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib import resources
from typing import Any

from pyspark.sql import SparkSession

_NAME = "HeadwaterListener"
_say = logging.getLogger("headwater.processing")


class Listener:
    """Listens to the queries of one session from now on."""

    def __init__(self, spark: SparkSession) -> None:
        self._streams: Any = spark._jsparkSession.streams()
        self._noting: Any = None
        try:
            noting = _compiled(spark._jvm)
            self._streams.addListener(noting)
            self._noting = noting
        except Exception as error:  # noqa: BLE001 - the bridge to Java has errors of its own, and all of them mean no
            _say.debug("Every query is asked for its progress: %s", error)

    def changed(self) -> set[str] | None:
        """The ids of queries that have done something since the last call; None where that is not known."""
        return None if self._noting is None else set(self._noting.take().split())

    def close(self) -> None:
        """Listens no more."""
        noting, self._noting = self._noting, None
        with suppress(Exception):  # a JVM that is gone has no listeners
            if noting is not None:
                self._streams.removeListener(noting)


def _compiled(jvm: Any) -> Any:
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(jvm.java.lang.Class.forName("org.apache.spark.sql.SparkSession").getClassLoader())
    compiler.cook((resources.files("headwater.processing.spark") / f"{_NAME}.java").read_text())
    return compiler.getClassLoader().loadClass(_NAME).newInstance()
