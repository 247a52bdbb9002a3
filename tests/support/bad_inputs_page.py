"""docs/bad-inputs.md, generated from the tables in test_bad_inputs.py.

python tests/support/bad_inputs_page.py writes it; the tests compare.
"""

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "test_bad_inputs.py"
PAGE = TESTS.parents[1] / "docs" / "bad-inputs.md"
START = """\
# Bad inputs

The error messages for {count} wrong inputs. Each is one line that contains these words, a `MoonshotError` in Python and
after `error:` on the command line, without a traceback. The model stays unchanged, and nothing is written. Every row is
a test in `tests/test_bad_inputs.py`; `python tests/support/bad_inputs_page.py` generates this page from their tables,
and a test compares them.

`WEIGHT` is 8×16, `GRAM` 16×16, `GRADIENTS` of 2 samples; `IDS` are two samples of 8 tokens, `keys_of(…)` a batch with
these keys; `LONG` is a number of 400 digits. `config()` is Wanda to 2:4 with λ = 1, `HALF` the same with λ = 0.5, `OBC`
its fields for that solver. `meta` moves a model or a layer to the meta device; `configured` writes a field of
config.json, `changed` a file, `cut` truncates the weights. FILE is a file, LINK a broken symbolic link, and `TEXT`
calibration on a text file.
"""


def _as_it_stands(parts):
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
    """What a string literal says."""
    return ast.literal_eval(source)


def _typed(options):
    """A list of options as one types it."""
    nodes = ast.parse(options, mode="eval").body.elts
    texts = [node.value if isinstance(node, ast.Constant) else ast.unparse(node).lstrip("*") for node in nodes]
    return " ".join(text or '""' for text in texts)


# Title, table, what is given, and what a row of the table says: a line of code, and words.
SECTIONS = [
    ("One matrix", "MATRICES", "`prune_weight(…)`",
     lambda p: (f"{p[0][1:-1].rstrip(',')}, config={p[1]}", _text(p[2]))),
    ("Several sparsities", "PATHS", "`prune_weight_path(…)`",
     lambda p: (f"WEIGHT, GRAM, config={p[0]}, sparsities={p[1]}", _text(p[2]))),
    ("Sizes and whole numbers", "NUMBERS", "`MoonshotConfig(…)`", lambda p: (f"{_text(p[0])}={p[1]}", _text(p[2]))),
    ("Calibration data", "DATA", "`prune(…)`", _as_it_stands),
    ("Custom losses", "LOSSES", "`prune(loss=…)`", _as_it_stands),
    ("Other arguments of a run", "ARGUMENTS", "of `prune` and `MoonshotConfig`", _as_it_stands),
    ("Models", "OBJECTS", "`MoonshotPruner(…)`", _as_it_stands),
    ("Folders of models", "MODELS", "a change in one", _as_it_stands),
    ("Where models are saved", "PLACES", "`save_pretrained(…)`", _as_it_stands),
    ("A run's report", "REPORTS", "`PruneReport.load`, a field", _field("run")),
    ("A layer in it", "LAYERS", "`PruneReport.load`, a field", _field("run", "layers[0].")),
    ("A sweep's report", "SWEEPS", "`SweepReport.load`, a field", _field("sweep")),
    ("Results of an evaluation", "EVALUATIONS", "`EvalReport.load`",
     lambda p: (p[0], "contains no results of an evaluation")),
    ("The command line", "COMMANDS", "`optimum-cli moonshot`", _option),
    ("Values that are no numbers", "VALUES", "`optimum-cli moonshot prune`",
     lambda p: (f"{_text(p[0])} {_text(p[1])}", "the option and the value (status 2)")),
]  # fmt: skip


def rows(tree, source, table):
    """The parts of every row of a table, as they stand in the source."""
    (value,) = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table
    ]
    for element in value.elts:
        if not isinstance(element, ast.Starred):
            yield _parts(element, source)
        elif isinstance(element.value.generators[0].iter, ast.Tuple):  # one value after another, with the same words
            name, _, words = element.value.elt.elts
            for given in element.value.generators[0].iter.elts:
                yield [_source(part, source) for part in (name, given, words)]
        # other generators repeat a table, which has a section of its own


def _parts(element, source):
    if not isinstance(element, ast.Tuple):
        return [_source(element, source)]
    return [_source(part, source) for part in element.elts]


def _source(node, source):
    return " ".join(ast.get_source_segment(source, node).split())


def _code(text):
    """A cell of code, whatever signs are in it."""
    text = text.replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def page():
    """The page, as text."""
    source = TESTS.read_text(encoding="utf-8")
    tree, lines, count = ast.parse(source), [], 0
    for title, table, head, cells in SECTIONS:
        lines += [f"\n## {title}\n", f"| {head} | message |", "|---|---|"]
        for parts in rows(tree, source, table):
            given, words = cells(parts)
            lines.append(f"| {_code(given)} | {_code(words)} |")
            count += 1
    return START.format(count=count) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit()
