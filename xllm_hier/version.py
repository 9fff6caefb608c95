"""The version of the package, for those who tell it to others; pyproject.toml has the same."""

__version__ = "0.1.0"
