"""The process in which an `AppTest` runs its application: `python -m headwater.testing.app_process FOLDER`.

It finds the application in `app.pickle`, runs it over what is there, and leaves its last status, or the error that it was refused
with, in `outcome.pickle`. It dies with the test that started it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from headwater.model.errors import HeadwaterError
from headwater.testing.servers.guard import die_with_parent


def main(folder: Path) -> None:
    """Runs the application to its end."""
    die_with_parent()
    app = pickle.loads((folder / "app.pickle").read_bytes())
    try:
        outcome = app.run(available_now=True, check=False)
    except HeadwaterError as error:
        outcome = error
    partial = folder / "outcome.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(folder / "outcome.pickle")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
