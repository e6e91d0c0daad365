"""The keys every experiment has.

They are a table, which docs/config.md and `bam train --help` show. A data set's config starts from
`get_config(method)` here and sets its own values. A key that is not listed here does not exist:
assigning it is an error, on the command line too.
"""

import json
import math
from typing import NamedTuple

from bam.data import augment
from bam.errors import InputError
from bam.extras import needs
from bam.training import registry

with needs("train"):
    from ml_collections import ConfigDict, config_dict

METHODS = tuple(registry.METHODS)
MOST_OF_ANY = 2**31 - 1  # the most that an integer key can be; a seed has any length


class Key(NamedTuple):
    """A key of a config.

    Attributes:
      name: `KEY` or `SECTION.KEY`.
      default: None where it is not set.
      help: what it means, for whoever reads docs/config.md or `bam train --help`.
      kind: the type of its values, where that is not the default's.
      least, most: bounds of its values, if it is set.
    """

    name: str
    default: object
    help: str
    kind: type | None = None
    least: float | None = None
    most: int = MOST_OF_ANY

    def __str__(self) -> str:
        """A line for people, as JSON has the default."""
        default = "not set" if self.default is None else json.dumps(self.default)
        return f"{self.name} ({default}): {self.help}"


# `clip`, `method`, `model`, `optimizer`, `dataset`, `features` and `loss` can also name your own
# MODULE:FUNCTION, see registry.py. For the largest group_size there is no memory, which says so.
# fmt: off
KEYS = (
    Key("seed", None,
        "Not set: a run to release, with secret randomness of the operating system. Set: a run "
        "that can be repeated to the bit, whose noise whoever knows the seed can remove.",
        kind=int, least=0),
    Key("epsilon", 3.0,
        "ε, the budget of the whole run. The noise follows from it before training starts."),
    Key("delta", 1e-5, "δ of (ε, δ)-differential privacy."),
    Key("accountant", "pld", 'What computes ε: "pld", which is tight, or "rdp".'),
    Key("clip_norm", 1.0, "C, the longest that one example's gradient can be in the sum."),
    Key("clip.name", "l2",
        "How an example's gradient is bounded: \"l2\" (clipping), \"normalize\" or \"per_layer\"."),
    Key("public_clip.quantile", 0.0,
        "If positive, C is this quantile of the model's gradient norms on public data "
        "(bam/training/public_clip.py)."),
    Key("public_clip.dataset", "",
        "The public data set. Nobody but you can say that it is public: it must share no example "
        "with the private one."),
    Key("public_clip.source", "", "As `dataset.source`."),
    Key("public_clip.path", "", "As `dataset.path`."),
    Key("public_clip.num_classes", 0, "As `dataset.num_classes`."),
    Key("public_clip.num_steps", 20, "Steps of ordinary training on it before norms are measured."),
    Key("expected_batch_size", 256,
        "l, the mean number of examples in a batch; sums are divided by it.", least=1),
    Key("mechanism.name", "poisson",
        'How batches are drawn, and so what ε a noise earns: "poisson" with q = l/N, "full_batch" '
        'or "random_allocation" (see bam/privacy/mechanisms.py). "banded" also correlates the '
        'noise of so many steps.'),
    Key("mechanism.bands", None,
        'Steps over which "banded" correlates the noise.', kind=int, most=2**16),
    Key("num_examples", None,
        "N as a public constant: at least the number of training examples (users, where those are "
        "protected), rounded, or a bound that was known before. Then ε is for adding or removing "
        "one. Not set: N is counted, and ε is for one that is replaced by nothing, its place left "
        "empty; see docs/privacy.md.", kind=int, least=1),
    Key("num_epochs", 10,
        "Length of the run in epochs of N // l steps, unless `num_steps` is positive.", least=1),
    Key("num_steps", 0, "Length of the run in steps; 0: `num_epochs` decides.", least=0),
    Key("spare_steps", 0,
        "Steps beyond these that the noise is planned for. Without a seed a step that a crash "
        "loses counts, and is made up for out of these; without any left the run ends earlier by "
        "as many.", least=0),
    Key("microbatch_size", 32,
        'Examples whose gradients are held in memory at once; "auto": the fastest, by timing a '
        "few.", kind=object),
    Key("convolution", "auto",
        'How convolutions are computed: "matmul", "xla" or "tpu"; "auto": by the platform.'),
    Key("precision", "float32",
        "Of the network's arithmetic: \"float32\", \"tensorfloat32\" or \"bfloat16\". Norms, "
        "clipping, sums and noise are float32 in each."),
    Key("method.name", "dp_sgd",
        "The method, which `--config=NAME:METHOD` sets; its options are keys beside it."),
    Key("model.name", "convnet", "The network: a row of `bam.models.MODELS`; \"auto\": "
        "a linear model of features, a small CNN of pixels."),
    Key("model.width", 16,
        "Channels of its first layer, or the widening factor of a wide ResNet.", most=2**16),
    Key("init_from", "",
        'Weights to begin from: a safetensors file, or a folder that `bam export` wrote; "": '
        "random. Nobody but you can say that they were made without the private data: only then "
        "are they free."),
    Key("init_fresh", "",
        'Regular expression, searched in names like "Dense_0/kernel": begins at random.'),
    Key("trainable", "", 'Regular expression, searched likewise: what is trained; "": everything.'),
    Key("loss.name", "cross_entropy",
        '"cross_entropy", "binary" (several labels of an image), "squared_error" or "per_pixel" '
        "(bam/models/losses.py), or your own MODULE:FUNCTION. `weights` of the classes are "
        "public."),
    Key("loss.weights", None, "Public weights of the classes.", kind=tuple),
    Key("lora.rank", 0,
        "Low-rank factors beside the linear layers whose names match `targets` "
        "(bam/models/lora.py); 0: none. To train them and the head alone: "
        'trainable="lora|head".', most=2**16),
    Key("lora.targets", "", "Regular expression, searched in the names of layers."),
    Key("dataset.name", "digits", 'The data set; "folder" is your own, made by `bam data import`.'),
    Key("dataset.source", "",
        "\"sklearn\", \"tfds\", \"parquet\", \"archive\", or \"\" for the data set's default."),
    Key("dataset.path", "", "Folder of its files."),
    Key("dataset.num_classes", 0,
        'Of a "folder" whose files do not name the classes; 0: as named, or as known.',
        least=0, most=2**20),
    Key("dataset.holdout", 0,
        "Training images set aside, to choose hyper-parameters on; evaluation reads them then.",
        least=0),
    Key("dataset.groups", "",
        "Ids of the users that training rows belong to, for privacy of users and not of single "
        "examples: a column of the Parquet files, or a .npy file with an integer for each row; "
        '"": with a group_size those that `bam data import` was told of.'),
    Key("dataset.group_size", 0,
        "The most examples used of a user. See docs/users.md.", most=2**62),
    Key("dataset.memory", "auto",
        "\"device\" holds the data in each device's memory, \"stream\" reads each batch from the "
        'files (sources parquet and tfds), "auto" does the first if there is room.'),
    Key("features.name", "",
        "Features of the images instead of their pixels, by a fixed map that never saw the "
        'private data: "" (none), "prior", "scattering", "backbone", or your own MODULE:FUNCTION. '
        'They are kept in the folder `cache`; "": beside the data. `whiten`, `mirror` and `groups` '
        "are scattering's, the others a backbone's (bam/training/backbone.py). What is not set is "
        "not passed to a map."),
    Key("features.cache", "", 'Folder that keeps computed features; "": beside the data.'),
    Key("features.whiten", None,
        "Scattering: strength of the whitening by two public photographs.", kind=float),
    Key("features.mirror", None,
        "Scattering: average with the features of the mirror image.", kind=bool),
    Key("features.groups", None,
        "Scattering: groups of channels that are standardised within an image.", kind=int),
    Key("features.model", None, "Backbone: its network.", kind=str),
    Key("features.weights", None, "Backbone: safetensors file of its public weights.", kind=str),
    Key("features.size", None,
        "Backbone: images are resized to squares of so many pixels.", kind=int),
    Key("features.mean", None, "Backbone: mean of the pixels that its weights expect.", kind=float),
    Key("features.std", None, "Backbone: standard deviation of the same.", kind=float),
    Key("augment.views", 1,
        "K, the views of each example. Their losses are averaged before clipping.", most=2**12),
    Key("augment.shift", 0,
        "Most pixels that a view is shifted by, in each direction.", most=2**12),
    Key("augment.flip", "none", '"horizontal" mirrors a view with probability 1/2.'),
    Key("augment.mixtures", 0,
        "Mixtures of two views of one example that are added (DP-MixSelf).", most=2**12),
    Key("input_clip_norm", 0.0, "Scale every input to at most this L2 norm; 0: leave it.", least=0),
    Key("optimizer.name", "nadam", "What moves the weights by the noisy gradient."),
    Key("optimizer.learning_rate", 2e-3, "Size of its steps."),
    Key("ema_decay", 0.0,
        "Decay of the moving average of weights that is evaluated; 0: no average."),
    Key("eval.every", 0, "Steps between evaluations; 0: only at the end.", least=0),
    Key("checkpoint.every", 100,
        "Steps between checkpoints; 0: only when the run is stopped.", least=0),
    Key("diagnostics.every", 0,
        "Steps between measurements of clipping bias on some training examples; 0: never. NOT "
        "PRIVATE.", least=0),
    Key("diagnostics.num_examples", 512, "Training examples that are measured.", least=1),
    Key("dry_run", False, "Print model, privacy plan and cost, then stop."),
)
# fmt: on
MOST = {key.name: key.most for key in KEYS} | {"model.depth": 2**16}
BOUNDED_LATER = ("epsilon", "selection.trials_shape")  # whose own check says what they can be


