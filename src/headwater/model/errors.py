"""Every error a user of Headwater can meet.

Each one says what happened, where (topic, partition, offset, file) and what to do next. `code` is stable and meant for
programs; `retriable` says whether the same call may succeed later without anybody changing anything.

    HeadwaterError
    ├── InvalidInput             the caller gave something that can never work
    │   ├── InvalidName          a topic name the log refuses
    │   ├── InvalidSchema        a schema that cannot be read or stored
    │   ├── SchemaMismatch       rows that do not fit the topic's schema
    │   ├── SchemaConflict       a schema change that old events would not survive
    │   ├── InvalidApp           an application's script cannot run as it is
    │   ├── EventTooLarge        one event above the topic's `event_bytes_max`
    │   ├── KeyTooLarge          a key has more rows in an operator's state than a batch can work on
    │   ├── NotCapturable        a database or one of its tables cannot be captured as it is
    │   └── Unsupported          this log cannot do that
    ├── NotFound
    │   ├── LogNotFound          no log at that URL
    │   ├── TopicNotFound        no such topic
    │   └── GroupNotFound        no such group
    ├── TopicExists
    ├── Closed                   the handle was closed, or belongs to the process that forked this one
    ├── Conflict
    │   ├── Fenced               another producer with the same id took over
    │   ├── SequenceGap          a producer's sequence went backwards inside one batch
    │   ├── LeaseExpired         the lease ran out and its event was given to somebody else, or is done
    │   ├── Diverged             a copy and its log hold different events
    │   ├── NotOwner             the partition belongs to another member of the group by now
    │   ├── Repartitioned        the topic got more partitions after the events were placed
    │   ├── GroupInUse           the group has members that live
    │   └── CheckpointConflict   a stage's batch does not follow the one it wrote last
    ├── Overloaded               a bounded buffer is full and the caller asked not to wait
    ├── TimedOut
    ├── PositionLost             the offset existed, and a power loss took it back
    ├── EventsMissed             retention removed events before they were read
    ├── CaptureLost              the database has forgotten changes that were not captured yet
    ├── Unreachable              the server behind a log, or behind a state, does not answer
    ├── SparkUnavailable         Spark cannot be started here
    └── StorageError
        ├── DiskFull
        │   └── TopicFull        a topic is at its `bytes_max`
        ├── NoAccess             the operating system refused
        ├── Damaged              bytes on disk fail their checksum
        ├── FormatTooNew         written by a newer Headwater
        └── Poisoned             an fsync failed; the partition takes no more events until it is re-opened
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """The root of the tree: what happened, and in `advice` what to do next."""

    code = "headwater"
    retriable = False

    def __init__(self, what: str, *, advice: str = "") -> None:
        super().__init__(f"{what} {advice}".strip())
        self.what = what
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.advice))


def _rebuild(kind: type[HeadwaterError], what: str, advice: str) -> HeadwaterError:
    """Errors cross process borders (pools, Spark workers): rebuild them without knowing each signature."""
    error = kind.__new__(kind)
    HeadwaterError.__init__(error, what, advice=advice)
    return error


class InvalidInput(HeadwaterError):
    """The caller gave something that can never work."""

    code = "invalid_input"


class InvalidName(InvalidInput):
    """A topic name the log refuses."""

    code = "invalid_name"


class InvalidSchema(InvalidInput):
    """A schema that cannot be read or stored."""

    code = "invalid_schema"


class SchemaMismatch(InvalidInput):
    """Rows that do not fit the topic's schema."""

    code = "schema_mismatch"


class SchemaConflict(InvalidInput):
    """A schema change that old events would not survive."""

    code = "schema_conflict"


class EventTooLarge(InvalidInput):
    """One event above the topic's `event_bytes_max`."""

    code = "event_too_large"


class Unsupported(InvalidInput):
    """This log cannot do that."""

    code = "unsupported"


class NotFound(HeadwaterError):
    """What was named does not exist."""

    code = "not_found"


class LogNotFound(NotFound):
    """There is no log at that URL."""

    code = "log_not_found"


class TopicNotFound(NotFound):
    """There is no such topic in the log."""

    code = "topic_not_found"


class GroupNotFound(NotFound):
    """There is no such group in the log."""

    code = "group_not_found"


