"""Esper beside ours: one process, one thread that hands it the bids as objects that lie in memory.

Esper has the GPL licence. It is fetched and run as a peer only, and nothing of it is in Headwater.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.java import JavaPeer, JavaProcess
from bench.patterns.bids import Bids

VERSION = "8.9.0"
PEER = f"Esper {VERSION.rpartition('.')[0]} in process"

_ESPER = JavaPeer(
    name=f"esper-{VERSION}",
    source=Path(__file__).with_name("EsperSide.java"),
    artifacts=(f"com.espertech:esper-compiler:{VERSION}", f"com.espertech:esper-runtime:{VERSION}"),
)


class EsperSide(JavaProcess):
    """A process that finds patterns; a context manager. Raises `ServerError` when Esper cannot be had."""

    def __init__(self, folder: Path) -> None:
        super().__init__(_ESPER, folder)
        self._folder = folder
        self._bids: Bids | None = None

    def run(self, statements: Sequence[str], bids: Bids) -> tuple[float, int]:
        """The seconds that the statements need for these bids, and their matches."""
        if self._bids is not bids:
            self.ask("bids", bids.numbers)
            self._bids = bids
        file = self._folder / "statements.epl"
        file.write_text("".join(f"{statement}\n" for statement in statements))
        nanoseconds, matches = self.ask("run", file, len(bids))
        return int(nanoseconds) / 1e9, int(matches)
