"""The style of the repository, as far as a machine can see it: what a reviewer would otherwise say again and again."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import headwater
from headwater.model.extras import EXTRAS
from tools.import_graph import cycles, imports

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

FILES_MAX = 25
LINES_MAX = 800
FUNCTION_LINES_MAX = 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMEDTUPLE = {"_asdict", "_replace", "_fields", "_make"}
NOUNS = {
    "feed",  # of changes
    "hashing", "grouping", "ranking", "staging",  # what the field calls them
    "windowed", "sliding",  # the functions of users that are in them
}  # fmt: skip
PRIVATE_OF_LIBRARIES = {
    r"_[A-Z_]+": "librdkafka names the errors that it makes itself so",
    r"_exit": "a fork ends without what its parent has registered for its own end",
    r"_getframe": "where something was declared, without the source lines that `inspect` reads for every frame",
    r"_GeneratorContextManager": "the type of what `contextmanager` makes, which has no public name",
    r"_jvm|_jdf|_jsc|_jsparkSession|_gateway|_callback_server": "PySpark has no public way to its JVM",
    r"_ensure_initialized|_active_spark_context|_instantiatedSession": "a JVM that has died is forgotten in no other way",
    r"_SimpleStreamReaderWrapper|_create_local_socket": "Spark hands rows to the driver by them, and by nothing public",
    r"_execute_command|_read_packet|_rfile|_sock|_force_close": "pymysql has no public way to the packets of a connection",
}
"""Members, and why there is no public way."""

# What breaks a rule today. An entry that nothing needs fails the test of its rule, so these lists only get shorter.
PARTICIPLES = {
    "src/headwater/log/file/segments/sealed.py",
}
LONG_FILES: dict[str, str] = {}
"""Files past the limit that hold one noun, and why they are not two."""

LONG_FUNCTIONS = {
    "src/headwater/log/topics.py: create_topic",
}
TWICE = {"Piece", "Sequences", "State"}
PRIVATE_OF_OURS = {
    "src/headwater/log/transaction.py: consumer._ended",
    "src/headwater/log/transaction.py: consumer._has",
    "src/headwater/log/transaction.py: consumer._parts",
}
FOR_ONE_SUBCLASS = {
    "KafkaStages._check_open",
    "KafkaStages._check_writable",
    "KafkaStages._parcel",
    "KafkaStages._settled",
    "LocalCopies._catalog",
    "LocalCopies._check_writable",
    "LocalCopies._settle",
    "LocalStages._append_atomically",
    "LocalStages._check_writable",
    "MemoryStages.write_atomically",
}
KNOTS = [
    # A cluster holds the writer and the fetchers that all handles of a process share, and these ask it for clients.
    ["headwater.log.kafka.cluster", "headwater.log.kafka.reader", "headwater.log.kafka.writer"],
    ["headwater.log.memory.cursor", "headwater.log.memory.store"],
    # A simulated process works on its disk. The disk knows its processes: a power loss takes back what they wrote.
    ["headwater.testing.simulation.disk", "headwater.testing.simulation.process"],
]

SAYS_NOTHING = {"utils", "util", "common", "base", "helpers", "helper", "manager", "misc"}
# A function that fills a container of the module changes what every other caller sees.
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


def check_exceptions(found: set[str], excepted: set[str], better: str) -> None:
    """What breaks a rule is what the list of exceptions names: nothing more, and nothing less."""
    assert not found - excepted, f"{better}: {sorted(found - excepted)}"
    assert not excepted - found, f"remove these from the list of exceptions: {sorted(excepted - found)}"


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
    """The configuration of the machine decides where packages come from."""
    hosts = r"pypi\.org|pythonhosted|repo1?\.maven|repo\.maven|registry\.npmjs|index-url\s*[=h]|find-links\s*[=/]"
    assert not found(hosts)


def test_module_names_say_what_is_inside() -> None:
    """One module, one noun."""
    assert not [name(file) for file in PYTHON if SAYS_NOTHING & {file.stem, *file.stem.split("_"), file.parent.name}]


def test_modules_are_named_by_nouns() -> None:
    """Nobody guesses a participle: `prefetch`, not `ahead` or `fetched`; its last word counts, so `sorted_runs` are runs."""
    files = {file for file in PYTHON if not file.name.startswith("test_")}
    offenders = {
        name(file) for file in files if re.search(r"(ed|ing)$", file.stem) and file.stem.rpartition("_")[2] not in NOUNS
    }
    check_exceptions(offenders, PARTICIPLES, "name these by a noun")


def test_folders_are_small() -> None:
    """A folder that one does not take in at a glance holds several nouns."""
    folders = Counter(file.parent for file in PYTHON if file.name != "__init__.py")
    assert not {name(folder): count for folder, count in folders.items() if count > FILES_MAX}


def test_files_hold_one_noun() -> None:
    """Past the limit there is a second noun in it, or a reason in the list."""
    offenders = {name(file) for file in PYTHON if len(file.read_text().splitlines()) > LINES_MAX}
    check_exceptions(offenders, set(LONG_FILES), "divide these, or write why not in LONG_FILES")


def test_functions_fit_a_screen() -> None:
    """With their docstring."""
    offenders = {
        f"{name(file)}: {function.name}"
        for file in PYTHON
        for function in ast.walk(tree(file))
        if isinstance(function, FUNCTIONS) and (function.end_lineno or 0) - function.lineno >= FUNCTION_LINES_MAX
    }
    check_exceptions(offenders, LONG_FUNCTIONS, "divide these")


def test_no_public_class_name_twice() -> None:
    """One word, one meaning: readers of a name need not look where it was imported from."""
    places: dict[str, set[str]] = {}
    for file in SOURCE:
        for statement in tree(file).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                places.setdefault(statement.name, set()).add(name(file))
    twice = {word: sorted(files) for word, files in places.items() if len(files) > 1}
    check_exceptions(set(twice), TWICE, f"give one of each another name ({twice})")


def test_no_private_member_of_another_module() -> None:
    """What others need is public, and says so. The check sees names, not types: a name that the module makes itself counts as its own."""
    own = {file: set(private_names(tree(file))) for file in SOURCE}
    ours = set[str]().union(*own.values())
    offenders = {
        (f"{name(file)}: {used}", used.rpartition(".")[2] in ours)
        for file in SOURCE
        for used in private_uses(tree(file))
        if used.rpartition(".")[2] not in own[file]
    }
    reached = {use for use, is_ours in offenders if is_ours}
    check_exceptions(reached, PRIVATE_OF_OURS, "make these public, or let their object do it")
    foreign = {use.rpartition(".")[2] for use, is_ours in offenders if not is_ours}
    reasons = {word: reason for word in foreign for reason in PRIVATE_OF_LIBRARIES if re.fullmatch(reason, word)}
    assert not foreign - set(reasons), f"write the reason in PRIVATE_OF_LIBRARIES: {sorted(foreign - set(reasons))}"
    assert set(reasons.values()) == set(PRIVATE_OF_LIBRARIES), "some reasons have no use"


def private_names(module: ast.Module) -> Iterator[str]:
    """Give the private names that a module makes: functions, classes, members."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=made) | ast.AsyncFunctionDef(name=made) | ast.ClassDef(name=made):
                yield made
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=made, ctx=ast.Store()):
                yield made
            case ast.Name(id=made, ctx=ast.Store()):
                yield made


