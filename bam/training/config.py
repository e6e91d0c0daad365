"""The keys every experiment has.

A data set's config starts from `get_config(method)` here and sets its own values. A key that is
not listed here does not exist: assigning it is an error, on the command line too.
"""

import math

from bam.data import augment, users
from bam.extras import needs
from bam.training import registry

with needs("train"):
    from ml_collections import ConfigDict, config_dict

METHODS = tuple(registry.METHODS)
# The most that an integer key can be; of others less than `MOST_OF_ANY`. A seed has any length.
MOST = {
    "augment.views": 2**12,
    "augment.mixtures": 2**12,
    "augment.shift": 2**12,
    "model.width": 2**16,
    "model.depth": 2**16,
    "lora.rank": 2**16,
    "dataset.num_classes": 2**20,
    "dataset.group_size": 2**62,  # with so many there is no memory, which is said then
    "mechanism.bands": 2**16,
}
MOST_OF_ANY = 2**31 - 1
BOUNDED_LATER = ("epsilon", "selection.trials_shape")  # whose own check says what they can be


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """The base configuration, locked, of a key of `METHODS`; a ValueError for another method."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    config = ConfigDict()
    # Not set: a run to release, with secret randomness of the operating system. Set: a run that can
    # be repeated to the bit, whose noise whoever knows the seed can remove.
    config.seed = config_dict.placeholder(int)

    # Privacy. The noise multiplier follows from these before training starts.
    config.epsilon = 3.0
    config.delta = 1e-5
    config.accountant = "pld"  # or "rdp"
    config.clip_norm = 1.0  # C
    # How an example's gradient is bounded: "l2" (clipping), "normalize" or "per_layer".
    config.clip = ConfigDict({"name": "l2"})
    # It, `method`, `optimizer`, `model` and `dataset` can also name your own MODULE:FUNCTION, see
    # bam/training/registry.py.
    # A positive quantile replaces C by that quantile of the model's gradient norms on this *public*
    # data set, after so many non-private steps there (see bam/training/public_clip.py). Nobody but
    # you can say that it is public: it must share no example with the private one.
    data = {"dataset": "", "source": "", "path": "", "num_classes": 0}
    config.public_clip = ConfigDict({"quantile": 0.0, **data, "num_steps": 20})
    config.expected_batch_size = 256  # l
    # How batches are drawn, and so what ε a noise earns: "poisson" with q = l/N, "full_batch" or
    # "random_allocation" (see bam/privacy/mechanisms.py).
    # "banded" also correlates the noise of so many steps.
    config.mechanism = ConfigDict({"name": "poisson", "bands": config_dict.placeholder(int)})

    # N, as a public constant: at least the number of training examples (users, where those are
    # protected), rounded, or a bound that was known before. Then ε is for adding or removing one.
    # Not set: N is counted, and ε is for one that is replaced by nothing, its place left empty.
    config.num_examples = config_dict.placeholder(int)
    # Length: `num_epochs` of N // l steps each, unless `num_steps` is positive.
    config.num_epochs = 10
    config.num_steps = 0
    # Steps beyond these that the noise is planned for. Without a seed a step that a crash loses
    # counts, and is made up for out of these; without any left the run ends earlier by as many.
    config.spare_steps = 0
    # Examples whose gradients are held in memory at once; "auto": the fastest, by timing a few.
    config.microbatch_size = config_dict.placeholder(object)
    config.microbatch_size = 32
    config.convolution = "auto"  # "matmul", "xla" or "tpu"; auto: by the platform
    # Of the network's arithmetic: "float32", "tensorfloat32" or "bfloat16". Norms, clipping, sums
    # and noise are float32 in each.
    config.precision = "float32"

    config.method = ConfigDict({"name": method, **registry.METHODS[method].options})
    config.model = ConfigDict({"name": "convnet", "width": 16})
    # Weights to begin from: a safetensors file, or a folder that `bam export` wrote; "": random.
    # Nobody but you can say that they were made without the private data: only then are they free.
    config.init_from = ""
    # Regular expressions, searched for in names like "Dense_0/kernel": what begins at random all
    # the same, and what is trained ("": all). The rest is frozen.
    config.init_fresh = ""
    config.trainable = ""
    # "cross_entropy", "binary" (several labels of an image), "squared_error" or "per_pixel"
    # (bam/models/losses.py), or your own MODULE:FUNCTION. `weights` of the classes are public.
    config.loss = ConfigDict({"name": "cross_entropy"})
    config.loss.weights = config_dict.placeholder(tuple)
    # Low-rank factors beside the linear layers whose names match `targets` (bam/models/lora.py); 0:
    # none. To train them and the head alone: trainable="lora|head".
    config.lora = ConfigDict({"rank": 0, "targets": ""})
    # source: "sklearn", "tfds", "parquet", "archive", or "" for the data set's default.
    # num_classes: of a "folder" whose files do not name the classes; 0: as named, or as known.
    # holdout: training images set aside, to choose hyper-parameters on; evaluation reads them then.
    # groups: ids of the users that training rows belong to, for privacy of users and not of single
    # examples: a column of the Parquet files, or a .npy file with an integer for each row.
    # group_size: the most examples used of a user. See docs/users.md.
    config.dataset = ConfigDict({"name": "digits", "source": "", "path": "", "num_classes": 0})
    # memory: "device" holds the data in each device's memory, "stream" reads each batch from the
    # files (sources parquet and tfds), "auto" does the first if there is room.
    config.dataset.update({"holdout": 0, "groups": "", "group_size": 0, "memory": "auto"})
    # Features of the images instead of their pixels, by a fixed map that never saw the private
    # data: "" (none), "scattering", "backbone", or your own MODULE:FUNCTION. They are kept in the
    # folder `cache`; "": beside the data. `whiten`, `mirror` and `groups` are scattering's, the
    # others a backbone's (bam/training/backbone.py). What is not set is not passed to a map.
    config.features = ConfigDict({"name": "", "cache": ""})
    config.features.whiten = config_dict.placeholder(float)
    config.features.mirror = config_dict.placeholder(bool)
    config.features.groups = config_dict.placeholder(int)
    config.features.model = config_dict.placeholder(str)
    config.features.weights = config_dict.placeholder(str)
    config.features.size = config_dict.placeholder(int)
    config.features.mean = config_dict.placeholder(float)
    config.features.std = config_dict.placeholder(float)
    # K views per example, each shifted by up to `shift` pixels, then mirrored with probability 1/2.
    # `mixtures` of two views each are seen beside them (DP-MixSelf).
    config.augment = ConfigDict({"views": 1, "shift": 0, "flip": "none", "mixtures": 0})
    config.input_clip_norm = 0.0  # scale every input to at most this L2 norm; 0: leave it
    config.optimizer = ConfigDict({"name": "nadam", "learning_rate": 2e-3})
    config.ema_decay = 0.0  # 0: no averaging; evaluation uses the averaged weights otherwise

    config.eval = ConfigDict({"every": 0})  # steps; 0: at the end only
    config.checkpoint = ConfigDict({"every": 100})  # steps, and at the end; 0: if stopped early
    # Steps between measurements of clipping bias on some training examples; 0: never. NOT PRIVATE
    config.diagnostics = ConfigDict({"every": 0, "num_examples": 512})
    config.dry_run = False  # print model, privacy plan and cost, then stop
    config.lock()
    return config


def set_strength(config: ConfigDict, **strengths: float) -> None:
    """Sets the strength of the config's method if it is given, by method, as `dp_sat=0.086` (ρ)."""
    name = config.method.name
    if name in strengths:
        config.method[registry.METHODS[name].strength] = strengths[name]


