"""Imports point in one direction: from higher to lower floors of packages, and without cycles between modules."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import optimum_moonshot

PACKAGE = Path(optimum_moonshot.__file__).parent
# A package imports only from lower floors, and from itself.
FLOORS = (
    ("approximate", "version", "errors", "devices"),
    ("files", "progress", "mapped", "options"),
    ("objective", "distributed", "kernels"),
    ("solvers",),
    ("config",),
    ("functional", "packing", "data"),
    ("model", "runtime"),
    ("masks", "calibration", "reports"),
    ("checkpoint", "evaluation"),
    ("pipeline",),
    # The capabilities: a folder each, with its run, report and command.
    ("allocate", "recover", "rotate"),
    ("experts",),
    ("prune",),
    ("sweep", "shrink", "plan"),
    ("pruner",),
    ("integrations",),
    ("commands",),
    ("__main__",),
)
# The report of a capability is a part of the report of a run, and its command one of the command line.
CAPABILITIES = ("allocate", "recover", "rotate", "experts", "prune", "sweep", "shrink", "plan")
FLOOR_OF = {"report": "reports", "command": "commands"}
# `__init__` imports its names lazily; the quantizer that it registers imports the rest on use.
ENTRY = "__init__"
MOST_IMPORTS = 15  # modules of the package that a file imports
FACADE = "pruner"
HEAVY = {"transformers", "datasets", "huggingface_hub", "matplotlib", "optimum", "peft"}


@cache
def modules():
    """Module name without the package → path."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")
    }


def imports(name, path, for_types=True):
    """The modules of this package that a module imports, including lazy imports, and those for type checkers."""
    ours, tree = modules(), ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = name.split(".")[: -node.level] + (node.module.split(".") if node.module else [])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "optimum_moonshot":
            base = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            for target in (".".join([*base, alias.name]), ".".join(base), ".".join([*base, "__init__"])):
                if target in ours and target != name:
                    yield target
                    break


def folder(name):
    return name.split(".")[0]


def graph():
    return {name: set(imports(name, path)) for name, path in modules().items() if name != ENTRY}


def test_every_package_is_on_one_floor():
    packages = [package for floor in FLOORS for package in floor]
    assert sorted(packages) == sorted({folder(name) for name in modules()} - {ENTRY})


def test_imports_point_to_lower_floors():
    floor = {package: height for height, packages in enumerate(FLOORS) for package in packages}

    def place(name):
        top, _, file = name.partition(".")
        return FLOOR_OF.get(file, top) if top in CAPABILITIES else top

    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if place(name) != place(other) and other != ENTRY and floor[place(other)] >= floor[place(name)]
    ]
    assert not wrong


def test_no_import_cycles():
    tuple(TopologicalSorter(graph()).static_order())


def test_a_module_imports_few_others():
    counts = {name: len(set(imports(name, path, for_types=False))) for name, path in modules().items()}
    assert {name for name, count in counts.items() if count > MOST_IMPORTS} <= {FACADE}


def test_numerical_packages_import_no_transformers():
    for name, path in modules().items():
        if folder(name) in ("objective", "solvers", "packing", "kernels", "errors"):
            imported = {
                alias.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                for alias in (
                    [node.module or ""]
                    if isinstance(node, ast.ImportFrom) and not node.level
                    else [each.name for each in node.names]
                    if isinstance(node, ast.Import)
                    else []
                )
            }
            assert not imported & HEAVY, name


def test_folders_are_two_levels_deep_at_most():
    assert all(name.count(".") <= 1 for name in modules() if not name.startswith("commands.register"))
