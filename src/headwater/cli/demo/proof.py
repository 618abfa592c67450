"""The proof: DuckDB compares what the shops should have sent with what the log holds."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from headwater.cli.demo.orders import TOPIC, sale
from headwater.cli.output import rows_of
from headwater.cli.question import answer
from headwater.log.log import Log

QUESTION = f"""
with stored as (select shop, number, product, amount, count(*) as copies from {TOPIC} group by all)
select coalesce(sent.shop, stored.shop) as shop,
       count(sent.number) as acknowledged,
       coalesce(sum(copies), 0)::bigint as in_log,
       count(*) filter (copies is null) as lost,
       coalesce(sum(copies - 1), 0)::bigint as doubled,
       count(*) filter (sent.number is null) as never_sent
from sent full join stored using (shop, number, product, amount)
group by 1 order by 1
"""


@dataclass(frozen=True)
class Line:
    """What the comparison says about one shop."""

    shop: str
    acknowledged: int
    in_log: int
    lost: int
    doubled: int
    never_sent: int

    @property
    def is_right(self) -> bool:
        """Whether each order is in the log exactly once, as it was sent."""
        return self.acknowledged == self.in_log and self.lost == self.doubled == self.never_sent == 0


def prove(log: Log, acknowledged: dict[str, int]) -> list[Line]:
    """Compares the log with what each shop had acknowledged, order by order."""
    shops, numbers, products, amounts = [], [], [], []
    for shop, count in acknowledged.items():
        for number in range(count):
            product, amount = sale(shop, number)
            shops.append(shop)
            numbers.append(number)
            products.append(product)
            amounts.append(amount)
    sent = pa.table({"shop": shops, "number": numbers, "product": products, "amount": amounts})
    with answer(log, QUESTION, tables={"sent": sent}) as batches:
        return [Line(*row) for batch in batches for row in rows_of(batch)]


def stored(log: Log, shop: str) -> int:
    """How many orders of one shop are in the log."""
    with answer(log, f"select count(distinct number) from {TOPIC} where shop = '{shop}'") as batches:
        return int(next(rows_of(batches.read_next_batch()))[0])
