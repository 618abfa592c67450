"""The script that declares an application, as an argument of the commands that run, plan or look at it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[Path, typer.Argument(metavar="APP.PY", help="The script that declares the application.")]
