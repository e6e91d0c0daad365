"""The configuration of an experiment: its keys, the options of its parts, and checks of values.

The keys are the table `bam.training.keys.KEYS`, which docs/config.md and `bam train --help` print.
A data set's config starts from `get_config(method)` and sets values. Setting a key that is not in
the table is an error, also on the command line.
"""

import inspect
import math
from collections.abc import Mapping

import numpy as np

from bam import part_table
from bam.core import slots
from bam.data import augment
from bam.errors import InputError
from bam.extras import needs
from bam.named import ANY
from bam.part_table import SECTIONS, USERS_OWN
from bam.text import choose, meant, synonyms
from bam.training import keys, methods, parts
from bam.training.keys import BY_NAME, KEYS, Key, own

with needs("train"):
    from ml_collections import ConfigDict, config_dict

METHODS = tuple(part_table.METHODS)
NOISE = ("epsilon", "noise_multiplier")  # each decides the other
LARGEST = float(np.finfo(np.float32).max)  # options become float32 in a compiled step


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """Returns the locked base configuration of a method in `METHODS`.

    InputError for another method.
    """
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}{choose(method, METHODS)}")
    config = ConfigDict()
    for key in KEYS:
        section, _, name = key.name.rpartition(".")
        if section and section not in config:
            config[section] = ConfigDict()
        (config[section] if section else config)[name] = _unset(key)
    _switch(config.method, "method", method)
    # From here on, a misspelt key is an error.
    config.lock()
    return config


def name_part(config: ConfigDict, section: str, /, name: str, **options: object) -> None:
    """Names the part of a section, with its options.

    Options that are not given have the part's defaults. The keys that each part of the section has,
    such as `optimizer.schedule`, stay as they are unless they are given. So no option of the
    earlier part is left.

    Args:
      config: the config to change.
      section: for example "model".
      name: one of bam's parts, or MODULE:FUNCTION.
      **options: keys of the section.

    Raises:
      InputError: for an option that the part lacks; the line lists its options.
    """
    chosen = config[section]
    _switch(chosen, section, name)
    for option, value in options.items():
        if option not in chosen:
            _add_option(chosen, section, option)
        chosen[option] = value


def add_options(config: ConfigDict, overrides: Mapping[str, object]) -> None:
    """Makes room in a config for the parts and options that a command line names.

    A given `epsilon` unsets `noise_multiplier`, and the other way round. If the command line names
    another part than the config, it is named as by `name_part`. Each option in the overrides is
    added with its default. The caller sets the values.

    Args:
      config: the config to change.
      overrides: KEY or SECTION.KEY -> value; only the values of `SECTION.name` are read.

    Raises:
      InputError: for an option that the part lacks; the line lists its options. Also if both set
        the noise.
    """
    given = [key for key in NOISE if key in overrides]
    if len(given) == 2:
        raise InputError("epsilon and noise_multiplier both set the noise: set one of them")
    for key in set(NOISE) - set(given) if given else ():
        config[key] = None
    # Names first: the options that a section can have depend on its part.
    for section in SECTIONS:
        name = overrides.get(f"{section}.name")
        if isinstance(name, str) and section in config and name != config[section].name:
            name_part(config, section, name)
    for key in overrides:
        section, _, option = key.partition(".")
        # The options of mechanisms are keys, and a private search alone sets further ones.
        takes_more = section in USERS_OWN and section in config
        if option and takes_more and option not in config[section]:
            _add_option(config[section], section, option)


def complete(config: ConfigDict) -> None:
    """Adds the keys that sections of a config lack, with their defaults, and locks the sections.

    A section lacks keys if a config file or a flag replaces it as a whole.
    """
    for section in {key.name.rpartition(".")[0] for key in KEYS}:
        options = config.get(section)
        if not isinstance(options, ConfigDict):
            continue
        defaults = {x: _unset(BY_NAME[f"{section}.{x}"]) for x in own(section)}
        name = options.get("name", defaults.get("name"))
        # A user's function gets the options that its section has, and no others.
        if isinstance(name, str) and ":" not in name:
            defaults |= _options_of(section, name)
        with options.unlocked():
            options.update({x: default for x, default in defaults.items() if x not in options})
        options.lock()


