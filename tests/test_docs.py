"""README and guides: every code block runs, links resolve, and figures equal the measured ones."""

import importlib
import json
import re
import shutil
import sys
from collections import Counter
from statistics import fmean

import huggingface_hub
import pytest
from hub_server import TOKEN, serve
from marks import slow
from pages import KINDS, PAGES, ROOT, SMALLER, Broken, blocks, lay_out, load_dataset, run
from test_imports import ENTRY, FLOORS, folder, modules

import optimum_moonshot
import optimum_moonshot.solvers.base as solvers
from optimum_moonshot.data import sources

NOT_RUN: dict[str, int] = {"docs/run.md": 2}  # page → number of blocks that do not run
# Pages that take several seconds each.
LONG = {
    f"docs/{name}.md"
    for name in ("quickstart", "choosing", "quantize", "rotate", "recover", "mixtures", "smaller", "run", "big-models")
}
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def every_block():
    return [block for page in PAGES for block in blocks(page, read(page))]


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    lay_out(folder)
    return folder


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


@pytest.fixture
def stage(layout, server, tmp_path, monkeypatch):
    """Change into a folder in which pages run; returns the simulated Hub."""
    shutil.copytree(layout, tmp_path / "stage")
    monkeypatch.chdir(tmp_path / "stage")
    monkeypatch.setattr(sources, "load_dataset", load_dataset)
    monkeypatch.setattr(solvers, "_SOLVERS", dict(solvers._SOLVERS))  # a page may register solvers
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    address, hub = server
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    hub.files.clear()
    return hub


@pytest.mark.parametrize("page", [slow(page) if page in LONG else page for page in PAGES if blocks(page, read(page))])
def test_every_block_runs(page, stage):
    run(blocks(page, read(page)))
    published = re.findall(r'push_to_hub\("([^"]+)"', read(page))
    assert sorted(stage.files) == sorted(published)


def test_every_block_has_a_language():
    assert not [(block.page, block.line, block.kind) for block in every_block() if block.kind not in KINDS]
    assert sum(text.count("\n```") for text in map(read, PAGES)) == 2 * len(
        every_block()
    )  # no block is indented or unclosed


def test_blocks_that_are_not_run_are_counted():
    assert Counter(block.page for block in every_block() if block.reason is not None) == NOT_RUN


def test_every_replacement_is_needed():
    assert not [text for text in SMALLER if not any(text in block.source for block in every_block())]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("```python\nfrom optimum_moonshot import Moonshot\n```", ImportError),
        ("```python\nvalue = 1\n```\n\n```python\nassert value == 2\n```", AssertionError),
        ("```bash\noptimum-cli moonshot prune meta-llama/Llama-3.2-1B --output out --sparsness 0.5\n```", Broken),
        ("```bash\noptimum-cli moonshot prune meta-llama/Llama-3.2-1B --output out --solver sparsgpt\n```", Broken),
        ("```bash\npython -m optimum_moonshot shrink DIR\n```", Broken),
        ("```bash\npython examples/reproduce_paper.py --model MODEL --table llama2\n```", Broken),
        ("```bash\npython examples/gone.py\n```", Broken),
        ("```bash\npython -m pytest tests/test_gone.py\n```", Broken),
        ("```bash\nmake coffee\n```", Broken),
        ("```bash\npip install optimum-moonshot[none]\n```", Broken),
        ("```bash\noptimum-cli export onnx\n```", Broken),
    ],
)
def test_a_broken_block_fails(source, error, stage):
    with pytest.raises(error):
        run(blocks("page.md", source + "\n"))
    run(blocks("page.md", f"<!-- not run: it is broken -->\n{source}\n")[:1])


