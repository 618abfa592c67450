"""Headwater: event streams end to end for Python teams.

One package in which an append-only log is the truth. `import headwater as hw` loads nothing heavy: each public name is
resolved when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.app import App as App
    from headwater.log.log import Log as Log
    from headwater.log.log import open_log as open_log
    from headwater.log.restore import restore_log as restore_log
    from headwater.log.topic import Topic as Topic
    from headwater.model.errors import HeadwaterError as HeadwaterError
    from headwater.model.event import Event as Event
    from headwater.model.marker import Marker as Marker
    from headwater.model.position import Position as Position
    from headwater.processing.source import register as register
    from headwater.views.view import View as View
    from headwater.views.view import open_view as open_view

__version__ = "0.1.0"

_HOMES = {
    "App": "headwater.app",
    "Event": "headwater.model.event",
    "HeadwaterError": "headwater.model.errors",
    "Log": "headwater.log.log",
    "Marker": "headwater.model.marker",
    "Position": "headwater.model.position",
    "Topic": "headwater.log.topic",
    "View": "headwater.views.view",
    "errors": "headwater.model.errors",
    "open_log": "headwater.log.log",
    "register": "headwater.processing.source",
    "open_view": "headwater.views.view",
    "restore_log": "headwater.log.restore",
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
    "errors",
    "open_log",
    "open_view",
    "register",
    "restore_log",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
    module = import_module(home)
    return module if home.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
