"""Find the packages: the repository's root is `rlake`, so each folder below is `rlake.<folder>`.

A list in pyproject.toml would be a second place to enter every new folder.
"""

from setuptools import find_packages, setup

FOLDERS = ("store", "operators", "pipelines", "loop")
found = find_packages(include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])

setup(
    packages=["rlake", *(f"rlake.{name}" for name in found)],
    script_name="setup.py",  # so that this file is known as the script and kept out of the wheel
)
