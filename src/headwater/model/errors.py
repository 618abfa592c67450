"""All errors of Headwater.

Each error says what happened, where (topic, partition, offset, file) and what to do next. `code` is stable, for programs;
`retriable` says whether the same call may succeed later without any change.

    HeadwaterError
    ├── InvalidInput             an argument is not valid
    │   ├── InvalidName          a topic name is not valid
    │   ├── InvalidSchema        a schema is not valid
    │   ├── SchemaMismatch       rows do not fit the topic's schema
    │   ├── SchemaConflict       a schema change does not fit the stored events
    │   ├── InvalidApp           an application's script cannot run as it is
    │   ├── EventTooLarge        an event exceeds the topic's `event_bytes_max`
    │   ├── KeyTooLarge          a key has more rows in an operator's state than one batch can process
    │   ├── NotCapturable        a database or one of its tables does not meet the requirements of a capture
    │   └── Unsupported          this log, store or source does not support the operation
    ├── NotFound
    │   ├── LogNotFound          no log at that URL
    │   ├── TopicNotFound        the topic does not exist
    │   └── GroupNotFound        the group does not exist
    ├── TopicExists
    ├── Closed                   the object was closed, or belongs to the parent of this forked process
    ├── Conflict
    │   ├── Fenced               another producer with the same id took over
    │   ├── SequenceGap          a producer's sequence numbers decrease within one batch
    │   ├── LeaseExpired         the lease expired, and its event was leased again or is done
    │   ├── Diverged             a copy and its log contain different events
    │   ├── NotOwner             the partition now belongs to another member of the group
    │   ├── Repartitioned        the topic got more partitions after the events were assigned
    │   ├── GroupInUse           the group has live members
    │   └── CheckpointConflict   a stage's batch does not follow the last batch that it wrote
    ├── Overloaded               a bounded buffer is full, and the caller does not wait
    ├── TimedOut
    ├── PositionLost             the offset existed, but a power loss removed it
    ├── EventsMissed             retention removed events before a reader read them
    ├── CaptureLost              the database no longer has changes that the capture still needs
    ├── Unreachable              a server does not answer
    ├── SparkUnavailable         Spark cannot be started here
    └── StorageError
        ├── DiskFull
        │   └── TopicFull        a topic is at its `bytes_max`
        ├── NoAccess             the operating system denied access
        ├── Damaged              bytes on disk do not match their checksum
        ├── FormatTooNew         written by a newer Headwater
        └── Poisoned             an fsync failed; the partition accepts no events until it is opened again
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """The base of all errors: `what` says what happened, `advice` what to do next."""

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
    """An argument is not valid; the same call never succeeds."""

    code = "invalid_input"


class InvalidName(InvalidInput):
    """A topic name is not valid."""

    code = "invalid_name"


class InvalidSchema(InvalidInput):
    """A schema is not valid."""

    code = "invalid_schema"


class SchemaMismatch(InvalidInput):
    """Rows do not fit the topic's schema."""

    code = "schema_mismatch"


class SchemaConflict(InvalidInput):
    """A schema change does not fit the stored events."""

    code = "schema_conflict"


class EventTooLarge(InvalidInput):
    """An event exceeds the topic's `event_bytes_max`."""

    code = "event_too_large"


class Unsupported(InvalidInput):
    """This log, store or source does not support the operation."""

    code = "unsupported"


class NotFound(HeadwaterError):
    """The named object does not exist."""

    code = "not_found"


class LogNotFound(NotFound):
    """There is no log at that URL."""

    code = "log_not_found"


class TopicNotFound(NotFound):
    """The topic does not exist in the log."""

    code = "topic_not_found"


class GroupNotFound(NotFound):
    """The group does not exist in the log."""

    code = "group_not_found"


class TopicExists(HeadwaterError):
    """The topic already exists."""

    code = "topic_exists"


class Closed(HeadwaterError):
    """The object was closed, or belongs to the parent of this forked process."""

    code = "closed"


class Conflict(HeadwaterError):
    """Another writer, reader or version came first."""

    code = "conflict"


class Fenced(Conflict):
    """Another producer with the same id took over."""

    code = "fenced"


class SequenceGap(Conflict):
    """A producer's sequence numbers decrease within one batch."""

    code = "sequence_gap"


class Diverged(Conflict):
    """A copy and its log contain different events."""

    code = "diverged"


class NotOwner(Conflict):
    """The partition now belongs to another member of the group."""

    code = "not_owner"


class Repartitioned(Conflict):
    """The topic got more partitions after the events were assigned; producers and `append` assign them again."""

    code = "repartitioned"
    retriable = True


class SchemaMoved(Conflict):
    """The topic's columns changed after a query over all columns was planned; an application plans the query again."""

    code = "schema_moved"


class GroupInUse(Conflict):
    """The group has live members."""

    code = "group_in_use"


class Overloaded(HeadwaterError):
    """A bounded buffer is full, and the caller does not wait."""

    code = "overloaded"
    retriable = True


class TimedOut(HeadwaterError):
    """The operation did not finish before its deadline."""

    code = "timed_out"
    retriable = True


class PositionLost(HeadwaterError):
    """The offset existed, but a power loss removed it."""

    code = "position_lost"


class StorageError(HeadwaterError):
    """The disk or the operating system failed."""

    code = "storage"


class DiskFull(StorageError):
    """The device is full."""

    code = "disk_full"
    retriable = True


class NoAccess(StorageError):
    """The operating system denied access."""

    code = "no_access"


class Damaged(StorageError):
    """Bytes on disk do not match their checksum; the log never returns them."""

    code = "damaged"


class FormatTooNew(StorageError):
    """The file was written by a newer Headwater."""

    code = "format_too_new"


class Poisoned(StorageError):
    """An fsync failed; the partition accepts no events until it is opened again and checked."""

    code = "poisoned"


class EventsMissed(HeadwaterError):
    """Retention removed events before a reader read them: `count` offsets from `first` to `last`."""

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
    """The lease expired, and its event was leased again or is done."""

    code = "lease_expired"


class TopicFull(DiskFull):
    """A topic has reached its `bytes_max`."""

    code = "topic_full"


class Unreachable(HeadwaterError):
    """A server does not answer."""

    code = "unreachable"
    retriable = True


class SparkUnavailable(HeadwaterError):
    """Spark cannot start here: Java is missing or too old."""

    code = "spark_unavailable"


class CheckpointConflict(Conflict):
    """A stage's batch does not follow the last batch that the stage wrote."""

    code = "checkpoint_conflict"


class InvalidApp(InvalidInput):
    """An application's script is not valid."""

    code = "invalid_app"


class AppRunning(Conflict):
    """Another process already runs this application."""

    code = "app_running"


class AppFailed(HeadwaterError):
    """A stage of an application failed permanently."""

    code = "app_failed"


class KeyTooLarge(InvalidInput):
    """A key has more rows in an operator's state than one batch can process."""

    code = "key_too_large"


class NotCapturable(InvalidInput):
    """A database or table does not meet the requirements of a capture: a key, a permission or a setting is missing."""

    code = "not_capturable"


class CaptureLost(HeadwaterError):
    """The database no longer has changes that the capture needs, or is another database; only a new backfill helps."""

    code = "capture_lost"
