"""A real OpenSearch: one node on free loopback ports in a temporary folder.

    with OpenSearchServer() as opensearch:
        urllib.request.urlopen(opensearch.url)

The server's own jars come from Maven Central once (see `maven`); what starts a node of them is a few lines of Java, compiled by ECJ, which
is a jar too, so a Java runtime is enough. Started by root, it runs as `nobody`.
"""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

from headwater.testing.servers import ServerError, maven
from headwater.testing.servers.kafka import find_java
from headwater.testing.servers.server import Server, free_port, tail

VERSION = "2.19.1"
START_S = 120.0

_ARTIFACTS = (
    f"org.opensearch:opensearch:{VERSION}",
    f"org.opensearch.plugin:transport-netty4-client:{VERSION}",
    "org.apache.logging.log4j:log4j-core:2.21.0",
    "org.eclipse.jdt:ecj:3.33.0",
)
_OPTIONS = ("-Xms128m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_NODE = """\
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;
import org.opensearch.transport.Netty4Plugin;

public class OneNode extends Node {
    OneNode(Environment environment) {
        super(environment, List.of(Netty4Plugin.class), false);
    }

    public static void main(String[] arguments) throws Exception {
        Settings settings = Settings.builder()
            .put("path.home", arguments[0])
            .put("http.port", arguments[1])
            .put("transport.port", arguments[2])
            .put("network.host", "127.0.0.1")
            .put("discovery.type", "single-node")
            .put("transport.type", "netty4")
            .put("http.type", "netty4")
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
        Path config = Path.of(arguments[0], "config");
        Node node = new OneNode(InternalSettingsPreparer.prepareEnvironment(settings, Map.of(), config, () -> "test"));
        node.start();
        new CountDownLatch(1).await();
    }
}
"""


class OpenSearchServer(Server):
    """One node."""

    name = "opensearch"

    def __init__(self, *, parent_folder: Path | None = None) -> None:
        super().__init__(parent_folder=parent_folder, start_timeout_s=START_S)
        self.port = 0

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Fetches the jars if needed, starts a node in a new folder and waits until it answers."""
        java, libs = find_java(), maven.fetch_jars(f"opensearch-{VERSION}", _ARTIFACTS)
        folder = self._new_folder()
        self.port = free_port()
        try:
            _compile(java, libs, folder)
            (folder / "config").mkdir()
            path = f"{folder}:{libs}/*"
            ports = [str(self.port), str(free_port())]
            self._run([java, *_OPTIONS, "-cp", path, "OneNode", str(folder), *ports])
        except BaseException:
            self.stop()
            raise

    def is_ready(self) -> bool:
        """Whether it takes documents."""
        try:
            with urllib.request.urlopen(f"{self.url}/_cluster/health", timeout=5.0) as answer:
                return answer.status == 200 and b'"red"' not in answer.read()
        except (OSError, urllib.error.URLError):
            return False


def _compile(java: str, libs: Path, folder: Path) -> None:
    source = folder / "OneNode.java"
    source.write_text(_NODE)
    compiler = [
        java,
        "-cp",
        f"{libs}/*",
        "org.eclipse.jdt.internal.compiler.batch.Main",
        "-17",
        "-nowarn",
        "-proc:none",
    ]
    jars = ":".join(map(str, sorted(libs.glob("*.jar"))))
    done = subprocess.run(
        [*compiler, "-cp", jars, "-d", str(folder), str(source)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if not (folder / "OneNode.class").exists():
        raise ServerError(
            "compile_failed", f"ECJ could not compile a node. Its last lines:\n{tail(done.stdout + done.stderr)}"
        )
