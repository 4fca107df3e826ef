"""The layers of CONTRIBUTING: a module imports from its own layer or lower ones, and never in a
circle."""

import ast
import graphlib
import importlib
from pathlib import Path

import pytest

import idmm

PACKAGE = Path(idmm.__file__).parent
LAYERS = (
    (
        "errors",
        "text",
        "batch",
        "display",
        "config",
        "seeding",
        "files",
        "distributed",
        "progress",
        "losses",
        "figures",
        "notebook",
    ),
    ("data", "models", "report"),
    ("methods",),
    ("training", "evaluation"),
    ("runs", "auto", "dense"),
    ("grid", "inference"),
    ("cli",),
)
LAYER = {}
for number, packages in enumerate(LAYERS):
    LAYER |= dict.fromkeys(packages, number)
FORBIDDEN = [
    ("data", "models"),
    ("models", "data"),
    ("methods", "data"),
]  # (importer, imported)
# tables and pictures are drawn from finished files, wherever those are read
FORBIDDEN += [("report", name) for name in LAYER if LAYER[name] and name != "report"]


def modules():
    """Every product module by its dotted name."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        *parents, name = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if name != "__init__":
            parents.append(name)
        paths[".".join(parents)] = path
    return paths


MODULES = modules()


def package(module):
    """``idmm.data.views`` is in the package ``data``, ``idmm`` itself in none."""
    return module.split(".")[1] if "." in module else None


def imported(module, path):
    """Return the product modules that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {path if path in MODULES else node.module for path in paths}
    return names & MODULES.keys()


GRAPH = {module: imported(module, path) for module, path in MODULES.items()}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"idmm"}))
def test_layer(module):
    """Each module has a layer and imports nothing from above; ``idmm`` itself imports when it is
    asked."""
    assert package(module) in LAYER, (
        f"{module} has no layer: add it to CONTRIBUTING and to this test"
    )
    for other in GRAPH[module] - {"idmm"}:
        assert LAYER[package(other)] <= LAYER[package(module)], (
            f"{module} imports {other}, which is a layer above it"
        )
    assert "idmm" not in GRAPH[module] or package(module) in LAYERS[-1], (
        f"{module} imports idmm itself"
    )


@pytest.mark.parametrize("importer, other", FORBIDDEN, ids=lambda name: name)
def test_neighbours_that_do_not_talk(importer, other):
    for module, names in GRAPH.items():
        if package(module) == importer:
            for name in names:
                assert package(name) != other, f"{module} imports from {other}"


def test_no_circles():
    """A module and its package's ``__init__`` count, and so does an import inside a function."""
    graphlib.TopologicalSorter(GRAPH).prepare()  # its error has the circle


def concrete_methods():
    return {
        name for name in MODULES if name.startswith("idmm.methods.") and name != "idmm.methods.base"
    }


def test_engine_knows_no_method():
    for module in [name for name in MODULES if package(name) in ("training", "evaluation")]:
        assert not GRAPH[module] & concrete_methods(), f"{module} imports a concrete method"
    assert concrete_methods()


def test_plan_imports_no_torch():
    """The grid's plan is made, and reports are drawn, where no torch may be (a cluster's front end,
    a laptop)."""
    heavy = {"torch", "torchvision", "timm", "accelerate"}
    packages = ("idmm.grid.plan", "idmm.cli", "idmm.errors", "idmm.runs")
    for module in MODULES:
        if module in packages or package(module) in ("config", "report"):
            for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                for name in names:
                    assert name.split(".")[0] not in heavy, module


def test_benchmarks_import_what_there_is():
    """They are run seldom: a name that has moved would be found out by a user."""
    for path in sorted((PACKAGE.parent / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "idmm":
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or f"{node.module}.{name}" in MODULES, (
                        f"{path.name}: {name}"
                    )
