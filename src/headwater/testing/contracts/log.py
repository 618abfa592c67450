"""The contract of a log: what every backend promises, as tests.

    class TestMyLog(LogContract):
        backend = "mine"

        @pytest.fixture
        def open_log(self, tmp_path):
            return lambda: headwater.open_log(str(tmp_path / "log"))

`open_log` gives a function; each call opens another handle on the same log, which the suite closes. One class holds the
tests of one part of the promise; `LogContract` is what all logs keep, `WholeLogContract` everything. A suite with strict
markers has to know `covers(name)`, which says which row of the coverage matrix a test shows.

Only this module and its parts need pytest.
"""

from __future__ import annotations

from headwater.testing.contracts.append import AppendContract
from headwater.testing.contracts.bounded_reads import ReadContract
from headwater.testing.contracts.closed_log import ClosedLogContract
from headwater.testing.contracts.compaction import CompactionContract
from headwater.testing.contracts.evolution import EvolutionContract
from headwater.testing.contracts.groups.consumers import GroupReadingContract
from headwater.testing.contracts.groups.group import GroupsContract
from headwater.testing.contracts.groups.transactions import GroupTransactionsContract
from headwater.testing.contracts.overload import OverloadContract
from headwater.testing.contracts.producer import ProducerContract
from headwater.testing.contracts.reader import ReaderContract
from headwater.testing.contracts.removal import RemovalContract
from headwater.testing.contracts.retention import RetentionContract
from headwater.testing.contracts.sequence import SequenceContract
from headwater.testing.contracts.split import SplitContract
from headwater.testing.contracts.stages import StageContract
from headwater.testing.contracts.table import TableContract
from headwater.testing.contracts.topic import TopicContract
from headwater.testing.contracts.transaction import TransactionContract

__all__ = ["LogContract", "WholeLogContract"]


class LogContract(
    TopicContract,
    EvolutionContract,
    AppendContract,
    TransactionContract,
    ProducerContract,
    SequenceContract,
    ReadContract,
    TableContract,
    ReaderContract,
    ClosedLogContract,
    GroupsContract,
    GroupReadingContract,
    GroupTransactionsContract,
):
    """What every log promises, whatever it is kept in."""


class WholeLogContract(
    LogContract,
    RetentionContract,
    CompactionContract,
    OverloadContract,
    SplitContract,
    RemovalContract,
    StageContract,
):
    """And what a log promises that keeps its events itself: retention, compaction, limits, added partitions, stages."""
