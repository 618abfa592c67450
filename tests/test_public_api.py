"""The public API: the names that users type and the arguments they pass, as they stay."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import headwater as hw
from headwater import testing
from headwater.log.port.topic import TopicSettings
from headwater.model import errors

_ROOT = Path(__file__).parent.parent

NAMES = [
    "App", "AppStatus", "Capture", "Change", "Consumer", "DebeziumExport", "Durability", "Duration", "Event", "HeadwaterError", "Lease",
    "Log", "Marker", "Overload", "Position", "Producer", "Queue", "Reader", "Receipt", "Stage", "Subscription", "Table", "Topic",
    "TopicNode", "TopicSettings", "Transaction", "VerifyReport", "View", "ViewMaintainer", "captures", "dedupe", "define_view", "detect",
    "errors", "load_app", "lookup", "make_session", "open_log", "open_view", "open_view_store", "operators", "our_error_in", "percolate",
    "plan_view", "register", "remove_capture", "restore_log", "sliding", "step", "stop_session", "top_n", "totals", "true_time",
    "verify_copy", "why", "windowed",
]  # fmt: skip

OPERATOR_NAMES = [
    "H1", "H2", "Combining", "Input", "Keys", "Operator", "State", "StateTable", "TableSpec", "Time", "operate", "to_arrow", "to_spark",
]  # fmt: skip

TESTING_NAMES = [
    "CRASH", "AppTest", "CouchServer", "Crash", "Crashed", "CrashingDisk", "Fault", "KafkaCluster", "KafkaServer", "MariaDbServer",
    "MongoServer", "NatsServer", "OpenSearchServer", "PostgresServer", "RabbitMqServer", "RandomCrashDisk", "RecordingDisk",
    "RedisServer", "S3Server", "SimDisk", "SimProcess", "SlowSyncDisk", "SparkCluster", "WouldDeadlock", "transform",
]  # fmt: skip

FUNCTIONS: dict[str, str] = {
    "captures": "(log)",
    "dedupe": "(df, on, *, within='0 seconds', at=None, uid=None)",
    "define_view": "(name, schema, *, key=(), mode='update', order=(), limit=None, code=None)",
    "load_app": "(script)",
    "lookup": "(events, table, on, *, at=None, table_at=None, how='left', ties='table', uid=None)",
    "make_session": "(name, master=None, conf=None, *, log=None, said=None)",
    "open_log": "(url, *, durability='fsync', create=True, read_only=False, disk=None, clock=system_clock)",
    "open_view": "(url, name, *, log=None)",
    "open_view_store": "(url, *, read_only=False)",
    "our_error_in": "(error)",
    "percolate": "(documents, searches, text, *, at=None, searches_at=None, ties='table', language=None, places=None, "
    "highlights=False, uid=None)",
    "plan_view": "(log, definition)",
    "register": "(spark)",
    "remove_capture": "(log, name, *, url=None, topics=False, forget=False)",
    "restore_log": "(backup, to, *, disk=None, clock=system_clock, on_progress=None)",
    "detect": "(events, pattern=None, *, key=(), at=None, within=None, steps=(), rules=None, rules_at=None, ties='table', timeouts=False, "
    "rows_max=100000, uid=None, **measures)",
    "step": "(name, condition=None, *, times=1, absent=False)",
    "sliding": "(df, by, *, over, at=None, uid=None, **wanted)",
    "stop_session": "(spark)",
    "top_n": "(df, n, *, by=None, order, key=None, over=None, every=None, ties=False, at=None, uid=None)",
    "totals": "(df, by, *, key=None, at=None, uid=None, **wanted)",
    "true_time": "(occurred, sent, received)",
    "verify_copy": "(source, target, *, key=(), columns=(), stage=None, settle_s=10.0, repair=False)",
    "why": "(query, document, *, text=None, language=None, places=None)",
    "windowed": "(df, by=None, *, over=None, every=None, gap=None, at=None, uid=None, **wanted)",
}

SIGNATURES: dict[str, dict[str, str]] = {
    "App": {
        "": "(self, name, *, log='./data', spark=None, master=None, conf=None, state=None, state_partitions=4, views=None, "
        "idle='30 seconds')",
        "functions": "property",
        "graph": "property",
        "log_url": "property",
        "moved": "(self, log, *, master, conf=None)",
        "name": "property",
        "operators_url": "property",
        "plan": "(self)",
        "run": "(self, *, available_now=False, accept_new_checkpoint=None, rebuild_state=None, watch=None, check=True)",
        "sink": "(self, source, *, to, key=None, name=None, trigger=None, events_max=None, partition_by=(), transactions=False)",
        "start": "(self, *, accept_new_checkpoint=None, rebuild_state=None)",
        "status": "(self)",
        "stop": "(self)",
        "stream": "(self, *inputs, to=None, key=None, mode='append', trigger=None, late=None, corrections='0 seconds', "
        "log_columns=(), events_max=None, **settings: TopicSettings)",
        "table": "(self, name, schema=None, *, key=None, source=None, **settings: TopicSettings)",
        "topic": "(self, name, schema=None, *, key=None, **settings: TopicSettings)",
        "use": "(self, *, master=None, conf=None)",
        "view": "(self, *inputs, key=(), mode='update', order=None, limit=None, trigger=None, late=None, "
        "corrections='0 seconds', log_columns=(), events_max=None, name=None)",
    },
    "Capture": {
        "": "(self, log, source, *, tables=(), name=None, key=None, prefix='', names=None, partitions=4, retention='7 days', "
        "heartbeat_s=10.0, backfill_again=False)",
        "catch_up": "(self)",
        "close": "(self)",
        "open": "(self)",
        "run": "(self, stop)",
        "status": "(self)",
        "step": "(self, *, timeout_s=0.2)",
    },
    "DebeziumExport": {
        "": "(self, log, history, *, to, topic, key=(), partitions=1, schemas=True, tombstones=True)",
        "catch_up": "(self)",
        "open": "(self)",
        "run": "(self, stop)",
        "step": "(self)",
    },
    "ViewMaintainer": {
        "": "(self, log, store, definition, *, app='views', stage=None, compact=False, durability=None)",
        "maintain": "(self, rows, marker)",
        "swap": "(self)",
    },
    "Stage": {
        "accept_new_checkpoint": "(self)",
        "commit": "(self, marker, appends=())",
        "commit_writes": "(self, marker, writes)",
        "last": "property",
        "positions": "property",
    },
    "View": {
        "close": "(self)",
        "definition": "property",
        "get": "(self, **key)",
        "rows": "(self, where=None, *, as_of=None, order=None, limit=None, timeout_s=10.0)",
        "sql": "(self, query, *, as_of=None, timeout_s=10.0, rows_max=100000)",
        "subscribe": "(self, since=None, *, order=None, limit=None, heartbeat_s=None)",
    },
    "Subscription": {
        "close": "(self)",
        "poll": "(self, *, changes_max=500, timeout_s=1.0)",
        "poll_async": "(self, *, changes_max=500, timeout_s=1.0)",
    },
    "Log": {
        "acked_floor": "(self, topic)",
        "adopt_topic": "(self, name, schema, *, key=None, time=None, lateness='0 seconds', future_max='1 day')",
        "alter_topic": "(self, name, *, schema=UNSET, lateness=UNSET, future_max=UNSET, event_bytes_max=UNSET, "
        "retention=UNSET, retention_bytes=UNSET, compact=UNSET, tombstones=UNSET, "
        "bytes_max=UNSET, overload=UNSET, archive=UNSET, partitions=UNSET, retain=UNSET, buffer_bytes=UNSET)",
        "append": "(self, topic, rows, *, atomic=False)",
        "appender": "property",
        "backup": "(self, to, *, on_progress=None)",
        "clock": "property",
        "close": "(self)",
        "consumer": "(self, topics=None, *, group, pattern=None, start='earliest', commit='auto', poll_interval_s_max=300.0, "
        "missed='raise', columns=None)",
        "counters": "(self)",
        "create_topic": "(self, name, schema=None, *, key=None, time=None, lateness='0 seconds', future_max='1 day', "
        "partitions=4, durability=None, segment_bytes=67108864, event_bytes_max=8388608, retention=None, retention_bytes=None, "
        "compact=False, tombstones='1 day', bytes_max=None, overload='block', archive=None, retain='all', buffer_bytes=67108864, "
        "exist_ok=False)",
        "delete_group": "(self, name)",
        "delete_queue": "(self, topic, *, group='default')",
        "delete_topic": "(self, name)",
        "mirror": "(self, to, *, topics=None, pattern=None, follow=False, stop=None, on_progress=None)",
        "group": "(self, name)",
        "groups": "(self)",
        "heartbeat": "(self, topic, time, *, idle='0 seconds')",
        "reached": "(self, topic)",
        "offsets": "(self, topic)",
        "offsets_at": "(self, topic, time, *, by='time')",
        "producer": "(self, *, id=None, linger_ms=20.0, retry_s=30.0)",
        "queue": "(self, topic, *, group='default', lease_s=30.0, deliveries_max=5, order='none', credit=None, "
        "duplicates_s=None, dead=None, where=None)",
        "read": "(self, topic, *, start='earliest', end='latest', columns=None)",
        "reader": "(self, topic, *, start='earliest', columns=None, missed='raise')",
        "request": "(self, topic, value=None, *, key=None, timeout_s=30.0, reply_topic=None, headers=None)",
        "reset_group": "(self, name, *, to)",
        "scan": "(self, topic, *, start='earliest', end='latest', columns=None)",
        "seal": "(self, topic)",
        "snapshot": "(self, topic, *, follow=None)",
        "stage": "(self, name)",
        "stages": "(self)",
        "store": "property",
        "table": "(self, topic, *, as_of=None)",
        "tidy": "(self, topic)",
        "topic": "(self, name)",
        "topics": "(self)",
        "transaction": "(self)",
        "url": "property",
    },
    "Transaction": {
        "ack": "(self, leases)",
        "append": "(self, topic, rows)",
        "commit": "(self)",
        "commit_offsets": "(self, consumer)",
    },
    "Consumer": {
        "assignment": "(self)",
        "close": "(self, *, commit=True)",
        "commit": "(self)",
        "commit_async": "(self)",
        "committed": "(self)",
        "lag": "(self)",
        "missed": "property",
        "pause": "(self, partitions)",
        "poll": "(self, *, events_max=500, timeout_s=1.0)",
        "poll_arrow": "(self, *, events_max=1000000, timeout_s=1.0)",
        "poll_arrow_async": "(self, *, events_max=1000000, timeout_s=1.0)",
        "poll_async": "(self, *, events_max=500, timeout_s=1.0)",
        "positions": "(self)",
        "resume": "(self, partitions=None)",
        "seek": "(self, to)",
    },
    "Producer": {
        "close": "(self)",
        "flush": "(self, *, timeout_s=None)",
        "flush_async": "(self, *, timeout_s=None)",
        "send": "(self, topic, value=None, *, key=None, headers=None, sequence=None)",
        "send_async": "(self, topic, value=None, **more)",
    },
    "Queue": {
        "ack": "(self, leases)",
        "ack_async": "(self, leases)",
        "browse": "(self, *, events_max=100)",
        "close": "(self)",
        "counters": "(self)",
        "dead": "(self, *, events_max=100)",
        "defer": "(self, leases)",
        "depth": "(self)",
        "extend": "(self, leases, lease_s)",
        "floors": "(self)",
        "flush": "(self)",
        "lease": "(self, *, events_max=500, timeout_s=1.0)",
        "lease_async": "(self, *, events_max=500, timeout_s=1.0)",
        "nack": "(self, leases, *, delay_s=0.0, reason='given back')",
        "recall": "(self, places)",
        "redrive": "(self, *, events_max=None)",
        "reject": "(self, leases, reason)",
        "reply": "(self, lease, value)",
        "seek": "(self, start)",
        "send": "(self, value=None, *, key=None, delay_s=None, at=None, id=None, headers=None)",
    },
    "Lease": {
        "ack": "(self)",
        "defer": "(self)",
        "extend": "(self, lease_s)",
        "nack": "(self, *, delay_s=0.0, reason='given back')",
        "reject": "(self, reason)",
        "reply": "(self, value)",
    },
    "Receipt": {"done": "(self)", "result": "(self, *, timeout_s=None)"},
    "Reader": {
        "close": "(self)",
        "lag": "(self)",
        "poll": "(self, *, events_max=500, timeout_s=1.0)",
        "poll_arrow": "(self, *, events_max=1000000, timeout_s=1.0)",
        "poll_arrow_async": "(self, *, events_max=1000000, timeout_s=1.0)",
        "poll_async": "(self, *, events_max=500, timeout_s=1.0)",
        "positions": "(self)",
        "seek": "(self, start)",
    },
}

MADE_BY_USERS = ("App", "Capture", "DebeziumExport", "ViewMaintainer")
"""Classes whose constructors users call."""

FIELDS = {
    "AppStatus": ["at_us", "is_alive", "log", "name", "notes", "pid", "stages", "started_us"],
    "Change": ["kind", "new", "old", "token", "why"],
    "VerifyReport": [
        "behind",
        "chunks",
        "differences",
        "differing",
        "duplicates",
        "exact",
        "is_equal",
        "repaired",
        "rows",
        "source",
        "stage",
        "target",
        "unreadable",
    ],
    "Event": ["key", "value", "time_us", "appended_us", "topic", "partition", "offset", "headers", "time", "appended"],
    "Position": ["topic", "partition", "offset", "incarnation"],
}

CODES = {
    "headwater", "invalid_input", "invalid_name", "invalid_schema", "schema_mismatch", "schema_conflict", "schema_moved",
    "event_too_large", "key_too_large", "unsupported", "not_found", "log_not_found", "topic_not_found", "topic_exists", "closed",
    "conflict", "fenced", "sequence_gap", "overloaded", "timed_out", "position_lost", "storage", "disk_full",
    "no_access", "damaged", "format_too_new", "poisoned", "lease_expired", "diverged", "events_missed", "topic_full",
    "not_owner", "group_in_use", "group_not_found", "unreachable", "repartitioned", "spark_unavailable", "checkpoint_conflict",
    "invalid_app", "app_running", "app_failed", "not_capturable", "capture_lost",
}  # fmt: skip

NO_SETTINGS = ("name", "schema", "key", "exist_ok", "return")

HEAVY = [
    "pyspark", "duckdb", "pyarrow", "numpy", "pandas", "polars", "sqlglot", "typer", "rich", "confluent_kafka", "fastapi",
    "uvicorn", "nicegui", "httpx", "psycopg", "psycopg2", "pymysqlreplication", "redis", "pika", "zmq", "tantivy",
    "pymongo", "numba", "pytest", "hypothesis",
]  # fmt: skip


def test_the_public_names_are_these() -> None:
    """A name that is added is added here, with its documentation; none is taken away."""
    assert hw.__all__ == NAMES
    assert dir(hw) == sorted([*NAMES, "__version__"])
    for name in NAMES:
        assert getattr(hw, name) is not None


def test_the_names_for_writing_operators_are_these() -> None:
    """What an operator of one's own is written with."""
    assert hw.operators.__all__ == OPERATOR_NAMES
    assert all(getattr(hw.operators, name) is not None for name in OPERATOR_NAMES)


