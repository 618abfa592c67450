"""A server that speaks MongoDB's protocol: mongo-java-server from Maven Central, since no registry has MongoDB itself.

    with MongoServer() as mongo:
        pymongo.MongoClient(mongo.url)

Its collections lie in memory, so a kill empties it. Change streams are ours (`ReplicaSet.java`, compiled once by Eclipse's compiler, which
needs no JDK): they follow MongoDB's documentation, and are no proof of what a MongoDB does that its documentation does not say. There
are no transactions.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from headwater.testing.servers import ServerError, cache_folder, maven
from headwater.testing.servers.kafka import find_java
from headwater.testing.servers.server import Server, free_port, tail

VERSION = "1.47.0"
_ARTIFACTS = [f"de.bwaldvogel:mongo-java-server:{VERSION}", "org.slf4j:slf4j-nop:2.0.17"]
_COMPILER = "org.eclipse.jdt:ecj:3.33.0"
_SOURCE = Path(__file__).with_name("ReplicaSet.java")


class MongoServer(Server):
    """One server, which says that it is a replica set."""

    name = "mongodb"

    def __init__(self, *options: str, parent_folder: Path | None = None) -> None:
        """`options` are those of `ReplicaSet.java`: `standalone`, `preimages`, `entries=100`."""
        super().__init__(parent_folder=parent_folder)
        self._options = options
        self.port = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"mongodb://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Fetches and compiles what is needed, and starts the server in a new folder."""
        java = find_java()
        libs = maven.fetch_jars(f"mongo-java-server-{VERSION}", _ARTIFACTS)
        classes = _compiled(java, libs)
        self.port = free_port()
        self._new_folder()
        try:
            small = ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
            place = ["-cp", f"{classes}:{libs}/*", "ReplicaSet", str(self.port)]
            self._run([java, *small, *place, *self._options])
        except BaseException:
            self.stop()
            raise

    def is_ready(self) -> bool:
        """Whether it says so."""
        return "ready" in self._log()


def _compiled(java: str, libs: Path) -> Path:
    """The folder of the class files of our part, made again when its source is another."""
    home = cache_folder(f"mongo-java-server-{VERSION}")
    text = _SOURCE.read_text(encoding="utf-8")
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        classes, stamp = home / "classes", home / "classes" / "ReplicaSet.source"
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != text:
            shutil.rmtree(classes, ignore_errors=True)
            compiler = next(maven.fetch_jars("ecj-3.33.0", [_COMPILER], alone=True).glob("ecj*.jar"))
            command = [java, "-jar", str(compiler), "-17", "-nowarn", "-proc:none"]
            done = subprocess.run(
                [*command, "-cp", ":".join(map(str, libs.glob("*.jar"))), "-d", str(classes), str(_SOURCE)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise ServerError(
                    "format_failed", f"ReplicaSet.java could not be compiled:\n{tail(done.stdout + done.stderr)}"
                )
            stamp.write_text(text, encoding="utf-8")
        return classes
