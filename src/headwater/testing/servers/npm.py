"""npm: programs of Node from the registry, fetched once, without running any of their scripts.

They lie beside Maven's jars (see `cache_folder`), one folder for each; later calls touch no network. Several processes may ask at once: one
downloads.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from headwater.testing.servers import ServerError, cache_folder
from headwater.testing.servers.server import tail


def fetch_package(package: str, version: str) -> Path:
    """The folder of an installed package, with all that it depends on beside it."""
    home = cache_folder(f"{package}-{version}")
    modules = home / "node_modules"
    if not modules.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with open(home / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not modules.is_dir():
                _download(f"{package}@{version}", home, modules)
    return modules / package


def find_node() -> str:
    """The program that runs them."""
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        raise ServerError("node_missing", "Node.js is not installed. Run: apt-get install nodejs.")
    return node


def _download(wanted: str, home: Path, modules: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ServerError(
            "node_missing", f"The program npm, which fetches {wanted}, is not installed. Run: apt-get install npm."
        )
    partial = home / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--omit=dev", "--prefix", str(partial)]
    done = subprocess.run(
        [npm, "install", *options, wanted], cwd=partial, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode or not (partial / "node_modules").is_dir():
        what = f"The program npm could not fetch {wanted}. Is the network reachable? Its last lines"
        raise ServerError("download_failed", f"{what}:\n{tail(done.stdout + done.stderr)}")
    (partial / "node_modules").rename(modules)  # a download that broke off is never taken for a whole one
