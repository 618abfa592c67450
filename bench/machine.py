"""The machine: its description for the results, and how much of its CPU other programs take."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

LIBRARIES = ("headwater", "pyarrow", "numpy", "google-crc32c", "msgspec", "confluent-kafka", "pyspark", "duckdb")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_KTHREADD = 2


def describe() -> dict[str, object]:
    """Processor, memory, disk and versions; nothing that names this machine or its folders."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(int(memory[1]) / 1e6, 1) if memory else None,
        "filesystem": filesystem(Path(tempfile.gettempdir())),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "java": _java_version(),
        "libraries": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def filesystem(folder: Path) -> str:
    """The kind of file system a folder is on; on tmpfs an fdatasync costs nothing and durable figures mean nothing."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, mount_kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, mount_kind
    return kind


def cpu_s() -> tuple[float, float, float]:
    """CPU seconds since boot: of all, of this program with its children (and the kernel for them), and idle."""
    user, nice, system, idle, iowait, irq, softirq, steal, *_ = (
        int(word) for word in _first_line("/proc/stat").split()[1:]
    )
    busy = user + nice + system + irq + softirq + steal
    return busy / _TICKS_PER_S, _own_ticks() / _TICKS_PER_S, (idle + iowait) / _TICKS_PER_S


def foreign_share(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """The share of the machine's CPU that other programs took between two readings of `cpu_s`."""
    busy, own, idle = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, busy - own) / (busy + idle) if busy + idle > 0 else 0.0


def _own_ticks() -> int:
    """Ticks of this process, its descendants (ended ones through their parents) and the kernel's threads."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            words = _first_line(f"/proc/{entry}/stat").rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry)] = int(words[1])
        ticks[int(entry)] = sum(int(word) for word in words[11:15])
    return sum(count for pid, count in ticks.items() if _is_ours(pid, parents))


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid in (os.getpid(), _KTHREADD):
            return True
        pid = parents.get(pid, 0)
    return False


def _first_line(path: str) -> str:
    with open(path) as file:
        return file.readline()


def _cpu_model() -> str:
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def _java_version() -> str | None:
    java = shutil.which("java")
    if java is None:
        return None
    lines = subprocess.run([java, "-version"], capture_output=True, text=True).stderr.splitlines()
    return lines[0] if lines else None
