"""A restart: where a stage begins again is on disk before anything else is forgotten."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import headwater as hw
from headwater.app.restarts import begin_again, beginnings
from headwater.log.clients.stage import Stage
from headwater.log.disk.atomic_file import replace_file
from headwater.log.disk.disk import Disk
from headwater.model.marker import Marker
from headwater.processing.graph.graph import StageNode
from tests.rigs.processing.misfortunes import Machine


def test_where_a_stage_begins_is_on_disk_before_its_marker_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss in between would leave a stage that has written something, knows of no marker, and begins with the first event."""
    starts = tmp_path / "state" / "starts" / "copy.json"
    done: list[str] = []

    def noted(sync: Callable[[int], None]) -> Callable[[int], None]:
        def call(handle: int) -> None:
            done.append(os.readlink(f"/proc/self/fd/{handle}"))
            sync(handle)

        return call

    forget = Stage.accept_new_checkpoint

    def forgetting(stage: Stage) -> Marker | None:
        done.append("forgotten")
        return forget(stage)

    with hw.open_log(f"file://{tmp_path}/log") as log:
        log.create_topic("in", partitions=1)
        log.create_topic("out", partitions=1)
        log.append("in", [b"a", b"b"])
        log.stage("app.copy").commit(Marker(query="q", epoch=0, ends={"in": {"0": 1}}), appends=[("out", [b"a"])])
        monkeypatch.setattr(os, "fsync", noted(os.fsync))
        monkeypatch.setattr(os, "fdatasync", noted(os.fdatasync))
        monkeypatch.setattr(Stage, "accept_new_checkpoint", forgetting)
        node = StageNode(name="copy", kind="stream", inputs=("in",), function=None, to="out")
        begin_again(log, node, "app.copy", "latest", checkpoint=tmp_path / "checkpoint", starts=starts)
        assert log.stage("app.copy").last is None
    before = done[: done.index("forgotten")]
    assert f"{starts}.new" in before
    assert before.index(f"{starts}.new") < before.index(str(starts.parent), before.index(f"{starts}.new"))
    assert json.loads(starts.read_text())["in"] == json.dumps({"in": {"0": 2}})


@pytest.mark.parametrize("seed", range(120))
def test_a_restart_that_is_cut_short_is_chosen_again(seed: int) -> None:
    """Once the last marker is forgotten, the file for where the stage begins is there, whole, and its checkpoint is not, whatever was lost.

    A checkpoint that came back would be gone on with, and everything since written twice.
    """
    machine = Machine(seed)
    starts, checkpoint = Path("/disk/state/starts/copy.json"), Path("/disk/state/checkpoints/copy")
    prepare(machine.disk.process("setup"), checkpoint)
    node = StageNode(name="copy", kind="stream", inputs=("in",), function=None, to="out")

    def restart(disk: Disk) -> None:
        with hw.open_log("/disk/log", disk=disk, create=False) as log:
            begin_again(log, node, "app.copy", "latest", checkpoint=checkpoint, starts=starts, disk=disk)

    is_over = machine.run(restart)
    disk = machine.disk.process("next")
    with hw.open_log("/disk/log", disk=disk, create=False) as log:
        is_forgotten = log.store.stage_state("app.copy").last is None
    assert is_forgotten or not is_over
    if is_forgotten:
        assert beginnings(starts, disk=disk) == {"in": json.dumps({"in": {"0": 2}})}
        assert not disk.exists(str(checkpoint))


def prepare(disk: Disk, checkpoint: Path) -> None:
    """A log in which a stage has written a batch, and its checkpoint, all on the platter."""
    with hw.open_log("/disk/log", disk=disk) as log:
        log.create_topic("in", partitions=1)
        log.create_topic("out", partitions=1)
        log.append("in", [b"a", b"b"])
        log.stage("app.copy").commit(Marker(query="q", epoch=0, ends={"in": {"0": 1}}), appends=[("out", [b"a"])])
    disk.make_folder(f"{checkpoint}/offsets")
    for name in ("metadata", "offsets/0"):
        replace_file(disk, f"{checkpoint}/{name}", [b"kept"])
    for folder in (checkpoint, *checkpoint.parents):
        disk.sync_folder(str(folder))
