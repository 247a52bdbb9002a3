"""Solvers of other installed packages, imported when a configuration asks for one.

A package names the module that registers a solver under the solver's name, in its ``pyproject.toml``:

    [project.entry-points."optimum_moonshot.solvers"]
    mine = "my_package.my_solver"
"""

from importlib.metadata import entry_points

from ..errors import MoonshotError, reason

GROUP = "optimum_moonshot.solvers"


def entry_point_names() -> list[str]:
    """The solvers that installed packages have, without importing any."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load_entry_point(name: str) -> bool:
    """Import what registers a solver, if an installed package has one of this name.

    Returns:
        Whether there is such a package.

    Raises:
        MoonshotError: the import fails; it names the package's object.
    """
    points = entry_points(group=GROUP, name=name)
    for point in points:
        try:
            point.load()
        except Exception as error:  # whatever the code of another package raises
            place = f"the entry point {point.value!r} of an installed package"
            raise MoonshotError(f"solver={name!r}: {place} cannot be imported ({reason(error)})") from error
    return bool(points)
