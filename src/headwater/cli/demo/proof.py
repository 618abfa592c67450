"""The check of the results: DuckDB compares the sent clicks with the log, and the log with the live views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headwater.cli.demo.clicks import REGIONS, TOPIC, USERS, clicks
from headwater.cli.output.rows import rows_of
from headwater.log.log import Log
from headwater.query.query import answer
from headwater.views.view import View

SENT = f"""
with stored as (select user_id, page, "at", count(*) as copies from {TOPIC} group by all),
     told as (select user_id, page, "at", count(*) as copies from sent group by all)
select coalesce(told.user_id, stored.user_id) // {USERS} as region,
       coalesce(sum(told.copies), 0)::bigint as acknowledged,
       coalesce(sum(stored.copies), 0)::bigint as in_log,
       coalesce(sum(greatest(coalesce(told.copies, 0) - coalesce(stored.copies, 0), 0)), 0)::bigint as lost,
       coalesce(sum(greatest(stored.copies - told.copies, 0)), 0)::bigint as doubled,
       coalesce(sum(stored.copies) filter (told.copies is null), 0)::bigint as never_sent
from told full join stored using (user_id, page, "at")
group by 1 order by 1
"""
VISITS = (
    f"select split_part(page, '?', 1) as page, \"at\" as clicked from {TOPIC} where not starts_with(page, '/health')"
)
QUESTIONS = {
    "top_pages": f"select page, count(*) as visits from ({VISITS}) group by 1 order by 2 desc, 1 limit 10",
    "per_minute": f"select page, time_bucket(interval 1 minute, clicked) as minute, count(*) as visits from ({VISITS}) group by all",
}
"""DuckDB's query over the log for each view of the application."""


@dataclass(frozen=True)
class RegionProof:
    """The result of the comparison for one region."""

    region: str
    acknowledged: int
    in_log: int
    lost: int
    doubled: int
    never_sent: int

    @property
    def is_right(self) -> bool:
        """Whether each click is in the log exactly once, as it was sent."""
        return self.acknowledged == self.in_log and self.lost == self.doubled == self.never_sent == 0


@dataclass(frozen=True)
class Agreement:
    """The rows of a live view beside DuckDB's result."""

    view: str
    rows: int
    visits: int
    rows_expected: int
    visits_expected: int
    differing: int

    @property
    def is_right(self) -> bool:
        """Whether both are the same, row by row."""
        return self.differing == 0


def prove(log: Log, acknowledged: dict[str, int], *, begun_us: int, rate: float) -> list[RegionProof]:
    """Compares the log with what each region had acknowledged, click by click."""
    sent = [clicks(region, 0, count, begun_us=begun_us, rate=rate) for region, count in acknowledged.items()]
    with answer(log, SENT, tables={"sent": pa.concat_tables(sent)}) as batches:
        rows = [row for batch in batches for row in rows_of(batch)]
    return [
        RegionProof(REGIONS[region] if 0 <= region < len(REGIONS) else "nobody", *counts) for region, *counts in rows
    ]


def compare(log: Log, view: View) -> Agreement:
    """Compares a live view with what DuckDB makes of the log."""
    found = {tuple(row.values()) for row in view.rows().to_pylist()}
    with answer(log, QUESTIONS[view.name]) as batches:
        expected: set[tuple[Any, ...]] = {row for batch in batches for row in rows_of(batch)}
    return Agreement(
        view=view.name,
        rows=len(found),
        visits=sum(row[-1] for row in found),
        rows_expected=len(expected),
        visits_expected=sum(row[-1] for row in expected),
        differing=len(found ^ expected),
    )


def stored(log: Log, region: str) -> int:
    """How many clicks of one region are in the log."""
    question = f"select count(*) from {TOPIC} where user_id // {USERS} = {REGIONS.index(region)}"
    with answer(log, question) as batches:
        return int(next(rows_of(batches.read_next_batch()))[0])
