"""The table of config keys. It imports no JAX, so `bam train --help` is fast.

`bam train --help` and docs/config.md print it; `bam.training.config` makes configs from it.
"""

import json
from typing import NamedTuple

from bam import part_table

# The largest value of an integer key, because JAX holds it in 32 bits. A seed never enters JAX.
MOST_OF_ANY = 2**31 - 1


class Key(NamedTuple):
    """A key of a config.

    Attributes:
      name: `KEY` or `SECTION.KEY`.
      default: its value in the base config; None: not set.
      help: its meaning, for readers of docs/config.md and `bam train --help`.
      kind: the type of its values, if it is not the default's.
      least, most: the bounds of its values, if it is set.
      unbounded: whether it may be infinite; then the part that reads it checks its values.
      names: bam's names for its values, for a key that names a part or a schedule.
      public: whether a release repeats it.
      changeable: whether it may differ when a run is resumed. Such keys decide when a run is
        evaluated and saved, never its weights.
      path: whether it is a path on this machine.
      of_part: whether it is an option of some parts of its section. Another part has a value of
        its own; all other keys of a section mean the same for each of its parts.
    """

    name: str
    default: object
    help: str
    kind: type | None = None
    least: float | None = None
    most: int = MOST_OF_ANY
    unbounded: bool = False
    names: tuple[str, ...] = ()
    public: bool = False
    changeable: bool = False
    path: bool = False
    of_part: bool = False

    def __str__(self) -> str:
        """Returns a line for readers, with the default as JSON."""
        default = "not set" if self.default is None else json.dumps(self.default)
        return f"{self.name} ({default}): {self.help}"


