"""An archive of the classes that Spark loads: a Java process that has it starts with half of the processor time.

Tests start Spark by the hundred. Java writes such an archive when a program ends, here after a few small queries, and lays it into
memory when it starts; one that does not fit (another Java, other jars) it leaves alone. It is made once for an environment. Where that
fails, tests are slower.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / ".venv" / "spark.jsa"
STAMP = ROOT / ".venv" / ".stamp-spark.jsa"
LOCK = ROOT / ".venv" / ".stamp-requirements.lock"
TIMEOUT_S = 180.0


def main() -> None:
    """Make the archive, unless it is there."""
    try:
        java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        print("archive: not made, since there is no Java", flush=True)
        return
    wanted = LOCK.read_text() + java
    if ARCHIVE.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return
    print("archive: of the classes that Spark loads, once; half a minute", flush=True)
    ARCHIVE.unlink(missing_ok=True)
    done = subprocess.run([sys.executable, __file__, "train"], check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"{done.stderr}\narchive: not made; tests run without it, more slowly", flush=True)
    else:
        STAMP.write_text(wanted)


def train() -> None:
    """A Spark that is used as tests use it, and writes the archive when it ends."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    import headwater as hw
    from headwater.processing.source.spark_source import make_session

    def copied(clicks: DataFrame) -> DataFrame:
        return clicks.where("id % 2 = 0")

    def counted(clicks: DataFrame) -> DataFrame:
        return hw.totals(clicks, by="id", n="count")

    def pages(clicks: DataFrame) -> DataFrame:
        return clicks.groupBy("page", F.window("at", "1 minute")).count().select("page", "window.start", "count")

    part = ARCHIVE.with_suffix(".part")
    part.unlink(missing_ok=True)
    java = f"-XX:ArchiveClassesAtExit={part} -Xlog:cds=off -Xlog:cds+dynamic=off"
    with tempfile.TemporaryDirectory() as folder, hw.open_log(f"{folder}/log") as log:
        log.create_topic("clicks", "id BIGINT NOT NULL, page STRING, at TIMESTAMP", key="id", time="at")
        log.append("clicks", [{"id": n, "page": "/", "at": f"2026-01-31T12:00:{n:02}Z"} for n in range(60)])
        spark = make_session("archive", "local[2]", {"spark.driver.extraJavaOptions": java, "spark.local.dir": folder})
        process = spark.sparkContext._gateway.proc
        app = hw.App("archive", log=f"{folder}/log", spark=spark)
        clicks = app.topic("clicks", schema="id BIGINT NOT NULL, page STRING, at TIMESTAMP", key="id", time="at")
        app.stream(clicks, to="copies", key="id")(copied)
        app.stream(clicks, to="counts")(counted)
        app.view(clicks, key=["page", "start"], mode="update")(pages)
        app.run(available_now=True)
        spark.read.format("headwater").option("log", log.url).option("topic", "copies").load().toArrow()
        spark.stop()
        spark.sparkContext._gateway.shutdown()
        process.stdin.close()
        process.wait(TIMEOUT_S)
    part.rename(ARCHIVE)


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
