"""Flink SQL in a process of its own, in the environment that `bench/nexmark/flink.py` makes: it needs what Headwater must not have.

A line of JSON on stdin is a request `{"settings": {…}, "tables": […], "query": …}`: the query goes to a sink that does nothing. The answer
is a line on stdout, `{"ms": …}` with the job's run time as Flink gives it (planning and starting the cluster are not in it), or
`{"error": …}`. With `"collects": true` the answer is `{"rows": […]}`, what the query's changes come to in the end. What the JVM prints goes
to stderr, so that stdout has answers only.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

from pyflink.common import RowKind
from pyflink.table import EnvironmentSettings, Table, TableEnvironment


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Run a query."""
    flink = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for key, value in request["settings"].items():
        flink.get_config().set(key, value)
    for statement in request["tables"]:
        flink.execute_sql(statement)
    result = flink.sql_query(request["query"])
    return {"rows": _rows(result)} if request.get("collects") else {"ms": _ms(flink, result)}


def _ms(flink: TableEnvironment, result: Table) -> int:
    schema = result._j_table.getResolvedSchema()
    kinds = [kind.getLogicalType().copy(True).asSerializableString() for kind in schema.getColumnDataTypes()]
    columns = ", ".join(f"`{name}` {kind}" for name, kind in zip(schema.getColumnNames(), kinds, strict=True))
    flink.execute_sql(f"CREATE TABLE sink ({columns}) WITH ('connector' = 'blackhole')")
    done = result.execute_insert("sink").get_job_client().get_job_execution_result().result()
    return int(done.get_net_runtime())


def _rows(result: Table) -> list[tuple[Any, ...]]:
    rows: Counter[tuple[Any, ...]] = Counter()
    with result.execute().collect() as changes:
        for change in changes:
            rows[tuple(change)] += 1 if change.get_row_kind() in (RowKind.INSERT, RowKind.UPDATE_AFTER) else -1
    return list(rows.elements())


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # before the JVM starts: it gets this stdout
for line in sys.stdin:
    try:
        answer = answer_to(json.loads(line))
    except Exception as error:  # noqa: BLE001 - one query that fails must not take the others with it
        answer = {"error": str(error)}
    print(json.dumps(answer, default=str), file=answers, flush=True)
