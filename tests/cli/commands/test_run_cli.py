"""`headwater run`, `plan` and `status`, and the page: an application as somebody at a terminal meets it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import textwrap
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

import headwater as hw
from headwater.cli.output.run_screen import Drawn
from headwater.model.errors import InvalidInput
from headwater.processing.stages.status import AppStatus, Rate, StageStatus, write_status
from headwater.server.page import REQUESTS_MAX, StatusPage
from headwater.views.definition import define_view
from headwater.views.maintainer import ViewMaintainer
from headwater.views.store_url import open_view_store
from tests.rigs.commands import COMMAND, Command, refused
from tests.rigs.processes import assert_all_gone, java_of, processes_of

SCRIPT = """\
    import headwater as hw
    from pyspark.sql import functions as F

    app = hw.App("shop", log="./data", master="local[1]")
    orders = app.topic("orders")


    def tax(amount):
        return amount * 0.2


    @app.stream(orders, to="taxed", key="id")
    def taxed(orders):
        return orders.select("id", F.udf(tax, "double")("amount").alias("tax"))


    @app.view(taxed, key="id")
    def total(taxed):
        return taxed.groupBy("id").agg(F.sum("tax").alias("tax"))
"""


def write_script(text: str) -> None:
    Path("app.py").write_text(textwrap.dedent(text))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_is_planned_run_and_asked(orders: Command) -> None:
    """Its functions reach Spark's workers, though no module holds them; a second run finds nothing new."""
    write_script(SCRIPT)
    for _ in range(2):
        process = subprocess.run([*COMMAND, "run", "app.py", "--available-now"], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert "taxed: done" in process.stdout and "Traceback" not in process.stderr
    with hw.open_log("data") as log:
        assert sorted(row["tax"] for row in log.read("taxed").to_pylist()) == pytest.approx([0.3, 0.5, 0.7])
    answer = orders("views", "sql", "select count(*) as n from total", "--store", "sqlite:///data/views.db")
    assert answer.rows == [{"n": 3}], answer.err
    told = json.loads(orders("status", "app.py", "--json").out)
    assert [stage["state"] for stage in told["stages"]] == ["done", "done"]
    assert "taxed" in orders("status", "app.py").out


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import nothing_of_that_name", ["app.py:1", "ModuleNotFoundError"]),
        ("x = 1", ["declares no application"]),
        ("import headwater as hw\na = hw.App('a')\nb = hw.App('b')", ["2 applications"]),
        ("import headwater as hw\napp = hw.App('a')", ["has no stages"]),
        ("import headwater as hw\napp = hw.App('a')\napp.stream('x', to='y')(print)", ["not a Python function"]),
        ("x = 1\ndef f(:", ["SyntaxError", "line 2"]),
        ("import sys\nsys.exit('enough')", ["app.py:2", "SystemExit", "enough"]),
        ("import headwater as hw\napp = hw.App('../up')", ["'../up'"]),
        ("import headwater as hw\napp = hw.App('a')\napp.topic('a b\\x1b[2J', schema='n BIGINT')", ["\\x1b[2J"]),
        ("\x00", ["app.py"]),
    ],
)
def test_a_wrong_script_is_told_in_a_sentence(command: Command, script: str, words: list[str]) -> None:
    Path("app.py").write_text(script)
    result = command("plan", "app.py")
    assert result.code == 1 and not result.out
    for word in words:
        assert word in result.err


def test_what_was_never_run_has_no_status(command: Command) -> None:
    write_script(SCRIPT)
    refused(command("status", "app.py"), "invalid_app", "has not run yet")
    refused(command("status", "none.py"), "invalid_app", "does not exist")
    refused(command("run", "app.py", "--accept-new-checkpoint", "taxed"), "invalid_app", "taxed")
    refused(command("run", "app.py", "--accept-new-checkpoint", "taxed=somewhere"), "invalid_app", "somewhere")


def write_copy(folder: Path, **settings: str) -> None:
    """A script with one stage, and settings of its App."""
    given = "".join(f", {name}={value}" for name, value in settings.items())
    text = f"""\
    import headwater as hw

    app = hw.App("copies", log={str(folder / "log")!r}, master="local[1]"{given})
    numbers = app.topic("numbers", schema="n BIGINT")


    @app.stream(numbers, to="copied")
    def copied(numbers):
        return numbers
    """
    (folder / "app.py").write_text(textwrap.dedent(text))


