"""State in an object store: a real server of S3's protocol, reached by URLs that say where it is and by whom it is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headwater as hw
from bench.harness import RESULTS
from headwater.app.app import load_app
from headwater.model.errors import Damaged, StorageError, Unreachable
from headwater.model.url import bare, inside, without_password
from headwater.processing.stages.status import read_status
from headwater.processing.state.files import StateFolder
from headwater.processing.state.state_info import find_states
from headwater.testing.servers.s3 import BUCKET, SECRET, S3Server
from tests.processing.state.test_state import filled, store_in
from tests.rigs.app.kafka_apps import PARTITIONS, SCHEMA, SCRIPT, Clicks, check, environment, wait_until_right
from tests.rigs.commands import Command, refused
from tests.rigs.processing.spark_writers import ROOT, kill_session
from tests.rigs.relay import Relay
from tests.rigs.wait import wait_until

DEADLINE_S = 240.0


@pytest.mark.parametrize("end", ["", "/"])
def test_what_stands_behind_the_question_mark_stays_there(end: str) -> None:
    """Of a URL; in a path a question mark is a letter."""
    url = f"s3://me:word@bucket/state{end}?region=eu&tls_ca_file_path=/etc/ca"
    assert inside(url, "shop", "busy") == "s3://me:word@bucket/state/shop/busy?region=eu&tls_ca_file_path=/etc/ca"
    assert inside(f"/data/what?{end}", "shop") == "/data/what?/shop"
    assert inside(f"s3://bucket/state{end}") == bare(url.replace("me:word@", "")) == "s3://bucket/state"
    assert hw.App("shop", log="memory://", state=url).operators_url == inside(url, "shop")


@pytest.mark.parametrize(
    ("secret", "code"),
    [
        ("zebra word", "unsupported"),
        ("ze/bra", "invalid_input"),
        ("/zebra", "invalid_input"),
        ("1/ze/bra", "invalid_input"),
    ],
)
def test_a_secret_in_a_url_is_never_shown(command: Command, secret: str, code: str) -> None:
    """Nor where it is not encoded, so that it is no URL any more, or one of something else."""
    url = f"s3://me:{secret}@bucket/state?scheme=http"
    assert without_password(url) == url.replace(f":{secret}", "")
    for words in (["state", "list", url], ["restore", url, "restored"]):
        told = command(*words)
        refused(told, code)
        assert "bra" not in told.err


@pytest.mark.service("s3")
def test_versions_and_other_numbers_of_partitions_in_a_bucket(
    s3: S3Server, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stands in the URL, or in the environment. What is listed and shown has no secret in it."""
    url = s3.url("versions")
    filled(url, 4)
    for epoch in (4, 5):
        for number in range(2):
            store = store_in(url, partition=number, partitions=2)
            store.save(store.load(epoch - 1), epoch)
    names = StateFolder(inside(url, "op")).names()
    assert names == ["00000-of-00002", "00001-of-00002"], "the old one goes when it is not needed"
    (one,) = json.loads(command("state", "list", url, "--json").out)
    assert (one["operator"], one["stage"], one["version"], one["partitions"]) == ("op", "versions", 5, 2)
    shown = command("state", "show", url)
    assert shown.code == 0 and "last: keyed, 43 rows" in shown.out
    assert SECRET not in one["url"] + shown.out and "%2F" not in one["url"] + shown.out

    StateFolder(inside(url, "op", names[1])).remove_all()
    with pytest.raises(Damaged, match=r"is missing") as caught:
        store_in(url, partition=1, partitions=2).load(5)
    assert "bra" not in str(caught.value)

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "word")
    filled(f"s3://{BUCKET}/plain", 2)
    assert store_in(f"s3://{BUCKET}/plain").load(1)["last"].rows().num_rows == 41


@pytest.mark.slow
@pytest.mark.service("s3")
def test_a_store_that_is_gone_or_has_no_such_bucket_is_told(s3: S3Server, command: Command) -> None:
    """The first may be another time, and so may what was opened before: it is read when it is needed."""
    with Relay(s3.port) as relay:
        url = s3.url("gone", port=relay.port)
        filled(url, 1)
        loaded = store_in(url).load(0)
        relay.cut()
        with pytest.raises(Unreachable, match="cannot be reached"):
            loaded["last"].rows()
        told = command("state", "list", url)
        refused(told, "unreachable", "whether its server runs")
        assert "bra" not in told.err
        relay.mend()
        assert loaded["last"].rows().num_rows == 40
    with pytest.raises(StorageError, match="Bucket 'nobody' not found"):
        filled(s3.url("x").replace(f"@{BUCKET}/", "@nobody/"), 1)


