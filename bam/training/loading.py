"""The data set that a config names, or its features, kept in memory for the next run."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bam import files, waits
from bam.data import datasets, users
from bam.data.catalogue import DATASETS
from bam.errors import InputError
from bam.extras import needs
from bam.features import PRIOR_SHA256, backbone, extraction
from bam.files import JsonObject
from bam.models import finetune, normalisation
from bam.models.normalisation import Normalisation
from bam.training import devices, keys, parts

with needs("train"):
    from ml_collections import ConfigDict, FrozenConfigDict

FEATURES = "features"  # the folder beside the data that keeps computed features
MEMORIES = ("auto", "device", "stream")
LARGE = 2**28  # bytes of images from which on a line tells whether they are streamed


def make_dataset(
    section: ConfigDict,
    features_section: ConfigDict | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> datasets.Dataset:
    """Returns the data of a config's `dataset` section.

    The last two of bam's own data sets stay in memory. `holdout` training examples are set aside,
    see `datasets.hold_out`. A `features` section replaces images by features, which are kept on the
    disk, in its `cache` or beside the data. `log` gets lines on long waits and on large data.
    Raises InputError as `datasets.load`.
    """
    _, load = list_data(section, features_section, log)
    return load()


def list_data(
    section: ConfigDict,
    features_section: ConfigDict | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[datasets.Dataset, Callable[[], datasets.Dataset]]:
    """Returns the data of `make_dataset` as far as they are read, and a function that loads them.

    Features are blank, because computing them may take minutes: a plan needs only the number, the
    shapes and the labels of the data. Without features, the data are complete.
    """
    key = {"dataset": section, "features": features_section or ConfigDict()}
    # A file of weights may have changed since the last run of this process.
    key["digest"] = features_digest(key["features"])
    key["normalisation"] = repr(features_normalisation(key["features"]))
    # The files of the data and of the users may have changed, too.
    key["files"] = _files_of(key["dataset"])
    # A copy, because the hash of a frozen config follows changes of the one that it was made of.
    sections = FrozenConfigDict(ConfigDict(key).copy_and_resolve_references())
    if sections in kept_datasets:
        dataset = kept_datasets[sections]
        return dataset, lambda: dataset
    with waits.awaited(log, f"reading {section.name}"):
        loaded = _read(sections.dataset, log)
    feature_map = parts.make_features(sections.features)
    holdout = sections.dataset.get("holdout", 0)
    if feature_map is None:
        dataset = _keep(sections, datasets.hold_out(loaded, holdout))
        return dataset, lambda: dataset
    # Held-out images are chosen by hashes, which takes long. A plan needs only their number, so
    # here the choice is among rows without pixels.
    rows = datasets.Split(np.zeros((len(loaded.train.labels), 0)), loaded.train.labels)
    blank = datasets.hold_out(extraction.blank(loaded, feature_map), holdout, of=rows)

    def load() -> datasets.Dataset:
        extracted = _extract(sections, loaded, feature_map, log)
        return _keep(sections, datasets.hold_out(extracted, holdout, of=loaded.train))

    return blank, load


def _files_of(dataset: ConfigDict) -> str:
    """Returns a digest of the files of a data set and of `dataset.groups`."""
    named = (str(_read_from(dataset) or ""), dataset.get("groups", ""))
    return repr([_files_at(path) for path in named if path])


def _read_from(section: ConfigDict) -> Path | None:
    """Returns the folder or archive that holds the files of a data set, or None."""
    where = section.get("name", ""), section.get("source"), section.get("path")
    folder, entry = datasets.folder_of(*where), DATASETS.get(where[0])
    is_prepared = entry is not None and datasets.source_of(*where) == "tfds"
    return folder / entry.tfds if folder and entry and is_prepared else folder


def _files_at(path: str) -> str:
    """Returns a digest of a path and of the inodes, sizes and times of its files.

    Files of a folder in the folder count, too, but not the features that a run kept there.
    """
    top = Path(os.path.realpath(files.user_path(path)))
    below = _inside(top)
    below += [x for folder in below if folder.name != FEATURES for x in _inside(folder)]
    stamps = {str(x): _stamp(x) for x in (top, *below)}
    text = repr([str(top), {x: stamp for x, stamp in stamps.items() if stamp}])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _inside(folder: Path) -> list[Path]:
    # If a folder cannot be read, the reader of the data says so, with a better message.
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _stamp(path: Path) -> tuple[int, ...]:
    """Returns the inode, size and time of a file, or () for anything else."""
    with contextlib.suppress(OSError):
        stats = path.stat()
        if stat.S_ISREG(stats.st_mode):
            return stats.st_ino, stats.st_size, stats.st_mtime_ns
    return ()


def _keep(sections: FrozenConfigDict, dataset: datasets.Dataset) -> datasets.Dataset:
    # A function of one's own is called for each run: nobody knows what it reads.
    if ":" in sections.dataset.name + sections.features.get("name", ""):
        return dataset
    # Dicts keep their order, so the first key is the oldest.
    while len(kept_datasets) > 1:
        del kept_datasets[next(iter(kept_datasets))]
    kept_datasets[sections] = dataset
    return dataset


# A sweep trains several methods on one data set, which is then read once.
kept_datasets: dict[FrozenConfigDict, datasets.Dataset] = {}


def _read(section: FrozenConfigDict, log: Callable[[str], None]) -> datasets.Dataset:
    options = section.as_configdict().to_dict()
    name = options.pop("name")
    options.pop("holdout", None)
    groups, size = options.pop("groups", ""), options.pop("group_size", 0)
    memory = options.pop("memory", "auto")
    if ":" in name:
        # For the keys in bam's table, "" and 0 mean "not set". An option of the user's function may
        # be set to 0 or False.
        is_set = {k: v for k, v in options.items() if v or k not in keys.in_section("dataset")}
        loaded = parts.make("dataset", {"name": name} | is_set)
        datasets.check(loaded)
    else:
        options["source"] = datasets.source_of(name, options.get("source"), options.get("path"))
        loaded = datasets.load(name, **options, stays=_stays(memory, options, log))
    folder = datasets.folder_of(name, options.get("source"), options.get("path"))
    named = users.column(folder) if name == "folder" else ""
    if size and not groups:
        groups = named
    in_parquet = folder if options.get("source") == "parquet" else None
    if groups:
        loaded = users.with_ids(loaded, groups, in_parquet)
    # Without `group_size`, too: persons of the test set are named whatever ε protects.
    return users.with_test_ids(loaded, groups or named, in_parquet, log)


def _extract(
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
        folder = (folder if folder.is_dir() else folder.parent) / FEATURES
    # The fields name the file of the kept features: the content of the weights counts, and not the
    # path that they or the normalisation were read from.
    fields = parts.set_keys(sections.features, "cache")
    if sections.digest:
        fields["weights"] = sections.digest
    if (expected := features_normalisation(sections.features)) and expected.source:
        fields["normalisation"] = expected._replace(source="")
    return extraction.extract(loaded, feature_map, fields, folder, log)


def _stays(memory: str, options: JsonObject, log: Callable[[str], None]) -> datasets.Stays:
    """Returns the function that decides whether images stay in their files, by `dataset.memory`."""
    if memory not in MEMORIES:
        raise InputError(f"unknown dataset.memory {memory!r}; choose from {', '.join(MEMORIES)}")

    def stays(num_bytes: int) -> bool:
        if memory != "auto":
            return bool(memory == "stream")
        room = devices.room_for_data()
        streamed = num_bytes > room
        if num_bytes > LARGE:
            action = "are streamed from their files" if streamed else "are held in memory"
            log(
                f"the training images {action}: {num_bytes / 2**30:.1f} GiB decoded, and "
                f"dataset.memory=auto holds up to {room / 2**30:.1f} GiB"
            )
        return streamed

    if memory == "stream" and options.get("source") in ("archive", "sklearn"):
        raise InputError(
            f"source {options['source']} cannot be streamed: set --config.dataset.memory=device, "
            "or --config.dataset.source=parquet or tfds"
        )
    return stays


def features_normalisation(section: ConfigDict) -> Normalisation | None:
    """Returns the normalisation that a backbone's weights expect, or None without a backbone."""
    if section.get("name") != "backbone" or not section.get("weights"):
        return None
    options = ("weights", "mean", "std", "size", "interpolation")
    return backbone.normalisation_of(**{x: section.get(x) for x in options})


