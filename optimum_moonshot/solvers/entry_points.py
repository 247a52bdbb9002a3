"""Solvers of other installed packages, imported when a configuration names one.

A package declares the module that registers a solver in its ``pyproject.toml``, under the solver's name:

    [project.entry-points."optimum_moonshot.solvers"]
    mine = "my_package.my_solver"
"""

from importlib.metadata import entry_points

from ..errors import MoonshotError, reason

GROUP = "optimum_moonshot.solvers"


def entry_point_names() -> list[str]:
    """Names of the solvers in installed packages; imports none of them."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_entry_point(name: str) -> bool:
    """Import the module that registers a solver, if an installed package declares one of this name.

    Returns:
        Whether a package declares it.

    Raises:
        MoonshotError: the import fails.
    """
    points = entry_points(group=GROUP, name=name)
    for point in points:
        try:
            point.load()
        except Exception as error:  # code of another package can raise anything
            message = f"the entry point {point.value!r} of an installed package cannot be imported ({reason(error)})"
            raise MoonshotError(message, field="solver", value=name) from error
    return bool(points)
