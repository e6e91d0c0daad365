"""The data set that a config names, or its features; kept in memory for the next run."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable

import numpy as np

from bam import files, waits
from bam.data import datasets, users
from bam.errors import InputError
from bam.extras import needs
from bam.features import PRIOR_SHA256, backbone, extraction
from bam.files import JsonObject
from bam.models import finetune, normalisation
from bam.models.normalisation import Normalisation
from bam.training import devices, keys, parts

with needs("train"):
    from ml_collections import ConfigDict, FrozenConfigDict

MEMORIES = ("auto", "device", "stream")
SAID = 2**28  # bytes of images from which on a line says where they are


def make_dataset(
    section: ConfigDict,
    features_section: ConfigDict | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> datasets.Dataset:
    """The data that a config's `dataset` section names; the last two sets are kept in memory.

    `holdout` training examples are set aside, see `datasets.hold_out`. A `features` section
    replaces images by features, which are kept on the disk, in its `cache` or beside the data;
    `log` gets a line if they are computed. Raises InputError as `datasets.load`.
    """
    _, mapped = listed(section, features_section, log)
    return mapped()


def listed(
    section: ConfigDict,
    features_section: ConfigDict | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[datasets.Dataset, Callable[[], datasets.Dataset]]:
    """The data of `make_dataset` with blank features, and a function that returns the true ones.

    Blank features have the true number and shape, so a plan need not wait for the map of images.
    """
    described = {"dataset": section, "features": features_section or ConfigDict()}
    # A file of weights may have changed since it was read before.
    described["digest"] = features_digest(described["features"])
    described["normalisation"] = repr(features_normalisation(described["features"]))
    # So may the files of the data.
    described["files"] = _files_at(section.get("path"))
    sections = FrozenConfigDict(described)
    if sections in kept_datasets:
        kept = kept_datasets[sections]
        return kept, lambda: kept
    with waits.awaited(log, f"reading {section.name}"):
        loaded = _loaded(sections.dataset, log)
    feature_map = parts.make_features(sections.features)
    holdout = sections.dataset.get("holdout", 0)
    if feature_map is None:
        kept = _keep(sections, datasets.hold_out(loaded, holdout))
        return kept, lambda: kept
    # All blank rows are equal, so no image is hashed to choose the held-out ones.
    rows = datasets.Split(np.zeros((len(loaded.train.labels), 0)), loaded.train.labels)
    blank = datasets.hold_out(extraction.blank(loaded, feature_map), holdout, of=rows)

    def mapped() -> datasets.Dataset:
        extracted = _extracted(sections, loaded, feature_map, log)
        return _keep(sections, datasets.hold_out(extracted, holdout, of=loaded.train))

    return blank, mapped


def _files_at(path: str | None) -> str:
    """A digest of the files at a path or in its folder: their names, sizes and times."""
    if not path:
        return ""
    place = os.path.realpath(files.user_path(path))
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(place)) if os.path.isdir(place) else []
        stats = [os.stat(x) for x in (place, *(os.path.join(place, x) for x in names))]
        facts = [(x.st_ino, x.st_size, x.st_mtime_ns) for x in stats if stat.S_ISREG(x.st_mode)]
        place += repr(facts)
    return hashlib.blake2b(place.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _keep(sections: FrozenConfigDict, dataset: datasets.Dataset) -> datasets.Dataset:
    while len(kept_datasets) > 1:
        del kept_datasets[next(iter(kept_datasets))]
    kept_datasets[sections] = dataset
    return dataset


kept_datasets: dict[FrozenConfigDict, datasets.Dataset] = {}  # several methods share a data set


def _loaded(section: FrozenConfigDict, log: Callable[[str], None]) -> datasets.Dataset:
    options = section.as_configdict().to_dict()
    name = options.pop("name")
    options.pop("holdout", None)
    groups, size = options.pop("groups", ""), options.pop("group_size", 0)
    memory = options.pop("memory", "auto")
    if ":" in name:
        # For keys that every data set has, "" and 0 mean "not set".
        is_set = {k: v for k, v in options.items() if v or k not in keys.in_section("dataset")}
        loaded = parts.make("dataset", {"name": name} | is_set)
        datasets.check(loaded)
    else:
        loaded = datasets.load(name, **options, stays=_stays(memory, options, log))
    folder = datasets.folder_of(name, options.get("source"), options.get("path"))
    if name == "folder" and size and not groups:
        groups = users.column(folder)
    if groups:
        has_columns = name == "folder" or options.get("source") == "parquet"
        loaded = users.with_ids(loaded, groups, folder if has_columns else None)
    return loaded


def _extracted(
    sections: FrozenConfigDict,
    loaded: datasets.Dataset,
    feature_map: extraction.FeatureMap,
    log: Callable[[str], None],
) -> datasets.Dataset:
    section = sections.dataset
    folder = datasets.folder_of(section.name, section.get("source"), section.get("path"))
    if sections.features.get("cache"):
        folder = files.user_path(sections.features.cache)
    elif folder is not None:
        folder = (folder if folder.is_dir() else folder.parent) / "features"
    facts = parts.set_keys(sections.features, "cache")
    if sections.digest:
        facts["weights"] = sections.digest
    if (expected := features_normalisation(sections.features)) and expected.source:
        facts["normalisation"] = expected._replace(source="")
    return extraction.extract(loaded, feature_map, facts, folder, log)


def _stays(memory: str, options: JsonObject, log: Callable[[str], None]) -> datasets.Stays:
    """The function that decides whether images stay in their files, by `dataset.memory`."""
    if memory not in MEMORIES:
        raise InputError(f"unknown dataset.memory {memory!r}; choose from {', '.join(MEMORIES)}")

    def stays(num_bytes: int) -> bool:
        if memory != "auto":
            return bool(memory == "stream")
        room = devices.room_for_data()
        streamed = num_bytes > room
        if num_bytes > SAID:
            where = "are streamed from their files" if streamed else "are held in memory"
            log(
                f"the training images {where}: {num_bytes / 2**30:.1f} GiB decoded, of "
                f"{room / 2**30:.1f} that dataset.memory=auto allows"
            )
        return streamed

    if memory == "stream" and options.get("source") in ("archive", "sklearn"):
        raise InputError("dataset.memory=stream is for the sources parquet and tfds")
    return stays


def unprotected_users(section: ConfigDict) -> list[str]:
    """A line for a run on an imported folder whose ε protects one image; [] for other runs."""
    if section.name != "folder":
        return []
    named = users.column(datasets.folder_of(section.name, section.source, section.path))
    way = ": these data name users, and --config.dataset.group_size=K protects all of each"
    return [f"ε IS FOR ONE IMAGE, NOT FOR ONE PERSON{way if named else ''} (docs/users.md)"]


def features_normalisation(section: ConfigDict) -> Normalisation | None:
    """The normalisation that a backbone's weights expect; None without a backbone."""
    if section.get("name") != "backbone" or not section.get("weights"):
        return None
    return backbone.expected(**{x: section.get(x) for x in ("weights", "mean", "std", "size")})


