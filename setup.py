"""What setup.cfg cannot say: where the command of optimum-cli lies, and the page that a package index shows."""

import configparser
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?://|#)(?P<path>[^)]+)\)")


def index_page(readme: str, repository: str | None) -> str:
    """The README as a package index shows it, where a link into the repository leads nowhere.

    Args:
        readme: Markdown, whose links into the repository are relative.
        repository: the address of the repository; links then lead to its files. Without one a link is its text, and
            a picture is left out.
    """

    def absolute(link: re.Match[str]) -> str:
        if repository is None:
            return "" if link["picture"] else link["text"]
        place = "raw" if link["picture"] else "blob"
        return f"{link['picture']}[{link['text']}]({repository.rstrip('/')}/{place}/main/{link['path']})"

    return LINK.sub(absolute, readme)


def repository() -> str | None:
    """`Source` of `project_urls` in setup.cfg."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    addresses = metadata.get("metadata", "project_urls", fallback="").strip().splitlines()
    named = dict(re.split(r"\s*=\s*", address.strip(), maxsplit=1) for address in addresses)
    return named.get("Source")


if __name__ == "__main__":
    setup(
        long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8"), repository()),
        long_description_content_type="text/markdown",
        # optimum-cli imports every module of the namespace package optimum.commands.register.
        packages=[*find_packages(include=["optimum_moonshot", "optimum_moonshot.*"]), "optimum.commands.register"],
        package_dir={"optimum.commands.register": "optimum_moonshot/commands/register"},
    )
