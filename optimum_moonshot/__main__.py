"""`python -m optimum_moonshot prune …` is `optimum-cli moonshot prune …`."""

import argparse
from collections.abc import Sequence

from .commands.moonshot import MoonshotCommand


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; it exits with a status other than 0 where it fails."""
    parser = argparse.ArgumentParser("python -m optimum_moonshot", description=MoonshotCommand.COMMAND.help)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for info in MoonshotCommand.SUBCOMMANDS:
        info.subcommand_class(subparsers, command=info)
    args = parser.parse_args(argv)
    args.func(args).run()


if __name__ == "__main__":
    main()
