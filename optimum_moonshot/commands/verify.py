"""`optimum-cli moonshot verify`: compare the weights of a folder with its declared metadata."""

import argparse
import json
import sys
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .common import check_source, remote_code, whole_names
from .messages import guard


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot verify`."""
    whole_names(parser)
    parser.add_argument(
        "model", metavar="DIR", help="folder of a pruned checkpoint, whoever wrote it last, or name on the Hub"
    )
    parser.add_argument("--revision", help="of a name on the Hub: a branch, a tag or a commit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def verify(args: argparse.Namespace) -> None:
    """`moonshot verify`: read, compare, print; exit status 1 if anything differs.

    Raises:
        UsageError: a model that is neither a folder nor a name on the Hub.
    """
    check_source(args.model)
    from .. import verify as verify_checkpoint

    revision = {} if args.revision is None or Path(args.model).is_dir() else {"revision": args.revision}
    found = verify_checkpoint(args.model, **remote_code(args), **revision)
    print(json.dumps(found.to_dict(), indent=2, ensure_ascii=False) if args.json else found.table())
    if not found:
        sys.exit(1)


class VerifyCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="verify", help="Compare the weights of a pruned checkpoint with its declared metadata.")
    parse_args = staticmethod(add_verify_options)

    def run(self) -> None:
        guard(verify, self.args)
