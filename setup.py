"""Build hook of the package; the metadata is in pyproject.toml."""

from setuptools import setup

setup()
