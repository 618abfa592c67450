"""Headwater: event streams end to end for Python teams.

One package in which an append-only log is the truth. `import headwater as hw` loads nothing heavy: each public name is
resolved when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.app.app import App as App
    from headwater.log.copies.restore import restore_log as restore_log
    from headwater.log.log import Log as Log
    from headwater.log.log import open_log as open_log
    from headwater.log.port.topic import Topic as Topic
    from headwater.model.errors import HeadwaterError as HeadwaterError
    from headwater.model.event import Event as Event
    from headwater.model.marker import Marker as Marker
    from headwater.model.position import Position as Position
    from headwater.processing.operators.dedupe import dedupe as dedupe
    from headwater.processing.operators.lookup import lookup as lookup
    from headwater.processing.operators.sliding import sliding as sliding
    from headwater.processing.operators.top_n import top_n as top_n
    from headwater.processing.operators.totals import totals as totals
    from headwater.processing.operators.windowed import windowed as windowed
    from headwater.processing.source.spark_source import register as register
    from headwater.processing.time.true_time import true_time as true_time
    from headwater.views.view import View as View
    from headwater.views.view import open_view as open_view

__version__ = "0.1.0"

_HOMES = {
    "App": "headwater.app.app",
    "Event": "headwater.model.event",
    "HeadwaterError": "headwater.model.errors",
    "Log": "headwater.log.log",
    "Marker": "headwater.model.marker",
    "Position": "headwater.model.position",
    "Topic": "headwater.log.port.topic",
    "View": "headwater.views.view",
    "dedupe": "headwater.processing.operators.dedupe",
    "errors": "headwater.model.errors",
    "lookup": "headwater.processing.operators.lookup",
    "open_log": "headwater.log.log",
    "open_view": "headwater.views.view",
    "register": "headwater.processing.source.spark_source",
    "restore_log": "headwater.log.copies.restore",
    "sliding": "headwater.processing.operators.sliding",
    "top_n": "headwater.processing.operators.top_n",
    "totals": "headwater.processing.operators.totals",
    "true_time": "headwater.processing.time.true_time",
    "windowed": "headwater.processing.operators.windowed",
}
__all__ = [
    "App",
    "Event",
    "HeadwaterError",
    "Log",
    "Marker",
    "Position",
    "Topic",
    "View",
    "dedupe",
    "errors",
    "lookup",
    "open_log",
    "open_view",
    "register",
    "restore_log",
    "sliding",
    "top_n",
    "totals",
    "true_time",
    "windowed",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        from headwater.model.extras import missing_extra

        raise missing_extra(error, purpose=f"headwater.{name}") or error from None
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
