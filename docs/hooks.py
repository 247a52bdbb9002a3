"""mkdocs hooks: pages from files of the repository, tables of options and of bad inputs, formulas as MathML.

The build fails if a page loads anything from another host, so that the site is readable without a network.
"""

import argparse
import html
import re
import runpy
from pathlib import Path

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "support" / "bad_inputs_page.py"
# Files outside docs/ that become pages.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?P<start>!?\[(?P<text>[^\]]*)\])\((?P<path>[^)#:]+)(?P<anchor>#[^)]*)?\)")
OPTIONS = "<!-- options of every command -->"
BAD_INPUTS = "<!-- bad inputs -->"
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
# A script, image or style sheet of another host; canonical and next-page links load nothing.
LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(?:https?:)?//"""
    r"""|<link(?![^>]*\brel=["']?(?:canonical|prev|next))[^>]*\shref=["']?(?:https?:)?//"""
)


def on_files(files, config):
    """Add the pages outside docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_linked(text, ROOT)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite links out of docs/, and insert the tables of command-line options and of bad inputs."""
    if page.file.src_uri not in PAGES.values():
        markdown = _linked(markdown, ROOT / "docs")
    if BAD_INPUTS in markdown:
        markdown = markdown.replace(BAD_INPUTS, runpy.run_path(str(TABLES))["tables"]())
    return markdown.replace(OPTIONS, _options()) if OPTIONS in markdown else markdown


def on_page_content(content, page, config, files):
    """Formulas as MathML, which browsers render without scripts."""
    return FORMULA.sub(lambda match: _mathml(match[2]), content)


def on_post_build(config):
    """Fail if a page loads anything from another host."""
    for path in Path(config["site_dir"]).rglob("*.html"):
        match = LOADED.search(path.read_text(encoding="utf-8"))
        if match:
            raise PluginError(f"{path.name} loads from another host: {match[0]}")


def _linked(markdown: str, folder: Path) -> str:
    """Resolve links of a page in `folder` relative to docs/; a link to a file without a page becomes its text."""

    def link(match: re.Match) -> str:
        target = (folder / match["path"]).resolve()
        if not target.exists() and match["path"] not in PAGES.values():
            raise PluginError(f"broken link: {match['path']} does not exist")
        page = PAGES.get(target.relative_to(ROOT).as_posix()) if target.is_relative_to(ROOT) else None
        if page is None and target.is_relative_to(ROOT / "docs"):
            page = target.relative_to(ROOT / "docs").as_posix()
        return f"{match['start']}({page}{match['anchor'] or ''})" if page else match["text"]

    return LINK.sub(link, markdown)


def _options() -> str:
    """One section per command, with one table per option group."""
    from optimum_moonshot.commands.moonshot import MoonshotCommand

    lines = []
    for info in MoonshotCommand.SUBCOMMANDS:
        parser = argparse.ArgumentParser(f"optimum-cli moonshot {info.name}", add_help=False)
        info.subcommand_class.parse_args(parser)
        lines += [f"### {info.name}", "", info.help, ""]
        for group in parser._action_groups:
            if group._group_actions:
                lines += _table(group)
    return "\n".join(lines)


def _table(group) -> list[str]:
    title = f"**{group.title}**" + (f": {group.description}" if group.description else "")
    lines = [title.capitalize() if not group.description else title, "", "| option | description |", "|---|---|"]
    for action in group._group_actions:
        names = ", ".join(action.option_strings) or action.metavar
        shown = names + (f" {_values(action)}" if action.option_strings and action.nargs != 0 else "")
        text = (action.help or "").replace("%%", "%").replace("|", "\\|")
        needed = " (required)" if action.required and action.option_strings else ""
        lines.append(f"| `{shown}` | {html.escape(text, quote=False)}{needed} |")
    return [*lines, ""]


def _values(action) -> str:
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    name = action.metavar or action.dest.upper()
    return {"+": f"{name} …", "?": f"[{name}]"}.get(action.nargs, name)


def _mathml(formula: str) -> str:
    formula = html.unescape(formula.strip())
    block = formula.startswith("\\[")
    return latex2mathml.converter.convert(formula[2:-2].strip(), display="block" if block else "inline")
