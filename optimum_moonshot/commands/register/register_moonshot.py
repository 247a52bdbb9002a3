"""Read by `optimum-cli` on every call. No `__init__.py` beside it: the folder is part of a namespace package."""

from optimum_moonshot.commands.moonshot import MoonshotCommand

REGISTER_COMMANDS = [MoonshotCommand]
