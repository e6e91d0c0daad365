"""The config of a method at a strength, with a command line's settings."""

from collections.abc import Iterable

from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonMapping
from bam.training import methods, named_configs
from bam.training.config import add_options

with needs("train"):
    from ml_collections import ConfigDict


def method_config(
    file: str, method: str, overrides: JsonMapping, fixed: Iterable[str] = ()
) -> ConfigDict:
    """A config file's configuration of METHOD, or of METHOD:STRENGTH for a method of BAM's kind.

    Args:
      file: the config file.
      method: what its `get_config` is called with; a number after a colon is the strength.
      overrides: key -> value, for all methods; keys of `method.*` for those that have them.
      fixed: keys that the caller sets and that therefore no override may set.

    Raises:
      InputError: for an override of what is fixed or not there, a strength that cannot be, or what
        the file's own code raises.
    """
    name, colon, number = method.partition(":")
    strength = methods.METHODS[name].strength if name in methods.METHODS else ""
    if colon and not strength:
        raise InputError(f"{method}: {name} takes no strength")
    keys = {"method.name", "seed", "dry_run", *fixed, *({f"method.{strength}"} if colon else ())}
    if set_twice := sorted(keys & set(overrides)):
        raise InputError(f"this command sets {', '.join(set_twice)} itself: leave it out")
    config = named_configs.load(f"{file}:{name}")
    add_options(config, {k: x for k, x in overrides.items() if not k.startswith("method.")})
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
            raise InputError(f"{method}: {number!r} is no number") from None
    return config