def get_config(method: str = "dp_sgd") -> ConfigDict:
    """The base configuration, locked, of a key of `METHODS`; an InputError for another method."""
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}; choose from {', '.join(METHODS)}")
    config = ConfigDict()
    for key in KEYS:
        section, _, name = key.name.rpartition(".")
        if section and section not in config:
            config[section] = ConfigDict()
        default = config_dict.FieldReference(key.default, key.kind) if key.kind else key.default
        (config[section] if section else config)[name] = default
    config.method.update({"name": method, **registry.METHODS[method].options})
    config.lock()
    return config


def set_strength(config: ConfigDict, **strengths: float) -> None:
    """Sets the strength of the config's method if it is given, by method, as `dp_sat=0.086` (ρ)."""
    name = config.method.name
    if name in strengths:
        config.method[registry.METHODS[name].strength] = strengths[name]


def check(config: ConfigDict) -> None:
    """Raises InputError, in one line, for values that no part of a run checks by itself."""
    _check_numbers(config)
    if config.epsilon == math.inf and registry.is_private(config.method.name):
        raise InputError(
            f"method {config.method.name} has no privacy at epsilon inf: set a finite epsilon, or "
            "say --config=FILE:non_private"
        )
    learning_rate = config.optimizer.get("learning_rate", 1.0)
    if not 0 < learning_rate < math.inf:
        raise InputError(f"optimizer.learning_rate must be positive, got {learning_rate}")
    _check_users(config)
    augment.check(*(config.augment[k] for k in ("views", "shift", "flip", "mixtures")))
    as_stored = config.augment.views == 1 and config.augment.shift == 0
    if config.features.name and not (as_stored and config.augment.flip == "none"):
        raise InputError("features cannot be shifted or mirrored: augment.views must be 1, no more")
    if config.loss.name == "per_pixel" and (config.augment.shift or config.augment.flip != "none"):
        raise InputError("labels of pixels are not moved with them: set augment.shift=0, flip=none")
    if config.augment.mixtures and config.dataset.group_size:
        raise InputError("augment.mixtures are of examples, not of users: it must be 0")
    if config.loss.name != "cross_entropy" and config.public_clip.quantile:
        raise InputError("public_clip is of the cross-entropy: public_clip.quantile must be 0")
    if config.features.name and config.public_clip.quantile:
        raise InputError("public_clip reads images, not features: public_clip.quantile must be 0")
    if (config.init_from or config.trainable) and config.public_clip.quantile:
        raise InputError("public_clip trains all of a model from scratch: set clip_norm instead")
    if not 0 <= config.ema_decay < 1:
        raise InputError(f"ema_decay must be at least 0 and below 1, got {config.ema_decay}")


