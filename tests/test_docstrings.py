"""Public functions say what they take and what they raise. Read from the source: nothing of the package is imported.

The rule is for every public function of a module, and every public method of a public class; what `__init__` takes is
said by the class. A method without a docstring has that of the method it overrides, also of a `Protocol` that its
module knows and its class fulfils.

1. With two or more parameters there is a docstring, and each parameter is named in it, or in the `Args:` of a function
   that it refers to ("as `prune_weight`"), or speaks for itself: its name repeats its class (``layer: PrunableLayer``,
   ``batches: list[Batch]``), or it is the model. An `Args:` section has all parameters, in order, and nothing else.
2. With two or more parameters, of which one is a tensor, shapes are given in brackets, such as [d_out, d_in], by the
   name of an attribute (`shape`), by reference, or as "any shape".
3. Whatever the number of parameters: a body that raises, by `raise`, `require` or a `check_…`, has `Raises:`, or the
   text names the error.

Fields of a dataclass are said by the comments beside them. A method without a docstring, in a class that derives from
another package's, is taken for an override of that package's, which documents it.
"""

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "optimum_moonshot"
RAISING = re.compile(r"require|expect|_?check(_\w+)?")  # calls that raise unless what they are given is so
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): ", re.MULTILINE)
ERROR = re.compile(r"`\w*(Error|SystemExit)\b")
SHAPE = re.compile(r"\[[^\]]+\]|any shape|`shape`")
# Annotations that do not say what their value is.
MUTE = {"Any", "Callable", "Tensor", "None", "bool", "dict", "float", "int", "list", "object", "slice", "str", "tuple"}


@dataclass
class Class:
    node: ast.ClassDef
    known: dict[str, str]  # name in its module → package that it comes from, "" for this one

    @property
    def bases(self):
        return [ast.unparse(base).partition("[")[0] for base in self.node.bases]

    @property
    def foreign(self):
        """Whether a base comes from another package than this one and Python's own."""
        origins = [self.known.get(base.partition(".")[0], "") for base in self.bases]
        return any(origin and origin not in sys.stdlib_module_names for origin in origins)

    @property
    def methods(self):
        return {node.name: node for node in self.node.body if isinstance(node, ast.FunctionDef)}

    def fulfils(self, other):
        """Whether it has the methods of a protocol that its module knows; attributes may be of any kind."""
        if "Protocol" not in other.bases or "Protocol" in self.bases or other.node.name not in self.known:
            return False
        wanted = {name for name, node in other.methods.items() if not decorated(node, "property")}
        return bool(wanted) and wanted <= self.methods.keys()


@dataclass
class Function:
    place: str
    node: ast.FunctionDef
    doc: str
    cls: Class | None = None
    parameters: dict[str, ast.expr | None] = field(init=False)  # name → annotation, without self and cls

    def __post_init__(self):
        args = self.node.args
        found = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
        bound = self.cls is not None and not decorated(self.node, "staticmethod")
        self.parameters = {arg.arg: arg.annotation for arg in [arg for arg in found if arg is not None][bound:]}

    @property
    def foreign(self):
        """Whether another package documents it."""
        return not self.doc and self.cls is not None and self.cls.foreign


class Package:
    """The public functions of all modules, by reading them."""

    def __init__(self, folder):
        trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
        self.classes = [
            Class(node, known_names(tree)) for tree in trees.values() for node in tree.body if is_class(node)
        ]
        self.functions = [
            function
            for path, tree in trees.items()
            for function in self.read(path.relative_to(folder).as_posix(), tree)
        ]
        self.by_name = {}
        for function in self.functions:
            self.by_name.setdefault(function.node.name, []).append(function)

    def read(self, module, tree):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield Function(f"{module}:{node.name}", node, ast.get_docstring(node) or "")
            if is_class(node) and not node.name.startswith("_"):
                cls = next(cls for cls in self.classes if cls.node is node)
                for name, method in cls.methods.items():
                    if name == "__init__" or not name.startswith("_"):
                        own = node if name == "__init__" else method
                        doc = ast.get_docstring(own) or self.inherited(cls, name)
                        yield Function(f"{module}:{node.name}.{name}", method, doc, cls)

    def inherited(self, cls, name):
        """The docstring of the method in a base or a fulfilled protocol of this package."""
        for other in self.classes:
            if other is not cls and (other.node.name in cls.bases or cls.fulfils(other)):
                found = other.methods.get(name)
                doc = found and ast.get_docstring(found) or self.inherited(other, name)
                if doc:
                    return doc
        return ""

    def referred(self, doc):
        """The functions whose names stand in a text."""
        return [function for name in re.findall(r"`(?:\w+\.)*(\w+)`", doc) for function in self.by_name.get(name, ())]

    def findings(self, rule):
        return [f"{function.place}: {wrong}" for function in self.functions if (wrong := rule(self, function))]


def is_class(node):
    return isinstance(node, ast.ClassDef)


def decorated(node, name):
    return any(ast.unparse(each) == name for each in node.decorator_list)