def test_the_names_for_tests_are_these() -> None:
    """What applications are tested with."""
    assert testing.__all__ == TESTING_NAMES
    assert all(getattr(testing, name) is not None for name in TESTING_NAMES)


def test_all_errors_are_public() -> None:
    """Whoever can be met can be caught."""
    kinds = [
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
    ]
    assert hw.errors.__all__ == sorted(kinds)
    assert all(getattr(hw.errors, name) is getattr(errors, name) for name in kinds)


def test_docs_and_examples_import_public_names_only() -> None:
    """From `headwater` and its public modules: what a page shows is what a program can rely on."""
    homes = {"headwater": hw.__all__, "headwater.errors": hw.errors.__all__, "headwater.testing": TESTING_NAMES}
    homes["headwater.operators"] = OPERATOR_NAMES
    pages = [_ROOT / "README.md", *(_ROOT / "docs").glob("*.md"), *(_ROOT / "examples").rglob("*.py")]
    statement = re.compile(r"^\s*(?:from (headwater\S*) import (.*)|import (headwater\S*))", re.MULTILINE)
    private = []
    for page in pages:
        for home, names, module in statement.findall(page.read_text()):
            imported = re.findall(r"\w+", names.partition("#")[0])
            if (module or home) not in homes or not set(imported) <= set(homes[module or home]):
                private.append(f"{page.relative_to(_ROOT)}: {module or home} {names}")
    assert not private


