"""An input as blocks of whole lines: a file or a pipe of any size in bounded memory.

A block ends with a line break that stands in no quotes (when quotes matter), so each block can be read by itself. A pipe
gives what it has after a short pause, so that `… | headwater produce` follows a program that goes on writing.
"""

from __future__ import annotations

import io
import os
import select
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from headwater.model.errors import InvalidInput

BLOCK_BYTES = 8 << 20
LINE_BYTES_MAX = 64 << 20
PAUSE_S = 0.02

_BOM = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Some whole lines, and the number of the first one, from 1."""

    first_line: int
    data: bytes


class Blocks:
    """The blocks of one input; `peek` looks at the first one without taking it."""

    def __init__(self, stream: Any, name: str, *, quotes: bool = False, block_bytes: int = BLOCK_BYTES) -> None:
        self.bytes_read = 0
        self.quotes = quotes
        self._stream = stream
        self._name = name
        self._block_bytes = block_bytes
        self._handle = _pipe_handle(stream)
        self._rest = b""
        self._line = 1
        self._peeked: Block | None = None

    def peek(self) -> Block | None:
        """The block that comes next, or None at the end."""
        if self._peeked is None:
            self._peeked = self._read()
        return self._peeked

    def __iter__(self) -> Iterator[Block]:
        while (block := self.peek()) is not None:
            self._peeked = None
            yield block

    def take_line(self) -> bytes:
        """The first line of the next block, which then begins behind it."""
        block = self.peek()
        if block is None:
            return b""
        line, _, data = block.data.partition(b"\n")
        self._peeked = Block(block.first_line + 1, data) if data else None
        return line

    def _read(self) -> Block | None:
        while True:
            more = self._more()
            if self.bytes_read == 0:
                more = more.removeprefix(_BOM)
            self.bytes_read += len(more)
            data = self._rest + more
            end = self._end_of_lines(data) if more else len(data)
            if end:
                block = Block(self._line, data[:end])
                self._rest = data[end:]
                self._line += block.data.count(b"\n")
                return block
            if not more:
                return None
            self._rest = data
            if len(data) > LINE_BYTES_MAX:
                raise InvalidInput(
                    f"{self._name}:{self._line}: The line is longer than {LINE_BYTES_MAX >> 20} MB"
                    f"{', or a quote is not closed' if self.quotes else ''}.",
                    advice="Check the format: each line must be one event.",
                )

    def _more(self) -> bytes:
        """The next bytes: as many as make a block, or as many as a pipe has now."""
        if self._handle is None:
            return bytes(self._stream.read(self._block_bytes))
        found = [os.read(self._handle, self._block_bytes)]
        length = len(found[0])
        while found[-1] and length < self._block_bytes and select.select([self._handle], [], [], PAUSE_S)[0]:
            found.append(os.read(self._handle, self._block_bytes))
            length += len(found[-1])
        return b"".join(found)

    def _end_of_lines(self, data: bytes) -> int:
        """Where the last whole line ends; 0 when there is none yet."""
        end = data.rfind(b"\n") + 1
        if not self.quotes or not end:
            return end
        is_inside = data.count(b'"', 0, end) % 2 == 1
        while is_inside and end:
            before = data.rfind(b"\n", 0, end - 1) + 1
            is_inside ^= data.count(b'"', before, end) % 2 == 1
            end = before
        return end


def _pipe_handle(stream: Any) -> int | None:
    """The descriptor of a pipe or terminal; None for a file, or for what has no descriptor."""
    try:
        handle = int(stream.fileno())
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None
    return None if stat.S_ISREG(os.fstat(handle).st_mode) else handle
