"""How a setting is declared, checked and read: command line, environment, config file; config.py has them all.

Order of precedence: command line, environment (`XLLM_<NAME>`), config file (JSON or YAML), default. What does not parse
is a ConfigError with the setting's name, its value and the allowed ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, get_type_hints

from .errors import ConfigError


def setting(
    default: Any,
    group: str,
    text: str,
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field of a dataclass of settings, with its meaning and its allowed values."""
    meta = {"group": group, "help": text, "unit": unit, "choices": tuple(choices), "low": low, "high": high}
    return field(default=default, metadata=meta)


def read_sources(
    cls: type,
    argv: Sequence[str],
    environ: Mapping[str, str],
    prog: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    what: str = "One xllm_hier instance.",
) -> dict[str, Any]:
    """Values of the settings of `cls` by name, from wherever they are given; `overrides` yield to every source.
    `what` is the first sentence of the help.

    Raises:
        ConfigError: unknown flag or name, or a value that does not parse.
        SystemExit: after `--help` (code 0).
    """
    given, config_file = _parse_command_line(cls, _normalise(cls, argv), prog, what)
    values: dict[str, Any] = dict(overrides or {})
    config_file = config_file or environ.get("XLLM_CONFIG", "")
    if config_file:
        values.update(_read_config_file(cls, config_file))
    by_name = {item.name: item for item in dataclasses.fields(cls)}
    values.update({name: environ[key] for name in by_name if (key := f"XLLM_{name.upper()}") in environ})
    values.update(given)
    hints = get_type_hints(cls)
    return {name: _parse_value(by_name[name], hints[name], value) for name, value in values.items()}


# ------------------------------------------------------------------------------------------------- values


def _allowed(item: dataclasses.Field[Any], kind: type) -> str:
    meta = item.metadata
    if meta["choices"]:
        return " | ".join(meta["choices"])
    if kind is bool:
        return "true | false"
    words = {int: "an integer", float: "a number", str: "a text"}[kind]
    low, high = meta["low"], meta["high"]
    if low is not None and high is not None:
        words += f" from {low:g} to {high:g}"
    elif low is not None:
        words += f" of at least {low:g}"
    return words + (f" ({meta['unit']})" if meta["unit"] else "")


def check_value(item: dataclasses.Field[Any], kind: type, value: Any) -> None:
    """Raise ConfigError unless `value` is one that this setting may have."""
    meta = item.metadata
    good = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if kind is not bool and isinstance(value, bool):
        good = False
    if good and meta["choices"]:
        good = value in meta["choices"]
    if good and kind in (int, float):
        good = not math.isnan(value) and (meta["low"] is None or value >= meta["low"])
        good = good and (meta["high"] is None or value <= meta["high"])
    if not good:
        raise ConfigError(item.name, value, _allowed(item, kind))


def _parse_value(item: dataclasses.Field[Any], kind: type, value: Any) -> Any:
    if not isinstance(value, str) or kind is str:
        return value
    text = value.strip()
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind is int and item.metadata["unit"] == "bytes":
            return _parse_bytes(text)
        return kind(text)
    except (KeyError, ValueError):
        raise ConfigError(item.name, value, _allowed(item, kind)) from None


def _parse_bytes(text: str) -> int:
    """`4GB`, `512MiB` or a plain number; K, M, G are powers of 1024 as in Mooncake's flags."""
    upper = text.upper().removesuffix("B").removesuffix("I")
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}.get(upper[-1:], 1)
    return int(float(upper[:-1]) * factor) if factor > 1 else int(upper)


# ----------------------------------------------------------------------------------------------- sources


def _normalise(cls: type, argv: Sequence[str]) -> Iterator[str]:
    """`--some-flag` and `--no-some-flag` as `--some_flag` and `--some_flag=false`."""
    names = {item.name for item in dataclasses.fields(cls)}
    for word in argv:
        if not word.startswith("--"):
            yield word
            continue
        flag, equals, value = word[2:].partition("=")
        flag = flag.replace("-", "_")
        if flag not in names and flag.startswith("no_") and flag[3:] in names and not equals:
            yield f"--{flag[3:]}=false"
        else:
            yield f"--{flag}{equals}{value}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError("command line", message, "see --help")


def _parse_command_line(cls: type, argv: Iterator[str], prog: str, what: str) -> tuple[dict[str, str], str]:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=42, width=120),
        description=f"{what} Each flag is also a key of the --config file and, as XLLM_<NAME>, of the environment.",
    )
    parser.add_argument("--config", default="", metavar="FILE", help="JSON or YAML file with the same names as keys")
    groups: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        meta, kind = item.metadata, hints[item.name]
        group = groups.setdefault(meta["group"], None) or parser.add_argument_group(meta["group"])
        groups[meta["group"]] = group
        shown = "|".join(meta["choices"]) or ("true|false" if kind is bool else (meta["unit"] or kind.__name__).upper())
        default = str(item.default).lower() if kind is bool else (item.default if item.default != "" else "empty")
        more: dict[str, Any] = {"nargs": "?", "const": "true"} if kind is bool else {}
        group.add_argument(
            f"--{item.name}",
            metavar=shown,
            default=argparse.SUPPRESS,
            help=f"{meta['help']} (default: {default})".replace("%", "%%"),
            **more,
        )
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(unknown[0].lstrip("-").partition("=")[0], unknown[0], "a flag that --help lists")
    values = vars(namespace)
    return values, values.pop("config")


def _read_config_file(cls: type, path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("config", path, f"a readable file ({error.strerror})") from None
    load: Callable[[str], Any] = json.loads
    if not path.endswith(".json"):
        import yaml  # PyYAML comes with transformers; only this path needs it

        load = yaml.safe_load
    try:
        values = load(text)
    except ValueError as error:
        raise ConfigError("config", path, f"JSON or YAML ({error})") from None
    except Exception as error:  # yaml.YAMLError has no import-free name here
        raise ConfigError("config", path, f"JSON or YAML ({error})") from None
    names = {item.name for item in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise ConfigError("config", path, "a mapping of setting names to values")
    for name in values:
        if name not in names:
            raise ConfigError(str(name), values[name], f"a setting that --help lists (in {path})")
    return values
