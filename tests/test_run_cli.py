"""`headwater run`, `plan` and `status`, and the page: an application as somebody at a terminal meets it."""

from __future__ import annotations

import json
import socket
import subprocess
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import headwater as hw
from commands import COMMAND, Command, refused
from headwater.model.errors import InvalidInput
from headwater.processing.status import AppStatus, StageStatus, write_status
from headwater.server.page import StatusPage

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
        ("import headwater as hw\napp = hw.App('a')\napp.stream('x', to='y')(print)", ["no function of Python"]),
        ("def f(:", ["SyntaxError"]),
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
    refused(command("status", "none.py"), "invalid_app", "no script")
    refused(command("run", "app.py", "--accept-new-checkpoint", "taxed"), "invalid_app", "taxed")
    refused(command("run", "app.py", "--accept-new-checkpoint", "taxed=somewhere"), "invalid_app", "somewhere")


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
        finally:
            page.close()
    with pytest.raises(InvalidInput, match="all taken"):
        StatusPage(app, port=65536)


def test_a_status_is_replaced_whole_and_knows_its_process(tmp_path: Path) -> None:
    app = hw.App("shop", log=tmp_path / "log", state=tmp_path)
    assert app.status() is None
    dead = subprocess.Popen(["true"])
    dead.wait()
    write_status(tmp_path, AppStatus(name="shop", log="./data", pid=dead.pid, started_us=0, at_us=0))
    found = app.status()
    assert found is not None and not found.is_alive
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["status.json"]
