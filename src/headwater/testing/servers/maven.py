"""Maven: jars from Maven Central, fetched once.

They lie in `$HEADWATER_CACHE` (default `~/.cache/headwater`, for root `/var/cache/headwater`), one folder for each set; later calls
touch no network. Several processes may ask at once: one downloads.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from headwater.testing.servers import ServerError, cache_folder
from headwater.testing.servers.server import tail

_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>headwater</groupId><artifactId>peer</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""
_ALONE = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"


def fetch_jars(name: str, artifacts: Sequence[str], *, alone: bool = False) -> Path:
    """The folder of the jars of a set: `group:artifact:version` each and, unless `alone`, what they depend on.

    `name` says what they are and in which version, since a set that is there is not looked at again.
    """
    home = cache_folder(name)
    libs = home / "libs"
    if libs.is_dir():
        return libs
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not libs.is_dir():
            (home / "pom.xml").write_text(_pom(artifacts, alone=alone))
            _download(name, home, libs)
    return libs


def _pom(artifacts: Sequence[str], *, alone: bool) -> str:
    dependencies = []
    for text in artifacts:
        group, artifact, version = text.split(":")
        place = f"<groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version>"
        dependencies.append(f"    <dependency>{place}{_ALONE if alone else ''}</dependency>")
    return _POM.format(dependencies="\n".join(dependencies))


def _download(name: str, home: Path, libs: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise ServerError(
            "maven_missing", f"Maven fetches the jars of {name}, but mvn is not installed. Run: apt-get install maven."
        )
    partial = home / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    goal = ["dependency:copy-dependencies", f"-DoutputDirectory={partial}", "-DincludeScope=runtime"]
    done = subprocess.run(
        [maven, "-B", "-ntp", *goal], cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode or not any(partial.glob("*.jar")):
        what = f"Maven could not fetch {name}. Is the network reachable? Its last lines"
        raise ServerError("download_failed", f"{what}:\n{tail(done.stdout + done.stderr)}")
    partial.rename(libs)  # a download that broke off is never taken for a whole one