def normalise(
    config: ConfigDict, dataset: datasets.Dataset
) -> tuple[datasets.Dataset, Normalisation | None]:
    """Returns the data normalised as the weights of `init_from` expect, and that normalisation.

    With features, the data stay as they are, and the normalisation is the backbone's. Float images
    stay as they are unless the config gives a normalisation, because they need not be pixels.
    """
    overrides = {"mean": config.init_mean, "std": config.init_std}
    if config.features.name or not config.init_from:
        if any(x is not None for x in overrides.values()):
            raise InputError(
                "init_mean and init_std are for images, and for weights to begin from: add "
                "--config.init_from=FILE, and leave features out"
            )
        return dataset, features_normalisation(config.features)
    mean, std = (tuple(np.ravel(x).tolist()) for x in (dataset.mean, dataset.std))
    file, ours = finetune.file_of(config.init_from), Normalisation(mean, std)
    expected = normalisation.expected_by(file, overrides, "init_", ours)
    if dataset.train.images.dtype != np.uint8 and not expected.given:
        return dataset, ours._replace(source="the data set: its images are floats")
    # The network computes in float32, as `datasets.normalize` does.
    mean32, std32 = (np.array(x, np.float32) for x in (expected.mean, expected.std))
    return dataset._replace(mean=mean32, std=std32), expected


def features_digest(section: ConfigDict) -> str:
    """Returns the SHA-256 of the weights of a map of images, or "" without weights."""
    # The weights of the prior come with bam, so their digest is a constant.
    is_prior = section.get("name") == "prior"
    return PRIOR_SHA256 if is_prior else finetune.digest(section.get("weights"))
