"""What every test can ask for: our marks, the real services, Spark, the command line, an inner pytest run; and how Hypothesis runs."""

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parent.parent

pytest.register_assert_rewrite("headwater.testing")  # so that the contract suite, too, says what differs

pytest_plugins = [
    "tests.rigs.marks",
    "tests.rigs.services",
    "tests.rigs.commands",
    "tests.rigs.spark",
    "tests.rigs.processing.source_topics",
    "tests.rigs.log.pairs",
    "tests.rigs.app.sink_targets",
    "pytester",
]

# Programs that tests start are modules of the tests, and import others.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of the many processes compiles everything again
# Tests start Java by the hundred, each for seconds: the quick compiler alone takes two thirds of the time that both take, and with
# an archive of Spark's classes (`tools/archive.py`) Spark starts with half of the processor time.
java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
archive = ROOT / ".venv" / "spark.jsa"
if archive.exists() and " " not in str(archive):
    java += f" -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
os.environ.setdefault("JDK_JAVA_OPTIONS", java)

# A shell has what it runs in the background ignore interrupts, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a busy machine is not a wrong result. The blob replays a failure that another machine found.
settings.register_profile("headwater", deadline=None, print_blob=True)
settings.load_profile("headwater")


@pytest.fixture(autouse=True, scope="module")
def nothing_piles_up() -> Iterator[None]:
    """What a module leaves to the collector is collected before the next: simulated disks and dead logs are circles that hold files by the
    hundred, and Spark does not work in a process that has more than 1,024 open."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # what was not closed is closed here
        gc.collect()
