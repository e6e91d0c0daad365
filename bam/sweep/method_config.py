"""The config of a method with a strength and the settings of a command line."""

from collections.abc import Iterable
from types import MappingProxyType

from bam import part_table
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonMapping
from bam.training import named_configs
from bam.training.config import add_options, complete

with needs("train"):
    from ml_collections import ConfigDict


def method_config(
    file: str,
    method: str,
    overrides: JsonMapping,
    fixed: Iterable[str] = (),
    names: JsonMapping = MappingProxyType({}),
) -> ConfigDict:
    """The config that a file gives for METHOD, or for METHOD:STRENGTH if the method has a strength.

    Args:
      file: the config file.
      method: the argument of its `get_config`; a number after a colon is the strength.
      overrides: key -> value, for all methods. A key `method.KEY` is set for the methods with that
        key and ignored for the others.
      fixed: keys that the caller sets, so that an override must not.
      names: SECTION.name -> the part that the caller names, whose options the overrides set.

    Raises:
      InputError: for an override of a fixed key, a key or value that the config does not take, a
        strength that is not a number or that the method lacks, and if the file's code fails.
    """
    name, colon, number = method.partition(":")
    row = part_table.row("method", name)
    strength = row.strength if row else ""
    if colon and not strength:
        raise InputError(f"--methods={method}: {name} has no strength; write --methods={name}")
    keys = {"method.name", "seed", "dry_run", *fixed, *({f"method.{strength}"} if colon else ())}
    if set_twice := sorted(keys & set(overrides)):
        raise InputError(f"this command sets {', '.join(set_twice)} itself: leave it out")
    config = named_configs.load(f"{file}:{name}")
    given = {k: x for k, x in overrides.items() if not k.startswith("method.")}
    add_options(config, {**given, **names})
    for key, value in overrides.items():
        if key.startswith("method.") and key.removeprefix("method.") not in config.method:
            continue
        try:
            config.update_from_flattened_dict({key: value})
        except (KeyError, TypeError) as error:
            raise InputError(f"{file} does not take {key} = {value!r}: {error}") from None
    if colon:
        try:
            config.method[strength] = float(number)
        except ValueError:
            raise InputError(f"--methods={method}: {number!r} is not a number") from None
    complete(config)  # an override may replace a whole section
    return config
