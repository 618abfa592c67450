"""The wheel alone, in an environment of its own: what a user has after `pip install`, from an empty folder."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

from tests.rigs.clean_install import ROOT, CleanInstall, build_wheel

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", README, re.MULTILINE)]
INSTALL_SPARK = 'pip install "headwater[spark]"'


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project, built."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def log_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanInstall:
    """What `pip install headwater` gives."""
    return CleanInstall(tmp_path_factory.mktemp("log"), wheel)


def needs_spark(command: list[str]) -> bool:
    """Whether a command of the README runs, or reads what ran, on Spark."""
    return command[1] == "run" or "views" in command


def test_the_log_alone_is_small_and_runs_the_readme(log_alone: CleanInstall) -> None:
    """`pip install headwater` brings neither Spark nor a client, and the README's log and its commands work, twice."""
    assert not log_alone.distributions & {"pyspark", "pandas", "confluent-kafka", "redis", "psycopg"}
    (log_alone.work / "first.py").write_text(SNIPPETS[0])
    for _ in range(2):
        for command in (["python", "first.py"], *(each for each in COMMANDS if not needs_spark(each))):
            ended = log_alone.run(*command)
            assert (ended.code, ended.err) == (0, ""), command
    assert "'id': 'o2'" in log_alone.run("python", "first.py").out


def test_without_spark_a_sentence_names_the_extra(log_alone: CleanInstall) -> None:
    """Everything that runs on Spark says the command that installs it; nothing else asks for it."""
    (log_alone.work / "app.py").write_text("from pyspark.sql import DataFrame\n" + SNIPPETS[1])
    for command in (["run", "app.py"], ["plan", "app.py"], ["status", "app.py"], ["demo"]):
        ended = log_alone.run("headwater", *command)
        assert (ended.code, ended.err.count("\n")) == (1, 2), ended.err
        assert ended.err.startswith("error [spark_unavailable]: "), ended.err
        assert INSTALL_SPARK in ended.err
    declared = "import headwater as hw\napp = hw.App('shop')\napp.topic('orders')\n"
    for last in ("app.run()", "app.plan()", "hw.dedupe", "hw.register", "from headwater import lookup"):
        (log_alone.work / "use.py").write_text(declared + last)
        ended = log_alone.run("python", "use.py")
        assert ended.err.splitlines()[-1].startswith("headwater.model.errors.SparkUnavailable: "), ended.err
        assert INSTALL_SPARK in ended.err


def test_a_missing_backend_names_its_extra(log_alone: CleanInstall) -> None:
    """Whichever way a backend is reached."""
    for extra, arguments in (
        ("kafka", ["--log", "kafka://127.0.0.1:1", "topics", "list"]),
        ("postgres", ["capture", "run", "postgresql://127.0.0.1:1/shop"]),
        ("mysql", ["capture", "run", "mariadb://127.0.0.1:1/shop"]),
        ("mongodb", ["capture", "run", "mongodb://127.0.0.1:1/shop"]),
    ):
        ended = log_alone.run("headwater", *arguments)
        assert "error [unsupported]" in ended.err, ended.err
        assert f'pip install "headwater[{extra}]"' in ended.err, ended.err


@pytest.mark.timeout(480)  # Spark starts four times
def test_with_spark_the_readme_an_application_and_the_demo_run(wheel: Path, tmp_path: Path) -> None:
    """`pip install "headwater[spark]"`: the README from top to bottom, its application by `headwater run`, and the demo."""
    installed = CleanInstall(tmp_path, wheel, extras=frozenset({"spark"}))
    assert {"pyspark", "pandas"} <= installed.distributions
    assert not installed.distributions & {"confluent-kafka", "redis", "pytest"}
    (installed.work / "first.py").write_text(SNIPPETS[0])
    (installed.work / "app.py").write_text(SNIPPETS[1])
    for command in (["python", "first.py"], *COMMANDS):
        ended = installed.run(*command)
        assert ended.code == 0, (command, ended.err)
    assert '"id":"o1","count":2' in ended.out
    ended = installed.run("headwater", "demo", "--seconds", "1")
    assert ended.code == 0, ended.err
    assert "each exactly once; the live views agree with DuckDB" in ended.out
    assert "Traceback" not in ended.out + ended.err


def test_all_is_every_extra(wheel: Path, tmp_path: Path) -> None:
    """`headwater[all]` has what each extra has, and every module can be imported but those that users' tests need pytest for."""
    installed = CleanInstall(tmp_path, wheel, extras=frozenset({"all"}))
    metadata = importlib.metadata.Distribution.at(next(installed.root.glob("lib/*/site-packages/headwater-*")))
    extras = set(metadata.metadata.get_all("Provides-Extra"))
    assert extras == {"spark", "kafka", "postgres", "mysql", "redis", "search", "delta", "mongodb", "all"}
    ended = installed.run(
        "python",
        "-c",
        "import pkgutil, headwater\n"
        "from importlib import import_module\n"
        "names = [each.name for each in pkgutil.walk_packages(headwater.__path__, 'headwater.')]\n"
        "[import_module(name) for name in names if not name.startswith('headwater.testing')]\n"
        "from headwater.model.extras import EXTRAS\n"
        "[import_module(name) for name in EXTRAS]\n",
    )
    assert ended.code == 0, ended.err