def test_without_java_nothing_starts_and_a_sentence_says_why(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_copy(tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    refused(command("plan", "app.py"), "spark_unavailable", "Java", "JAVA_HOME")
    result = command("run", "app.py", "--no-page")
    assert result.code == 1 and "error [spark_unavailable]: Spark needs Java" in result.err


@pytest.mark.slow
def test_a_kafka_that_does_not_answer_is_told_before_spark_starts(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka")
    write_copy(tmp_path, state="'state'")
    with socket.socket() as nobody:  # bound and not listening: whoever connects is refused
        nobody.bind(("127.0.0.1", 0))
        url = f"kafka://127.0.0.1:{nobody.getsockname()[1]}"
        text = (tmp_path / "app.py").read_text().replace(repr(str(tmp_path / "log")), repr(url))
        (tmp_path / "app.py").write_text(text)
        result = command("run", "app.py", "--no-page")
    assert result.code == 1 and f"error [unreachable]: {url} does not answer" in result.err and "next: " in result.err


def test_a_port_that_cannot_be_is_refused(command: Command, tmp_path: Path) -> None:
    write_copy(tmp_path)
    assert command("run", "app.py", "--port", "70000").code == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("memory", "words"),
    [("100m", ["Insufficient driver memory", "spark.driver.memory"]), ("900t", ["ended before", "heap"])],
)
def test_a_spark_without_memory_is_told_and_leaves_no_process(tmp_path: Path, memory: str, words: list[str]) -> None:
    write_copy(tmp_path, conf=repr({"spark.driver.memory": memory}))
    run = [*COMMAND, "run", "app.py", "--available-now"]
    process = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 1 and "error [spark_unavailable]: " in process.stderr
    for word in words:
        assert word in process.stderr
    assert "Traceback" not in process.stderr and "\n\tat " not in process.stderr
    assert_all_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["starts", "runs"])
@pytest.mark.parametrize("whom", ["the JVM", "everybody"])
def test_a_jvm_that_is_killed_is_told_in_a_sentence(tmp_path: Path, moment: str, whom: str) -> None:
    """By the kernel, which is short of memory, or by a SIGTERM that systemd or a shell sends to all processes at once: neither is a bug."""
    write_copy(tmp_path)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("numbers", "n BIGINT", partitions=1)
        log.append("numbers", [{"n": n} for n in range(100)])
    process = subprocess.Popen(
        [*COMMAND, "run", "app.py", "--no-page"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while (java := java_of(process.pid)) is None:
        assert process.poll() is None
        time.sleep(0.05)
    while moment == "runs" and "100 events" not in process.stdout.readline():
        assert process.poll() is None
    if whom == "the JVM":
        os.kill(java, signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err, err
    assert "error [bug]" not in err and "Check the path" not in err, err
    if whom == "the JVM":
        assert process.returncode == 1
        assert "Spark's Java process" in err and (
            "tart it again" in err or "tart the application again" in err or "memory" in err
        )
    assert_all_gone(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_nothing_of_a_run_survives_its_end(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Neither Java nor a worker nor the page: after Ctrl-C and SIGTERM, which finish the batch, and after a crash."""
    write_copy(tmp_path)
    with hw.open_log(tmp_path / "log") as log:
        log.create_topic("numbers", "n BIGINT", partitions=1)
        log.append("numbers", [{"n": n} for n in range(100)])
    words = ["env", "--default-signal=INT", *COMMAND, "run", "app.py", "--port", "8900"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    read = ""
    while "100 events" not in (line := process.stdout.readline()):
        assert line, f"it ended: {read} {process.communicate()}"
        read += line
    page = re.search(r"http://[\d.:]+", read)
    assert page is not None and any("java" in name for name in processes_of(tmp_path))
    assert json.load(urllib.request.urlopen(f"{page[0]}/status.json"))["stages"][0]["name"] == "copied"
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (code, ""), out
    assert_all_gone(tmp_path)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(page[0], timeout=5)
    with hw.open_log(tmp_path / "log") as log:
        assert sorted(log.read("copied")["n"].to_pylist()) == list(range(100))


def test_the_page_tells_what_the_application_does(tmp_path: Path) -> None:
    """Also when its port is taken: it moves on to the next."""
    app = hw.App("shop", log=tmp_path / "log")
    status = AppStatus(
        name="shop", log="./data", pid=1, started_us=0, at_us=0, stages=[StageStatus(name="s", kind="stream", to="t")]
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        page = StatusPage(app, port=taken.getsockname()[1])
        try:
            page.show(status)
            assert json.load(urllib.request.urlopen(f"{page.url}/status.json"))["stages"][0]["to"] == "t"
            assert json.load(urllib.request.urlopen(f"{page.url}/views.json")) == {}
            html = urllib.request.urlopen(page.url).read().decode()
            assert "<title>Headwater</title>" in html and "http://" not in html.replace(
                "http://www.w3.org/2000/svg", ""
            )
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{page.url}/etc/passwd")
            other = urllib.request.Request(page.url, headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(other)
        finally:
            page.close()
    with pytest.raises(InvalidInput, match="all in use"):
        StatusPage(app, port=65536)


def test_strange_requests_to_the_page_are_no_news(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A header that is no host, a connection that is reset and a request that is no HTTP: answered or dropped, never a traceback."""
    page = StatusPage(hw.App("shop", log=tmp_path), port=18642)
    try:
        address = ("127.0.0.1", int(page.url.rpartition(":")[2]))
        for request in (
            b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\r\n\r\n",
            b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        ):
            with socket.create_connection(address, timeout=10) as connection:
                connection.sendall(request)
                assert connection.recv(100), request
        for half in (b"", b"GET /status.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"GET / HT"):
            with socket.create_connection(address, timeout=10) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(half)
        assert urllib.request.urlopen(page.url).status == 200
    finally:
        page.close()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_half_sent_requests_hold_no_thread_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that stay silent are dropped; while there are too many of them others are turned away, and served again afterwards."""
    monkeypatch.setattr("headwater.server.page._Handler.timeout", 0.5)
    page = StatusPage(hw.App("shop", log=tmp_path), port=18642)
    try:
        address = ("127.0.0.1", int(page.url.rpartition(":")[2]))
        with ExitStack() as silent:
            held = [
                silent.enter_context(socket.create_connection(address, timeout=30)) for _ in range(REQUESTS_MAX + 8)
            ]
            for connection in held:
                with suppress(OSError):
                    connection.sendall(b"GET / HTTP/1.1\r\nHost")
            assert len([each for each in threading.enumerate() if "process_request" in each.name]) <= REQUESTS_MAX
            for connection in held:
                with suppress(ConnectionError):
                    assert connection.recv(100) == b""  # the server has ended it
            assert urllib.request.urlopen(page.url).status == 200
    finally:
        page.close()


def test_a_status_is_replaced_whole_and_knows_its_process(tmp_path: Path) -> None:
    app = hw.App("shop", log=tmp_path / "log", state=tmp_path)
    assert app.status() is None
    dead = subprocess.Popen(["true"])
    dead.wait()
    write_status(tmp_path, AppStatus(name="shop", log="./data", pid=dead.pid, started_us=0, at_us=0))
    found = app.status()
    assert found is not None and not found.is_alive
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["status.json"]


def stages_in_trouble() -> list[StageStatus]:
    error = "app.py:31: ZeroDivisionError: division by zero"
    return [
        StageStatus(name="visits", kind="stream", to="visits", state="running", epoch=7, events=1_234_567, lag=89),
        StageStatus(name="a_rather_long_name_of_a_view", kind="view", to="view v", where="app.py:29", state="failed", error=error),
        StageStatus(name="top", kind="view", to="view top", state="waiting", restarts=3, error="[unreachable] \x1b[2J", lag=123_456),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_table_fits_its_terminal_and_never_cuts_a_number(width: int) -> None:
    status = AppStatus(name="shop", log="./data", pid=1, started_us=0, at_us=90_000_000, stages=stages_in_trouble())
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None, legacy_windows=False).print(Drawn(status))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(out.getvalue().split())
    assert "123,456" in text and "failed" in text and "ZeroDivisionError" in text and "(app.py:29)" in text
    assert "\x1b[2J" not in out.getvalue(), "what an error says cannot steer the terminal"
    assert width < 80 or "1,234,567" in text


def test_a_rate_counts_quiet_moments_and_forgets_what_was_long_ago() -> None:
    rate = Rate(over_s=10)
    assert rate.see(0, 0.0) == 0.0
    assert rate.see(100, 1.0) == 100.0
    assert rate.see(100, 10.0) == 10.0
    assert rate.see(100, 30.0) == 0.0


def test_a_view_on_the_page_shows_its_newest_rows_and_every_type(tmp_path: Path) -> None:
    app = hw.App("shop", log=tmp_path / "log")
    app.view(app.topic("clicks", schema="n BIGINT"), key=["page", "minute"], name="pages")(lambda clicks: clicks)
    schema = "page STRING, minute TIMESTAMP, visits BIGINT, share DOUBLE, tags ARRAY<STRING>"
    with hw.open_log(tmp_path / "log") as log:
        store = open_view_store(f"sqlite:///{tmp_path}/log/views.db")
        rows = [
            {"page": "</script>", "minute": datetime(2026, 1, 1, 0, n, tzinfo=UTC), "visits": 2**60 + n, "share": math.nan, "tags": ["a"]}
            for n in range(30)
        ]  # fmt: skip
        definition = define_view("pages", schema, key=["page", "minute"])
        table = pa.Table.from_pylist(rows, definition.schema)
        ViewMaintainer(log, store, definition).maintain(table, hw.Marker(query="q", epoch=0, ends={}))
        store.close()
    page = StatusPage(app, port=8950)
    try:
        shown = json.load(urllib.request.urlopen(f"{page.url}/views.json"))["pages"]
        assert json.load(urllib.request.urlopen(f"{page.url}/status.json"))["stages"][0]["state"] == "starting"
    finally:
        page.close()
    assert shown["columns"] == ["page", "minute", "visits", "share", "tags"] and len(shown["rows"]) == 10
    assert shown["rows"][0] == ["</script>", "2026-01-01 00:29:00+00:00", str(2**60 + 29), None, "['a']"]
