"""A segment of frames: the file that a partition's events are appended to.

Format of `<base offset, 20 digits>.frames`: a header, then frames (see `frame`) one after the other.

    0  magic "HWSEGM"    6  format u16       8  base offset i64   16  running i64    24  appended i64
   32  chain u32        36  header bytes u32 40  producers u32    44  crc32c u32, of the whole header with this word 0
   48  producers, 36 bytes each: id 16 bytes, epoch u32, last sequence i64, offset after its last event i64
       then named u32, and for each of the first so many producers the time of its last append i64

The header repeats what the partition knew when the segment began (running maximum of event time, append time, chain,
the last sequence number of each recent producer), so opening a partition never reads an older segment. Producers with a name have
an epoch above 0 and come first; a header from before their times were kept has zeros in the place of `named`, and they count as
having appended when the segment began.

Invariants: every segment but the newest is whole and on disk before the next one is created; room is allocated ahead of
the frames, so the file is longer than its content until it is closed, and only the head says where the content ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pyarrow as pa
from crc32c import crc32c

from headwater.log.disk.disk import Disk, File
from headwater.log.file.segments import frame as frames
from headwater.log.file.segments.frame import Frame
from headwater.log.file.segments.index import Index, build_index, load_index, save_index
from headwater.log.port.chunk import Chunk
from headwater.log.port.topic import Topic
from headwater.log.port.write import NO_PRODUCER, physical_schema
from headwater.model.errors import FormatTooNew, StorageError
from headwater.model.schema import project

FORMAT = 1
PRODUCERS_MAX = 1000
"""Of producers without a name so many are remembered, those that appended last: they only retry their last batch."""

NAMED_KEPT_US = 30 * 86_400_000_000
"""How long a producer with a name is remembered after its last append to the partition, by the append times of the partition."""

NAMED_MAX = 100_000
"""And at most so many of them, those that appended last."""

_MAGIC = b"HWSEGM"
_HEADER = struct.Struct("<6sHqqqIII")
_CRC_AT = _HEADER.size
_PRODUCER = struct.Struct("<16sIqq")
_PRODUCERS_AT = _CRC_AT + 4
_ALIGNMENT = 64
_WORTH_SAVING = 100
_MAPPINGS_MAX = 20
_SKIM = struct.Struct("<8xQqI36xq16sI12xq")
_NAMED = struct.Struct("<I")


class ProducerSequence(msgspec.Struct, frozen=True, gc=False):
    """The last that a producer has stored in a partition; `at` is the append time, 0 where nobody knows it."""

    epoch: int
    last: int
    end_offset: int
    at: int = 0


class SegmentHeader(msgspec.Struct, frozen=True):
    """What the partition knew when the segment began."""

    base: int
    running: int
    appended: int
    chain: int
    producers: Mapping[bytes, ProducerSequence]


def segment_name(base: int) -> str:
    """The file's name, so that names sort as offsets do."""
    return f"{base:020d}.frames"


def index_name(base: int) -> str:
    """The name of its index."""
    return f"{base:020d}.index"


def encode_header(header: SegmentHeader) -> bytes:
    """The header's bytes; of the producers the most recent ones."""
    recent = list(recent_producers(header.producers, now=header.appended).items())
    times = [sequence.at or header.appended for _, sequence in recent if sequence.epoch]
    times_at = _PRODUCERS_AT + _PRODUCER.size * len(recent)
    size = times_at + _NAMED.size + 8 * len(times)
    size += -size % _ALIGNMENT
    data = bytearray(size)
    _HEADER.pack_into(
        data, 0, _MAGIC, FORMAT, header.base, header.running, header.appended, header.chain, size, len(recent)
    )
    for number, (producer, sequence) in enumerate(recent):
        at = _PRODUCERS_AT + number * _PRODUCER.size
        _PRODUCER.pack_into(data, at, producer, sequence.epoch, sequence.last, sequence.end_offset)
    struct.pack_into(f"<I{len(times)}q", data, times_at, len(times), *times)
    struct.pack_into("<I", data, _CRC_AT, crc32c(data))
    return bytes(data)


