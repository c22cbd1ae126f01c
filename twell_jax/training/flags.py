"""The `--config` flag: a Python file with `get_config()`, and overrides of its fields."""

import contextlib
import dataclasses
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterator

from absl import app, flags
from ml_collections import config_flags

from twell_jax.training.config import Config

# The flag belongs, in --help, to the program that asks for it.
flags.disclaim_key_flags()

_CONFIG_CLASS = f"{Config.__module__}.{Config.__qualname__}"

# What ml_collections raises for `section.field` that the configuration does not have.
_UNKNOWN = re.compile(r"Field (\w+) not found on dataclass|\.(\w+) does not exist")


def define_config_flag(default: str) -> flags.FlagHolder[Config]:
    """Defines `--config`; its help lists every field that `--config.section.field` can set."""
    lines = ["Fields, and their defaults before the file sets them:"]
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            kind = field.type.__name__
            lines.append(f"  --config.{section.name}.{field.name}={field.default!r} ({kind})")
    # The default file is loaded, and overrides are looked up in it, already here.
    with _explained_errors(sys.argv):
        return config_flags.DEFINE_config_file(
            "config",
            default,
            f"Python file whose get_config() returns a {_CONFIG_CLASS}. "
            "--config.section.field=value overrides a field; the classes in that module "
            "explain each one.\n" + "\n".join(lines),
        )


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse_flags)`: says what is wrong with a flag."""
    # ml_collections prints a traceback for a missing file, and fails only later.
    for argument, following in itertools.pairwise([*argv, ""]):
        name, _, value = argument.partition("=")
        path = value or following
        if name in ("-config", "--config") and not os.path.isfile(path.split(":")[0]):
            sys.exit(f"--config: no file {path!r}")
    with _explained_errors(argv):
        rest = app.parse_flags_with_usage(argv)
    config = flags.FLAGS.config
    if not isinstance(config, Config):
        sys.exit(f"--config: get_config() must return a {_CONFIG_CLASS}, got {type(config)}")
    return rest


@contextlib.contextmanager
def _explained_errors(argv: list[str]) -> Iterator[None]:
    try:
        yield
    except (KeyError, AttributeError) as error:
        if "has no attribute 'get_config'" in str(error):
            sys.exit(f"--config: the file has no get_config(), which returns a {_CONFIG_CLASS}")
        match = _UNKNOWN.search(str(error))
        if match is None:
            raise
        sys.exit(_unknown_field(argv, match.group(1) or match.group(2)))


def _unknown_field(argv: list[str], field: str) -> str:
    override = next(
        (arg for arg in argv if re.match(rf"--?config\.(\w+\.)*{field}\b", arg)),
        f"--config.{field}",
    )
    name = override.split("=")[0].lstrip("-").removeprefix("config.")
    sections = {f.name: dataclasses.fields(f.default_factory) for f in dataclasses.fields(Config)}
    section = name.split(".")[0]
    if section in sections:
        known = [f"{section}.{f.name}" for f in sections[section]]
    else:
        known = [f"{s}.{f.name}" for s, fields in sections.items() for f in fields]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean --config.{close[0]}? " if close else ""
    return f"--config.{name}: no such field; {hint}Known are {', '.join(known)}"
