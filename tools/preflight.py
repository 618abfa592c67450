"""What this machine must have before the environment can be made, checked and, where we may, installed.

Each thing that is missing is said in one line. As root on Debian it is then installed by apt; an ordinary user is told
the command. Nothing is started by the installation: a policy-rc.d forbids it while apt runs.
Standard library only, and no syntax newer than Python 3.8: an old Python must get a sentence, not a SyntaxError.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON_MIN = (3, 11)
JAVA_MIN = 17
DISK_GB_MIN = 4.0  # .venv, pip's cache and room to work
DISK_GB_MIN_AGAIN = 1.0  # once .venv is there
MEMORY_GB_MIN = 3.0  # a local Spark session, its Python workers and the tests
POLICY = "/usr/sbin/policy-rc.d"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
SERVERS = ("rabbitmq-server", "redis-server", "nats-server")  # programs that are called as their packages are
TESTED = ("redis-server",)
NODE = (("node", "nodejs"), ("npm", "npm"))  # programs and their packages


class Machine(NamedTuple):
    """What the checks look at; tests pass their own."""

    python: Tuple[int, int]
    has_venv: bool
    java: Optional[int]
    has_maven: bool
    disk_gb: float
    has_environment: bool
    memory_gb: float
    is_root: bool
    is_debian: bool
    lacks_servers: Tuple[str, ...] = ()
    has_postgres: bool = True
    has_mariadb: bool = True
    lacks_node: Tuple[str, ...] = ()


class Lack(NamedTuple):
    """One thing that is missing: what to say, what apt can do about it, and whether we can go on without."""

    text: str
    package: Optional[str] = None
    fatal: bool = True


def main(
    arguments: Optional[List[str]] = None,
    look: Optional[Callable[[], Machine]] = None,
    install: Optional[Callable[[List[str]], None]] = None,
    say: Callable[[str], None] = print,
) -> int:
    """Check, install what may be installed, check again; the exit code is 0 when nothing fatal is left."""
    parser = argparse.ArgumentParser(description="Say what is missing on this machine; as root on Debian, install it.")
    parser.add_argument("--services", action="store_true", help="also what the tests with real services need")
    parser.add_argument("--bench", action="store_true", help="also the servers that Headwater is measured beside")
    parser.add_argument("--strict", action="store_true", help="what only those tests need is needed too")
    options = parser.parse_args(arguments)
    look = look or look_around
    machine = look()
    lacks = missing(machine, options.services, options.strict, options.bench)
    packages = [lack.package for lack in lacks if lack.package]
    if packages and machine.is_root and machine.is_debian:
        say("preflight: installing " + " ".join(packages))
        (install or apt_install)(packages)
        machine = look()
        lacks = missing(machine, options.services, options.strict, options.bench)
    for lack in lacks:
        say("preflight: " + lack.text + advice(lack, machine))
    return 1 if any(lack.fatal for lack in lacks) else 0


def missing(machine: Machine, services: bool, strict: bool, bench: bool = False) -> List[Lack]:
    """List what `machine` lacks, in the order in which it would hurt."""
    lacks = []
    if machine.python < PYTHON_MIN:
        text = "Python {}.{} is too old, {}.{} or newer is needed; name one with `make PYTHON=...`"
        lacks.append(Lack(text.format(*machine.python, *PYTHON_MIN)))
    if not machine.has_venv:
        lacks.append(Lack("this Python cannot make virtual environments (no ensurepip)", "python3-venv"))
    if machine.java is None:
        text = f"no Java on the PATH or in JAVA_HOME; Spark needs {JAVA_MIN} or newer"
        lacks.append(Lack(text, "default-jre-headless"))
    elif machine.java < JAVA_MIN:
        text = f"Java {machine.java} is too old; Spark needs {JAVA_MIN} or newer"
        lacks.append(Lack(text, "default-jre-headless"))
    disk_gb_min = DISK_GB_MIN_AGAIN if machine.has_environment else DISK_GB_MIN
    if machine.disk_gb < disk_gb_min:
        lacks.append(Lack(f"{machine.disk_gb:.1f} GB of disk are free here, {disk_gb_min:.0f} GB are needed"))
    if machine.memory_gb < MEMORY_GB_MIN:
        text = f"{machine.memory_gb:.1f} GB of memory are free; below {MEMORY_GB_MIN:.0f} GB Spark may be killed"
        lacks.append(Lack(text, fatal=False))
    if services and not machine.has_maven:
        lacks.append(Lack("no Maven; the tests with a real Kafka need it and are skipped without", "maven", strict))
    if services and not machine.has_postgres:
        text = "no PostgreSQL server; the tests with a real one need it and are skipped without"
        lacks.append(Lack(text, "postgresql", strict))
    if services and not machine.has_mariadb:
        text = "no MariaDB server; the tests with a real one need it and are skipped without"
        lacks.append(Lack(text, "mariadb-server", strict))
    for program, package in NODE if services else ():
        if program in machine.lacks_node:
            text = f"no {program}; the tests of CouchDB's protocol need it and are skipped without"
            lacks.append(Lack(text, package, strict))
    for server in machine.lacks_servers:
        if services and server in TESTED:
            text = f"no {server}; the tests with a real one need it and are skipped without"
            lacks.append(Lack(text, server, strict))
        elif bench:
            lacks.append(Lack(f"no {server}; the queue figures need it", server))
    return lacks


def advice(lack: Lack, machine: Machine) -> str:
    if lack.package is None:
        return ""
    if machine.is_debian:
        return f"; install it with `{'' if machine.is_root else 'sudo '}apt-get install {lack.package}`"
    return f"; install what your system calls {lack.package}"


def look_around() -> Machine:
    """See what this machine has."""
    return Machine(
        python=sys.version_info[:2],
        has_venv=importlib.util.find_spec("ensurepip") is not None,
        java=java_version(),
        has_maven=shutil.which("mvn") is not None,
        disk_gb=shutil.disk_usage(ROOT).free / 1e9,
        has_environment=(ROOT / ".venv").exists(),
        memory_gb=memory_gb(),
        is_root=os.geteuid() == 0,
        is_debian=os.path.exists("/etc/debian_version") and shutil.which("apt-get") is not None,
        lacks_servers=tuple(server for server in SERVERS if shutil.which(server, path=PATH) is None),
        has_postgres=has_postgres(),
        has_mariadb=shutil.which("mariadbd", path=PATH) is not None,
        lacks_node=tuple(program for program, _ in NODE if shutil.which(program) is None),
    )


def has_postgres() -> bool:
    """Look for the server where Debian keeps it, which is not on the PATH, and on the PATH."""
    return shutil.which("postgres") is not None or any(Path("/usr/lib/postgresql").glob("*/bin/postgres"))


def java_version() -> Optional[int]:
    """Give the major version of the Java that Spark would start, or None."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else "java"
    try:
        output = subprocess.run([java, "-version"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    return java_major(output.decode(errors="replace"))


def java_major(output: str) -> Optional[int]:
    """Read `17` out of `openjdk version "17.0.15"`, and 8 out of the old form `"1.8.0_392"`."""
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(found.group(1)) if found else None


def memory_gb() -> float:
    """Give the memory that new processes can have without swapping."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    if found:
        return int(found.group(1)) * 1024 / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def apt_install(packages: List[str]) -> None:
    """Install Debian packages without a question and without starting a service."""
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    ours = not os.path.exists(POLICY)
    if ours:
        Path(POLICY).write_text("#!/bin/sh\nexit 101\n")
        os.chmod(POLICY, 0o755)
    try:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            apt = ["apt-get", "--quiet", *command]
            done = subprocess.run(
                apt, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
            if done.returncode:
                print(done.stdout.decode(errors="replace"), f"preflight: `{' '.join(apt)}` failed", sep="")
    finally:
        if ours:
            os.remove(POLICY)


if __name__ == "__main__":
    sys.exit(main())
