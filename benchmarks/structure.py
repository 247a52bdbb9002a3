"""Structure of the package in figures, each beside its aim: compares the code before and after a refactoring.

    python benchmarks/structure.py --json structure.json    # below a minute on two idle cores
    python benchmarks/structure.py --check                  # as `make lint`: no figure above its limit

- Code path of a prune: SparseGPT prunes the demo model to 2:4 on 8 windows, in a process of its own for each λ, so
  that no cache or import of another run shortens it. A function counts once if any thread calls it between the call of
  `MoonshotPruner.prune` and its return. Functions are code objects with a file of the package: lambdas, comprehensions,
  generator expressions, class bodies and module bodies do not count, neither does generated code (the `__init__` of a
  dataclass). Loading, progress bars and `resume_dir` are excluded.
- Depth: frames of the package on the stack at the first call of `Gram.add` (`--gram` names another method), which
  counts, below `prune`, which does not; frames of torch and transformers between them do not count. Generators of the
  package that `prune` has started and that are suspended at that moment, such as open context managers, are a row of
  their own.
- Imports: distinct modules of the package that a file imports, within functions too; `from ..x import a, b` counts once
  unless `a` and `b` are modules themselves. Imports for type checkers alone are excluded and listed in the JSON.
  Percentiles are by nearest rank, over all files.
- Concerns: files with a matching identifier: `rank`, `ranks` or `Ranks`, the names of processes, and all that contain
  "offload". Comments, docstrings and other strings do not count; the JSON has the count over the whole text too.
- Sizes: physical lines; a function's from `def` to its last, docstring included.
- Importers: files that exactly one other file of the package imports.
- Types: errors of mypy over the whole package with the flags of setup.cfg.
- Wording: clauses of docstrings and comments by the relative pronoun that begins them, one with a capital at the start
  of a sentence; occurrences of vague names as variables or parameters.

`--check` compares with structure_limits.json, the figures of the last commit that changed them. Where a figure has to
grow, write the file anew by `--limits`, with the reason in the commit; where one shrinks, write it anew too, so that
it does not grow back.

Requires Python 3.11, whose code objects have qualified names.
"""

import ast
import gc
import inspect
import io
import json
import math
import re
import subprocess
import sys
import threading
import tokenize
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

import torch
from common import parser

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "optimum_moonshot"
DEMO = ROOT / "examples" / "demo_model"
AREAS = ("optimum_moonshot", "tests", "benchmarks")
LAMBDAS = (1.0, 0.9)  # the second is the default
CODE_PATH = {1.0: (200, 38), 0.9: (230, 40)}  # λ → functions and files of a prune, at most
LIMITS = Path(__file__).with_name("structure_limits.json")
# How much more a figure of the code path may be on another machine, whose instruction set takes other branches.
SLACK = {"functions": 8, "files": 2, "suspended": 2}
SAMPLES, LENGTH = 8, 256
LONG = 60  # lines of a function
MOST_LINES = {"optimum_moonshot": 33_000}
WORST = 4  # listed in the table
LISTED = 10  # in the JSON
# Identifiers of a concern, and the largest number of files that may contain them.
CONCERNS = {"ranks": (re.compile(r"\branks?\b", re.IGNORECASE), 10), "offload": (re.compile("offload", re.I), 15)}
VAGUE = ("found", "known", "own", "told")


@dataclass
class Measure:
    name: str
    value: int | None  # None: not measured
    aim: int | None  # at most; None: no aim
    where: Any = None  # the worst, or the parts

    def row(self) -> str:
        cells = [self.name, *("–" if number is None else str(number) for number in (self.value, self.aim))]
        return f"| {cells[0]:<48} | {cells[1]:>6} | {cells[2]:>4} | {_short(self.where)} |"


def _short(where: Any) -> str:
    """The first few entries."""
    if isinstance(where, dict):
        where = [f"{name} {count}" for name, count in where.items()]
    return ", ".join(map(str, (where or [])[:WORST]))


