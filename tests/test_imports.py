"""Imports point one way: between the package's folders by their floors, and between all modules without a cycle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import optimum_moonshot

PACKAGE = Path(optimum_moonshot.__file__).parent
# What stands on a floor imports what stands below it, or in the same folder.
FLOORS = (
    ("version", "errors", "devices"),
    ("files", "progress", "mapped"),
    ("objective", "distributed"),
    ("solvers", "recipes"),
    ("config_checks",),
    ("config",),
    ("kernels",),
    ("functional", "packing", "data"),
    ("model", "runtime"),
    ("masks", "calibration", "reports"),
    ("rotation",),
    ("checkpoint", "evaluation"),
    ("results",),
    ("pipeline",),
    ("allocation", "recovery"),
    ("runs", "planning"),
    ("pruner",),
    ("integrations",),
    ("commands",),
    ("__main__",),
)
# `__init__` names everything, when it is asked for; the quantizer that it registers loads the rest when it is used.
ENTRY = "__init__"
HEAVY = {"transformers", "datasets", "huggingface_hub", "matplotlib", "optimum", "peft"}


def modules():
    """Module → its path, both without the package's name."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")
    }


def imports(name, path):
    """The modules of this package that a module imports, also those it imports late."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = name.split(".")[: -node.level] + (node.module.split(".") if node.module else [])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "optimum_moonshot":
            base = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            for found in (".".join([*base, alias.name]), ".".join(base), ".".join([*base, "__init__"])):
                if found in known and found != name:
                    yield found
                    break


def folder(name):
    return name.split(".")[0]


def graph():
    return {name: set(imports(name, path)) for name, path in modules().items() if name != ENTRY}


def test_every_folder_stands_on_one_floor():
    standing = [room for floor in FLOORS for room in floor]
    assert sorted(standing) == sorted({folder(name) for name in modules()} - {ENTRY})


def test_imports_go_down():
    floor = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if folder(name) != folder(other) and other not in (ENTRY,) and floor[folder(other)] >= floor[folder(name)]
    ]
    assert not wrong


def test_no_module_imports_itself_through_others():
    tuple(TopologicalSorter(graph()).static_order())


def test_the_mathematics_needs_no_transformers():
    for name, path in modules().items():
        if folder(name) in ("objective", "solvers", "packing", "kernels", "errors"):
            found = {
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
            assert not found & HEAVY, name


def test_folders_are_two_levels_deep_at_most():
    assert all(name.count(".") <= 1 for name in modules() if not name.startswith("commands.register"))