def private_uses(module: ast.Module) -> Iterator[str]:
    """Give `thing._member` wherever the thing is another than this object, and `import._name`."""
    for node in ast.walk(module):
        match node:
            case (
                ast.Attribute(value=ast.Name(id="self" | "cls")) | ast.Attribute(value=ast.Call(func=ast.Name("super")))
            ):
                continue
            case ast.Attribute(attr=member) if is_private(member):
                yield ast.unparse(node)
            case ast.ImportFrom():
                yield from (f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name))


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word not in NAMEDTUPLE


def test_no_class_is_made_for_one_subclass() -> None:
    """A method that only one subclass gives is a call up and down again: an object that is handed what it needs says it."""
    classes = [(file, node) for file in PYTHON for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef)]
    below: dict[str, set[str]] = {}
    gives: dict[str, set[str]] = {}
    for _, node in classes:
        for base in node.bases:
            below.setdefault(ast.unparse(base).partition("[")[0].rpartition(".")[2], set()).add(node.name)
        gives.setdefault(node.name, set()).update(
            method.name for method in node.body if isinstance(method, FUNCTIONS) and not is_abstract(method)
        )
    offenders = {
        f"{node.name}.{method.name}"
        for file, node in classes
        if PACKAGE in file.parents
        for method in node.body
        if isinstance(method, FUNCTIONS)
        and is_abstract(method)
        and sum(method.name in gives[each] for each in subclasses(node.name, below)) < 2
    }
    check_exceptions(offenders, FOR_ONE_SUBCLASS, "compose these")


def is_abstract(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is marked so, or only says that it is not there."""
    marked = any("abstractmethod" in ast.unparse(decorator) for decorator in method.decorator_list)
    refused = any(isinstance(line, ast.Raise) and "NotImplementedError" in ast.unparse(line) for line in method.body)
    return marked or refused


def subclasses(word: str, below: Mapping[str, set[str]]) -> set[str]:
    direct = below.get(word, set())
    return direct.union(*(subclasses(each, below) for each in direct))


def test_no_import_cycles() -> None:
    """Modules that import each other are read as one. Imports inside of functions and those for types count."""
    assert cycles(imports()) == sorted(KNOTS)


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
    """Give the packages of pyproject.toml by the list that requires them."""
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