def check(config: ConfigDict) -> None:
    """Raises ValueError, in one line, for values that no part of a run checks by itself."""
    _check_numbers(config)
    at_least = {
        "seed": (0 if config.seed is None else config.seed, 0),
        "expected_batch_size": (config.expected_batch_size, 1),
        "num_examples": (1 if config.num_examples is None else config.num_examples, 1),
        "num_steps": (config.num_steps, 0),
        "dataset.num_classes": (config.dataset.num_classes, 0),
        "spare_steps": (config.spare_steps, 0),
        "dataset.holdout": (config.dataset.holdout, 0),
        "num_epochs": (config.num_epochs, 0 if config.num_steps else 1),
        "eval.every": (config.eval.every, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "diagnostics.every": (config.diagnostics.every, 0),
        "diagnostics.num_examples": (config.diagnostics.num_examples, 1),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if config.epsilon == math.inf and registry.is_private(config.method.name):
        raise ValueError(
            f"method {config.method.name} has no privacy at epsilon inf: set a finite epsilon, or "
            "say --config=FILE:non_private"
        )
    learning_rate = config.optimizer.get("learning_rate", 1.0)
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"optimizer.learning_rate must be positive, got {learning_rate}")
    users.check(config)
    augment.check(*(config.augment[k] for k in ("views", "shift", "flip", "mixtures")))
    of_pixels = config.augment.views == 1 and config.augment.shift == 0
    if config.features.name and not (of_pixels and config.augment.flip == "none"):
        raise ValueError("features cannot be shifted or mirrored: augment.views must be 1, no more")
    if config.loss.name == "per_pixel" and (config.augment.shift or config.augment.flip != "none"):
        raise ValueError("labels of pixels are not moved with them: set augment.shift=0, flip=none")
    if config.augment.mixtures and users.group_size(config):
        raise ValueError("augment.mixtures are of examples, not of users: it must be 0")
    if config.loss.name != "cross_entropy" and config.public_clip.quantile:
        raise ValueError("public_clip is of the cross-entropy: public_clip.quantile must be 0")
    if config.features.name and config.public_clip.quantile:
        raise ValueError("public_clip reads images, not features: public_clip.quantile must be 0")
    if (config.init_from or config.trainable) and config.public_clip.quantile:
        raise ValueError("public_clip trains all of a model from scratch: set clip_norm instead")
    if not config.input_clip_norm >= 0:
        raise ValueError(f"input_clip_norm must be at least 0, got {config.input_clip_norm}")
    if not 0 <= config.ema_decay < 1:
        raise ValueError(f"ema_decay must be at least 0 and below 1, got {config.ema_decay}")


def _check_numbers(config: ConfigDict) -> None:
    """Refuses numbers that nothing can be computed with: too large, NaN or infinite.

    ε may be infinite, and the plan refuses what else it cannot be. The options of a function of
    one's own are left to it.
    """
    sections = {key: value for key, value in config.items() if isinstance(value, ConfigDict)}
    named = {f"{key}.{k}": v for key, x in sections.items() if ":" not in x.get("name", "")
             for k, v in x.items()}  # fmt: skip
    for key, value in {**config, **named}.items():
        if isinstance(value, bool) or key == "seed":
            continue
        most = MOST.get(key, MOST_OF_ANY)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{key} must be at most {most}, got {value}")
        if isinstance(value, float) and key not in BOUNDED_LATER and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, got {value}")
