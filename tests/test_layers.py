"""The layers of CONTRIBUTING: a module imports from its own layer or lower ones, and never in a circle."""

import ast
import importlib
from pathlib import Path

import pytest

import idmm

PACKAGE = Path(idmm.__file__).parent
LAYERS = (
    (
        "errors",
        "config",
        "seeding",
        "files",
        "intervals",
        "distributed",
        "progress",
        "losses",
        "figures",
        "charts",
        "sheets",
    ),
    ("data", "models"),
    ("methods",),
    ("training", "evaluation"),
    ("stages", "dense"),
    ("transfer", "report", "inference"),
    ("cli",),
)
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
FORBIDDEN = [("data", "models"), ("models", "data"), ("methods", "data")]  # (importer, imported)
# reports are drawn from finished files, wherever those are read
FORBIDDEN += [("report", package) for packages in LAYERS[1:] for package in packages if package != "report"]


def modules():
    """Every product module by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def package(module):
    """``idmm.data.views`` is in the package ``data``, ``idmm`` itself in none."""
    return module.split(".")[1] if "." in module else None


def imported(tree, module, is_package):
    """Names of product modules that a syntax tree imports, wherever the import stands."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return {name for name in names if name in MODULES}


def graph():
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    return {name: imported(trees[name], name, path.name == "__init__.py") for name, path in MODULES.items()}


GRAPH = graph()


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"idmm"}))
def test_layer(module):
    """Each module has a layer and imports nothing from above; ``idmm`` itself imports when it is asked."""
    assert package(module) in LAYER, f"{module} has no layer: add it to CONTRIBUTING and to this test"
    for other in GRAPH[module] - {"idmm"}:
        assert LAYER[package(other)] <= LAYER[package(module)], f"{module} imports {other}, which is a layer above it"
    assert "idmm" not in GRAPH[module] or package(module) in LAYERS[-1], f"{module} imports idmm itself"


@pytest.mark.parametrize(("importer", "other"), FORBIDDEN, ids=lambda name: name)
def test_neighbours_that_do_not_talk(importer, other):
    for module, names in GRAPH.items():
        if package(module) == importer:
            assert not [name for name in names if package(name) == other], f"{module} imports from {other}"


def test_no_circles():
    """Of a module and a package's ``__init__`` too; a name imported inside a function counts."""
    state = {}

    def visit(module, path):
        assert module not in path, " imports ".join([*path[path.index(module) :], module])
        if module not in state:
            for other in sorted(GRAPH[module]):
                visit(other, [*path, module])
            state[module] = True

    for module in sorted(MODULES):
        visit(module, [])


def concrete_methods():
    return {name for name in MODULES if name.startswith("idmm.methods.") and name != "idmm.methods.base"}


def test_engine_knows_no_method():
    for module in [name for name in MODULES if package(name) in ("training", "evaluation")]:
        assert not GRAPH[module] & concrete_methods(), f"{module} imports a concrete method"
    assert concrete_methods()


def test_plan_imports_no_torch():
    """The grid's plan is made, and reports are drawn, where no torch may be (a cluster's front end, a laptop)."""
    heavy = {"torch", "torchvision", "timm", "accelerate"}
    packages = ("idmm.transfer.plan", "idmm.cli", "idmm.errors", "idmm.stages")
    for module in MODULES:
        if module in packages or package(module) in ("config", "report"):
            body = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
            names = {a.name for node in body if isinstance(node, ast.Import) for a in node.names}
            names |= {node.module or "" for node in body if isinstance(node, ast.ImportFrom)}
            assert not {name.split(".")[0] for name in names} & heavy, module


def test_benchmarks_import_what_there_is():
    """They are run seldom: a name that has moved would be found out by a user."""
    for path in sorted((PACKAGE.parent / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "idmm":
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or f"{node.module}.{name}" in MODULES, f"{path.name}: {name}"
