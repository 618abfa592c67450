"""A real Apache Kafka: one KRaft node on free loopback ports in a temporary folder.

    with KafkaServer() as kafka:
        Producer({"bootstrap.servers": kafka.bootstrap})

The jars come from Maven Central once (see `maven`), and later starts need no network. The folder is formatted anew at each start
and removed at the stop. Started by root, it runs as `nobody`: a service needs no rights over the machine.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from headwater.testing.servers import ServerError, give_away, maven
from headwater.testing.servers.guard import owner
from headwater.testing.servers.server import START_TIMEOUT_S, Server, tail

VERSION = "4.3.1"
JAVA_VERSION_MIN = 17
START_ATTEMPTS_MAX = 3

Size = Literal["small", "bench"]

# small: quick to start, about 300 MB; bench: what a broker deserves when it is measured.
_JAVA_OPTIONS: dict[Size, tuple[str, ...]] = {
    "small": ("-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    "bench": ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
}
_LOG_OPTIONS = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
)
_READY = "Kafka Server started"
_SLF4J = "org.slf4j:slf4j-simple:1.7.36"
_PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "num.partitions": "4",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    # The cleaner's default of 128 MB does not fit a small heap.
    "log.cleaner.dedupe.buffer.size": "16777216",
}


class KafkaServer(Server):
    """One Kafka broker."""

    name = "kafka"

    def __init__(
        self,
        *,
        size: Size = "small",
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        parent_folder: Path | None = None,
        version: str = VERSION,
        start_timeout_s: float = START_TIMEOUT_S,
        cluster_id: str | None = None,
    ) -> None:
        """`settings` are broker properties laid over ours; `parent_folder` holds the temporary folder."""
        super().__init__(parent_folder=parent_folder, start_timeout_s=start_timeout_s)
        self._cluster_id = cluster_id or new_cluster_id()
        self._size = size
        self._port = port
        self._settings = dict(settings or {})
        self._version = version
        self.bootstrap = ""

    def start(self) -> None:
        """Fetch the jars if needed, format a new folder, start the broker and wait until it serves."""
        java, libs = find_java(), fetch_jars(version=self._version)
        for attempt in range(1, START_ATTEMPTS_MAX + 1):
            try:
                self._start_once(java, libs)
                return
            except ServerError as error:
                self.stop()
                # A port found free can be taken before the broker binds it; one that was asked for is not replaced.
                if error.code != "port_in_use" or self._port is not None or attempt == START_ATTEMPTS_MAX:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the broker and remove its folder; stopping twice does nothing."""
        super().stop()
        self.bootstrap = ""

    def is_ready(self) -> bool:
        """Whether the broker says so; it binds its port before it serves."""
        return _READY in self._log()

    def _start_once(self, java: str, libs: Path) -> None:
        port, controller_port = _ports(self._port)
        folder = self._new_folder()
        properties = folder / "server.properties"
        properties.write_text(_properties(folder, port, controller_port, self._settings))
        give_away(folder)
        class_path = str(libs / "*")
        _format(java, class_path, properties, self._cluster_id)
        self.bootstrap = f"127.0.0.1:{port}"
        self._run([java, *_JAVA_OPTIONS[self._size], *_LOG_OPTIONS, "-cp", class_path, "kafka.Kafka", str(properties)])


def new_cluster_id() -> str:
    """What the brokers of one cluster are formatted with."""
    return base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=").replace("-", "A")


def fetch_jars(*, version: str = VERSION) -> Path:
    """The folder of Kafka's jars."""
    artifacts = [f"org.apache.kafka:kafka_2.13:{version}", f"org.apache.kafka:kafka-tools:{version}", _SLF4J]
    return maven.fetch_jars(f"kafka-{version}", artifacts)


def find_java() -> str:
    """The program that runs services, new enough for all of them."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    advice = f"Install Java {JAVA_VERSION_MIN} or newer: apt-get install openjdk-17-jre-headless."
    if java is None:
        raise ServerError(
            "java_missing", f"A server needs Java, but {'JAVA_HOME' if home else 'PATH'} has none. {advice}"
        )
    text = subprocess.run([java, "-version"], capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', text)
    if found is None or int(found[1]) < JAVA_VERSION_MIN:
        raise ServerError(
            "java_missing",
            f"A server needs Java {JAVA_VERSION_MIN} or newer, but found {text.splitlines()[:1]}. {advice}",
        )
    return java


def _ports(port: int | None) -> tuple[int, int]:
    """A port for clients (`port` if it is free) and one for the controller."""
    with socket.socket() as client, socket.socket() as controller:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            client.bind(("127.0.0.1", port or 0))
        except OSError as error:
            what = f"Port {port} of 127.0.0.1 is not free ({error.strerror})."
            raise ServerError("port_in_use", f"{what} Pass another port, or none to get a free one.") from error
        controller.bind(("127.0.0.1", 0))
        return client.getsockname()[1], controller.getsockname()[1]


def _properties(folder: Path, port: int, controller_port: int, settings: Mapping[str, str]) -> str:
    places = {
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(folder / "data"),
    }
    return "".join(f"{name}={value}\n" for name, value in {**_PROPERTIES, **places, **settings}.items())


def _format(java: str, class_path: str, properties: Path, cluster_id: str) -> None:
    command = [java, *_JAVA_OPTIONS["small"], *_LOG_OPTIONS, "-cp", class_path, "kafka.tools.StorageTool"]
    done = subprocess.run(
        [*command, "format", "-t", cluster_id, "-c", str(properties)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        **owner(str(properties.parent)),
    )
    if done.returncode:
        what = "Kafka's folder could not be formatted. The tool's last lines"
        raise ServerError("format_failed", f"{what}:\n{tail(done.stdout + done.stderr)}")