def _switch(options: ConfigDict, section: str, name: str) -> None:
    """Gives a section another part, with the part's defaults.

    The section's own keys stay.
    """
    defaults = _options_of(section, name)
    with options.unlocked():
        for option in set(options) - set(own(section)):
            del options[option]
        options.name = name
        options.update(defaults)


def _options_of(section: str, name: str) -> dict[str, object]:
    """Returns the options that a section has with a part if none is set, with their values.

    They are those with defaults in the table of parts, and those in the table of keys. The others
    are added when they are set, and until then the part has its defaults.
    """
    defaults = parts.options_of(section, name)
    row = part_table.row(section, name)
    options: dict[str, object] = dict(row.defaults) if row else {}
    for option, key in keys.options(section).items():
        if key.default is None:
            options[option] = _unset(key)
        # A user's function need not take the option; without a default, it gets the table's.
        elif option in defaults or ANY in defaults or ":" not in name:
            default = defaults.get(option, inspect.Parameter.empty)
            options[option] = key.default if default is inspect.Parameter.empty else default
    return options


def _unset(key: Key) -> object:
    """Returns the default of a key, which a key with a type of its own refers to."""
    return config_dict.FieldReference(key.default, key.kind) if key.kind else key.default


def _add_option(options: ConfigDict, section: str, option: str) -> None:
    defaults = parts.options_of(section, options.name)
    if option not in defaults and ANY not in defaults:
        has = sorted({*defaults, *options} - {"name"})
        same = synonyms(option, [f"{section}.{x}" for x in (*has, "name")])
        alike = [f"{section}.{x}" for x in [meant(option, has)] if x]
        hint = "".join(f"did you mean {near}? " for near in (same or alike)[:1])
        parts_with = "" if same else " or ".join(_parts_with(section, option))
        remedy = f"; there is one with --config.{section}.name={parts_with}" if parts_with else ""
        raise InputError(
            f"{section} {options.name or 'without a name'} has no option {option!r}: {hint}its "
            f"options: {', '.join(has) or 'none'}{remedy}"
        )
    default = defaults.get(option)
    # A default decides the type of the value. A placeholder takes any.
    has_type = default is not None and default is not inspect.Parameter.empty
    with options.unlocked():
        options[option] = default if has_type else config_dict.placeholder(object)


def _parts_with(section: str, option: str) -> list[str]:
    """Returns the parts of a section that have an option of that name or meaning."""
    parts_with = []
    for name, row in SECTIONS[section].rows.items():
        keys_of_row = [f"{section}.{x}" for x in row.public_options]
        if f"{section}.{option}" in keys_of_row or synonyms(option, keys_of_row):
            parts_with.append(name)
    return parts_with


def set_strength(config: ConfigDict, **strengths: float) -> None:
    """Sets the strength of the config's method, if `strengths` has it, as in `dp_sat=0.086`."""
    name = config.method.name
    if name in strengths:
        config.method[part_table.METHODS[name].strength] = strengths[name]


