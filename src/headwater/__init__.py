"""Headwater: event streams end to end for Python teams.

One package in which an append-only log is the truth. `import headwater as hw` loads nothing heavy: each public name is
resolved when it is first used. Errors are in `headwater.errors`, what applications are tested with in `headwater.testing`, and what
operators of your own are written with in `headwater.operators`. Everything else is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.model.lazy_names import lazy_names

if TYPE_CHECKING:
    from headwater import errors as errors
    from headwater import operators as operators
    from headwater.app.app import App as App
    from headwater.app.app import load_app as load_app
    from headwater.capture.capture import Capture as Capture
    from headwater.capture.capture import remove_capture as remove_capture
    from headwater.capture.progress import captures as captures
    from headwater.log.clients.batch import Receipt as Receipt
    from headwater.log.clients.consumer import Consumer as Consumer
    from headwater.log.clients.producer import Producer as Producer
    from headwater.log.clients.reader import Reader as Reader
    from headwater.log.clients.stage import Stage as Stage
    from headwater.log.copies.restore import restore_log as restore_log
    from headwater.log.log import Log as Log
    from headwater.log.log import open_log as open_log
    from headwater.log.port.topic import Durability as Durability
    from headwater.log.port.topic import Overload as Overload
    from headwater.log.port.topic import Topic as Topic
    from headwater.log.port.topic import TopicSettings as TopicSettings
    from headwater.log.queue.lease import Lease as Lease
    from headwater.log.queue.queue import Queue as Queue
    from headwater.log.transaction import Transaction as Transaction
    from headwater.model.clock import Duration as Duration
    from headwater.model.errors import HeadwaterError as HeadwaterError
    from headwater.model.event import Event as Event
    from headwater.model.marker import Marker as Marker
    from headwater.model.position import Position as Position
    from headwater.processing.graph.graph import TopicNode as TopicNode
    from headwater.processing.graph.table import Table as Table
    from headwater.processing.operators.dedupe import dedupe as dedupe
    from headwater.processing.operators.lookup import lookup as lookup
    from headwater.processing.operators.sliding import sliding as sliding
    from headwater.processing.operators.top_n import top_n as top_n
    from headwater.processing.operators.totals import totals as totals
    from headwater.processing.operators.windowed import windowed as windowed
    from headwater.processing.patterns.detect import detect as detect
    from headwater.processing.patterns.detect import step as step
    from headwater.processing.search.percolate import percolate as percolate
    from headwater.processing.search.why import why as why
    from headwater.processing.source.spark_source import make_session as make_session
    from headwater.processing.source.spark_source import register as register
    from headwater.processing.spark.errors import our_error_in as our_error_in
    from headwater.processing.spark.session import stop_session as stop_session
    from headwater.processing.stages.status import AppStatus as AppStatus
    from headwater.processing.time.true_time import true_time as true_time
    from headwater.sinks.debezium_export import DebeziumExport as DebeziumExport
    from headwater.verify.comparison import VerifyReport as VerifyReport
    from headwater.verify.verification import verify_copy as verify_copy
    from headwater.views.catalog import plan_view as plan_view
    from headwater.views.definition import define_view as define_view
    from headwater.views.maintainer import ViewMaintainer as ViewMaintainer
    from headwater.views.store_url import open_view_store as open_view_store
    from headwater.views.subscription import Change as Change
    from headwater.views.subscription import Subscription as Subscription
    from headwater.views.view import View as View
    from headwater.views.view import open_view as open_view

__version__ = "0.1.0"

_HOMES = {
    "App": "headwater.app.app",
    "AppStatus": "headwater.processing.stages.status",
    "Capture": "headwater.capture.capture",
    "Change": "headwater.views.subscription",
    "Consumer": "headwater.log.clients.consumer",
    "DebeziumExport": "headwater.sinks.debezium_export",
    "Durability": "headwater.log.port.topic",
    "Duration": "headwater.model.clock",
    "Event": "headwater.model.event",
    "HeadwaterError": "headwater.model.errors",
    "Lease": "headwater.log.queue.lease",
    "Log": "headwater.log.log",
    "Marker": "headwater.model.marker",
    "Overload": "headwater.log.port.topic",
    "Position": "headwater.model.position",
    "Producer": "headwater.log.clients.producer",
    "Queue": "headwater.log.queue.queue",
    "Reader": "headwater.log.clients.reader",
    "Receipt": "headwater.log.clients.batch",
    "Stage": "headwater.log.clients.stage",
    "Subscription": "headwater.views.subscription",
    "Table": "headwater.processing.graph.table",
    "Topic": "headwater.log.port.topic",
    "TopicNode": "headwater.processing.graph.graph",
    "TopicSettings": "headwater.log.port.topic",
    "Transaction": "headwater.log.transaction",
    "VerifyReport": "headwater.verify.comparison",
    "View": "headwater.views.view",
    "ViewMaintainer": "headwater.views.maintainer",
    "captures": "headwater.capture.progress",
    "dedupe": "headwater.processing.operators.dedupe",
    "define_view": "headwater.views.definition",
    "detect": "headwater.processing.patterns.detect",
    "errors": "headwater.errors",
    "load_app": "headwater.app.app",
    "lookup": "headwater.processing.operators.lookup",
    "make_session": "headwater.processing.source.spark_source",
    "open_log": "headwater.log.log",
    "open_view": "headwater.views.view",
    "open_view_store": "headwater.views.store_url",
    "operators": "headwater.operators",
    "our_error_in": "headwater.processing.spark.errors",
    "percolate": "headwater.processing.search.percolate",
    "plan_view": "headwater.views.catalog",
    "register": "headwater.processing.source.spark_source",
    "remove_capture": "headwater.capture.capture",
    "restore_log": "headwater.log.copies.restore",
    "sliding": "headwater.processing.operators.sliding",
    "step": "headwater.processing.patterns.detect",
    "stop_session": "headwater.processing.spark.session",
    "top_n": "headwater.processing.operators.top_n",
    "totals": "headwater.processing.operators.totals",
    "true_time": "headwater.processing.time.true_time",
    "verify_copy": "headwater.verify.verification",
    "why": "headwater.processing.search.why",
    "windowed": "headwater.processing.operators.windowed",
}
__all__ = [
    "App",
    "AppStatus",
    "Capture",
    "Change",
    "Consumer",
    "DebeziumExport",
    "Durability",
    "Duration",
    "Event",
    "HeadwaterError",
    "Lease",
    "Log",
    "Marker",
    "Overload",
    "Position",
    "Producer",
    "Queue",
    "Reader",
    "Receipt",
    "Stage",
    "Subscription",
    "Table",
    "Topic",
    "TopicNode",
    "TopicSettings",
    "Transaction",
    "VerifyReport",
    "View",
    "ViewMaintainer",
    "captures",
    "dedupe",
    "define_view",
    "detect",
    "errors",
    "load_app",
    "lookup",
    "make_session",
    "open_log",
    "open_view",
    "open_view_store",
    "operators",
    "our_error_in",
    "percolate",
    "plan_view",
    "register",
    "remove_capture",
    "restore_log",
    "sliding",
    "step",
    "stop_session",
    "top_n",
    "totals",
    "true_time",
    "verify_copy",
    "why",
    "windowed",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
