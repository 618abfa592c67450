"""The project's virtual environment: made from the locks, stamped by their hash, left alone while the stamps hold.

A run whose stamps match reaches neither pip nor the network, so every later `make` is quick and works offline.
Everything comes from the locks with its hash checked, also what builds the source distributions (PySpark has no wheel).
pip's own configuration decides where packages come from. Standard library only: it runs before anything is installed.
"""

import fcntl
import hashlib
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
# In this order: the first holds pip and the build back-ends, so that the second is built with them and nothing unhashed.
LOCKS = (ROOT / "requirements-build.lock", ROOT / "requirements.lock")
PROJECT = ROOT / "pyproject.toml"


def main() -> None:
    """Bring .venv to the state of the locks; do nothing when it is there already."""
    if complete():
        return
    with open(ROOT / ".venv.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two `make`s at once must not install over each other
        if not complete():
            install()


def complete() -> bool:
    return PYTHON.exists() and all(stamped(file) for file in (*LOCKS, PROJECT))


def install() -> None:
    started = time.monotonic()
    print("environment: bringing .venv to the state of the locks", flush=True)
    if not usable():
        print("environment: it is new; unless pip has them cached, 0.7 GB are downloaded", flush=True)
        venv.EnvBuilder(clear=True, with_pip=True, symlinks=True).create(ENVIRONMENT)
    for lock in LOCKS:
        if not stamped(lock):
            pip("--require-hashes", "--no-build-isolation", "--requirement", str(lock))
            stamp(lock)
    pip("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    stamp(PROJECT)
    print(f"environment: ready after {time.monotonic() - started:.0f} s", flush=True)


def usable() -> bool:
    """Whether .venv runs and has pip: not so after an interrupted start, or when its Python has been removed."""
    try:
        return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(f"environment: `{' '.join(command)}` failed with code {code}; its own words are above")


def stamp(file: Path) -> None:
    stamp_file(file).write_text(digest(file))


def stamped(file: Path) -> bool:
    return stamp_file(file).exists() and stamp_file(file).read_text() == digest(file)


def stamp_file(file: Path) -> Path:
    return ENVIRONMENT / f".stamp-{file.name}"


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
