"""A Java program of a peer: its source lies in `bench`, its libraries and classes in the cache, and a process of it answers lines.

Maven brings the libraries and `javac` compiles the source, both at first use. A request is one line of words with tabs between them.
The answer is one line of the same form, and `error` as its first word means that the request failed. The process ends when its
stdin is closed, so it ends with the program that started it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from headwater.testing.servers import ServerError, cache_folder, maven
from headwater.testing.servers.kafka import find_java
from headwater.testing.servers.server import tail

MEMORY = "4g"  # as Spark's driver has
STARTS_WITH_MEMORY = "1g"


@dataclass(frozen=True)
class JavaPeer:
    """A program and what it needs. `name` is that of its folder in the cache and says the version."""

    name: str
    source: Path
    artifacts: Sequence[str]

    def fetch(self) -> list[Path]:
        """The class path. Raises `ServerError` when the program cannot be had."""
        libs = maven.fetch_jars(self.name, self.artifacts)
        version = hashlib.sha256(self.source.read_bytes()).hexdigest()[:12]
        classes = cache_folder(self.name) / f"classes-{version}"
        if not classes.is_dir():
            with open(cache_folder(self.name) / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not classes.is_dir():
                    self._compile(libs, classes)
        return [classes, *sorted(libs.glob("*.jar"))]

    def _compile(self, libs: Path, classes: Path) -> None:
        partial = classes.with_name("classes-partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [_find_javac(), "-nowarn", "-proc:none", "-cp", f"{libs}/*", "-d", str(partial), str(self.source)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise ServerError("compile_failed", f"javac refused {self.source.name}:\n{tail(done.stderr)}")
        partial.rename(classes)  # classes that are not complete never get this name


class JavaProcess:
    """A process of a peer's program; a context manager.

    Its errors and what its libraries print go to `<program>.out` in `folder`.
    """

    def __init__(self, peer: JavaPeer, folder: Path, *, memory: str = MEMORY) -> None:
        class_path = os.pathsep.join(map(str, peer.fetch()))
        heap = [f"-Xms{STARTS_WITH_MEMORY}", f"-Xmx{memory}"]
        self._name = peer.source.stem
        self._told = folder / f"{self._name}.out"
        with open(self._told, "w") as told:
            self._process = subprocess.Popen(
                [find_java(), *heap, "-cp", class_path, self._name],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # closes its streams, and waits for its end
            pass

    def ask(self, *words: object) -> list[str]:
        """The answer to a request. Raises `JavaError` when the program refuses it or ends."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\t".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise JavaError(f"{self._name} has ended; its last lines:\n{tail(self._told.read_text())}")
        answer = line.rstrip("\n").split("\t")
        if answer[0] == "error":
            raise JavaError(f"{self._name} refused {words[0]}: {' '.join(answer[1:])}")
        return answer


class JavaError(RuntimeError):
    """A request that a peer's program refused, or during which it ended."""


def _find_javac() -> str:
    home = os.environ.get("JAVA_HOME")
    javac = shutil.which("javac", path=f"{home}/bin") if home else shutil.which("javac")
    if javac is None:
        where = "JAVA_HOME" if home else "PATH"
        advice = "install a JDK: apt-get install openjdk-17-jdk-headless"
        raise ServerError("java_missing", f"a peer's program needs javac and there is none in {where}; {advice}")
    return javac
