"""A printer of rows that arrive over time, in columns whose widths the first rows fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.cli.output.rows import is_number, make_table, to_cell

if TYPE_CHECKING:
    import pyarrow as pa

WIDTH_MIN = 6
WIDTH_MAX = 40
NUMBER_WIDTH_MIN = 10
GAP = 2


class RowPrinter:
    """Prints rows under one header, as wide as the terminal."""

    def __init__(self, names: Sequence[str], types: Sequence[pa.DataType]) -> None:
        self._names = names
        self._types = types
        self._console = Console()
        self._widths: list[int] | None = None

    def print(self, rows: list[tuple[Any, ...]]) -> None:
        """Prints some rows; the first call also prints the header."""
        if not rows:
            return
        cells = [[to_cell(value) for value in row] for row in rows]
        is_first = self._widths is None
        if self._widths is None:
            self._widths = self._measure(cells)
        table = make_table(self._names, self._types)
        _strip(table, show_header=is_first)
        for column, width in zip(table.columns, self._widths, strict=True):
            column.width, column.no_wrap = width, True
        for row in cells:
            table.add_row(*row)
        self._console.print(table, crop=False, soft_wrap=False)

    def _measure(self, cells: list[list[Text]]) -> list[int]:
        """The widths for the first rows: numbers may grow, and the last text column gets the rest."""
        wide = []
        for at, name in enumerate(self._names):
            widest = max(row[at].cell_len for row in cells)
            least = NUMBER_WIDTH_MIN if is_number(self._types[at]) else WIDTH_MIN
            wide.append(min(max(widest, len(name), least), WIDTH_MAX))
        while sum(wide) + GAP * len(wide) > self._console.width and max(wide) > WIDTH_MIN:
            wide[wide.index(max(wide))] -= 1
        texts = [at for at, type_ in enumerate(self._types) if not is_number(type_)]
        if texts:
            wide[texts[-1]] += max(0, self._console.width - sum(wide) - GAP * len(wide))
        return wide


def _strip(table: Table, *, show_header: bool) -> None:
    table.box = None
    table.show_header = show_header
    table.pad_edge = False
    table.padding = (0, GAP, 0, 0)