def normalised(
    config: ConfigDict, dataset: datasets.Dataset
) -> tuple[datasets.Dataset, Normalisation | None]:
    """The data normalised as the weights of `init_from` expect, and that normalisation.

    With features, the data stay as they are, and the normalisation is the backbone's. Float images
    stay as they are unless the config gives a normalisation, because they need not be pixels.
    """
    given = {"mean": config.init_mean, "std": config.init_std}
    if config.features.name or not config.init_from:
        if any(x is not None for x in given.values()):
            raise InputError("init_mean and init_std are for images, and weights: name init_from")
        return dataset, features_normalisation(config.features)
    mean, std = (tuple(np.ravel(x).tolist()) for x in (dataset.mean, dataset.std))
    file, ours = finetune.file_of(config.init_from), Normalisation(mean, std)
    expected = normalisation.expected_by(file, given, "init_", ours)
    if dataset.train.images.dtype != np.uint8 and not expected.given:
        return dataset, ours._replace(source="the data set: its images are floats")
    mean32, std32 = (np.array(x, np.float32) for x in (expected.mean, expected.std))
    return dataset._replace(mean=mean32, std=std32), expected


def features_digest(section: ConfigDict) -> str:
    """SHA-256 of the weights of a map of images; "" without weights."""
    is_prior = section.get("name") == "prior"
    return PRIOR_SHA256 if is_prior else finetune.digest(section.get("weights"))
