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

from headwater.testing.contract_append import AppendContract
from headwater.testing.contract_closing import ClosingContract
from headwater.testing.contract_compaction import CompactionContract
from headwater.testing.contract_evolution import EvolutionContract
from headwater.testing.contract_groups import GroupsContract
from headwater.testing.contract_groups_reading import GroupReadingContract
from headwater.testing.contract_groups_transactions import GroupTransactionsContract
from headwater.testing.contract_overload import OverloadContract
from headwater.testing.contract_producer import ProducerContract
from headwater.testing.contract_read import ReadContract
from headwater.testing.contract_reader import ReaderContract
from headwater.testing.contract_removal import RemovalContract
from headwater.testing.contract_retention import RetentionContract
from headwater.testing.contract_sequence import SequenceContract
from headwater.testing.contract_split import SplitContract
from headwater.testing.contract_stages import StageContract
from headwater.testing.contract_table import TableContract
from headwater.testing.contract_topic import TopicContract
from headwater.testing.contract_transaction import TransactionContract

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
    ClosingContract,
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