def anchors(page):
    """The anchors of a page's headings, as mkdocs and GitHub generate them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", read(page), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_resolve():
    broken = []
    for page in PAGES:
        for link in LINK.finditer(read(page)):
            target = (ROOT / page).parent / link["path"] if link["path"] else ROOT / page
            exists = target.is_file() or target.is_dir()
            if exists and link["anchor"] and target.suffix == ".md":
                name = target.resolve().relative_to(ROOT).as_posix()
                exists = link["anchor"] in anchors(name) or f"::: {link['anchor']}\n" in read(name)
            broken += [] if exists else [(page, link[0])]
    assert not broken


def test_figures_of_the_readme_are_in_the_guide():
    """The figures of the real model, which the guide has with their seeds and more settings."""
    table = read("README.md").partition("<!-- SmolLM2 -->")[2].partition("<!-- end of SmolLM2 -->")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if re.search(r"\d\d\.\d", line)]
    assert len(rows) >= 4
    guide = read("docs/choosing.md")
    assert not [cell for row in rows for cell in map(str.strip, row) if cell != "100%" and cell not in guide]


@pytest.mark.parametrize("name", ["SmolLM2", "Gemma"])
@pytest.mark.parametrize("page, least", [("choosing.md", 20), ("quantize.md", 4)])
def test_the_tables_of_a_real_model_are_those_of_the_benchmark(monkeypatch, page, least, name):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    choices = importlib.import_module("choices")
    begin, end = choices.marked(name)
    tables = read(f"docs/{page}").partition(begin)[2].partition(end)[0]
    assert tables == choices.marked_tables()[page, name] and tables.count("\n") > least


def test_figures_of_the_demo_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    choices, cells = (importlib.import_module(name) for name in ("choices", "cells"))
    dense = choices.read("quality")["perplexity"]["sparsegpt λ=1"]["0.8"]
    recipe = cells.gather(choices.read("beyond-llama"), "0.8", "ALPS, basis, shares", 0.5)
    assert f'perplexity of {fmean(dense):.1f}, `"one-shot"` of {fmean(recipe):.1f}' in read("docs/choosing.md")


def test_the_packages_are_listed_from_top_to_bottom():
    rows = read("CONTRIBUTING.md").partition("| package | contents |")[2].partition("\n\n")[0]
    table = re.findall(r"^\| `(\w+)/` \|", rows, re.M)
    folders = {folder(name) for name in modules() if "." in name}
    assert sorted(table) == sorted(folders - {ENTRY})
    floor = {package: height for height, packages in enumerate(FLOORS) for package in packages}
    assert [floor[package] for package in table] == sorted((floor[package] for package in table), reverse=True)


def test_the_reference_has_every_public_name():
    page = read("docs/reference.md")
    assert not [
        name
        for name in optimum_moonshot.__all__
        if f"::: optimum_moonshot.{name}\n" not in page and f"`optimum_moonshot.{name}`" not in page
    ]


def test_pages_are_short():
    lines = {page: len(read(page).splitlines()) for page in PAGES if page.startswith("docs/")}
    assert len(lines) <= 12 and max(lines.values()) <= 260, lines
    assert len(read("README.md").splitlines()) <= 120


def test_the_site_has_every_page():
    nav = read("mkdocs.yml").partition("nav:")[2].partition("markdown_extensions:")[0]
    listed = re.findall(r": ([\w-]+\.md)$", nav, re.M)
    assert sorted(f"docs/{name}" for name in listed if (ROOT / "docs" / name).is_file()) == sorted(
        page for page in PAGES if page.startswith("docs/")
    )


def test_the_choices_of_the_guide_are_the_measured_ones():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import choices
    import real

    table = choices.table()
    assert table in read("docs/choosing.md") and len(table.splitlines()) <= 9  # six choices are read in a minute
    fast, alps = (real.configuration(real.SETTINGS[f"2:4, {name}"], {}) for name in ("fast", "ALPS, shared"))
    assert fast == alps  # which the tables show for n:m
    names = {"MoonshotConfig": optimum_moonshot.MoonshotConfig, "recipe": optimum_moonshot.MoonshotConfig.recipe}
    for code, setting, _ in choices.TABLE.values():
        fields = real.SETTINGS[setting]
        if code.startswith("pruner.shrink"):
            assert code == f"pruner.shrink(parameters={fields['parameters']})"
        else:
            assert eval(code, names) == real.configuration(fields, {})


def test_the_coverage_of_architectures_is_the_measured_one():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import architectures

    results = json.loads((ROOT / "benchmarks/results/architectures.json").read_text(encoding="utf-8"))["results"]
    assert architectures.table(results) in read("docs/reference.md")


def test_the_neighbours_are_the_checked_ones():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import neighbours

    results = json.loads((ROOT / "benchmarks/results/neighbours.json").read_text(encoding="utf-8"))["results"]
    assert results.keys() == neighbours.CHECKS.keys() and neighbours.table(results) in read("docs/reference.md")


def test_the_tables_of_the_mixture_are_the_measured_ones():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import experts

    results = json.loads((ROOT / "benchmarks/results/experts.json").read_text(encoding="utf-8"))
    for settings in (experts.INSIDE, experts.WHOLE):
        assert experts.table(results, settings) in read("docs/mixtures.md")
