"""Small servers from Debian's packages: RabbitMQ, Redis and NATS, each started by its own program on a free port.

    with RabbitMqServer() as rabbitmq:
        pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbitmq.port))

Each runs in a temporary folder, as nobody where we are root, watched by the guard, and is stopped by pid.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.testing.servers import ServerError, give_away

START_TIMEOUT_S = 60.0
LOG_CHARACTERS_SHOWN = 2_000


class PackagedServer:
    """One server, running between `start` and `stop` (or inside `with`)."""

    program: str
    package: str
    also_in: tuple[str, ...] = ()

    def __init__(self, *, parent_folder: Path | None = None) -> None:
        self._parent_folder = parent_folder
        self._folder: Path | None = None
        self._guard: subprocess.Popen[str] | None = None
        self.port = 0
        self.pid = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def command(self, program: str, folder: Path, port: int) -> list[str]:
        """What to run."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts the server in a new folder and waits until it takes connections."""
        program = shutil.which(self.program, path=os.pathsep.join([os.environ.get("PATH", ""), *self.also_in]))
        if program is None:
            raise ServerError("program_missing", f"there is no {self.program}: apt-get install {self.package}")
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix=f"headwater-{self.program}-", dir=self._parent_folder))
        give_away(self._folder)
        guard = Path(__file__).with_name("guard.py")
        command = self.command(program, self._folder, self.port)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guard), str(self._folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        try:
            self.pid = int(self._guard.stdout.readline())
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the server and removes its folder; stopping twice does nothing."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None and guard.stdout is not None
            guard.stdin.close()
            guard.wait()
            guard.stdout.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self.pid = None, 0

    def is_ready(self) -> bool:
        """Whether it serves."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _wait_until_ready(self) -> None:
        assert self._guard is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if self._guard.poll() is not None or time.monotonic() > deadline:
                code, what = ("died", "ended") if self._guard.poll() is not None else ("not_ready", "was not ready")
                raise ServerError(code, f"{self.program} {what}; its last log lines:\n{self.log_tail()}")
            time.sleep(0.05)

    def log_tail(self) -> str:
        """The end of what the server has printed."""
        if self._folder is None:
            return ""
        try:
            return (self._folder / "service.log").read_text(errors="replace")[-LOG_CHARACTERS_SHOWN:]
        except FileNotFoundError:
            return ""


class RedisServer(PackagedServer):
    """Redis with an append-only file, synced every second as by default."""

    program = package = "redis-server"

    def command(self, program: str, folder: Path, port: int) -> list[str]:
        """What to run."""
        settings = {"bind": "127.0.0.1", "port": str(port), "dir": str(folder), "appendonly": "yes", "save": ""}
        return [program, *(word for name, value in settings.items() for word in (f"--{name}", value))]


class NatsServer(PackagedServer):
    """NATS with JetStream, its streams in files."""

    program = package = "nats-server"
    also_in = ("/usr/sbin",)

    def command(self, program: str, folder: Path, port: int) -> list[str]:
        return [program, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", str(folder)]


class RabbitMqServer(PackagedServer):
    """RabbitMQ, one node with a name of its own and without epmd's usual port."""

    program = "rabbitmq-server"
    package = "rabbitmq-server"
    also_in = ("/usr/lib/rabbitmq/bin", "/usr/sbin")

    def __init__(self, *, parent_folder: Path | None = None) -> None:
        super().__init__(parent_folder=parent_folder)
        self._epmd_port = free_port()

    def stop(self) -> None:
        """Ends Erlang's port mapper too, which the server starts as a daemon of its own."""
        running = self.pid
        super().stop()
        if running:
            epmd = {**os.environ, "ERL_EPMD_PORT": str(self._epmd_port), "ERL_EPMD_RELAXED_COMMAND_CHECK": "true"}
            subprocess.run(["epmd", "-kill"], env=epmd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def command(self, program: str, folder: Path, port: int) -> list[str]:
        # The package's wrapper insists on its own user; the program behind it runs as anybody.
        own = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
        settings = {
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "RABBITMQ_NODENAME": f"headwater-{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_RELAXED_COMMAND_CHECK": "true",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        return ["env", *(f"{name}={value}" for name, value in settings.items()), str(own if own.exists() else program)]


def free_port() -> int:
    """A port on loopback that nobody uses at this moment."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
