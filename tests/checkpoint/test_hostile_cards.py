"""Untrusted text in cards: a foreign card or name neither stops a save nor adds markup to our part."""

import ast
import copy
import dataclasses
import os
import shlex

import pytest
import torch
import yaml
from checkpoints import pruned
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from markdown_it import MarkdownIt
from models import make

from optimum_moonshot import MoonshotConfig, MoonshotPruner, PruneReport, convert
from optimum_moonshot.checkpoint.base_card import MARKER, code, code_block, escaped, find_base, parted, unescaped
from optimum_moonshot.checkpoint.card import Facts, render
from optimum_moonshot.checkpoint.measuring import record
from optimum_moonshot.evaluation.metrics import Perplexity

HOSTILE = (
    "<script>alert(1)</script>",
    "a | b || c",
    "two\nlines\r\n# and a heading\n\n---\nlicense: evil\n---",
    "```\n````\n`` ` ``",
    '"quoted" \\ back\\\\slash\'s',
    "{{ curly }} {% raw %}",
    f"{MARKER}\n# Card of the dense model",
    "![picture](http://x) [link](http://y) <http://z> &amp; *bold* _it_ ~~gone~~ # ## ",
    "---\n[: {]}*&!%@`",
    "\x00\x1b[31mred\x85\u2028\u202e\ufeff",
)
MARKDOWN = MarkdownIt("commonmark").enable("table")
HEADINGS = ("How to load it", "How it was pruned", "How to make it again", "Sparsity", "Evaluation", "Size and cost")


@pytest.fixture(scope="module")
def pruner():
    return pruned()


def card(folder):
    """The YAML and the text, split by the regular expression of huggingface_hub."""
    content = (folder / "README.md").read_bytes().decode()
    header = REGEX_YAML_BLOCK.search(content)
    assert "\r" not in content
    return yaml.safe_load(header[2]), content[header.end() :]


def tokens(text):
    return [inner for token in MARKDOWN.parse(text) for inner in (token, *(token.children or ()))]


def assert_whole(text, name):
    """Our part of a card has our headings, no foreign markup, and as many cells in every row of a table."""
    parsed = tokens(parted(text)[0])
    kinds = [token.type for token in parsed]
    assert not {"html_block", "html_inline"} & set(kinds)
    assert kinds.count("image") == 1
    links = [token.attrs["href"] for token in parsed if token.type == "link_open"]
    assert all(link.startswith(("https://arxiv.org/", "https://huggingface.co/")) for link in links)
    titles = [parsed[number + 1].children for number, token in enumerate(parsed) if token.type == "heading_open"]
    shown = ["".join(child.content for child in children) for children in titles]
    assert shown[0] == " ".join(name.split()) and [title for title in HEADINGS if title in shown] == shown[1:]
    rows, cells = [], 0
    for token in parsed:
        if token.type in ("tr_open", "table_open"):
            rows, cells = (rows if token.type == "tr_open" else []), 0
        cells += token.type in ("td_open", "th_open")
        if token.type == "tr_close":
            rows.append(cells)
            assert cells == rows[0]
    assert "\x00" not in text and "\x1b" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_displayed_verbatim(text):
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
    inline = MARKDOWN.parseInline(escaped(text))[0].children
    assert "".join(child.content for child in inline) == shown
    assert {child.type for child in inline} <= {"text", "text_special"} or not shown
    assert unescaped(escaped(text)) == shown
    (only,) = MARKDOWN.parseInline(f"{code(text)}")[0].children
    assert only.type == "code_inline" and only.content.strip() == shown.strip()
    (block,) = MARKDOWN.parse(code_block(text, "yaml"))
    assert block.type == "fence" and block.info == "yaml"


