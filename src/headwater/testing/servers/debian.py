"""Small servers from Debian's packages: RabbitMQ, Redis and NATS, each started by its own program on a free port.

    with RabbitMqServer() as rabbitmq:
        pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbitmq.port))

Each runs as nobody where we are root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from abc import abstractmethod
from pathlib import Path

from headwater.testing.servers import ServerError
from headwater.testing.servers.server import Server, free_port


class PackagedServer(Server):
    """One server whose program a package brings; it serves when it takes connections."""

    program: str
    package: str
    also_in: tuple[str, ...] = ()

    def __init__(self, *, parent_folder: Path | None = None) -> None:
        super().__init__(parent_folder=parent_folder)
        self.name = self.program
        self.port = 0

    @abstractmethod
    def command(self, program: str, folder: Path, port: int) -> list[str]:
        """What to run."""

    def start(self) -> None:
        """Starts the server in a new folder and waits until it takes connections."""
        program = shutil.which(self.program, path=os.pathsep.join([os.environ.get("PATH", ""), *self.also_in]))
        if program is None:
            raise ServerError(
                "program_missing", f"The program {self.program} is not installed. Run: apt-get install {self.package}."
            )
        self.port = free_port()
        try:
            self._run(self.command(program, self._new_folder(), self.port))
        except BaseException:
            self.stop()
            raise

    def is_ready(self) -> bool:
        """Whether it takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True


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