# All sections that name a part but `mechanism` can also name your own MODULE:FUNCTION, see
# bam/part_table.py. The order is that of docs/config.md and of `bam train --help`.
# fmt: off
KEYS = (
    Key("seed", None,
        "Not set: secret randomness, for a run to release. Set: repeatable to the bit, but whoever "
        "knows it can remove the noise.", kind=int, least=0),
    Key("epsilon", 3.0, "ε of the whole run; the noise follows from it.",
        kind=float, unbounded=True, public=True),
    Key("noise_multiplier", None,
        "σ, in place of `epsilon`. A flag for one of the two unsets the other.", kind=float,
        public=True),
    Key("delta", 1e-5, "δ of (ε, δ)-differential privacy.", public=True),
    Key("accountant", "pld", 'How ε is computed: "pld" (tight) or "rdp".', public=True),
    Key("clip_norm", 1.0, "C, the largest norm of one example's gradient in the sum.",
        public=True),
    Key("clip_norm_from", "",
        'Where C comes from, as `bam clip_norm` prints it; "": chosen by hand. It is published.',
        public=True),
    Key("clip.name", "l2",
        'How a gradient is bounded: "l2" scales it to norm C if it is longer. With slack=8, ε also '
        "covers the share of gradients clipped.",
        names=tuple(part_table.CLIPS), public=True),
    Key("expected_batch_size", 256,
        "l, the mean number of examples in a batch; sums are divided by it.", least=1, public=True),
    Key("mechanism.name", "poisson",
        'How batches are drawn: "poisson" with q = l/N, "full_batch" or "random_allocation"; '
        '"banded" also correlates the noise of `bands` steps (docs/batches.md).',
        names=tuple(part_table.MECHANISMS), public=True),
    Key("mechanism.bands", None,
        'Steps over which "banded" correlates the noise.', kind=int, most=2**16, public=True,
        of_part=True),
    Key("num_examples", None,
        "N as a public constant, at least the number of training examples (or users): ε is for "
        "adding or removing one. Not set: N is counted, and ε is for replacing one by nothing "
        "(docs/privacy.md).", kind=int, least=1, public=True),
    Key("num_epochs", 10, "Length in epochs of N // l steps, if `num_steps` is 0.", least=1,
        public=True),
    Key("num_steps", 0, "Length in steps; 0: `num_epochs` decides.", least=0, public=True),
    Key("spare_steps", 0,
        "Further steps that the noise is planned for, which replace steps lost in a crash. Without "
        "them the run is shorter.",
        least=0, public=True),
    Key("microbatch_size", 32,
        "Examples whose gradients are in memory at once; `--config.dry_run --tune` finds a fast "
        "number.", kind=object),
    Key("convolution", "",
        'How convolutions are computed: "matmul", "xla", "grouped" or "tpu"; "": by the platform.'),
    Key("precision", "float32",
        'The network\'s arithmetic: "float32", "tensorfloat32" or "bfloat16". Norms, clipping, '
        "sums and noise are float32 in each.", public=True),
    Key("method.name", "dp_sgd",
        "The method, which `--config=NAME:METHOD` sets with the config's strength for it.",
        names=tuple(part_table.METHODS), public=True),
    Key("model.name", "convnet", "The network.", names=tuple(part_table.MODELS), public=True),
    Key("model.width", 16,
        "Channels of the first layer, or the widening factor of a wide ResNet.", most=2**16,
        public=True, of_part=True),
    Key("init_from", "",
        "Weights to begin from, made without the private data: a safetensors file, or a folder "
        'that `bam export` wrote; "": random.', path=True),
    Key("init_mean", None,
        "Mean of the pixels that these weights expect, one number or three in [0, 1]. Not set: "
        "as in the file beside them, else the data set's (docs/finetuning.md).",
        kind=object, public=True),
    Key("init_std", None, "Standard deviation of the pixels, as `init_mean`.", kind=object,
        public=True),
    Key("init_fresh", "",
        'Regular expression: weights whose names match, like "Dense_0/kernel", begin at random.',
        public=True),
    Key("trainable", "", 'Regular expression: weights whose names match are trained; "": all.',
        public=True),
    Key("loss.name", "cross_entropy",
        '"cross_entropy", "binary" (several labels an image), "squared_error" or "per_pixel".',
        names=tuple(part_table.LOSSES), public=True),
    Key("loss.weights", None,
        "Weights of the classes, which are public: do not compute them from the private data.",
        kind=tuple, public=True, of_part=True),
    Key("lora.rank", 0,
        "Rank of the factors beside the linear layers `targets`; 0: none. To train them and the "
        'head alone: trainable="lora|head".', most=2**16, public=True),
    Key("lora.targets", "", "Regular expression for the names of layers.",
        public=True),
    Key("dataset.name", "digits", 'The data set; "folder" is your own, made by `bam data import`.',
        names=tuple(part_table.DATASETS), public=True),
    Key("dataset.source", "",
        '"parquet", "archive" (the official files), "tfds" or "sklearn"; "": recognised by the '
        "files in `path`.", public=True),
    Key("dataset.path", "", "Folder of its files, or a packed archive of CIFAR.", path=True),
    Key("dataset.num_classes", 0,
        'Number of classes of a "folder" whose files do not name them; 0: it is known.',
        least=0, most=2**20, public=True),
    Key("dataset.holdout", 0,
        "Training images set aside to evaluate the run, in place of the test images.",
        least=0, public=True),
    Key("dataset.groups", "",
        "The user of each training row: a column of the Parquet files, or a .npy file of ids. "
        '"": with a group_size, the users that `bam data import` recorded.', path=True),
    # A size for which the memory is too small has an error of its own, so this bound is loose.
    Key("dataset.group_size", 0,
        "Largest number of examples used of a user; 0: examples are protected, not users "
        "(docs/users.md).", most=2**62, public=True),
    Key("dataset.memory", "auto",
        '"device" holds the data on each device, "stream" reads each batch from the files (parquet '
        'and tfds), "auto" chooses "device" if there is room.'),
    Key("features.name", "",
        'A fixed map of images to features: "prior", "scattering" or "backbone"; "": none. It must '
        "never have seen the private data.",
        names=tuple(part_table.FEATURES), public=True),
    Key("features.cache", "", 'Folder that keeps computed features; "": beside the data.',
        path=True),
    Key("features.whiten", None,
        "Scattering: strength of the whitening by two public photographs.", kind=float,
        public=True, of_part=True),
    Key("features.mirror", None,
        "Scattering: average with the features of the mirror image.", kind=bool, public=True,
        of_part=True),
    Key("features.groups", None,
        "Scattering: groups of channels standardised within an image.", kind=int, public=True,
        of_part=True),
    Key("features.model", None, "Backbone: name of its network.", kind=str, public=True,
        of_part=True),
    Key("features.weights", None, "Backbone: safetensors file of its public weights.", kind=str,
        of_part=True),
    Key("features.size", None, "Backbone: side in pixels to which images are resized.", kind=int,
        public=True, of_part=True),
    Key("features.mean", None,
        "Backbone: mean of the pixels that its weights expect. Not set: mean, size and std are as "
        "in the file beside the weights, else 0.5, 224 and 0.5.", kind=object,
        public=True, of_part=True),
    Key("features.std", None, "Backbone: standard deviation of the pixels, as `features.mean`.",
        kind=object, public=True, of_part=True),
    Key("augment.views", 1,
        "K, the views of each example; their losses are averaged before clipping.", most=2**12,
        public=True),
    Key("augment.shift", 0, "Largest shift of a view in pixels.", most=2**12, public=True),
    Key("augment.flip", "none", '"horizontal" mirrors a view with probability 1/2.', public=True),
    Key("augment.mixtures", 0,
        "Number of added mixtures of two views of one example (DP-MixSelf).", most=2**12,
        public=True),
    Key("input_clip_norm", 0.0, "Scale every input to at most this L2 norm; 0: leave it.", least=0,
        public=True),
    Key("optimizer.name", "nadam", "The update of the weights from the private gradient.",
        names=tuple(part_table.OPTIMIZERS), public=True),
    Key("optimizer.learning_rate", 2e-3, "Learning rate; with a schedule, the largest.",
        public=True),
    Key("optimizer.schedule", "constant",
        'How the rate falls: "constant" (not at all), "cosine" or "linear" (to 0).',
        names=("constant", "cosine", "linear"), public=True),
    Key("optimizer.warmup_steps", 0, "Steps in which the rate first rises to the largest.", least=0,
        public=True),
    Key("ema_decay", 0.0,
        "Decay of the average of weights that is evaluated and released; 0: no average.",
        public=True),
    Key("eval.every", 0, "Steps between evaluations; 0: only at the end.", least=0,
        public=True, changeable=True),
    Key("checkpoint.every", 100,
        "Steps between checkpoints; 0: only when the run is stopped.", least=0,
        public=True, changeable=True),
    Key("diagnostics.every", 0,
        "Steps between measurements of clipping bias on training examples, NOT PRIVATE; 0: never.",
        least=0, public=True, changeable=True),
    Key("diagnostics.num_examples", 512, "Training examples of one such measurement.", least=1,
        public=True, changeable=True),
    Key("dry_run", False, "Print model, privacy plan and cost, then stop.", changeable=True),
)

