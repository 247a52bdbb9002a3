"""`optimum-cli moonshot verify`: compare the weights of a folder with its declared metadata."""

import argparse
import json
import sys
from pathlib import Path

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .common import check_source, remote_code, whole_names
from .messages import guard


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot verify`."""
    whole_names(parser)
    parser.add_argument(
        "model", metavar="DIR", help="folder of a pruned checkpoint, written by any program, or name on the Hub"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a name on the Hub")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def verify(args: argparse.Namespace) -> None:
    """`moonshot verify`: read, compare, print; exit status 1 if the metadata do not match.

    Raises:
        UsageError: a model that is neither a folder nor a name on the Hub.
    """
    check_source(args.model)
    from .. import verify as verify_checkpoint

    revision = {} if args.revision is None or Path(args.model).is_dir() else {"revision": args.revision}
    result = verify_checkpoint(args.model, **remote_code(args), **revision)
    print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if args.json else result.table())
    if not result:
        sys.exit(1)


class VerifyCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="verify", help="Compare the weights of a pruned checkpoint with its metadata.")
    parse_args = staticmethod(add_verify_options)

    def run(self) -> None:
        guard(verify, self.args)
