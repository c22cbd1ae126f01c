"""The `--config` flag: a Python file with `get_config()`, and overrides of its fields."""

import dataclasses
import difflib
import re
import sys

from absl import app, flags
from ml_collections import config_flags

from twell_jax.training.config import Config


def define_config_flag(default: str) -> flags.FlagHolder[Config]:
    """Defines `--config`; its help lists every field that `--config.section.field` can set."""
    lines = ["  fields and their defaults before the file sets them:"]
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory):
            kind = field.type.__name__
            lines.append(f"    --config.{section.name}.{field.name}={field.default!r} ({kind})")
    return config_flags.DEFINE_config_file(
        "config",
        default,
        "Python file whose get_config() returns a twell_jax.training.config.Config. "
        "--config.section.field=value overrides a field; the classes in that module explain "
        "each one.\n" + "\n".join(lines),
    )


def parse_flags(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse_flags)`: says what is wrong with an override."""
    try:
        return app.parse_flags_with_usage(argv)
    except (KeyError, AttributeError) as error:
        match = re.search(r"Field (\w+) not found on dataclass", str(error))
        if match is None:
            raise
        sys.exit(_unknown_field(argv, match.group(1)))
    except (FileNotFoundError, ModuleNotFoundError) as error:
        sys.exit(f"--config: {error}")


def _unknown_field(argv: list[str], field: str) -> str:
    override = next(
        (arg for arg in argv if re.match(rf"--?config\.(\w+\.)*{field}\b", arg)),
        f"--config.….{field}",
    )
    name = override.split("=")[0].lstrip("-").removeprefix("config.")
    sections = {f.name: dataclasses.fields(f.default_factory) for f in dataclasses.fields(Config)}
    section = name.split(".")[0]
    if section in sections and section != field:
        known = [f"{section}.{f.name}" for f in sections[section]]
    else:
        known = [f"{s}.{f.name}" for s, fields in sections.items() for f in fields]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean --config.{close[0]}? " if close else ""
    return f"--config.{name}: no such field; {hint}Known here: {', '.join(known)}"
