"""A MongoDB database and its change stream, asked by plain commands: a batch of events for each, and where to go on behind it.

pymongo's own stream gives one event at a time and does not say where a batch ends, so the commands are ours. Every failure becomes one
of our errors: `Unreachable` where trying again can help, `NotCapturable` where somebody has to do something first, `CaptureLost` where
changes are gone. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import MongoClient
from pymongo.errors import ConfigurationError, ConnectionFailure, InvalidURI, OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from headwater.capture.source_url import SourceUrl
from headwater.databases.address import SECRETS
from headwater.databases.failures import in_our_words
from headwater.model.errors import CaptureLost, HeadwaterError, InvalidInput, NotCapturable, Unreachable

PORT = 27017
CONNECT_S = 5.0
TIMEOUT_S = 60.0
IMAGES_SINCE = (6, 0)
"""From this version on a server tells a document as it was before, where its collection keeps that."""

CODEC: CodecOptions[dict[str, Any]] = CodecOptions(
    tz_aware=True,
    uuid_representation=UuidRepresentation.STANDARD,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)

_NO_REPLICA_SET, _NO_RIGHT, _TOO_LARGE = 40573, 13, 10334
_REFUSED = (18, 8000)
_LOST = (280, 286, 260)
_RETRY_LABELS = ("ResumableChangeStreamError", "RetryableWriteError", "TransientTransactionError")
_CURSOR_GONE = 43


class Mongo:
    """One database: its client, and a change stream that is open or not."""

    def __init__(self, url: SourceUrl) -> None:
        self.shown = url.shown
        self.name = url.path.strip("/")
        self._url = url
        self._client: MongoClient[dict[str, Any]] | None = None
        self._session: Any = None
        self._cursor = 0

    @property
    def client(self) -> MongoClient[dict[str, Any]]:
        """Connected when it is first used."""
        if self._client is None:
            others = {name: v for name, v in self._url.options.items() if not name.startswith("schema")}
            for name in (*SECRETS, "password"):
                others.pop(name, None)
            if self._url.user is not None:
                others |= {"username": self._url.user, "password": self._url.read_password() or ""}
            with self.told():
                self._client = MongoClient(
                    self._url.host,
                    self._url.port or PORT,
                    serverSelectionTimeoutMS=int(CONNECT_S * 1000),
                    connectTimeoutMS=int(CONNECT_S * 1000),
                    socketTimeoutMS=int(TIMEOUT_S * 1000),
                    appname="headwater",
                    **others,  # type: ignore[arg-type]
                )
        return self._client

    @property
    def database(self) -> Any:
        """Reads what a majority of the servers has: a change stream tells nothing else."""
        return self.client.get_database(self.name, codec_options=CODEC, read_concern=ReadConcern("majority"))

    @property
    def session(self) -> Any:
        """The session of all reads: none goes behind what an earlier one has seen."""
        if self._session is None:
            self._session = self.client.start_session()
        return self._session

    def ask(self, command: Mapping[str, Any]) -> Any:
        """What a command gives."""
        with self.told():
            return self.database.command(command, session=self.session, codec_options=CODEC)

    def open_stream(self, match: Mapping[str, Any], *, after: str | None) -> tuple[list[Any], str | None]:
        """Opens the change stream behind a position, or at the present; its first events, and the position behind them."""
        self.close_stream()
        stage: dict[str, Any] = {"fullDocument": "updateLookup"}
        if tuple(self.ask({"buildInfo": 1})["versionArray"][:2]) >= IMAGES_SINCE:
            stage["fullDocumentBeforeChange"] = "whenAvailable"
        if after is not None:
            stage["startAfter"] = {"_data": after}
        pipeline = [{"$changeStream": stage}, {"$match": match}]
        return self._batch(self.ask({"aggregate": 1, "pipeline": pipeline, "cursor": {}}), "firstBatch")

    def read_stream(self, wait_ms: int) -> tuple[list[Any], str | None]:
        """The next events, waiting so long for one, and the position behind them."""
        command = {"getMore": self._cursor, "collection": "$cmd.aggregate", "maxTimeMS": max(1, wait_ms)}
        return self._batch(self.ask(command), "nextBatch")

    @property
    def is_streaming(self) -> bool:
        """Whether the stream is open; the server ends it when the whole database is dropped."""
        return self._cursor != 0

    def close_stream(self) -> None:
        """Ends the stream."""
        cursor, self._cursor = self._cursor, 0
        if cursor and self._client is not None:
            with suppress(PyMongoError):
                self.database.command({"killCursors": "$cmd.aggregate", "cursors": [cursor]}, session=self._session)

    def close(self) -> None:
        """Ends everything; the next call connects anew."""
        self.close_stream()
        client, self._client = self._client, None
        session, self._session = self._session, None
        with suppress(PyMongoError):
            if session is not None:
                session.end_session()
            if client is not None:
                client.close()

    def _batch(self, answer: Any, name: str) -> tuple[list[Any], str | None]:
        cursor = answer["cursor"]
        self._cursor = cursor["id"]
        token = cursor.get("postBatchResumeToken")
        return cursor[name], None if token is None else str(token["_data"])

    def told(self) -> AbstractContextManager[None]:
        """Turns what pymongo raises into our errors; the stream is over then."""
        return in_our_words(self._problem, then=self._forget_stream)

    def _forget_stream(self) -> None:
        self._cursor = 0

    def _problem(self, error: Exception) -> HeadwaterError | None:
        if not isinstance(error, PyMongoError):
            return None
        if isinstance(error, (ConfigurationError, InvalidURI)):
            return InvalidInput(f"{self.shown}: {error}.", advice="Check the options of the URL.")
        text = str(error).partition(", full error")[0].partition(" (configured timeouts")[0].partition(", Timeout:")[0]
        code = error.code if isinstance(error, OperationFailure) else None
        if code == _NO_REPLICA_SET:
            return NotCapturable(
                f"{self.shown} is a standalone server, and only a replica set has change streams.",
                advice="Start the server with `mongod --replSet rs0`, and run `rs.initiate()` once in mongosh. A replica "
                "set of one server is enough.",
            )
        if code in _LOST:
            return CaptureLost(
                f"{self.shown}: {text}.",
                advice="The oplog of the server no longer has changes that the capture needs. Start the capture with "
                "--backfill-again: it copies the collections again. To keep the oplog longer, run "
                "db.adminCommand({replSetResizeOplog: 1, minRetentionHours: 48})",
            )
        if code in _REFUSED:
            return NotCapturable(
                f"{self.shown}: {text}.",
                advice="Check the user, the password (?password_env=NAME or ?password_file=…) and ?authSource=….",
            )
        if code == _NO_RIGHT:
            return NotCapturable(
                f"{self.shown}: {text}.",
                advice=f'Run: db.getSiblingDB("admin").grantRolesToUser("{self._url.user}", [{{role: "read", db: "{self.name}"}}])',
            )
        if code == _TOO_LARGE:
            return NotCapturable(
                f"{self.shown}: A change is larger than MongoDB's limit of 16 MB for one event: {text}.",
                advice="Disable pre-images with db.runCommand({collMod: …, changeStreamPreAndPostImages: {enabled: "
                "false}}), and start the capture with --backfill-again.",
            )
        lasts = not isinstance(error, ConnectionFailure) and not any(map(error.has_error_label, _RETRY_LABELS))
        if isinstance(error, OperationFailure) and lasts and code != _CURSOR_GONE:
            return NotCapturable(
                f"{self.shown}: {text} (code {code}).", advice="Check the log of the server for details."
            )
        return Unreachable(f"{self.shown}: {text}.", advice="Check that the server runs and accepts connections.")