class TopicExists(HeadwaterError):
    """The topic is there already."""

    code = "topic_exists"


class Closed(HeadwaterError):
    """The handle was closed, or belongs to the process that forked this one."""

    code = "closed"


class Conflict(HeadwaterError):
    """Somebody else's write came first."""

    code = "conflict"


class Fenced(Conflict):
    """Another producer with the same id took over."""

    code = "fenced"


class SequenceGap(Conflict):
    """A producer's sequence went backwards inside one batch."""

    code = "sequence_gap"


class Diverged(Conflict):
    """A copy and its log hold different events."""

    code = "diverged"


class NotOwner(Conflict):
    """The partition belongs to another member of the group by now."""

    code = "not_owner"


class Repartitioned(Conflict):
    """The topic got more partitions after the events were placed; producers and `append` place them again by themselves."""

    code = "repartitioned"
    retriable = True


class SchemaMoved(Conflict):
    """The topic got other columns after a query was planned that is to have all of them; an application plans it again by itself."""

    code = "schema_moved"


class GroupInUse(Conflict):
    """The group has members that live."""

    code = "group_in_use"


class Overloaded(HeadwaterError):
    """A bounded buffer is full and the caller asked not to wait."""

    code = "overloaded"
    retriable = True


class TimedOut(HeadwaterError):
    """The deadline passed first."""

    code = "timed_out"
    retriable = True


class PositionLost(HeadwaterError):
    """The offset existed, and a power loss took it back."""

    code = "position_lost"


class StorageError(HeadwaterError):
    """The disk, or the operating system above it, did not do as asked."""

    code = "storage"


class DiskFull(StorageError):
    """No room is left on the device."""

    code = "disk_full"
    retriable = True


class NoAccess(StorageError):
    """The operating system refused access."""

    code = "no_access"


class Damaged(StorageError):
    """Bytes on disk fail their checksum; they are named and never served."""

    code = "damaged"


class FormatTooNew(StorageError):
    """The file was written by a newer Headwater."""

    code = "format_too_new"


class Poisoned(StorageError):
    """An fsync failed; the partition takes no more events until it is re-opened and checked."""

    code = "poisoned"


class EventsMissed(HeadwaterError):
    """Retention removed events before they were read: offsets `first` to `last`, `count` of them."""

    code = "events_missed"

    def __init__(self, what: str, *, advice: str = "", first: int = 0, last: int = -1) -> None:
        super().__init__(what, advice=advice)
        self.first = first
        self.last = last
        self.count = last - first + 1

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_missed, (self.what, self.advice, self.first, self.last))


def _rebuild_missed(what: str, advice: str, first: int, last: int) -> EventsMissed:
    return EventsMissed(what, advice=advice, first=first, last=last)


class LeaseExpired(Conflict):
    """The lease ran out and its event was given to somebody else, or is done already."""

    code = "lease_expired"


class TopicFull(DiskFull):
    """A topic is at its `bytes_max`, and waits for room."""

    code = "topic_full"


class Unreachable(HeadwaterError):
    """The server behind a log, or behind a state, does not answer."""

    code = "unreachable"
    retriable = True


class SparkUnavailable(HeadwaterError):
    """Spark cannot be started here: no Java, or one that is too old."""

    code = "spark_unavailable"


class CheckpointConflict(Conflict):
    """A stage's batch does not follow the one that the stage wrote last."""

    code = "checkpoint_conflict"


class InvalidApp(InvalidInput):
    """An application's script cannot run as it is."""

    code = "invalid_app"


class AppRunning(Conflict):
    """Another process runs this application."""

    code = "app_running"


class AppFailed(HeadwaterError):
    """A stage of an application failed for good."""

    code = "app_failed"


class KeyTooLarge(InvalidInput):
    """A key has more rows in an operator's state than a batch can work on."""

    code = "key_too_large"


class NotCapturable(InvalidInput):
    """A database, or one of its tables, cannot be captured as it is: a key, a right or a setting is missing."""

    code = "not_capturable"


class CaptureLost(HeadwaterError):
    """The database has forgotten changes that were not captured yet, or is another one; only a new backfill repairs that."""

    code = "capture_lost"
