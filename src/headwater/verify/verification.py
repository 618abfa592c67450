"""A verification: whether a copy equals its source, and on request its repair. What `headwater verify` and `hw.verify_copy` do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import msgspec

from headwater.verify.comparison import SETTLE_S, VerifyReport, compare, open_pair
from headwater.verify.repair import repair as repair_pair


def verify_copy(
    source: str,
    target: str,
    *,
    key: Sequence[str] = (),
    columns: Sequence[str] = (),
    stage: str | None = None,
    settle_s: float = SETTLE_S,
    repair: bool = False,
) -> VerifyReport:
    """Compares a copy with its source row by row; both are URLs as on docs/verify.md, such as "./data#users".

    `key` names the key columns where neither side knows them, `columns` the only ones to compare, `stage` the sink that feeds the
    target where several do. Without a common position a key must differ for `settle_s` to be reported. `repair` writes the rows of
    keys that differ to the target, removes those of extra keys, and compares again.
    """
    with closing(open_pair(source, target, key=key, columns=columns, stage=stage)) as pair:
        report = compare(pair, settle_s=settle_s)
        if not repair or report.is_equal:
            return report
        return msgspec.structs.replace(report, repaired=repair_pair(pair, report, settle_s=settle_s))
