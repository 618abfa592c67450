"""A script that declares an application, loaded by the commands that run, plan or look at it."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.model.errors import HeadwaterError, InvalidApp

if TYPE_CHECKING:
    from headwater.app import App

Script = Annotated[Path, typer.Argument(metavar="APP.PY", help="The script that declares the application.")]


def load_app(path: Path) -> App:
    """The application of a script; `InvalidApp` says in which line the script went wrong.

    The script's functions go to Spark's workers by value: the script is not a module that they could import.
    """
    from headwater.app import App
    from headwater.processing.shipping import ship_by_value

    if not path.is_file():
        raise InvalidApp(f"There is no script {path}.", advice="Name the file that declares the application.")
    spec = importlib.util.spec_from_file_location("headwater_app", path)
    if spec is None or spec.loader is None:
        raise InvalidApp(f"{path} is no Python script.", advice="Name a file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules["headwater_app"] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except HeadwaterError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        raise InvalidApp(f"{where}: {type(error).__name__}: {error}", advice="Correct the script.") from error
    ship_by_value(module)
    apps = list({id(value): value for value in vars(module).values() if isinstance(value, App)}.values())
    if len(apps) != 1:
        found = "no application" if not apps else f"{len(apps)} applications"
        raise InvalidApp(f"{path} declares {found}.", advice='One script declares one: app = hw.App("name").')
    return apps[0]
