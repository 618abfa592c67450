"""The lowest versions that pyproject.toml allows, installed and tried: `make floors`.

uv resolves every direct dependency to its floor, into an environment of its own in the cache; tests of each dependency then run in
it with this source tree. A floor is what passed here, not a guess. It needs the network and half an hour, so it is not part of `make test`.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".venv" / "bin" / "uv"
# At least one module for each dependency: the log, SQL, the command line, Spark, and every backend.
TESTS = (
    "log/file/test_reference_model", "model/test_schema", "log/arrow/test_rows", "processing/spark/test_columnar",
    "log/file/test_log_file", "log/file/segments/test_archive", "cli/test_cli", "cli/commands/test_cli_produce",
    "cli/commands/test_cli_tail", "cli/commands/test_export", "log/kafka/test_kafka",
    "processing/source/test_spark_source", "processing/operators/test_operators_spark", "app/test_app",
    "views/test_views_stores", "sinks/test_sinks", "capture/sqlite/test_capture_sqlite",
    "capture/postgres/test_capture_postgres", "capture/mysql/test_capture_mysql", "capture/test_capture_documents",
    "processing/state/test_state_s3",
)  # fmt: skip


def main() -> None:
    """Make the environment, then run the tests in it; the exit code is theirs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "floors"
    folder.mkdir(parents=True, exist_ok=True)
    pins, environment = folder / "floors.txt", folder / "environment"
    python = environment / "bin" / "python"
    uv("pip", "compile", "--quiet", "--resolution", "lowest-direct", "--python", sys.executable, "pyproject.toml",
       "--extra", "all", "--group", "test", "--output-file", str(pins))  # fmt: skip
    uv("venv", "--quiet", "--clear", "--python", sys.executable, str(environment))
    uv("pip", "install", "--quiet", "--python", str(python), "--requirement", str(pins))
    print(pins.read_text(), flush=True)
    modules = [f"tests/{name}.py" for name in TESTS]
    command = [str(python), "-m", "pytest", "-m", "not bench", "--numprocesses", "2", "--dist", "loadfile", *modules]
    # A backend whose server is missing is not tried: its floor must not count as passed, whatever make was told.
    settings = dict(os.environ, PYTHONPATH=str(ROOT / "src"), HEADWATER_SERVICES="required")
    sys.exit(subprocess.run(command, cwd=ROOT, env=settings, check=False).returncode)


def uv(*arguments: str) -> None:
    """Run uv, which does not read pip's configuration: it is handed the index."""
    pip = [str(ROOT / ".venv" / "bin" / "pip"), "config", "get", "global.index-url"]
    configured = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    index = os.environ.get("PIP_INDEX_URL") or configured
    environment = dict(os.environ, UV_DEFAULT_INDEX=index) if index else dict(os.environ)
    code = subprocess.run([str(UV), *arguments], cwd=ROOT, env=environment, check=False).returncode
    if code:
        sys.exit(f"floors: `uv {' '.join(arguments)}` failed with code {code}; its own words are above")


if __name__ == "__main__":
    main()
