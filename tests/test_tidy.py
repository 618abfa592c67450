"""The style of the repository, as far as a machine can see it: what a reviewer would otherwise say again and again."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from headwater.model.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
PYTHON = sorted(
    file for folder in ("src", "tests", "bench", "tools", "examples") for file in (ROOT / folder).rglob("*.py")
)
SOURCE = [file for file in PYTHON if PACKAGE in file.parents]
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BUILD = [
    ROOT / name for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-build.lock", ".ci/run")
]
# Without this file: it names what it forbids.
TEXTS = sorted({*PYTHON, *DOCS, *BUILD, *(ROOT / "bench").rglob("*.json")} - {Path(__file__).resolve()})

LINES_MAX = 800
SAYS_NOTHING = {"utils", "util", "common", "base", "helpers", "helper", "manager", "misc"}
# Whoever fills a container of the module changes what every other caller sees.
EMPTY_CONTAINERS = {"[]", "{}", "list()", "dict()", "set()", "defaultdict(list)", "defaultdict(dict)", "deque()"}
NOT_OUR_WORDS = {"message", "messages", "msg", "record", "records"}
OPTIONAL = ["pyspark", "duckdb", "pandas", "polars", "confluent_kafka", "sqlglot", "typer", "rich"]


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def found(pattern: str, files: list[Path] = TEXTS) -> list[str]:
    """Give `file:line: text` of every line that matches."""
    return [
        f"{name(file)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=name(file))


def test_no_notes_to_ourselves() -> None:
    """What is left to do is an issue, not a comment."""
    assert not found(r"\b(TODO|FIXME|XXX|HACK)\b")


def test_no_banners() -> None:
    """A file that needs dividing lines needs dividing."""
    assert not found(r"^\s*#\s*[-=*#─═]{4,}", PYTHON)


def test_no_addresses_of_one_machine() -> None:
    """Nothing here knows where it was written."""
    assert not found(r"(?<![\w.~-])/(work|root|home|Users)/|/tmp/lab")


def test_no_addresses_of_registries() -> None:
    """Where packages come from is decided by the configuration of whoever installs them."""
    hosts = r"pypi\.org|pythonhosted|repo1?\.maven|repo\.maven|registry\.npmjs|index-url\s*[=h]|find-links\s*[=/]"
    assert not found(hosts)


def test_module_names_say_what_is_inside() -> None:
    """One module, one noun."""
    assert not [name(file) for file in PYTHON if SAYS_NOTHING & {file.stem, *file.stem.split("_"), file.parent.name}]


def test_modules_in_the_package_are_short() -> None:
    """Past the limit there is a second noun in it."""
    assert not [name(file) for file in SOURCE if len(file.read_text().splitlines()) > LINES_MAX]


@pytest.mark.parametrize("file", PYTHON, ids=name)
def test_the_first_sentence_says_what_the_module_is(file: Path) -> None:
    """A docstring begins with the noun, not with `This module`, and its first paragraph is a sentence."""
    docstring = ast.get_docstring(tree(file))
    assert docstring, "no docstring"
    paragraph = docstring.partition("\n\n")[0]
    assert paragraph[-1] in ".:", paragraph
    assert not re.match(r"(This|The following) (module|file|package)\b", paragraph), paragraph


def test_no_module_keeps_state() -> None:
    """State belongs to an object that somebody made; a module has constants only."""
    assert not [f"{name(file)}: {statement}" for file in SOURCE for statement in mutable_globals(tree(file))]


def mutable_globals(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield ast.unparse(node)
    for statement in module.body:
        value = getattr(statement, "value", None)
        if value is not None and ast.unparse(value) in EMPTY_CONTAINERS:
            yield ast.unparse(statement)


def test_units_and_limits_stand_last() -> None:
    """`bytes_max`, not `max_bytes`: names that belong together then sort and read together."""
    assert not [
        f"{name(file)}: {argument.arg}"
        for file in SOURCE
        for argument in ast.walk(tree(file))
        if isinstance(argument, ast.arg) and re.match(r"(max|min)_", argument.arg)
    ]


def test_public_names_use_the_words_of_the_glossary() -> None:
    """An event is never a message or a record in our own API; Arrow's record batch keeps its name."""
    assert not [word for word in public_words() if NOT_OUR_WORDS & set(parts(word))]


