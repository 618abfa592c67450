"""Preflight: one line for each thing that is missing, installed as root on Debian, advised to everybody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import preflight
from tools.preflight import Machine

GOOD = Machine(
    python=(3, 11),
    has_venv=True,
    java=17,
    has_maven=True,
    disk_gb=50.0,
    has_environment=False,
    memory_gb=8.0,
    is_root=False,
    is_debian=True,
)


class Run:
    """One preflight with a machine of our making; `install` changes the machine as apt would."""

    def __init__(self, machine: Machine, *arguments: str, repairs: Callable[[Machine], Machine] | None = None) -> None:
        self.machine = machine
        self.lines: list[str] = []
        self.installed: list[str] = []
        self.repairs = repairs or (lambda machine: machine)
        self.code = preflight.main(
            list(arguments), look=lambda: self.machine, install=self.install, say=self.lines.append
        )

    def install(self, packages: list[str]) -> None:
        self.installed += packages
        self.machine = self.repairs(self.machine)


def test_a_good_machine_hears_nothing() -> None:
    run = Run(GOOD, "--services", "--strict")
    assert (run.code, run.lines, run.installed) == (0, [], [])


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        ({"python": (3, 9)}, ["Python 3.9 is too old", "3.11", "make PYTHON="]),
        ({"has_venv": False}, ["ensurepip", "sudo apt-get install python3-venv"]),
        ({"java": None}, ["no Java", "17", "sudo apt-get install default-jre-headless"]),
        ({"java": 11}, ["Java 11 is too old", "17", "sudo apt-get install default-jre-headless"]),
        ({"disk_gb": 2.0}, ["2.0 GB of disk", "4 GB"]),
    ],
)
def test_each_lack_is_one_line_that_says_what_to_do(lack: dict[str, object], words: list[str]) -> None:
    run = Run(GOOD._replace(**lack))
    assert run.code == 1
    [line] = run.lines
    assert all(word in line for word in words), line


def test_everything_missing_is_said_at_once() -> None:
    """Nobody should learn of the second lack after mending the first."""
    run = Run(
        GOOD._replace(python=(3, 8), has_venv=False, java=None, disk_gb=0.5, memory_gb=1.0, has_maven=False),
        "--services",
    )
    assert len(run.lines) == 6


def test_little_memory_is_a_warning_only() -> None:
    run = Run(GOOD._replace(memory_gb=1.5))
    assert run.code == 0
    assert "1.5 GB of memory" in run.lines[0]


def test_less_disk_is_enough_once_the_environment_is_there() -> None:
    assert Run(GOOD._replace(disk_gb=2.0, has_environment=True)).code == 0


def test_root_on_debian_installs_what_is_missing() -> None:
    machine = GOOD._replace(is_root=True, java=None, has_venv=False)
    run = Run(machine, repairs=lambda machine: machine._replace(java=17, has_venv=True))
    assert run.installed == ["python3-venv", "default-jre-headless"]
    assert run.code == 0
    assert run.lines == ["preflight: installing python3-venv default-jre-headless"]


def test_an_installation_that_did_not_help_is_a_failure() -> None:
    run = Run(GOOD._replace(is_root=True, java=None))
    assert run.code == 1
    assert "no Java" in run.lines[-1]


def test_root_elsewhere_is_told_and_nothing_is_installed() -> None:
    run = Run(GOOD._replace(is_root=True, is_debian=False, java=None))
    assert (run.code, run.installed) == (1, [])
    assert "install what your system calls default-jre-headless" in run.lines[0]


@pytest.mark.parametrize(("lack", "package"), [("has_postgres", "postgresql"), ("has_mariadb", "mariadb-server")])
def test_a_database_is_asked_for_with_services_only_and_needed_when_they_are_required(lack: str, package: str) -> None:
    machine = GOOD._replace(**{lack: False})
    assert Run(machine).lines == []
    assert (Run(machine, "--services").code, Run(machine, "--services", "--strict").code) == (0, 1)
    assert f"sudo apt-get install {package}" in Run(machine, "--services").lines[0]


def test_node_is_asked_for_with_services_only_and_needed_when_they_are_required() -> None:
    machine = GOOD._replace(lacks_node=("node", "npm"))
    assert Run(machine).lines == []
    assert (Run(machine, "--services").code, Run(machine, "--services", "--strict").code) == (0, 1)
    assert [line.rpartition(" ")[2] for line in Run(machine, "--services").lines] == ["nodejs`", "npm`"]


def test_maven_is_asked_for_with_services_only_and_needed_when_they_are_required() -> None:
    machine = GOOD._replace(has_maven=False)
    assert Run(machine).lines == []
    assert (Run(machine, "--services").code, Run(machine, "--services", "--strict").code) == (0, 1)
    assert "sudo apt-get install maven" in Run(machine, "--services").lines[0]


@pytest.mark.parametrize(
    ("output", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ("no version here", None),
    ],
)
def test_java_says_its_version_in_two_forms(output: str, major: int | None) -> None:
    assert preflight.java_major(output) == major


def test_java_home_is_the_java_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark starts the Java of JAVA_HOME, whatever the PATH says."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert preflight.java_version() == 11
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    assert preflight.java_version() is None


def test_apt_runs_unattended_and_starts_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy forbids starting while apt runs, and is taken away again only where it was ours."""
    policy, seen = tmp_path / "policy-rc.d", tmp_path / "seen"
    apt = tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\n{policy}; echo "$? $DEBIAN_FRONTEND $*" >> {seen}\n')
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(preflight, "POLICY", str(policy))
    preflight.apt_install(["maven"])
    assert seen.read_text().splitlines() == [
        "101 noninteractive --quiet update",
        "101 noninteractive --quiet install --yes --no-install-recommends maven",
    ]
    assert not policy.exists()
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    preflight.apt_install(["maven"])
    assert policy.exists()


def test_this_machine_passes_and_the_script_runs_by_itself() -> None:
    """Whoever runs the tests has passed preflight; it must say so again without a word."""
    script = Path(preflight.__file__)
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_old_python_can_read_it() -> None:
    """The refusal must not itself be a SyntaxError."""
    compile(Path(preflight.__file__).read_text(), "preflight.py", "exec", _feature_version=8)


def test_servers_are_asked_for_by_the_bench_only() -> None:
    machine = GOOD._replace(lacks_servers=("nats-server",))
    assert Run(machine, "--services", "--strict").code == 0
    run = Run(machine, "--services", "--bench")
    assert run.code == 1
    assert "no nats-server" in run.lines[0] and "apt-get install nats-server" in run.lines[0]


def test_a_server_that_tests_need_is_asked_for_once() -> None:
    machine = GOOD._replace(lacks_servers=("redis-server",))
    assert (Run(machine).code, Run(machine, "--services").code) == (0, 0)
    run = Run(machine, "--services", "--strict", "--bench")
    assert run.code == 1 and len(run.lines) == 1
    assert "no redis-server" in run.lines[0] and "skipped" in run.lines[0]