def test_docs_and_examples_use_names_that_exist() -> None:
    """Each `hw.name` of a page or an example is public."""
    pages = [_ROOT / "README.md", *(_ROOT / "docs").glob("*.md"), *(_ROOT / "examples").rglob("*.py")]
    used = {(page.name, name) for page in pages for name in re.findall(r"\bhw\.([A-Za-z]\w*)", page.read_text())}
    assert len(used) > 60 and not [(page, name) for page, name in used if name not in NAMES]


def test_an_unknown_name_is_an_attribute_error() -> None:
    """As of any module, so that `hasattr` and `from headwater import …` say what they should."""
    assert not hasattr(hw, "nothing_of_that_name")
    with pytest.raises(ImportError):
        from headwater import nothing_of_that_name  # noqa: F401


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_members_and_their_arguments_are_these(name: str) -> None:
    """Names, order, kinds and defaults; under no name those of the constructor, where users call it."""
    kind = getattr(hw, name)
    found = {
        member: _signature(inspect.getattr_static(kind, member))
        for member in dir(kind)
        if not member.startswith("_") and not inspect.ismemberdescriptor(inspect.getattr_static(kind, member))
    }
    if name in MADE_BY_USERS:
        found[""] = _signature(kind.__init__)
    assert found == SIGNATURES[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_functions_and_their_arguments_are_these(name: str) -> None:
    """Names, order, kinds and defaults."""
    assert _signature(getattr(hw, name)) == FUNCTIONS[name]


@pytest.mark.parametrize("name", FIELDS)
def test_data_has_these_fields(name: str) -> None:
    """And no others that do not begin with an underscore."""
    assert sorted(field for field in dir(getattr(hw, name)) if not field.startswith("_")) == sorted(FIELDS[name])


def test_the_settings_of_topics_are_those_of_create_topic() -> None:
    """`TopicSettings` gives applications the same names and types; schema and key are arguments of their own there."""
    typed = get_type_hints(hw.Log.create_topic, vars(sys.modules[hw.Log.create_topic.__module__]))
    settings = get_type_hints(TopicSettings)
    assert settings == {name: typed[name] for name in typed if name not in NO_SETTINGS}


def test_durations_and_limits_have_one_style() -> None:
    """A duration is a text or a `timedelta`; a number of seconds ends with `_s`, a limit with `_max`, and `limit` is SQL's LIMIT."""
    found = [(place, each) for place, signature in _signatures() for each in signature.parameters.values()]
    named = {(place, each.name) for place, each in found}
    others = {name for _, name in named if re.search(r"_(ns|us|ms|seconds|minutes|hours|days)$", name)}
    assert others == {"linger_ms"}, "Kafka's producers have a setting of this name; everything else is in seconds"
    seconds = [each for _, each in found if each.name.endswith("_s")]
    assert len(seconds) > 20 and not [each for each in seconds if "float" not in str(each.annotation)]
    durations = [each for _, each in found if "Duration" in str(each.annotation)]
    assert len(durations) > 10 and not [each for each in durations if each.name.endswith("_s")]
    assert not [name for _, name in named if re.match(r"(max|min|n|num|number)_", name)]
    assert {place for place, name in named if name == "limit"} == {
        "App.view",
        "View.rows",
        "View.subscribe",
        "define_view",
    }


def test_error_codes_are_these() -> None:
    """Programs compare them, so they never change."""
    kinds = [hw.HeadwaterError]
    for kind in kinds:
        kinds += [child for child in kind.__subclasses__() if child.__module__ == "headwater.model.errors"]
    assert {kind.code for kind in kinds} == CODES
    retriable = {kind.code for kind in kinds if kind.retriable}
    assert retriable == {"overloaded", "repartitioned", "timed_out", "disk_full", "topic_full", "unreachable"}


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import headwater", []),
        ("import headwater; headwater.errors, headwater.HeadwaterError", []),
        ("import headwater; headwater.open_log('memory://').create_topic('t')", ["pyarrow", "numpy"]),
        ("import headwater.testing", ["pyarrow", "numpy"]),
    ],
    ids=["import", "errors", "use", "testing"],
)
def test_nothing_is_loaded_before_it_is_needed(statement: str, allowed: list[str]) -> None:
    """Neither Spark nor any optional client, and without a log not even Arrow."""
    script = f"{statement}\nimport sys\nprint([module for module in {HEAVY!r} if module in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(eval(done.stdout)) <= set(allowed), done.stdout


def _signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """The functions that users call, and their signatures."""
    for name in FUNCTIONS:
        yield name, inspect.signature(getattr(hw, name))
    for name, members in SIGNATURES.items():
        kind = getattr(hw, name)
        for member in members:
            if members[member] != "property":
                yield f"{name}.{member}", inspect.signature(getattr(kind, member) if member else kind.__init__)


def _signature(member: Any) -> str:
    """The parameters with their defaults, without annotations but for those of keyword arguments that are listed elsewhere."""
    if isinstance(member, property):
        return "property"
    signature = inspect.signature(member)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<function (\w+) at \w+>", r"\1", text)
    listed = next((each.annotation for each in signature.parameters.values() if "Unpack" in str(each.annotation)), None)
    return text if listed is None else text.replace("**settings", f"**settings: {listed[len('Unpack[') : -1]}")
