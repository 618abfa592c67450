"""A Delta table as a sink: `delta:///./warehouse/users?partition_by=country`, for warehouses that read Delta.

A batch is one merge, one version of the table. Its commit has the stage's transaction (Delta's `txn`: the stage as `appId`, the batch's
number as `version`), which every reader of Delta understands, and the whole marker as metadata. A commit is made on the version that the
batch began with, and on no other (`max_commit_retries=0`): whoever was overtaken changes nothing. That needs no fencing number,
as files do not: a writer that wakes late finds its batch there, or a later one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headwater.databases.address import load_client, parse_address, quoted
from headwater.model.errors import InvalidInput, NotFound, Unreachable
from headwater.model.marker import Marker
from headwater.model.schema import DELETED
from headwater.sinks.ledger import NO_ENTRY, LedgerEntry, admits, check_unmoved
from headwater.sinks.sink import Refusal, Shape, ShapedSink, column_names

MARKER = "headwater.marker"
_COMMITS = 16
_ACCEPTED = -1
"""The version of the stage's transaction after its last marker was forgotten."""


class DeltaSink(ShapedSink):
    """One Delta table, fed by one stage."""

    def __init__(self, to: str, *, stage: str) -> None:
        address = parse_address(to, options=("partition_by",))
        super().__init__(address.shown, stage=stage)
        self.folder = Path(address.path).absolute()
        self.partition_by = column_names(address.options.get("partition_by", ""))
        self._delta = load_client("deltalake", extra="delta", purpose="The Delta sink")
        self._table: Any = None
        self._pieces: list[pa.Table] = []

    def open(self, shape: Shape) -> None:
        self._shape = shape
        with self._told():
            nullable = pa.schema([field.with_nullable(True) for field in shape.schema])
            if not self._exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                parts = list(self.partition_by)
                missing = [name for name in parts if name not in nullable.names]
                if missing:
                    raise InvalidInput(
                        f"{self.url}: The partition column {missing[0]!r} does not exist.",
                        advice=f"The columns are: {', '.join(nullable.names)}.",
                    )
                self._delta.DeltaTable.create(str(self.folder), schema=nullable, mode="ignore", partition_by=parts)
            table = self.load()
            self._check_partitions(tuple(table.metadata().partition_columns))
            there = set(table.schema().to_arrow().names)
            missing = [field for field in nullable if field.name not in there]
            if missing:
                table.alter.add_columns(list(self._delta.Schema.from_arrow(pa.schema(missing)).fields))

    def entry(self) -> LedgerEntry:
        with self._told():
            return self._entry(self.load()) if self._exists() else NO_ENTRY

    def load(self) -> Any:
        """The table's newest version; `NotFound`."""
        with self._told():
            return self._delta.DeltaTable(str(self.folder))

    def entries_in(self, table: Any, *, commits: int | None = None) -> dict[str, LedgerEntry]:
        """What a version of the table knows of every stage that writes to it, or what its last commits do."""
        found: dict[str, LedgerEntry] = {}
        for commit in table.history(commits):
            if MARKER in commit:
                marker = Marker.from_canonical(commit[MARKER].encode())
                found.setdefault(marker.stage, NO_ENTRY if marker.ends == _ACCEPTED else LedgerEntry(0, marker))
        return found

    def begin(self, marker: Marker) -> bool:
        with self._told():
            self._table, self._pieces = self.load(), []
            return admits(self.stage, self._entry(self._table), 0, marker)

    def begin_repair(self, marker: Marker | None) -> None:
        with self._told():
            self._table, self._pieces = self.load(), []
            check_unmoved(self.stage, self._entry(self._table), marker)

    def upsert(self, rows: pa.Table) -> Sequence[Refusal]:
        self._pieces.append(rows.append_column(DELETED.name, pa.array(np.zeros(rows.num_rows, bool))))
        return ()

    def delete(self, keys: pa.Table) -> None:
        columns = [
            keys.column(field.name) if field.name in keys.column_names else pa.nulls(keys.num_rows, field.type)
            for field in self.shape.schema
        ]
        rows = pa.Table.from_arrays(columns, names=self.shape.schema.names)
        self._pieces.append(rows.append_column(DELETED.name, pa.array(np.ones(rows.num_rows, bool))))

    def commit(self, marker: Marker | None) -> None:
        with self._told():
            named = None if marker is None else msgspec.structs.replace(marker, stage=self.stage)
            self._commit(named, self._pieces or [self._empty()])
        self._pieces = []

    def rollback(self) -> None:
        self._pieces = []

    def accept_new_checkpoint(self) -> Marker | None:
        last = self.entry().last
        if last is not None:
            with self._told():
                self._table = self.load()
                forgotten = Marker(query="", epoch=0, ends=_ACCEPTED, stage=self.stage)
                self._table.alter.set_table_description(
                    f"Fed by {self.stage}", commit_properties=self._properties(forgotten)
                )
        return last

    def close(self) -> None:
        self._table = None

    def _check_partitions(self, there: tuple[str, ...]) -> None:
        """A table keeps the partitions that it was made with; whoever names none takes them as they are."""
        if self.partition_by and self.partition_by != there:
            raise InvalidInput(
                f"{self.url} is partitioned by {', '.join(there) or 'nothing'}, not by {', '.join(self.partition_by)}.",
                advice="Use a new folder, because Delta cannot change the partitioning.",
            )

    def _empty(self) -> pa.Table:
        return pa.schema([*self.shape.schema, DELETED]).empty_table()

    def _commit(self, marker: Marker | None, pieces: Sequence[pa.Table]) -> None:
        rows = pa.concat_tables(pieces, promote_options="permissive")
        same = " and ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in self.shape.key)
        values = {quoted(name): f"s.{quoted(name)}" for name in self.shape.schema.names}
        gone = f"s.{quoted(DELETED.name)}"
        merge = self._table.merge(
            rows, same, source_alias="s", target_alias="t", commit_properties=self._properties(marker)
        )
        merge = merge.when_matched_delete(gone).when_matched_update(values)
        merge.when_not_matched_insert(values, f"not {gone}").execute()
        if marker is not None and self._table.transaction_version(self.stage) != marker.epoch:
            self._commit_alone(marker)

    def _commit_alone(self, marker: Marker) -> None:
        """A merge that changes no row, as of deletions of keys that are not there, makes no version; the batch counts all the same."""
        self._table.create_write_transaction(
            [],
            mode="append",
            schema=self._table.schema(),
            partition_by=list(self._table.metadata().partition_columns),
            commit_properties=self._properties(marker),
        )

    def _properties(self, marker: Marker | None) -> Any:
        more: dict[str, Any] = {}
        if marker is not None:
            more["custom_metadata"] = {MARKER: marker.canonical().decode()}
            more["app_transactions"] = [self._delta.Transaction(self.stage, marker.epoch)]
        return self._delta.CommitProperties(max_commit_retries=0, **more)

    def _entry(self, table: Any) -> LedgerEntry:
        """The newest marker of the stage among the commits that Delta keeps."""
        if table.transaction_version(self.stage) is None:
            return NO_ENTRY
        # The last marker is nearly always among the last commits, and the whole history grows with every batch.
        for commits in (_COMMITS, None):
            found = self.entries_in(table, commits=commits).get(self.stage)
            if found is not None:
                return found
        raise InvalidInput(
            f"{self.url}: Delta's log no longer has the commit with the last marker of {self.stage!r}.",
            advice="Write everything again with --accept-new-checkpoint STAGE=earliest.",
        )

    def _exists(self) -> bool:
        return bool(self._delta.DeltaTable.is_deltatable(str(self.folder)))

    @contextmanager
    def _told(self) -> Iterator[None]:
        errors = self._delta.exceptions
        try:
            yield
        except errors.CommitFailedError as error:
            # Perhaps somebody only tidied the table up: the next attempt finds out whether it was another writer of this stage.
            raise Unreachable(
                f"{self.url}: Another writer changed the table: {_first_line(error)}",
                advice="The sink wrote nothing and retries the batch.",
            ) from None
        except errors.TableNotFoundError:
            raise NotFound(
                f"{self.url}: The table does not exist.", advice="The first run of the stage creates the table."
            ) from None
        except errors.DeltaError as error:
            raise InvalidInput(
                f"{self.url}: {_first_line(error)}", advice="Check that the table is complete."
            ) from None
        except OSError as error:
            raise Unreachable(
                f"{self.url}: {_first_line(error)}", advice="Check the folder and its permissions."
            ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
