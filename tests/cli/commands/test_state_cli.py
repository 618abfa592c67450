"""`headwater state …` at a terminal and in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.app.app import App
from headwater.processing.stages.status import AppStatus
from headwater.processing.state.files import StateFolder
from headwater.processing.state.sorted_runs import AT, H1, H2
from headwater.processing.state.state import StateStore, TableSpec
from tests.rigs.commands import Command, refused

SPECS = {
    "waiting": TableSpec("timed", [pa.field("word", pa.string())]),
    "counts": TableSpec("keyed", [pa.field("n", pa.int64())]),
}
CHECKPOINT = "data/apps/shop/checkpoints/busy"


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    """An operator in three partitions, after two batches."""
    for epoch in range(2):
        for partition in range(3):
            store = StateStore(
                str(tmp_path / CHECKPOINT / "operators"), uid="counter-1", query="q1", fingerprint="f1", partition=partition,
                partitions=3, specs=SPECS,
            )  # fmt: skip
            state = store.load(epoch - 1)
            state["counts"].put(pa.table({H1: [partition, partition + 3], H2: [1, 1], "n": [epoch, 7]}))
            state["waiting"].put(pa.table({H1: [partition], H2: [1], AT: [epoch * 10 + 5], "word": ["\x1b[31mred"]}))
            state["waiting"].take(epoch * 10)
            store.save(state, epoch, watermark=1_767_225_600_000_000 + epoch)
    return tmp_path / CHECKPOINT / "operators"


@pytest.mark.parametrize("where", ["data/apps/shop", CHECKPOINT, f"{CHECKPOINT}/operators", "file"])
def test_states_are_listed(command: Command, operators: Path, where: str) -> None:
    """From the application's folder, a checkpoint, or a URL."""
    listed = command("state", "list", f"file://{operators}" if where == "file" else where)
    assert listed.code == 0
    for text in ("busy", "counter-1", "counts 6", "waiting 3", "2026-01-01 00:00:00.000Z"):
        assert text in listed.out
    (one,) = json.loads(command("state", "list", where.replace("file", str(operators)), "--json").out)
    assert (one["version"], one["partitions"], one["query"], one["trouble"]) == (1, 3, "q1", None)
    assert one["tables"]["counts"] == {"kind": "keyed", "rows": 6, "runs": 3}
    assert one["bytes"] == sum(path.stat().st_size for path in operators.rglob("*0001.state"))


def test_a_state_is_shown(command: Command, operators: Path) -> None:
    """Some rows of each table; nothing in them steers the terminal."""
    shown = command("state", "show", CHECKPOINT, "busy/counter-1", "-n", "4")
    assert shown.code == 0
    for text in ("version      1 of query q1", "counts: keyed, 6 rows", "\\x1b[31mred"):
        assert text in shown.out
    told = json.loads(command("state", "show", CHECKPOINT, "--json", "--table", "waiting").out)
    assert [row["word"] for row in told["some"]["waiting"]] == ["\x1b[31mred"] * 3
    assert [row[AT] for row in told["some"]["waiting"]] == [15, 15, 15], "what was taken is gone"


def test_what_is_not_there_is_told(command: Command, operators: Path, tmp_path: Path) -> None:
    refused(command("state", "list", tmp_path / "nowhere"), "not_found", "No state of operators")
    refused(command("state", "show", CHECKPOINT, "other"), "not_found", "Operator 'other' does not exist")
    refused(command("state", "show", CHECKPOINT, "--table", "other"), "not_found", "no table 'other'")
    (tmp_path / "app.py").write_text("import headwater as hw\napp = hw.App('other', log='./data')\n")
    refused(command("state", "list", "app.py"), "not_found", "No state of operators")


def test_a_script_leads_to_its_state(command: Command, operators: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import headwater as hw\napp = hw.App('shop', log='./data')\n")
    (one,) = json.loads(command("state", "list", "app.py", "--json").out)
    assert one["operator"] == "counter-1"


def test_a_way_to_rebuild_that_is_not_known_is_refused(command: Command, tmp_path: Path) -> None:
    """Before Spark is started."""
    (tmp_path / "app.py").write_text("import headwater as hw\napp = hw.App('shop', log='./data')\n")
    refused(command("run", "app.py", "--rebuild-state", "busy=never"), "invalid_app", "busy=never", "STAGE=kept")


def test_stages_to_be_rebuilt_are_handed_on(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are meant: from all events, or from those that are kept."""
    asked: list[object] = []

    def run(app: App, **settings: object) -> AppStatus:
        asked.append(settings["rebuild_state"])
        return AppStatus(name=app.name, log="", pid=0, started_us=0, at_us=0, notes=[], stages=[])

    monkeypatch.setattr(App, "run", run)
    (tmp_path / "app.py").write_text("import headwater as hw\napp = hw.App('shop', log='./data')\n")
    command("run", "app.py", "--no-page", "--rebuild-state", "busy", "--rebuild-state", "idle=kept")
    assert asked == [{"busy": "all", "idle": "kept"}]


def test_nothing_is_removed_where_nothing_is(tmp_path: Path) -> None:
    """Whoever begins a checkpoint anew removes the state first, and there may be none."""
    StateFolder(str(tmp_path / "nowhere")).remove_all()


def test_damage_is_told_beside_the_others(command: Command, operators: Path) -> None:
    """And with the way out."""
    newest = max(operators.rglob("*.state"))
    newest.write_bytes(newest.read_bytes()[:-9])
    listed = command("state", "list", CHECKPOINT)
    assert listed.code == 1
    assert "counter-1" in listed.out
    assert "is damaged" in listed.err
    assert "--rebuild-state" in listed.err
    refused(command("state", "show", CHECKPOINT), "invalid_input", "is damaged")
    for path in operators.rglob("00002-of-00003/*.state"):
        path.unlink()
    assert "all its partitions" in command("state", "list", CHECKPOINT).err
