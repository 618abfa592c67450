"""A side that a sink of ours may write to: it is found, read and repaired by the sink's own code."""

from __future__ import annotations

from headwater.sinks.sink import Shape, Sink, open_sink


class SinkSide:
    """One target; the kinds of them add how they are looked at."""

    _sink: Sink

    def __init__(self, url: str) -> None:
        self._given = url
        self._sink = open_sink(url, stage="")
        self.url = self._sink.url
        self._shape: Shape | None = None

    def shape(self) -> Shape | None:
        """None: it takes its columns from the other side."""
        return None

    def take(self, shape: Shape) -> None:
        """From now on rows are read in these columns."""
        self._shape = shape
        self._sink.attach(shape)

    def repairs(self, stage: str) -> Sink:
        """The sink of the stage that feeds the target."""
        assert self._shape is not None
        sink = open_sink(self._given, stage=stage)
        sink.attach(self._shape)
        return sink

    def close(self) -> None:
        """Frees connections."""
        self._sink.close()