@pytest.mark.covers("concept: rebuilding state")
def test_every_way_to_come_by_a_state_was_timed() -> None:
    """From a local snapshot, from a remote store and from the log, side by side in one run: a snapshot is sooner there than the log."""
    figures = {figure["name"]: figure for figure in json.loads((RESULTS / "state.json").read_text())}
    disk, remote, log = (figures[f"state_from_{place}"] for place in ("disk", "s3", "log"))
    assert {figure["unit"] for figure in (disk, remote, log)} == {"s"}
    assert all(figure["ours"] > 0 and figure["runs"] > 1 and figure["quiet"] for figure in (disk, remote, log))
    assert disk["peer_value"] == remote["peer_value"] == log["ours"]
    assert disk["met"] and remote["met"]


class Driver:
    """The application in a process of its own, that runs until it is killed."""

    def __init__(self, folder: Path, told: dict[str, str]) -> None:
        self._said = folder / "driver.log"
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                [sys.executable, "app.py"],
                cwd=folder,
                env={**os.environ, **told, "PYTHONPATH": str(ROOT / "src")},
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> str:
        """Ends it, its JVM and its workers; what it said."""
        kill_session(self._process.pid)
        self._process.wait()
        return self._said.read_text()


@pytest.mark.slow
@pytest.mark.service("s3")
@pytest.mark.timeout(600)
@pytest.mark.covers("concept: rebuilding state")
def test_an_application_goes_on_from_a_remote_state_and_has_it_rebuilt_from_the_log(
    s3: S3Server, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is away for a while, and the driver is killed between two batches or in one: the result is DuckDB's each time.

    State that is lost is refused with the way out; rebuilt from the log it goes on, and nothing was given twice. How long each way takes
    is measured by `bench/state/`.
    """
    (tmp_path / "app.py").write_text(SCRIPT)
    clicks = Clicks(seed := 7)
    print(f"seed {seed}")
    with Relay(s3.port) as relay, hw.open_log(tmp_path / "log") as log:
        place = s3.url("apps", port=relay.port)
        views = f"sqlite:///{tmp_path}/views.db"
        told = {**environment(str(tmp_path / "log"), tmp_path, views), "STATE": place}
        checkpoints = tmp_path / "log/apps/clickstream"
        log.create_topic("clicks", SCHEMA, key="user_id", time="at", partitions=PARTITIONS)

        def run_until_right(driver: Driver) -> None:
            wait_until_right(log, views, clicks, state=checkpoints, alive=driver.is_alive, s=DEADLINE_S)

        driver = Driver(tmp_path, told)
        try:
            clicks.append(log, 300)
            run_until_right(driver)
            relay.cut()
            clicks.append(log, 100)
            wait_until(lambda: busy_error(checkpoints), seconds=DEADLINE_S)
            error = busy_error(checkpoints)
            relay.mend()
            run_until_right(driver)
            before = kept(place)
            for _ in range(4):
                clicks.append(log, 50)
            wait_until(lambda: kept(place) > before, seconds=DEADLINE_S)
        finally:
            said = driver.kill()
        assert error.startswith("[unreachable]") and "whether its server runs" in error
        assert "bra" not in error + said and "Traceback" not in error + said

        driver = Driver(tmp_path, told)
        try:
            clicks.append(log, 100)
            run_until_right(driver)
        finally:
            driver.kill()

        [lost] = [state for state in find_states(place) if state.stage == "busy"]
        StateFolder(lost.url).remove_all()
        clicks.append(log, 100)
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        app = load_app(tmp_path / "app.py")
        monkeypatch.setattr(app, "_given_spark", spark)
        [error] = [each.error or "" for each in app.run(available_now=True, check=False).stages if each.name == "busy"]
        assert "is missing" in error and "--rebuild-state" in error and "bra" not in error
        app.run(available_now=True, rebuild_state={"busy": "all"})
        check(log, views, clicks)
        assert "bra" not in app.plan()


def kept(place: str) -> int:
    """The newest version of any state."""
    return max((state.version or 0 for state in find_states(place)), default=0)


def busy_error(checkpoints: Path) -> str:
    """What the status says of the stage with the operator."""
    status = read_status(checkpoints)
    return "" if status is None else next(each.error or "" for each in status.stages if each.name == "busy")
