from setuptools import find_packages, setup

# optimum-cli imports every module of the namespace package optimum.commands.register.
setup(
    packages=[*find_packages(include=["optimum_moonshot", "optimum_moonshot.*"]), "optimum.commands.register"],
    package_dir={"optimum.commands.register": "optimum_moonshot/commands/register"},
)
