"""What the doctor looks at in a topic's archive: the manifest, every page of every file, and that no event lies between two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from headwater.log.file.segments.archive import Archive, Archived
from headwater.log.port.topic import Topic
from headwater.model.errors import Damaged, HeadwaterError
from headwater.model.url import without_password

Check = tuple[str, Callable[[], object], Callable[[], object] | None]
"""A path, how to look at what is there, and how to mend it where that can be done."""


def archive_checks(topic: Topic, number: int, *, first: int, oldest: int) -> Iterator[Check]:
    """For one partition, which begins at `first`; from `oldest` on its events are to be in the archive."""
    try:
        archive = Archive(topic)
    except HeadwaterError as error:
        yield without_password(str(topic.archive)), partial(_tell, error), None
        return
    manifest = archive.manifest_path(number)

    def list_again() -> None:
        found = archive.found(number, topic=topic)
        _check_whole(manifest, found, first=first, oldest=oldest)
        archive.write_manifest(number, found)

    yield manifest, partial(archive.entries, number), list_again
    try:
        entries = archive.entries(number)
    except HeadwaterError:
        return  # which is told already
    for entry in entries:
        path = f"{manifest.rpartition('/')[0]}/{entry.name}"
        yield path, partial(_check_file, archive, topic, number, entry), None
    yield manifest, lambda: _check_whole(manifest, entries, first=first, oldest=oldest), list_again


def _tell(error: HeadwaterError) -> None:
    raise error


def _check_file(archive: Archive, topic: Topic, number: int, entry: Archived) -> None:
    events = archive.check(number, entry, topic=topic)
    if events != entry.events:
        raise Damaged(
            f"{entry.name} of the archive holds {events} events and is listed with {entry.events}.",
            advice="Restore this file of the archive from a copy.",
        )


def _check_whole(manifest: str, entries: list[Archived], *, first: int, oldest: int) -> None:
    """Every offset from `oldest` to `first` is in some file."""
    at = oldest
    for entry in entries:
        if entry.base <= at < entry.end:
            at = entry.end
    if at < first:
        raise Damaged(
            f"{manifest} lists no file with event {at}; events up to {first - 1} were archived.",
            advice="Restore the archive from a copy.",
        )
