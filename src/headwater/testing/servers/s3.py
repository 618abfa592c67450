"""A server that speaks S3's protocol: moto, in a process of its own, with one bucket.

    with S3Server() as s3:
        hw.App("shop", log="./data", state=s3.url("state"))

What it keeps is in its memory, and gone when it ends.
"""

from __future__ import annotations

import importlib.util
import sys
import urllib.error
import urllib.request
from pathlib import Path

from headwater.testing.servers import ServerError
from headwater.testing.servers.server import Server, free_port

BUCKET, KEY, SECRET = "bucket", "tester", "zebra/word"
MODULES = ("moto", "flask", "flask_cors")


class S3Server(Server):
    """One object store, that takes any key and secret."""

    name = "s3"
    gives_away = False  # it runs from our own environment, which others may not read

    def __init__(self, *, parent_folder: Path | None = None) -> None:
        super().__init__(parent_folder=parent_folder)
        self.port = 0

    def start(self) -> None:
        """Starts the server and makes the bucket."""
        for module in MODULES:
            if importlib.util.find_spec(module) is None:
                raise ServerError(
                    "program_missing",
                    f"Module {module} is not installed. Run: pip install 'moto[s3]' flask flask-cors.",
                )
        self.port = free_port()
        self._new_folder()
        try:
            self._run([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)])
            self._ask("PUT", BUCKET)
        except BaseException:
            self.stop()
            raise

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            self._ask("GET", "")
        except OSError:
            return False
        return True

    def url(self, folder: str, *, port: int | None = None) -> str:
        """What `pyarrow.fs` takes for a folder of the bucket; `port` is that of whoever stands before the server."""
        where = f"scheme=http&endpoint_override=127.0.0.1:{port or self.port}&region=us-east-1"
        return f"s3://{KEY}:{SECRET.replace('/', '%2F')}@{BUCKET}/{folder}?{where}"

    def _ask(self, method: str, path: str) -> None:
        signed = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", method=method, headers=signed)
        urllib.request.urlopen(request, timeout=5.0).close()
