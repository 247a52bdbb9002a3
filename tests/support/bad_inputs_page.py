"""Tables of the tested bad inputs, from the sources of their tests. The site shows them in docs/reliability.md."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1] / "bad_inputs"
NOTE = """\
`WEIGHT` is 8×16, `GRAM` 16×16, `GRADIENTS` has 2 samples; `IDS` has two samples of 8 tokens, `keys_of(…)` is a batch
with these keys; `LONG` is a number of 400 digits. `config()` is Wanda to 2:4 with λ = 1, `HALF` the same with λ = 0.5,
`OBC` the fields for that solver. `meta` moves a model or a layer to the meta device; `configured` changes a field of
config.json, `changed` a file, and `cut` truncates the weights. FILE is a file, LINK a broken link, and `TEXT` is
calibration on a text file.
"""


def _first_and_last(parts):
    return parts[0], _text(parts[-1])


def _option(parts):
    command, options, status, words = parts
    return f"{_text(command)} … {_typed(options)}", f"error: {_text(words)}… (status {status})"


def _field(kind, prefix=""):
    def cells(parts):
        name = prefix + _text(parts[0])
        return f"{name}: {parts[1]}", f"is damaged: it is not the report of a {kind} ({name}…"

    return cells


def _text(source):
    """The value of a string literal."""
    return ast.literal_eval(source)


def _typed(options):
    """A list of options as typed in a shell."""
    nodes = ast.parse(options, mode="eval").body.elts
    texts = [node.value if isinstance(node, ast.Constant) else ast.unparse(node).lstrip("*") for node in nodes]
    return " ".join(text or '""' for text in texts)


# Title, table, heading of the input column, and the two cells of a row: code and message.
SECTIONS = [
    ("One matrix", "MATRICES", "`prune_weight(…)`",
     lambda p: (f"{p[0][1:-1].rstrip(',')}, config={p[1]}", _text(p[2]))),
    ("Several sparsities", "PATHS", "`prune_weight_path(…)`",
     lambda p: (f"WEIGHT, GRAM, config={p[0]}, sparsities={p[1]}", _text(p[2]))),
    ("Sizes and whole numbers", "NUMBERS", "`MoonshotConfig(…)`", lambda p: (f"{_text(p[0])}={p[1]}", _text(p[2]))),
    ("Calibration data", "DATA", "`prune(…)`", _first_and_last),
    ("Custom losses", "LOSSES", "`prune(loss=…)`", _first_and_last),
    ("Other arguments of a run", "ARGUMENTS", "of `prune` and `MoonshotConfig`", _first_and_last),
    ("Models", "OBJECTS", "`MoonshotPruner(…)`", _first_and_last),
    ("Folders of models", "MODELS", "change", _first_and_last),
    ("Output folders", "PLACES", "`save_pretrained(…)`", _first_and_last),
    ("A run's report", "REPORTS", "`PruneReport.load`, a field", _field("run")),
    ("A layer in a run's report", "LAYERS", "`PruneReport.load`, a field", _field("run", "layers[0].")),
    ("A sweep's report", "SWEEPS", "`SweepReport.load`, a field", _field("sweep")),
    ("Results of an evaluation", "EVALUATIONS", "`EvalReport.load`",
     lambda p: (p[0], "contains no results of an evaluation")),
    ("The command line", "COMMANDS", "`optimum-cli moonshot`", _option),
    ("Values of the wrong type", "VALUES", "`optimum-cli moonshot prune`",
     lambda p: (f"{_text(p[0])} {_text(p[1])}", "the option and the value (status 2)")),
]  # fmt: skip


def sources():
    """Table name → its node and source, from all tests of bad inputs."""
    assigned = {}
    for path in sorted(TESTS.glob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign):
                assigned[ast.unparse(node.targets[0])] = node.value, source
    return assigned


def rows(node, source):
    """The source of every part of every row of a table."""
    for element in node.elts:
        if not isinstance(element, ast.Starred):
            yield _parts(element, source)
        elif isinstance(element.value.generators[0].iter, ast.Tuple):  # several values with the same message
            name, _, words = element.value.elt.elts
            for value in element.value.generators[0].iter.elts:
                yield [_source(part, source) for part in (name, value, words)]
        # other generators repeat a table that has its own section


def _parts(element, source):
    if not isinstance(element, ast.Tuple):
        return [_source(element, source)]
    return [_source(part, source) for part in element.elts]


def _source(node, source):
    return " ".join(ast.get_source_segment(source, node).split())


def _code(text):
    """A cell of code, with special characters escaped."""
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def tables():
    """A table in Markdown for each section."""
    assigned, lines = sources(), [NOTE]
    for title, name, head, cells in SECTIONS:
        lines += [f"\n### {title}\n", f"| {head} | message |", "|---|---|"]
        for parts in rows(*assigned[name]):
            code, words = cells(parts)
            lines.append(f"| {_code(code)} | {_code(words)} |")
    return "\n".join(lines) + "\n"
