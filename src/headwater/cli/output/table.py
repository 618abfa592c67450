"""Tables on a terminal. Their style is defined here only: every command makes its tables with these functions.

| table | use |
|---|---|
| `lined_table` | the output of a command: a frame and bold headings |
| `typed_table` | the same for Arrow columns |
| `plain_table` | a part of a longer text: no lines |
| `panel_table` | the inside of a panel: full width, dimmed headings or none |
| `live_table` | a table that is redrawn: a line below dimmed headings, columns of fixed width |
| `RowPrinter` | rows that arrive over time, under one header |

Columns whose heading is `Right` are right-aligned, as numbers should be. Unprintable characters are escaped
(`terminal.printable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.cli.output.rows import csv_cell
from headwater.cli.output.terminal import printable

if TYPE_CHECKING:
    import pyarrow as pa

CELL_CHARACTERS_MAX = 200
PIPE_WIDTH_MAX = 10_000

GAP = 2
"""The space between columns without a line."""

WIDTH_MIN = 6
WIDTH_MAX = 40
NUMBER_WIDTH_MIN = 10


class Right(str):
    """The heading of a right-aligned column."""

    __slots__ = ()


def lined_table(*headings: str, title: str | None = None) -> Table:
    """An empty table in a frame."""
    table = Table(header_style="bold", border_style="dim", title=title, title_justify="left", title_style="bold")
    return _with_columns(table, headings)


def typed_table(names: Iterable[str], types: Iterable[pa.DataType]) -> Table:
    """An empty table in a frame for columns of these types; numbers are right-aligned."""
    return lined_table(*_headings(names, types))


def plain_table(*headings: str) -> Table:
    """An empty table without lines."""
    return _with_columns(Table(box=None, header_style="bold", padding=(0, GAP, 0, 0)), headings)


def panel_table(*headings: str) -> Table:
    """An empty table for a panel, which truncates text that is too wide. It has no header if all headings are empty."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), show_header=any(headings), header_style="dim")
    _with_columns(table, headings)
    for column in table.columns:
        column.no_wrap = True
    return table


def live_table(widths: Mapping[str, int]) -> Table:
    """An empty table with a width for each heading, which truncates text that is too wide."""
    table = Table(box=SIMPLE_HEAD, header_style="dim", padding=(0, GAP - 1, 0, 0), pad_edge=False)
    _with_columns(table, widths)
    _fix_widths(table, widths.values())
    return table


def to_cell(value: object) -> Text:
    """A value as one cell of a table."""
    if value is None:
        return Text("null", style="dim")
    if isinstance(value, float):
        return Text(f"{value:,.12g}")
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3])
    text = value if isinstance(value, str) else csv_cell(value)
    short = str(text) if len(str(text)) <= CELL_CHARACTERS_MAX else str(text)[: CELL_CHARACTERS_MAX - 1] + "…"
    return Text(printable(short).replace("\n", "↵"))


def print_table(table: Table) -> None:
    """Prints a table to stdout, as wide as the terminal; in a pipe, as wide as its content."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=Console(width=PIPE_WIDTH_MAX).measure(table).maximum)
    console.print(table)


class RowPrinter:
    """Prints rows under one header, as wide as the terminal; the first rows fix the widths of columns."""

    def __init__(self, names: Sequence[str], types: Sequence[pa.DataType]) -> None:
        self._headings = _headings(names, types)
        self._console = Console()
        self._widths: list[int] | None = None

    def print(self, rows: list[tuple[Any, ...]]) -> None:
        """Prints some rows; the first call also prints the header."""
        if not rows:
            return
        cells = [[to_cell(value) for value in row] for row in rows]
        table = plain_table(*self._headings)
        table.pad_edge, table.show_header = False, self._widths is None
        if self._widths is None:
            self._widths = self._measure(cells)
        _fix_widths(table, self._widths)
        for row in cells:
            table.add_row(*row)
        self._console.print(table, crop=False, soft_wrap=False)

    def _measure(self, cells: list[list[Text]]) -> list[int]:
        """The widths for the first rows: numbers may grow, and the last text column gets the rest."""
        wide = []
        for at, heading in enumerate(self._headings):
            widest = max(row[at].cell_len for row in cells)
            least = NUMBER_WIDTH_MIN if isinstance(heading, Right) else WIDTH_MIN
            wide.append(min(max(widest, len(heading), least), WIDTH_MAX))
        while sum(wide) + GAP * len(wide) > self._console.width and max(wide) > WIDTH_MIN:
            wide[wide.index(max(wide))] -= 1
        texts = [at for at, heading in enumerate(self._headings) if not isinstance(heading, Right)]
        if texts:
            wide[texts[-1]] += max(0, self._console.width - sum(wide) - GAP * len(wide))
        return wide


def _headings(names: Iterable[str], types: Iterable[pa.DataType]) -> list[str]:
    import pyarrow as pa

    is_ = pa.types
    return [
        Right(name) if is_.is_integer(type_) or is_.is_floating(type_) or is_.is_decimal(type_) else name
        for name, type_ in zip(names, types, strict=True)
    ]


def _with_columns(table: Table, headings: Iterable[str]) -> Table:
    for heading in headings:
        table.add_column(Text(printable(heading)), justify="right" if isinstance(heading, Right) else "left")
    return table


def _fix_widths(table: Table, widths: Iterable[int]) -> None:
    for column, width in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap = width, True