# The code path and depth of a prune.


class Trace:
    """A profile function: the package's functions that are called, and the stack at the first call of a method."""

    def __init__(self, method: str):
        self.method, self.codes, self.stack, self.suspended = method, set[CodeType](), list[str](), list[str]()
        self.earlier = set(map(id, _suspended()))

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not _is_function(code):
            return
        self.codes.add(code)
        if not self.stack and code.co_qualname == self.method:
            self.stack = _stack(frame)
            self.suspended = [_label(each.gi_code) for each in _suspended() if id(each) not in self.earlier]


def _in_package(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{PACKAGE}/")


def _is_function(code: CodeType) -> bool:
    is_class_body = not code.co_flags & inspect.CO_OPTIMIZED
    return _in_package(code) and not code.co_name.startswith("<") and not is_class_body


def _label(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_qualname}"


def _stack(frame: FrameType | None) -> list[str]:
    """The package's frames from the outermost inwards, without `prune`, which is the first."""
    labels = []
    while frame is not None:
        labels += [_label(frame.f_code)] if _in_package(frame.f_code) else []
        frame = frame.f_back
    return labels[::-1][1:]


def _suspended() -> list[GeneratorType]:
    """The package's generators that have started and are suspended."""
    generators = [each for each in gc.get_objects() if type(each) is GeneratorType]  # isinstance wakes lazy attributes
    return [each for each in generators if each.gi_suspended and _in_package(each.gi_code)]


def trace_prune(lam: float, method: str) -> dict[str, Any]:
    """Prune the demo model in this process."""
    sys.path.insert(0, str(ROOT))  # this tree's package, whichever is installed
    from transformers.utils import logging

    from optimum_moonshot import MoonshotConfig, MoonshotPruner

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    config = MoonshotConfig(solver="sparsegpt", pattern="2:4", lam=lam, num_samples=SAMPLES, sequence_length=LENGTH)
    pruner = MoonshotPruner.from_pretrained(DEMO, config, dtype="auto")
    trace = Trace(method)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        pruner.prune(str(DEMO / "calibration.txt"), progress=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = Counter(sorted(str(Path(code.co_filename).relative_to(PACKAGE)) for code in trace.codes))
    return {"files": dict(files.most_common()), "stack": trace.stack, "suspended": sorted(trace.suspended)}


def code_path(lam: float, method: str) -> list[Measure]:
    """As `trace_prune`, in a process of its own."""
    command = [sys.executable, __file__, "--trace", str(lam), "--gram", method]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    trace = json.loads(output.splitlines()[-1])
    files, stack, suspended = trace["files"], trace["stack"], trace["suspended"]
    if not stack:
        print(f"{method} is not called at λ = {lam:g}: give its qualified name as --gram", file=sys.stderr)
    return [
        Measure(f"functions of a prune, λ = {lam:g}", sum(files.values()), CODE_PATH[lam][0], files),
        Measure(f"files of a prune, λ = {lam:g}", len(files), CODE_PATH[lam][1]),
        Measure(f"frames from prune to {method}, λ = {lam:g}", len(stack) or None, 9, stack[::-1]),
        Measure(f"suspended generators there, λ = {lam:g}", len(suspended) if stack else None, 6, suspended),
    ]


# Imports, concerns, sizes and wording, from the source.


@dataclass
class Source:
    path: str  # relative to the repository
    text: str
    tree: ast.Module
    tokens: list[tokenize.TokenInfo]

    @classmethod
    def read(cls, path: Path) -> "Source":
        text = path.read_text(encoding="utf-8")
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        return cls(path.relative_to(ROOT).as_posix(), text, ast.parse(text), tokens)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def functions(self) -> dict[str, int]:
        """Lines of each."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {f"{self.path}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1 for node in nodes}

    def prose(self) -> list[str]:
        """Docstrings and comments."""
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(self.tree) if isinstance(node, documented)]
        comments = [token.string for token in self.tokens if token.type == tokenize.COMMENT]
        return [*filter(None, docstrings), *comments]

    def identifiers(self) -> set[str]:
        return {token.string for token in self.tokens if token.type == tokenize.NAME}

    def variables(self) -> Counter[str]:
        """Occurrences of names as variables or parameters."""
        nodes = list(ast.walk(self.tree))
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        return Counter([*names, *(node.arg for node in nodes if isinstance(node, ast.arg))])


def imported(source: Source) -> tuple[set[Path], set[Path]]:
    """Modules of the package that a file imports, and those that it imports for type checkers alone."""
    for_checkers = {
        id(node)
        for branch in ast.walk(source.tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    modules: tuple[set[Path], set[Path]] = set(), set()
    for node in ast.walk(source.tree):
        modules[id(node) in for_checkers].update(_modules(node, ROOT / source.path))
    running, checking = (each - {ROOT / source.path} for each in modules)
    return running, checking - running


def _modules(node: ast.AST, path: Path) -> set[Path]:
    """Files of the package that one statement imports."""
    if isinstance(node, ast.Import):
        files = {_file(ROOT.joinpath(*alias.name.split("."))) for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        base = path.parents[node.level - 1] if node.level else ROOT
        base = base.joinpath(*(node.module or "").split("."))
        files = {_file(base / alias.name) or _file(base) for alias in node.names}
    else:
        return set()
    return {file for file in files if file and file.is_relative_to(PACKAGE)}


def _file(module: Path) -> Path | None:
    candidates = (module.with_name(f"{module.name}.py"), module / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def imports(sources: list[Source]) -> list[Measure]:
    modules = {source.path: imported(source) for source in sources}
    counts = Counter({path: len(running) for path, (running, _) in modules.items()})
    checking = {path: len(checking) for path, (_, checking) in modules.items() if checking}
    worst = dict(counts.most_common(LISTED))
    importers: dict[Path, set[str]] = {}
    for path, (running, _) in modules.items():
        for module in running if path != "optimum_moonshot/__init__.py" else ():
            importers.setdefault(module, set()).add(path)
    single = {str(path.relative_to(ROOT)): next(iter(by)) for path, by in importers.items() if len(by) == 1}
    ordered = sorted(counts.values())
    percentile = lambda share: ordered[math.ceil(share * len(ordered)) - 1]  # noqa: E731
    return [
        Measure("imports from the package per file, p50", percentile(0.5), None),
        Measure("imports from the package per file, p90", percentile(0.9), 8),
        Measure("imports from the package per file, max", ordered[-1], 12, worst),
        Measure("files with one importer", len(single), 15, single),
        Measure("imports from the package, all files", sum(ordered), None),
        Measure("imports for type checkers alone, all files", sum(checking.values()), None, checking),
    ]


def concerns(sources: list[Source]) -> list[Measure]:
    measures = []
    for name, (pattern, aim) in CONCERNS.items():
        code = [source.path for source in sources if any(map(pattern.search, source.identifiers()))]
        text = sum(bool(pattern.search(source.text)) for source in sources)
        folders = Counter(path.split("/")[1] for path in code)
        where = {**dict(folders.most_common()), "in the whole text": text, "files": code}
        measures.append(Measure(f"files that name {name} in code", len(code), aim, where))
    return measures


def sizes(area: str, sources: list[Source]) -> list[Measure]:
    lines = Counter({source.path: source.lines for source in sources})
    long = Counter({name: count for source in sources for name, count in source.functions().items() if count > LONG})
    return [
        Measure(f"files, {area}", len(sources), None),
        Measure(f"lines, {area}", lines.total(), MOST_LINES.get(area), dict(lines.most_common(LISTED))),
        Measure(f"functions above {LONG} lines, {area}", len(long), 0, dict(long.most_common())),
    ]


def wording(area: str, sources: list[Source]) -> list[Measure]:
    def clauses(word: str) -> Counter[str]:
        pattern = re.compile(rf"\b{word}\b")
        return +Counter({source.path: len(pattern.findall("\n".join(source.prose()))) for source in sources})

    variables = sum((source.variables() for source in sources), Counter())
    vague = {name: variables[name] for name in VAGUE}
    capital, small = clauses("What"), clauses("what")
    return [
        Measure(f"sentences that begin with What, {area}", capital.total(), 0, dict(capital.most_common(LISTED))),
        Measure(f"other clauses with what, {area}", small.total(), None, dict(small.most_common(LISTED))),
        Measure(f"vague names, {area}", sum(vague.values()), 0, vague),
    ]


# Types.


def start_mypy() -> subprocess.Popen[str]:
    """mypy over the package, beside the other measurements; its cache is not that of `make lint`."""
    cache = ROOT / ".mypy_cache" / "structure"
    command = [sys.executable, "-m", "mypy", "--output", "json", "--cache-dir", str(cache), PACKAGE.name]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def mypy_errors(process: subprocess.Popen[str]) -> Measure:
    output, problems = process.communicate()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"mypy: {problems or output}")
    messages = [json.loads(line) for line in output.splitlines() if line.startswith("{")]  # no summary, such as Success
    errors = [message for message in messages if message["severity"] == "error"]
    files = dict(Counter(error["file"] for error in errors).most_common())
    codes = dict(Counter(error["code"] for error in errors).most_common())
    return Measure("mypy errors", len(errors), 0, {**codes, "files": files})


def measure(method: str, with_mypy: bool) -> list[Measure]:
    mypy = start_mypy() if with_mypy else None
    measures = [each for lam in LAMBDAS for each in code_path(lam, method)]
    sources = {area: [Source.read(path) for path in sorted((ROOT / area).rglob("*.py"))] for area in AREAS}
    measures += imports(sources["optimum_moonshot"]) + concerns(sources["optimum_moonshot"])
    measures += [each for area in AREAS for each in sizes(area, sources[area])]
    measures += [each for area in AREAS for each in wording(area, sources[area])]
    return [*measures, mypy_errors(mypy)] if mypy else measures


def exceeds(name: str, value: int | None, limit: int | None) -> bool:
    """Whether a figure is above its limit, or cannot be compared with it."""
    if value is None or limit is None:
        return True
    return value > limit + (SLACK.get(name.split()[0], 0) if "λ" in name else 0)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the figures, and where they are from")
    arguments.add_argument(
        "--gram", default="Gram.add", metavar="NAME", help="method that adds a batch to the Gram matrix"
    )
    arguments.add_argument("--check", action="store_true", help="fail if a figure is above its limit; without types")
    arguments.add_argument("--limits", action="store_true", help=f"write the figures as the limits, {LIMITS.name}")
    arguments.add_argument("--no-mypy", action="store_true", help="leave out the types")
    arguments.add_argument("--trace", type=float, metavar="LAM", help="print one code path, for internal use")
    options = arguments.parse_args()
    if options.trace is not None:
        print(json.dumps(trace_prune(options.trace, options.gram)))
        return
    if options.check and sys.version_info < (3, 11):
        print("structure: not checked, since it requires Python 3.11")
        return
    limited = options.check or options.limits
    measures = measure(options.gram, not (options.no_mypy or limited))
    values = {each.name: each.value for each in measures if each.aim is not None}
    if options.limits:
        LIMITS.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.check:
        limits = json.loads(LIMITS.read_text(encoding="utf-8"))
        worse = [
            f"{name}: {value}, limit {limits.get(name)}"
            for name, value in values.items()
            if exceeds(name, value, limits.get(name))
        ]
        print(*(worse or ["structure: no figure is above its limit"]), sep="\n")
        raise SystemExit(bool(worse))
    print("| measure | value | aim | where |\n|---|---|---|---|")
    print(*(each.row() for each in measures), sep="\n")
    if options.json:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        results = {"commit": commit.stdout.strip(), "measures": [asdict(each) for each in measures]}
        options.json.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