def recent_producers(producers: Mapping[bytes, ProducerSequence], *, now: int) -> dict[bytes, ProducerSequence]:
    """Those that are remembered: of the named ones all that appended lately, first; those without a name never displace them."""
    ordered = sorted(producers.items(), key=lambda item: item[1].end_offset)
    named = [(name, found) for name, found in ordered if found.epoch and (found.at or now) >= now - NAMED_KEPT_US]
    anonymous = [(name, found) for name, found in ordered if not found.epoch]
    return dict(named[-NAMED_MAX:] + anonymous[-PRODUCERS_MAX:])


def create_segment(disk: Disk, folder: str, header: SegmentHeader) -> int:
    """A new, empty segment, on disk with its name; returns where its first frame goes."""
    file = disk.open(f"{folder}/{segment_name(header.base)}", "create")
    try:
        file.truncate(0)
        data = encode_header(header)
        file.write_at(0, [data])
        file.sync()
    finally:
        file.close()
    disk.sync_folder(folder)
    return len(data)


class Segment:
    """One `.frames` file opened for reading."""

    def __init__(self, disk: Disk, folder: str, base: int) -> None:
        self.base = base
        self.path = f"{folder}/{segment_name(base)}"
        self._disk = disk
        self._file: File = disk.open(self.path)
        self._view: pa.Buffer = pa.py_buffer(b"")
        self._bytes = memoryview(self._view)
        self.seen: Index | None = None
        self.header, self.start = self._read_header()

    def size(self) -> int:
        """The file's length: for a closed segment also the end of its frames."""
        return self._file.size()

    def scan(self, position: int, *, end: int | None = None) -> Iterator[tuple[int, Frame]]:
        """The intact headers from `position` on, each chained to the one before it if that one was seen here."""
        before: Frame | None = None
        while end is None or position < end:
            frame = self.frame_at(position)
            if frame is None or (
                before and (frame.chain != before.header_crc or frame.base_offset != before.end_offset)
            ):
                return
            yield position, frame
            position += frame.stride
            before = frame

    def frame_at(self, position: int) -> Frame | None:
        """The header at a position, or None where no intact one stands.

        The file may have been cut since it was mapped, and a page behind its end must not be touched.
        """
        size = self.size()
        if position + frames.HEADER_BYTES > size:
            return None
        if position + frames.HEADER_BYTES > self._view.size:
            self._map_again()
        return frames.decode(self._bytes, position)

    def producers(self, position: int, *, end: int) -> dict[bytes, ProducerSequence]:
        """The last sequence of each producer in the frames between two positions.

        Unpacks little, since it runs under the append lock, over frames that are published.
        """
        self._reach(end)
        found = {}
        while position < end:
            if not frames.has_intact_header(self._bytes, position):
                raise frames.damaged(self.path, position, "a frame's header")
            size, base, count, appended, producer, epoch, last = _SKIM.unpack_from(self._bytes, position)
            if producer != NO_PRODUCER:
                found[producer] = ProducerSequence(epoch, last, base + count, appended)
            position += frames.stride_of(size)
        return found

    def is_intact(self, frame: Frame, position: int) -> bool:
        """Whether the frame's payload is whole."""
        self._reach(position + frame.stride)
        return frames.is_intact(frame, self._view, position)

    def find(self, offset: int, *, end: int, known: Index | None = None) -> int:
        """The position of the frame that holds an offset, of a segment written up to the position `end`.

        `known` is what was `seen` of it before: only the frames behind that are looked at.
        """
        self.seen = self.seen or known
        if self.seen is None:
            self.seen = self._load_index(end)
        elif self.seen.end < min(end, self.size()):
            self.seen = self.seen.with_more(build_index(self.scan(max(self.seen.end, self.start), end=end)))
        return self.seen.find(offset)

    def index(self, *, end: int) -> Index:
        """Offsets, positions and times of all frames up to the position `end`."""
        self.find(self.base, end=end)
        assert self.seen is not None
        if self.seen.end < min(end, self.size()) and end > self.start:
            raise frames.damaged(self.path, max(self.seen.end, self.start), "a frame's header")
        return self.seen

    def read(self, position: int, *, topic: Topic, partition: int) -> tuple[Chunk, int] | None:
        """The frame at a position as a chunk, and the next position; None at the end of the file."""
        frame = self.frame_at(position)
        if frame is None:
            return None
        if frame.schema_id > topic.schema_id:
            raise frames.damaged(self.path, position, f"schema {frame.schema_id} is unknown")
        self._reach(position + frame.stride)
        schema = topic.schemas[frame.schema_id]
        batch = frames.load(frame, self._view, position, schema=schema, path=self.path)
        if frame.schema_id != topic.schema_id:
            batch = project(batch, physical_schema(topic.schema, frame.flags))
        chunk = Chunk(topic, partition, frame.base_offset, batch, frame.appended, running=frame.running_before)
        return chunk, position + frame.stride

    def close(self) -> None:
        """Closes the file; chunks already read stay valid."""
        self._file.close()

    def _read_header(self) -> tuple[SegmentHeader, int]:
        raw = self._file.read_at(0, 4096)
        fields = _HEADER.unpack_from(raw) if len(raw) >= _PRODUCERS_AT else (b"", 0, 0, 0, 0, 0, 0, 0)
        magic, version, base, running, appended, chain, size, count = fields
        if magic == _MAGIC and version > FORMAT:
            raise FormatTooNew(
                f"{self.path} has format {version}; this Headwater reads up to {FORMAT}.", advice="Upgrade Headwater."
            )
        if size > len(raw):
            raw = self._file.read_at(0, size)
        data = bytearray(raw[:size])
        crc = data[_CRC_AT:_PRODUCERS_AT]
        data[_CRC_AT:_PRODUCERS_AT] = bytes(4)
        if magic != _MAGIC or base != self.base or struct.pack("<I", crc32c(data)) != crc:
            raise frames.damaged(self.path, 0, "the segment's header")
        producers, times = {}, _times(data, _PRODUCERS_AT + count * _PRODUCER.size)
        for number in range(count):
            producer, epoch, last, end = _PRODUCER.unpack_from(data, _PRODUCERS_AT + number * _PRODUCER.size)
            at = times[number] if number < len(times) else appended
            producers[producer] = ProducerSequence(epoch, last, end, at)
        return SegmentHeader(base, running, appended, chain, producers), size

    def _load_index(self, end: int) -> Index:
        """The index up to a position; that of a closed segment with many frames is kept for the next process."""
        path = self.path.removesuffix(segment_name(self.base)) + index_name(self.base)
        saved = load_index(self._disk, path)
        if saved is not None and saved.end == self.size():
            return saved
        index = build_index(self.scan(self.start, end=end))
        if len(index.entries) >= _WORTH_SAVING and index.end == self.size():
            try:
                save_index(self._disk, path, index)
            except StorageError:
                return index
        return index

    def _reach(self, length: int) -> None:
        if length > self._view.size:
            self._map_again()

    def _map_again(self) -> None:
        """Maps the file as long as it is now; it may be cut between the look and the mapping, and be as long again at the next look."""
        for attempt in range(_MAPPINGS_MAX):
            try:
                self._view = self._file.view(self.size())
                break
            except StorageError:
                if attempt == _MAPPINGS_MAX - 1:
                    raise
        self._bytes = memoryview(self._view)


def _times(header: bytearray, at: int) -> Sequence[int]:
    """When the named producers of a header appended last; of one from before that was kept, none."""
    if at + _NAMED.size > len(header):
        return ()
    (count,) = _NAMED.unpack_from(header, at)
    return struct.unpack_from(f"<{count}q", header, at + _NAMED.size)