# Keys of a config with certain parts, or of a trial of a private search: no other config has them.
MORE = (
    Key("model.depth", None, "Number of layers of a network.", kind=int, most=2**16),
    Key("mechanism.trials_mean", None, "Mean number of trials.", kind=float, public=True),
    Key("mechanism.trials_shape", None, "η of the distribution of that number.", kind=float,
        unbounded=True, public=True),
    Key("mechanism.score_noise_multiplier", None,
        "Standard deviation of the noise on a score, in images.", kind=float, public=True),
)
# fmt: on
BY_NAME = {key.name: key for key in (*KEYS, *MORE)}
# A resumed run may differ in these; `rundir` refuses a difference in any other key.
CHANGEABLE = frozenset(key.name for key in KEYS if key.changeable)
PATHS = tuple(key.name for key in KEYS if key.path)


def in_section(section: str) -> tuple[str, ...]:
    """Returns the keys that a section has with every part, without the section's name."""
    return tuple(x.name.rpartition(".")[2] for x in KEYS if x.name.rpartition(".")[0] == section)


def own(section: str) -> tuple[str, ...]:
    """Returns the keys of a section, as `learning_rate`, that mean the same for all its parts."""
    return tuple(x for x in in_section(section) if not BY_NAME[f"{section}.{x}"].of_part)


def options(section: str) -> dict[str, Key]:
    """Returns the options of parts that a section has with every part, set or not.

    They are the keys with `of_part`.
    """
    rows = {x: BY_NAME[f"{section}.{x}"] for x in in_section(section)}
    return {x: key for x, key in rows.items() if key.of_part}