def public_words() -> Iterator[str]:
    """Give the public names, their public members and the arguments of both."""
    for public in headwater.__all__:
        thing = getattr(headwater, public)
        members = [member for member in dir(thing) if not member.startswith("_")] if inspect.isclass(thing) else []
        yield from (public, *(f"{public}.{member}" for member in members))
        for callable_ in (thing, *(getattr(thing, member) for member in members)):
            if inspect.isfunction(callable_):
                yield from (f"{public}: {argument}" for argument in inspect.signature(callable_).parameters)


def parts(word: str) -> list[str]:
    spaced = re.sub(r"[_.:]|(?<=[a-z])(?=[A-Z])", " ", word).lower()
    return spaced.replace("record batch", "batch").split()


def test_public_names_are_documented() -> None:
    """What a user can type, a user can look up."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in DOCS)
    assert not [public for public in headwater.__all__ if not re.search(rf"\b{public}\b", text)]


def test_import_is_light() -> None:
    """`import headwater` loads neither Spark nor any client: a command that needs them loads them."""
    script = f"import sys, headwater; print([module for module in {OPTIONAL} if module in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def declared() -> dict[str, list[str]]:
    """Give the packages of pyproject.toml by where they are asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = {
        "core": project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
        **project["dependency-groups"],
    }
    packages = {place: [re.match(r"[\w-]+", line)[0] for line in lines] for place, lines in asked.items()}
    return {place: [package for package in found if package != "headwater"] for place, found in packages.items()}


def test_every_dependency_has_its_line() -> None:
    """What it does for us, who keeps it, what we would otherwise write."""
    lines = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    written = {match[1]: line for line in lines if (match := re.match(r"\| `([\w-]+)` \|", line))}
    assert {package for packages in declared().values() for package in packages} == set(written)
    assert not [line for line in written.values() if not all(cell.strip() for cell in line.strip("|").split("|"))]


def test_the_package_imports_only_what_it_declares() -> None:
    """A package that happens to be installed is not there for our users; development tools never are."""
    distributions = importlib.metadata.packages_distributions()
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    allowed = {package for place, packages in declared().items() if place not in groups for package in packages}
    imported = {(module, name(file)) for file in SOURCE for module in third_party(tree(file))}
    # Its users have pytest, and may hand frames to us that Polars made.
    allowed |= {"pytest", "hypothesis", "polars"}
    assert not [pair for pair in sorted(imported) if not allowed & set(distributions.get(pair[0], []))]


def test_an_extra_exists_only_while_code_imports_it() -> None:
    """Each package of an extra is imported, or loaded by name, somewhere in the package; each module is in the table of extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) | {"all"} == set(extras)
    text = "\n".join(file.read_text() for file in SOURCE if file.name != "extras.py")
    homes = {
        module: {each.lower() for each in found}
        for module, found in importlib.metadata.packages_distributions().items()
    }
    for extra in set(extras) - {"all"}:
        for package in declared()[extra]:
            modules = [module for module, brings in EXTRAS.items() if brings == extra and package in homes[module]]
            used = [module for module in modules if re.search(rf"""(import |from |["']){module}\b""", text)]
            assert used, f"{extra}: nothing imports {package}"
    (everything,) = extras["all"]
    named = set(re.match(r"headwater\[(.*)\]$", everything)[1].split(","))
    assert named == set(extras) - {"all"}


def third_party(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for top in {full.partition(".")[0] for full in names}:
            if top not in sys.stdlib_module_names and top != "headwater":
                yield top


@pytest.mark.parametrize("file", DOCS, ids=name)
def test_links_inside_the_documentation_lead_somewhere(file: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8"))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert not [link for link in local if not (file.parent / link).exists()]