@pytest.mark.parametrize("text", HOSTILE)
def test_names_of_models_layers_and_data_add_no_markup(text, pruner, tmp_path):
    report = copy.deepcopy(pruner.report)
    report.layers[0] = dataclasses.replace(report.layers[0], name=text)
    report.skipped = {text: text}
    report.config = {**report.config, "targets": [text], "solver": text, "allocation": {text: 0.5}}
    report.calibration = {"source": text, "num_samples": 1, "sequence_length": 2, "digest": text, "notes": [text]}
    report.versions, report.seconds = {text: text}, {**report.seconds, text: 1.0}
    report.record_evaluation(text, 2.0, 3.0)
    facts = dataclasses.replace(Facts.gather(pruner.model, "name", "dense"), name=text, source=text)
    for format in ("dense", "packed"):
        rendered = str(render(report, dataclasses.replace(facts, format=format)))
        (tmp_path / "README.md").write_text(rendered, encoding="utf-8")
        data, shown = card(tmp_path)
        assert_whole(shown, facts.name)
        assert data["moonshot"]["solver"] == text and data["moonshot"]["calibration"]["source"] == text
        assert "license" not in data
        fences = {token.content: token.info for token in tokens(shown) if token.type == "fence"}
        loading, pruning = [content for content, language in fences.items() if language == "python"]
        (call,) = [line for line in loading.splitlines() if "from_pretrained" in line]
        stand_in = type("Auto", (), {"from_pretrained": staticmethod(lambda name, dtype: name)})
        assert eval(call.partition("=")[2], {"AutoModelForCausalLM": stand_in}) == facts.name
        source = ast.parse(pruning).body[-3].value.args[0].value
        assert source == text
        for command in (content for content, language in fences.items() if language == "bash"):
            assert facts.name in shlex.split(command)


@pytest.mark.parametrize("name", ["a|b`c<i>*x*", "two\nlines", "# --- {{x}}", "_x_ &amp;"])
def test_a_folder_may_have_any_name(name, tmp_path):
    pruner = pruned()
    pruner.save_pretrained(tmp_path / name)
    convert(tmp_path / name, tmp_path / "out" / name, "packed")
    assert record(tmp_path / "out" / name, Perplexity(5.0, name, 1, 1, 1))
    for folder in (tmp_path / name, tmp_path / "out" / name):
        shown = " ".join("".join(sign if sign.isprintable() else " " for sign in name).split())
        assert_whole(card(folder)[1], shown)
        assert Facts.read(folder, None, "dense").name == shown


def test_a_folder_name_may_be_invalid_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"bytes-\xff")
    pruner = pruned()
    pruner.report.record_evaluation(folder.name, None, 2.0)
    pruner.save_pretrained(folder)
    assert_whole(card(folder)[1], "bytes-")
    assert folder.name in PruneReport.load(folder).evaluations


DAMAGED = (
    "moonshot: 3\ntags: [custom]",
    "moonshot: [1, 2]",
    "moonshot: text",
    "moonshot: {}",
    "moonshot: {solver: [], pattern: 2}",
    "moonshot: {solver: magnitude}",
    "moonshot: &a {solver: *a, pattern: x}",
    "moonshot: {solver: magnitude, pattern: '2:4'}\ntags: 3\nbase_model: {a: b}",
    "tags: {a: b}\nlicense: 4\nlanguage: [en, {x: y}]",
    "tags: [1, [2], null, ok]\nlicense_name: [x]\nlicense: {}\npipeline_tag: 2020-01-01",
    "tags: one\nlicense: [mit, apache-2.0]\nlanguage: no",
    "model-index: 3\neval_results: [4]\nmodel_name: {}",
    "model-index:\n- name: x\n  results: [{task: 3}]",
    "3: 4\nnull: x",
    "base_model: [a, b]\ndatasets: {}\nextra: |\n  ````\n  `````\n  ---\n  <!-- x",
    "base_model: '](http://x) <script>'",
    "ignore_metadata_errors: 3\nself: 4",
    "- a\n- list",
    "a: b: c\n  - [",
    "license: !!python/object/apply:os.system [echo]",
    "license: |\n  a\n  ---\n  # b",
)


