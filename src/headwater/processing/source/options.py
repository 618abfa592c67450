"""Options: what a user says to `spark.read.format("headwater")`, checked one by one before anything is read.

Names and meanings follow Spark's Kafka source where it has the same thing. A name that is not known is refused, since a
misspelt option would otherwise do nothing in silence.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from headwater.log.port.topic import check_name
from headwater.model.clock import duration_us, time_us
from headwater.model.errors import HeadwaterError, InvalidInput, Unsupported
from headwater.model.text import compiled_pattern
from headwater.processing.checkpoint.offsets import EARLIEST, LATEST, Place, Places, parse_places

Use = Literal["stream", "batch"]

NAMES = (
    "log", "topic", "subscribePattern", "startingOffsets", "endingOffsets", "maxOffsetsPerTrigger", "minPartitions",
    "failOnDataLoss", "columns", "filter", "asOf", "lateness", "pace", "maxima", "stopOffsets",
    "operator", "capture", "schemaVersion", "where", "lateRows", "lateUntil", "lateWindow", "awaits",
)  # fmt: skip

_COUNT_MAX = 1 << 62
_COLUMN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^,`]+?))\s*(?:,|$)")
_BATCH_ONLY = {"endingOffsets": "a stream has no end", "asOf": "a table as of a time does not go on"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """All options, read and checked as far as that needs no log. `columns` may hold "*"; `as_of` is a time or "latest".

    `lateness_us` is that of the columns `_late` and `_watermark` where it is not the topic's own.
    `pace`, `maxima` and `stop` are for applications: the folder in which a stream tells how far its batches go, and that it keeps a
    watermark; the one in which tasks tell how far event time has come, where the log does not keep it; and the offsets that another query
    has in its checkpoint, at which a stream that is run over what is there ends; `operator` is one that works inside the source;
    `capture` the stage of a capture whose topics are read, to ends at which its transactions are whole (see `capture_transactions`);
    `schema_version` the one that all columns of the topic were planned by: where it has another, the stream goes no further; `where`
    what the stage asks of each row before anything else (see `pushdown`); `late_rows` the folder in which tasks tell how many rows came
    too late; `late_until` the time, in µs, at and before which every event is late, because Spark would drop it; `late_window` the
    length of the windows, in µs, in which an event is late when its window has ended; `awaits` the
    topics of all sources of the query, for one of which the source waits when it has nothing to read (see `arrivals`).
    """

    log: str
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    starting: Place | Places | None = None
    ending: Place | Places | None = None
    offsets_max: int | None = None
    partitions_min: int = 1
    fails_on_loss: bool = True
    columns: tuple[str, ...] = ("*",)
    condition: str | None = None
    as_of: int | str | None = None
    lateness_us: int | None = None
    pace: str | None = None
    maxima: str | None = None
    stop: str | None = None
    operator: str | None = None
    capture: str | None = None
    schema_version: str | None = None
    where: str | None = None
    late_rows: str | None = None
    late_until: int | None = None
    late_window: int | None = None
    awaits: tuple[str, ...] = ()

    def check_use(self, use: Use) -> None:
        """Refuses what makes no sense for a stream."""
        given = {"endingOffsets": self.ending, "asOf": self.as_of}
        for name, why in _BATCH_ONLY.items():
            if use == "stream" and given[name] is not None:
                raise Unsupported(
                    f"Option {name} is for spark.read: {why}.", advice="Leave it out of spark.readStream."
                )


def read_options(given: Mapping[str, str]) -> Options:
    """The options that a user gave; `InvalidInput` names the first one that is wrong, and what it takes."""
    known = {name.lower(): name for name in NAMES}
    for name in given:
        if name.lower() not in known:
            close = difflib.get_close_matches(name.lower(), known, 1)
            meant = f"Did you mean {known[close[0]]}? " if close else ""
            raise InvalidInput(f"Unknown option {name!r}.", advice=f"{meant}Options are {', '.join(NAMES)}.")
    said = {known[name.lower()]: text for name, text in given.items()}
    as_of = said.get("asOf")
    options = Options(
        log=_log(said.get("log", "")),
        topics=_topics(said),
        pattern=_pattern(said.get("subscribePattern")),
        starting=_places("startingOffsets", said.get("startingOffsets"), (EARLIEST, LATEST)),
        ending=_places("endingOffsets", said.get("endingOffsets"), (LATEST,)),
        offsets_max=_count("maxOffsetsPerTrigger", said.get("maxOffsetsPerTrigger")),
        partitions_min=_count("minPartitions", said.get("minPartitions")) or 1,
        fails_on_loss=_truth("failOnDataLoss", said.get("failOnDataLoss", "true")),
        columns=_columns(said.get("columns", "*")),
        condition=said.get("filter"),
        as_of=as_of if as_of is None or as_of == "latest" else _time("asOf", as_of, also='"latest" or '),
        lateness_us=_duration("lateness", said.get("lateness")),
        pace=said.get("pace"),
        maxima=said.get("maxima"),
        stop=said.get("stopOffsets"),
        operator=said.get("operator"),
        capture=said.get("capture"),
        schema_version=said.get("schemaVersion"),
        where=said.get("where"),
        late_rows=said.get("lateRows"),
        late_until=None if "lateUntil" not in said else int(said["lateUntil"]),
        late_window=None if "lateWindow" not in said else int(said["lateWindow"]),
        awaits=tuple(filter(None, said.get("awaits", "").split(","))),
    )
    if options.as_of is not None and (options.starting is not None or options.ending is not None):
        raise InvalidInput(
            "Option asOf reads a table, which does not have startingOffsets or endingOffsets.",
            advice="Use asOf for the newest row of each key, or offsets for the events.",
        )
    return options


def columns_text(names: Iterable[str]) -> str:
    """Names of columns as the option has them, whatever characters they have."""
    return ",".join(f"`{name.replace('`', '``')}`" for name in names)


def _log(url: str) -> str:
    if not url:
        raise InvalidInput("Option log is missing.", advice='Give the log\'s URL, such as .option("log", "./data").')
    if url.startswith("memory:"):
        raise Unsupported(
            "Option log: a memory:// log exists in one process only, and Spark reads from other processes.",
            advice="Use a folder (file://) or kafka://; in tests a temporary folder.",
        )
    return url


def _topics(said: Mapping[str, str]) -> tuple[str, ...]:
    if ("topic" in said) == ("subscribePattern" in said):
        raise InvalidInput(
            "Exactly one of the options topic and subscribePattern says what to read.",
            advice='Give .option("topic", "orders"), several as "orders,returns", or .option("subscribePattern", "orders.*").',
        )
    names = [name.strip() for name in said.get("topic", "").split(",")] if "topic" in said else []
    with _about("topic", said.get("topic", "")):
        return tuple(dict.fromkeys(check_name(name) for name in names))


def _pattern(text: str | None) -> str | None:
    compiled_pattern(text or "", what="Option subscribePattern=")
    return text


def _places(option: str, text: str | None, ends: tuple[str, ...]) -> Place | Places | None:
    if text is None or text in ends:
        return text
    if text.lstrip().startswith("{"):
        return parse_places(option, text, ends)
    words = " or ".join(f'"{end}"' for end in ends)
    return _time(option, text, also=f'{words}, JSON such as {{"orders": {{"0": 23, "1": -1}}}}, or ')


def _time(option: str, text: str, *, also: str = "") -> int:
    try:
        return time_us(text)
    except InvalidInput:
        raise InvalidInput(
            f"Option {option}={text!r} is not understood.",
            advice=f'Use {also}a time in ISO 8601, such as "2026-01-31T12:00:00Z".',
        ) from None


def _duration(option: str, text: str | None) -> int | None:
    try:
        return None if text is None else duration_us(text)
    except InvalidInput:
        raise InvalidInput(
            f"Option {option}={text!r} is not a duration.", advice='Use one such as "10 minutes".'
        ) from None


def _count(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,18}", text.strip()) or not 0 < int(text) <= _COUNT_MAX:
        raise InvalidInput(
            f"Option {option}={text!r} is not a number of 1 or more.", advice="Use a whole number, such as 100000."
        )
    return int(text)


def _truth(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidInput(f"Option {option}={text!r} is neither true nor false.", advice='Use "true" or "false".')
    return text.lower() == "true"


def _columns(text: str) -> tuple[str, ...]:
    found: list[str] = []
    at = 0
    while at < len(text):
        part = _COLUMN.match(text, at)
        if part is None:
            break
        found.append(part[1].replace("``", "`") if part[1] else part[2])
        at = part.end()
    if not found or at < len(text) or len({name.lower() for name in found}) < len(found):
        raise InvalidInput(
            f"Option columns={text!r} is not a list of different names.",
            advice='Separate names by commas, such as "id,amount,_offset"; "*" means all columns of the topic. Put a name '
            "with a comma between backticks.",
        )
    return tuple(found)


class _about:  # noqa: N801 - reads as a statement
    """Says in an error which option it is about."""

    def __init__(self, option: str, text: str) -> None:
        self._said = f"Option {option}={text!r}: "

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, HeadwaterError):
            raise type(error)(self._said + error.what, advice=error.advice) from None