def known_names(tree):
    found = {node.name: "" for node in tree.body if is_class(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin = "" if node.level else node.module.partition(".")[0]
            found |= {alias.asname or alias.name: origin for alias in node.names}
        elif isinstance(node, ast.Import):
            names = (alias.name.partition(".")[0] for alias in node.names)
            found |= {alias.asname or name: name for alias, name in zip(node.names, names, strict=True)}
    return found


def identifiers(annotation):
    """The last names of all types in an annotation."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval")
    nodes = [] if annotation is None else list(ast.walk(annotation))
    return {n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)}


def speaks(name, annotation):
    types = identifiers(annotation)
    if name == "model" and types & {"Module", "PreTrainedModel"}:
        return True
    flat = name.replace("_", "")
    singular = {flat, flat.removesuffix("s"), flat.removesuffix("es")}
    return any(word in known.lower() for known in types - MUTE for word in singular)


def arguments(doc):
    """The names in the `Args:` section, in order; None without one."""
    parts = SECTION.split(doc)
    if "Args" not in parts:
        return None
    return [name for entry in ENTRY.findall(parts[parts.index("Args") + 1]) for name in entry.split(", ")]


def parameters(package, function):
    names, doc = function.parameters, function.doc
    if len(names) < 2 or function.foreign:
        return None
    if not doc:
        return "no docstring"
    listed = arguments(doc)
    if listed is not None:
        return None if listed == list(names) else f"Args: has {', '.join(listed)}; it takes {', '.join(names)}"
    elsewhere = {name for other in package.referred(doc) for name in arguments(other.doc) or ()}
    missing = [
        name
        for name, annotation in names.items()
        if name not in elsewhere and not speaks(name, annotation) and not re.search(rf"\b{name}\b", doc)
    ]
    return f"it does not say what {', '.join(missing)} is" if missing else None


def shapes(package, function):
    tensors = [name for name, annotation in function.parameters.items() if "Tensor" in identifiers(annotation)]
    texts = [function.doc, *(other.doc for other in package.referred(function.doc))]
    if len(function.parameters) < 2 or not tensors or function.foreign or any(map(SHAPE.search, texts)):
        return None
    return f"no shape of {', '.join(tensors)}"


def own_nodes(node):
    """Everything in a function but the functions inside of it, which raise when they are called."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def raised(node):
    """What a body raises; not what it only hands on, nor what ends a pass of its own."""
    for child in own_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            name = ast.unparse(child.exc).partition("(")[0]
            if not name.startswith("_"):
                yield name
        elif isinstance(child, ast.Call) and RAISING.fullmatch(name := ast.unparse(child.func).rpartition(".")[2]):
            yield name


def errors(package, function):
    found = sorted({*raised(function.node)})
    said = "Raises:" in function.doc or ERROR.search(function.doc) or function.foreign
    return f"no Raises: for {', '.join(found)}" if found and not said else None


@pytest.fixture(scope="module")
def package():
    return Package(PACKAGE)


@pytest.mark.parametrize("rule", [parameters, shapes, errors], ids=lambda rule: rule.__name__)
def test_public_functions_say_it(package, rule):
    assert not package.findings(rule)


BREAKING = '''
from torch import Tensor

from .elsewhere import require


def bare(first, second):
    pass


def unnamed(weight: Tensor, count: int):
    """Of a weight [d_out, d_in]."""


def partial(weight: Tensor, count: int):
    """Something.

    Args:
        weight: [d_out, d_in].
    """


def shapeless(weight: Tensor, count: int):
    """The first `count` of `weight`."""


def silent(value):
    """A value."""
    require(value, "none")


class Pruner:
    """A class."""

    def method(self, layer: "PrunableLayer", share: float):
        """Of a layer."""
'''
KEEPING = '''
from torch import Tensor, nn


class PrunableLayer(nn.Module):
    """The layer.

    Args:
        first: one number.
        second: another.
    """

    def __init__(self, first, second):
        self.sum = first + second

    def forward(self, inputs, options):
        raise ValueError


def prune(layer: PrunableLayer, weight: Tensor, share: float):
    """The layer with a weight.

    Args:
        layer: the layer.
        weight: [d_out, d_in].
        share: in [0, 1].

    Raises:
        ValueError: always.
    """
    raise ValueError


def again(layer: PrunableLayer, weight: Tensor, share: float):
    """As `prune`."""

    def later():
        raise ValueError


class Loss:
    """A loss."""

    def of(self, model: nn.Module, layers: list[PrunableLayer]):
        """Of some layers; raise `ValueError` without any."""
        raise ValueError


class Squared(Loss):
    """Its square."""

    def of(self, model: nn.Module, layers: list[PrunableLayer]):
        raise ValueError
'''


def test_the_rule_finds_what_breaks_it_and_nothing_else(tmp_path):
    (tmp_path / "breaking.py").write_text(BREAKING, encoding="utf-8")
    (tmp_path / "keeping.py").write_text(KEEPING, encoding="utf-8")
    package = Package(tmp_path)
    found = {rule.__name__: package.findings(rule) for rule in (parameters, shapes, errors)}
    assert found == {
        "parameters": [
            "breaking.py:bare: no docstring",
            "breaking.py:unnamed: it does not say what count is",
            "breaking.py:partial: Args: has weight; it takes weight, count",
            "breaking.py:Pruner.method: it does not say what share is",
        ],
        "shapes": ["breaking.py:shapeless: no shape of weight"],
        "errors": ["breaking.py:silent: no Raises: for require"],
    }