def write_foreign_card(folder, header):
    (folder / "README.md").write_text(f"---\n{header}\n---\n# Theirs\n\n{HOSTILE[6]}\n", encoding="utf-8")


@pytest.mark.parametrize("header", DAMAGED)
def test_a_foreign_card_breaks_nothing(header, pruner, tmp_path, caplog):
    write_foreign_card(tmp_path, header)
    facts = Facts.gather(pruner.model, "name", "dense")
    below = ""
    for again in (False, True):
        base = find_base(str(tmp_path))
        (tmp_path / "README.md").write_text(str(render(pruner.report, dataclasses.replace(facts, base=base))))
        data, text = card(tmp_path)
        assert data["moonshot"]["pattern"] == "2:4" and parted(text)[1].count("# Theirs") <= 1
        assert_whole(text, "name")
        assert not again or parted(text)[1] == below
        below = parted(text)[1]
    if header.startswith("moonshot") and "pattern: " not in header:
        assert "the card is kept as a foreign one" in caplog.text and "moonshot:" in below


def test_a_foreign_card_does_not_stop_a_save(tmp_path, caplog):
    make("llama").save_pretrained(tmp_path / "base")
    write_foreign_card(tmp_path / "base", DAMAGED[0])
    pruner = MoonshotPruner.from_pretrained(tmp_path / "base", MoonshotConfig(solver="magnitude", pattern="2:4"))
    pruner.prune(progress=False)
    pruner.save_pretrained(tmp_path / "out")
    data, text = card(tmp_path / "out")
    assert data["moonshot"]["pattern"] == "2:4" and "moonshot: 3\n" in parted(text)[1]
    assert "moonshot=3 is not of this package: the card is kept as a foreign one" in caplog.text


def test_text_fields_of_a_foreign_card_are_kept(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("---\ntags: one\nlicense: [mit, 'b\n\n  c']\nlanguage: [de, no]\nlicense_link: 3\n---\ntext")
    base = find_base(str(tmp_path))
    assert base.data == {"tags": ["one"], "license": ["mit", "b c"], "language": ["de", "no"]}
    assert yaml.safe_load(base.text.split("````yaml\n")[1].split("\n````")[0]) == {"license_link": 3}
    path.write_text("---\r\nlicense: mit\r\n---\r\nwith\r\nother\r\nlines\r\n" * 2, newline="")
    pruner = pruned()
    pruner.model.config._name_or_path = pruner.model.name_or_path = str(tmp_path)
    pruner.save_pretrained(tmp_path / "out")
    data, text = card(tmp_path / "out")
    assert data["license"] == "mit" and text.endswith("\nother\nlines\n")


def test_a_conversion_copies_our_card_if_it_is_damaged(tmp_path):
    pruned(dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "README.md"
    original = path.read_text(encoding="utf-8")
    header = yaml.safe_load(original.split("---\n")[1])
    for entry, value in (
        ("lambda", "x"), ("weight_bytes", 3), ("weight_bytes", {"dense": 0, "packed": 0}), ("pattern", 4),
    ):  # fmt: skip
        changed = {**header, "moonshot": {**header["moonshot"], entry: value}}
        path.write_text(f"---\n{yaml.safe_dump(changed)}---\n# x\n", encoding="utf-8")
        content = path.read_bytes()
        convert(tmp_path / "dense", tmp_path / "packed", "packed")
        assert (tmp_path / "packed" / "README.md").read_bytes() == content


def test_an_entry_of_nested_aliases_is_shortened(tmp_path, caplog):
    """Written out, its 10¹² words would take all memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "README.md").write_text("\n".join(["---", *lines, "moonshot: *a11", "---", "# Name"]))
    base = find_base(str(tmp_path))
    assert base.text.startswith("# Name") and "moonshot=[[[" in caplog.text
    assert Facts.read(tmp_path, None, "dense") is None
