"""The command line: flags, and the config that `--config` names and `--config.KEY` changes."""

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

from absl import flags

from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.text import did_you_mean, meant
from bam.training import named_configs
from bam.training.keys import KEYS


def parse(values: flags.FlagValues, argv: Sequence[str], program: str) -> list[str]:
    """Parses flags into `values`, makes the config that `--config` names, returns other arguments.

    InputError for an unknown flag, a flag that is set twice, a value that a flag cannot have, and a
    key that the config lacks.
    """
    try:
        args = [_from_home(x) for x in values.read_flags_from_files(list(argv))]
        _check_set_once(values, args)
        if has_config := "config" in values and "config" in map(flag_name, args):
            _take_config(values, args)
        rest: list[str] = values([program, *args])
        if has_config:  # a flag may replace a whole section, which then lacks keys
            from bam.training.config import complete

            complete(values.config)
        return rest[1:]
    except flags.UnrecognizedFlagError as error:
        raise InputError(_unknown(error.flagname, values)) from None
    except flags.Error as error:
        refused = error.__context__ if isinstance(error, flags.IllegalFlagValueError) else None
        if isinstance(refused, InputError):  # absl wraps the errors of a flag's parser
            raise refused from None
        raise InputError(_in_words(str(error))) from None


def _in_words(refusal: str) -> str:
    """Returns absl's line about a flag's value, with Python's words on numbers in plain ones."""
    number = r"flag (--.*): (could not convert string to float|invalid literal for int\(\)).*"
    if match := re.fullmatch(number, refusal):
        kind = "a number" if "float" in match[2] else "a whole number"
        return f"{match[1]}: expected {kind}"
    return refusal


def _take_config(values: flags.FlagValues, args: list[str]) -> None:
    """Replaces the string flag `config` by one of `ml_collections`, which reads `--config.KEY`."""
    with needs("train"):
        from ml_collections import ConfigDict, config_flags

    class Config(flags.ArgumentParser):
        """Loads a config, and refuses unknown keys before any key is set."""

        def parse(self, value: str) -> ConfigDict:
            from bam.training.config import add_options

            config, overrides = named_configs.load(value), _overrides(args)
            add_options(config, dict(overrides))
            for key, text in overrides:
                _check_key(config, key, text)
                if inside := [x for x, _ in overrides if x.startswith(f"{key}.")]:
                    raise InputError(
                        f"--config.{key} replaces the whole section: set {inside[0]} in it, and "
                        f"leave out --config.{inside[0]}"
                    )
            config.lock()
            return config

    about = values["config"].help
    delattr(values, "config")
    config_flags.DEFINE_config_file("config", None, about, flag_values=values, sys_argv=["", *args])
    values["config"].parser = Config()


def config_source(values: flags.FlagValues) -> tuple[str, JsonObject]:
    """The file that `--config` names, and the keys that `--config.KEY=VALUE` sets."""
    from ml_collections import config_flags

    flag = values["config"]
    file = named_configs.file_of(config_flags.get_config_filename(flag)).partition(":")[0]
    return file, config_flags.get_override_values(flag)


def _overrides(args: Sequence[str]) -> list[tuple[str, str]]:
    """The keys that `--config.KEY=VALUE` sets, each with its value as text."""
    overrides = []
    for argument, after in itertools.zip_longest(args, [*args][1:], fillvalue="-"):
        if match := re.match(r"--?(?:no)?config\.([^=]*)(=?)(.*)", argument):
            in_two = not match[2] and not after.startswith("-")  # --config.KEY VALUE
            overrides.append((match[1], after if in_two else match[3]))
    return overrides


def _check_key(config: Any, key: str, text: str) -> None:
    """InputError for a key that a config lacks, or for a section that is set to a word."""
    flat = [*config.to_dict()]
    for section in [x for x in flat if hasattr(config[x], "keys")]:
        flat += [f"{section}.{name}" for name in config[section]]
    place = config
    for part in key.split("."):
        if not hasattr(place, "keys") or part not in place:
            raise InputError(f"the config has no key {key!r}{did_you_mean(key, flat)}")
        place = place[part]
    if hasattr(place, "keys") and not text.startswith("{"):
        keys = ", ".join(place)
        raise InputError(f"{key} is a section of the config: set --config.{key}.KEY, KEY of {keys}")


def _check_set_once(values: flags.FlagValues, args: Sequence[str]) -> None:
    """InputError for a flag that is set twice, because only one value would count."""
    seen = set()
    for name in filter(None, map(flag_name, args[: args.index("--")] if "--" in args else args)):
        if name not in values and name.removeprefix("no") in values:
            name = name.removeprefix("no")
        if name in seen and not (name in values and isinstance(values[name], flags.MultiFlag)):
            raise InputError(f"--{name} is given twice: give it once")
        seen.add(name)


def _unknown(name: str, values: flags.FlagValues) -> str:
    """The error for an unknown flag, with the flag or the key that may be meant."""
    ours = own_flags(values)
    keys = [key.name for key in KEYS] if "config" in values else []
    if same := [key for key in keys if name in (key, key.rpartition(".")[2])]:
        return f"--{name} is a key of the config: write --config.{same[0]}"
    if name.startswith("config."):
        needed = "name the config first, by --config" if keys else "this command takes no config"
        return f"--{name}: {needed}"
    is_key = meant(name, [*ours, *keys]).partition(",")[0] not in ours
    hint = did_you_mean(name, [*ours, *keys], "--config." if is_key else "--")
    return f"--{name} is not a flag{hint or ': see --help'}"


def own_flags(values: flags.FlagValues) -> list[str]:
    """The names of bam's flags: libraries define many others among absl's global ones."""
    modules = {name: str(values.find_module_defining_flag(name)) for name in values}
    return [name for name, module in modules.items() if not module.startswith(("absl.", "orbax."))]


def flag_name(argument: str) -> str:
    """The name of the flag in an argument, "" if that is not a flag."""
    return argument.lstrip("-").partition("=")[0] if argument.startswith("-") else ""


def _from_home(argument: str) -> str:
    """Expands `~` in a flag's value, which shells leave alone in `--workdir=~/runs`.

    Values of a config stay as they are written; `bam.files.user_path` expands them when they are
    read.
    """
    name, equals, value = argument.partition("=")
    if name.lstrip("-").startswith("config"):
        return argument
    return name + equals + ",".join(map(os.path.expanduser, value.split(",")))