def _check_users(config: ConfigDict) -> None:
    """Refuses, with an InputError, settings that cannot be together with users."""
    size = config.dataset.group_size
    if size < 0:
        raise InputError(f"dataset.group_size must be at least 1, or 0 for none, got {size}")
    if config.dataset.groups and not size:
        raise InputError(
            "dataset.groups needs dataset.group_size, the most examples used of a user: at least 1"
        )
    refused = {
        "dataset.holdout": "sets examples aside, not users",
        "method.ascent_views": "would ascend by a user's first example alone",
        "public_clip.quantile": "is of gradients of examples, not of users: set clip_norm instead",
    }
    for key, why in refused.items():
        section, name = key.split(".")
        if size and config[section].get(name, 0):
            raise InputError(f"{key} with dataset.group_size: it {why}")


def _check_numbers(config: ConfigDict) -> None:
    """Refuses numbers that nothing can be computed with: out of bounds, NaN or infinite.

    ε may be infinite, and the plan refuses what else it cannot be. The options of a function of
    one's own are left to it.
    """
    values, own = dict(config.items()), []
    for section, options in config.items():
        if isinstance(options, ConfigDict):
            values |= {f"{section}.{name}": x for name, x in options.items()}
            own += [section] if ":" in options.get("name", "") else []
    for key, value in values.items():
        if isinstance(value, bool) or key == "seed" or key.partition(".")[0] in own:
            continue
        most = MOST.get(key, MOST_OF_ANY)
        if isinstance(value, int) and value > most:
            raise InputError(f"{key} must be at most {most}, got {value}")
        if isinstance(value, float) and key not in BOUNDED_LATER and not math.isfinite(value):
            raise InputError(f"{key} must be finite, got {value}")
    for key, _, _, _, least, _ in KEYS:
        value = values.get(key)
        if least is None or value is None:
            continue
        if key == "num_epochs" and config.num_steps:
            least = 0
        if value < least:
            raise InputError(f"{key} must be at least {least}, got {value}")
