"""The application of the demonstration: a process like that of `headwater run`, and the director's handle of it.

The process (`python -m headwater.cli.demo.application APP.PY PORT`) prints the page's URL, then its status as JSON about
every second. A line on stdin stops it after the current batches. When stdin closes, the director is dead, and the process
ends at once; the next one reads again what it has not written.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from headwater.app.app import load_app
from headwater.cli.demo.child import Child
from headwater.model.errors import HeadwaterError
from headwater.processing.stages.status import AppStatus

STOP_S_MAX = 60.0
# A demonstration ends before Java's second compiler has paid for itself, and there are two cores for everything.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class Application:
    """The application as the director sees it: started, killed, started again."""

    def __init__(self, script: Path, folder: Path, *, port: int) -> None:
        self.url = ""
        self.status: AppStatus | None = None
        self.is_killed = False
        self._script = script
        self._folder = folder
        self._port = port
        self._child = self._open()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    def kill(self) -> None:
        """Ends it as a crash would; Spark's JVM and workers end with it."""
        self._child.kill()
        self.is_killed, self.status = True, None

    def open_again(self) -> None:
        """Restarts the process, with its page at the same URL."""
        self.is_killed = False
        self._child = self._open()

    def check(self) -> None:
        """Raises when it has died by itself."""
        if not self.is_killed and not self._child.is_running:
            raise self._child.failed("stopped unexpectedly")

    def close(self) -> None:
        """Lets each stage finish its batch, and ends it."""
        self._child.say("stop")
        self._child.wait_until_ended(STOP_S_MAX)
        self.is_killed = True

    def leave(self) -> None:
        """Ends it in any case."""
        self._child.leave()

    def __enter__(self) -> Application:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _open(self) -> Child:
        port = self._port if not self.url else int(self.url.rpartition(":")[2])
        scratch = self._folder / "scratch"  # a JVM that is killed leaves its files behind; here they go with the folder
        scratch.mkdir(exist_ok=True)
        java = f"{JAVA_OPTIONS} -Djava.io.tmpdir={scratch} {os.environ.get('JDK_JAVA_OPTIONS', '')}".strip()
        return Child(
            "The application",
            "headwater.cli.demo.application",
            [str(self._script), str(port)],
            errors=self._folder / "application.err",
            hear=self._hear,
            environment={"JDK_JAVA_OPTIONS": java, "SPARK_LOCAL_DIRS": str(scratch), "TMPDIR": str(scratch)},
        )

    def _hear(self, line: bytes) -> None:
        if line.startswith(b"http"):
            self.url = line.decode("ascii").strip()
        else:
            self.status = msgspec.json.decode(line, type=AppStatus)


def main() -> None:
    """Runs the application until it is told to stop."""
    from headwater.server.page import StatusPage

    app = load_app(Path(sys.argv[1]))
    page = StatusPage(app, port=int(sys.argv[2]))
    _say(page.url.encode("ascii"))
    threading.Thread(target=_listen, daemon=True).start()

    def watch(status: AppStatus) -> None:
        page.show(status)
        _say(msgspec.json.encode(status))

    try:
        app.run(watch=watch, check=False)
    finally:
        page.close()


def _listen() -> None:
    """Obeys the director, and does not outlive it."""
    while os.read(0, 64):
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1)


def _say(line: bytes) -> None:
    try:
        os.write(1, line + b"\n")
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(1)
    except HeadwaterError as error:
        sys.stderr.write(f"[{error.code}] {error}\n")
        sys.exit(1)
