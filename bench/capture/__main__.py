"""The figures of capture: `python -m bench.capture` writes `bench/results/capture.json`.

`--only postgres_rates` runs one group, `--quick` shrinks everything.
"""

from __future__ import annotations

from bench.capture.mysql import BENCHES as MARIADB
from bench.capture.postgres import BENCHES as POSTGRES
from bench.capture.sqlite import SQLITE_BENCHES as SQLITE
from bench.harness import main

if __name__ == "__main__":
    raise SystemExit(main("capture", {**POSTGRES, **MARIADB, **SQLITE}))
