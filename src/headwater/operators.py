"""Writing operators of your own: the public names for that (see docs/operators.md).

They need Spark, which is loaded when the first of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.model.lazy_names import lazy_names

if TYPE_CHECKING:
    from headwater.processing.operators.operator import Combining as Combining
    from headwater.processing.operators.operator import Input as Input
    from headwater.processing.operators.operator import Operator as Operator
    from headwater.processing.operators.operator import Time as Time
    from headwater.processing.operators.operator import operate as operate
    from headwater.processing.spark.types import to_arrow as to_arrow
    from headwater.processing.spark.types import to_spark as to_spark
    from headwater.processing.state.sorted_runs import H1 as H1
    from headwater.processing.state.sorted_runs import H2 as H2
    from headwater.processing.state.sorted_runs import Keys as Keys
    from headwater.processing.state.state import State as State
    from headwater.processing.state.state import StateTable as StateTable
    from headwater.processing.state.state import TableSpec as TableSpec

_HOMES = {
    "H1": "headwater.processing.state.sorted_runs",
    "H2": "headwater.processing.state.sorted_runs",
    "Combining": "headwater.processing.operators.operator",
    "Input": "headwater.processing.operators.operator",
    "Keys": "headwater.processing.state.sorted_runs",
    "Operator": "headwater.processing.operators.operator",
    "State": "headwater.processing.state.state",
    "StateTable": "headwater.processing.state.state",
    "TableSpec": "headwater.processing.state.state",
    "Time": "headwater.processing.operators.operator",
    "operate": "headwater.processing.operators.operator",
    "to_arrow": "headwater.processing.spark.types",
    "to_spark": "headwater.processing.spark.types",
}
__all__ = [
    "H1",
    "H2",
    "Combining",
    "Input",
    "Keys",
    "Operator",
    "State",
    "StateTable",
    "TableSpec",
    "Time",
    "operate",
    "to_arrow",
    "to_spark",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
