"""The version of the package, told to clients and peers; pyproject.toml has the same."""

__version__ = "0.1.0"