def check(config: ConfigDict) -> None:
    """Raises an InputError, in one line, for values that no part of a run checks itself."""
    for section in SECTIONS:
        if not isinstance(name := config[section].get("name"), str):
            raise InputError(f"{section}.name is {name}: set --config.{section}.name=NAME")
    _check_numbers(config)
    is_private = methods.is_private(config.method.name)
    if is_private and (config.epsilon is None) == (config.noise_multiplier is None):
        raise InputError("set epsilon or noise_multiplier, and the other one to None")
    if ":" not in config.clip.name:
        slots.check(config.clip.get("slack", 0), "clip.slack")
    # An infinite ε would train without noise under a private method's name.
    if config.epsilon == math.inf and is_private:
        raise InputError(
            f"method {config.method.name} has no privacy at epsilon inf: set a finite epsilon, as "
            "--config.epsilon=3, or the method non_private, as --config=FILE:non_private"
        )
    learning_rate = config.optimizer.get("learning_rate", 1.0)  # a user's optimizer may lack it
    if not 0 < learning_rate < math.inf:
        raise InputError(f"optimizer.learning_rate must be positive, got {learning_rate}")
    _check_users(config)
    augment.check(*(config.augment[k] for k in ("views", "shift", "flip", "mixtures")))
    as_stored = config.augment.views == 1 and config.augment.shift == 0
    if config.features.name and not (as_stored and config.augment.flip == "none"):
        raise InputError(
            "features cannot be shifted or mirrored: set --config.augment.views=1, "
            "--config.augment.shift=0 and --config.augment.flip=none"
        )
    if config.loss.name == "per_pixel" and (config.augment.shift or config.augment.flip != "none"):
        raise InputError(
            "loss per_pixel: augmentation does not move the labels with the pixels: set "
            "--config.augment.shift=0 and --config.augment.flip=none"
        )
    if config.augment.mixtures and config.dataset.group_size:
        raise InputError(
            "augment.mixtures mixes the views of an example, not of a user: set "
            "--config.augment.mixtures=0 or --config.dataset.group_size=0"
        )
    if not 0 <= config.ema_decay < 1:
        raise InputError(f"ema_decay must be at least 0 and below 1, got {config.ema_decay}")


def _check_users(config: ConfigDict) -> None:
    """Raises InputError for settings that cannot be combined with users."""
    size = config.dataset.group_size
    if size < 0:
        raise InputError(f"dataset.group_size must be at least 1, or 0 for none, got {size}")
    if config.dataset.groups and not size:
        raise InputError(
            "dataset.groups needs dataset.group_size, the most examples used of a user: set "
            "--config.dataset.group_size=K, at least 1"
        )
    refused = {
        "dataset.holdout": "sets examples aside, not users",
        "method.ascent_views": "would ascend by a user's first example alone",
    }
    for key, why in refused.items():
        section, name = key.split(".")
        if size and config[section].get(name, 0):
            raise InputError(f"{key} does not work with dataset.group_size, because it {why}")


def _check_numbers(config: ConfigDict) -> None:
    """Raises InputError for numbers out of bounds, NaN or infinity.

    A number may be infinite if its key is `unbounded`, as ε, which its part checks. The options of
    a user's function are not checked here.
    """
    values, user_sections = dict(config.items()), []
    for section, options in config.items():
        if isinstance(options, ConfigDict):
            values |= {f"{section}.{name}": x for name, x in options.items()}
            user_sections += [section] if ":" in options.get("name", "") else []
    for key, value in values.items():
        # A seed has up to 256 bits, and a user's function checks its options.
        if isinstance(value, bool) or key == "seed" or key.partition(".")[0] in user_sections:
            continue
        # An option that the table lacks has the bounds of any integer.
        row = BY_NAME.get(key, Key(key, None, ""))
        if isinstance(value, int) and value > row.most:
            raise InputError(f"{key} must be at most {row.most}, got {value}")
        if isinstance(value, float) and not (row.unbounded or math.isfinite(value)):
            raise InputError(f"{key} must be finite, got {value}")
        if isinstance(value, float) and not row.unbounded and abs(value) > LARGEST:
            raise InputError(f"{key} must be at most {LARGEST:.2g}, as float32, got {value}")
    for row in KEYS:
        value = values.get(row.name)
        if row.least is None or value is None:
            continue
        # With num_steps, num_epochs is not read, and 0 says so.
        least = 0 if row.name == "num_epochs" and config.num_steps else row.least
        if value < least:
            raise InputError(f"{row.name} must be at least {least}, got {value}")
