"""What a user ships to a cluster: the package as a wheel, in an environment of its own, as a folder and as an archive.

Spark, Arrow and the like are not copied: a line in the environment points to those of the tests. The checkout itself is not
reachable from there, so what runs is the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = "environment"


def make_environment(folder: Path, *, with_headwater: bool = True) -> Path:
    """A virtual environment in `folder`; its interpreter."""
    home = folder / ENVIRONMENT
    venv.create(home, symlinks=True)
    [site] = home.glob("lib/python*/site-packages")
    (site / "heavy.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    if with_headwater:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return home / "bin" / "python"


def make_archive(folder: Path) -> Path:
    """The environment of a folder as one file for `--archives`."""
    archive = folder / f"{ENVIRONMENT}.tar.gz"
    subprocess.run(["tar", "-czf", str(archive), "-C", str(folder / ENVIRONMENT), "."], check=True)
    return archive
