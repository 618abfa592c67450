"""The script of an application, as an argument of `run`, `plan` and `status`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[Path, typer.Argument(metavar="APP.PY", help="The script that declares the application.")]
