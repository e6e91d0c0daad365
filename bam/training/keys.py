"""The table of config keys, with all that is known of each: imported without JAX.

`bam train --help` and docs/config.md show them; `bam.training.config` makes configs of them.
"""

import json
from typing import NamedTuple

MOST_OF_ANY = 2**31 - 1  # the most that an integer key can be; a seed has any length


class Key(NamedTuple):
    """A key of a config.

    Attributes:
      name: `KEY` or `SECTION.KEY`.
      default: None where it is not set.
      help: what it means, for whoever reads docs/config.md or `bam train --help`.
      kind: the type of its values, where that is not the default's.
      least, most: bounds of its values, if it is set.
      unbounded: whether a number may be infinite: its part's own check says what it can be.
      names: what is ours, of a key that names a part; a test compares them with the tables.
      public: whether a release repeats it.
      changeable: whether it may differ when a run is resumed: it says when a run is looked at and
        saved, never what is computed.
      path: whether it says where a machine has its files.
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

    def __str__(self) -> str:
        """A line for people, as JSON has the default."""
        default = "not set" if self.default is None else json.dumps(self.default)
        return f"{self.name} ({default}): {self.help}"


# `clip`, `method`, `model`, `optimizer`, `dataset`, `features` and `loss` can also name your own
# MODULE:FUNCTION, see parts.py. For the largest group_size there is no memory, which says so.
# fmt: off
KEYS = (
    Key("seed", None,
        "Not set: a run to release, with secret randomness of the operating system. Set: a run "
        "that can be repeated to the bit, whose noise whoever knows the seed can remove.",
        kind=int, least=0),
    Key("epsilon", 3.0,
        "ε, the budget of the whole run. The noise follows from it before training starts.",
        unbounded=True, public=True),
    Key("delta", 1e-5, "δ of (ε, δ)-differential privacy.", public=True),
    Key("accountant", "pld", 'What computes ε: "pld", which is tight, or "rdp".', public=True),
    Key("clip_norm", 1.0, "C, the longest that one example's gradient can be in the sum.",
        public=True),
    Key("clip_norm_from", "",
        'Where C came from, as `bam clip_norm` prints it; "": chosen by hand. PRIVACY.md and '
        "releases repeat it.", public=True),
    Key("clip.name", "l2",
        'How an example\'s gradient is bounded: "l2" scales down what is longer than C.',
        names=("l2", "normalize", "per_layer"), public=True),
    Key("expected_batch_size", 256,
        "l, the mean number of examples in a batch; sums are divided by it.", least=1, public=True),
    Key("mechanism.name", "poisson",
        'How batches are drawn, and so what ε a noise earns: "poisson" with q = l/N, "full_batch" '
        'or "random_allocation" (see bam/privacy/mechanisms.py). "banded" also correlates the '
        'noise of so many steps.',
        names=("poisson", "banded", "full_batch", "random_allocation", "best_of_trials"),
        public=True),
    Key("mechanism.bands", None,
        'Steps over which "banded" correlates the noise.', kind=int, most=2**16, public=True),
    Key("num_examples", None,
        "N as a public constant: at least the number of training examples (users, where those are "
        "protected), rounded, or a bound that was known before. Then ε is for adding or removing "
        "one. Not set: N is counted, and ε is for one that is replaced by nothing, its place left "
        "empty; see docs/privacy.md.", kind=int, least=1, public=True),
    Key("num_epochs", 10,
        "Length of the run in epochs of N // l steps, unless `num_steps` is positive.", least=1,
        public=True),
    Key("num_steps", 0, "Length of the run in steps; 0: `num_epochs` decides.", least=0,
        public=True),
    Key("spare_steps", 0,
        "Steps beyond these that the noise is planned for. Without a seed a step that a crash "
        "loses counts, and is made up for out of these; without any left the run ends earlier by "
        "as many.", least=0, public=True),
    Key("microbatch_size", 32,
        "Examples whose gradients are held in memory at once. `bam train --config.dry_run --tune` "
        "times which is fastest on a device.", kind=object),
    Key("convolution", "",
        'How convolutions are computed: "matmul", "xla" or "tpu"; "": by the platform.'),
    Key("precision", "float32",
        "Of the network's arithmetic: \"float32\", \"tensorfloat32\" or \"bfloat16\". Norms, "
        "clipping, sums and noise are float32 in each.", public=True),
    Key("method.name", "dp_sgd",
        "The method, which `--config=NAME:METHOD` sets; its options are keys beside it.",
        names=("non_private", "dp_sgd", "dp_sat", "bam_sam", "bam_exact"), public=True),
    Key("model.name", "convnet", "The network: a row of `bam.models.MODELS`.",
        names=("convnet", "deep_residual", "lenet5", "linear", "resnet18", "resnet50",
               "resnet9", "tanh_cnn", "vit_ti16", "vit_s16", "vit_b16", "wide_resnet",
               "wide_resnet_bam"), public=True),
    Key("model.width", 16,
        "Channels of its first layer, or the widening factor of a wide ResNet.", most=2**16,
        public=True),
    Key("init_from", "",
        'Weights to begin from: a safetensors file, or a folder that `bam export` wrote; "": '
        "random. Nobody but you can say that they were made without the private data: only then "
        "are they free.", path=True),
    Key("init_mean", None,
        "Mean of the pixels, in [0, 1], that these weights expect, one number or three. Not set: "
        "as the file beside them says (docs/finetuning.md), or else the data set's.", kind=object,
        public=True),
    Key("init_std", None, "Standard deviation of the same.", kind=object, public=True),
    Key("init_fresh", "",
        'Regular expression, searched in names like "Dense_0/kernel": begins at random.',
        public=True),
    Key("trainable", "", 'Regular expression, searched likewise: what is trained; "": everything.',
        public=True),
    Key("loss.name", "cross_entropy",
        '"cross_entropy", "binary" (several labels of an image), "squared_error" or "per_pixel" '
        "(bam/models/losses.py), or your own MODULE:FUNCTION. `weights` of the classes are "
        "public.",
        names=("binary", "cross_entropy", "per_pixel", "squared_error"), public=True),
    Key("loss.weights", None, "Public weights of the classes.", kind=tuple, public=True),
    Key("lora.rank", 0,
        "Low-rank factors beside the linear layers whose names match `targets` "
        "(bam/models/lora.py); 0: none. To train them and the head alone: "
        'trainable="lora|head".', most=2**16, public=True),
    Key("lora.targets", "", "Regular expression, searched in the names of layers.", public=True),
    Key("dataset.name", "digits", 'The data set; "folder" is your own, made by `bam data import`.',
        names=("digits", "breast_cancer", "mnist", "cifar10", "cifar100", "imagenet32",
               "folder"), public=True),
    Key("dataset.source", "",
        "\"sklearn\", \"tfds\", \"parquet\", \"archive\", or \"\" for the data set's default.",
        public=True),
    Key("dataset.path", "", "Folder of its files.", path=True),
    Key("dataset.num_classes", 0,
        'Of a "folder" whose files do not name the classes; 0: as named, or as known.',
        least=0, most=2**20, public=True),
    Key("dataset.holdout", 0,
        "Training images set aside, to choose hyper-parameters on; evaluation reads them then.",
        least=0, public=True),
    Key("dataset.groups", "",
        "Ids of the users that training rows belong to, for privacy of users and not of single "
        "examples: a column of the Parquet files, or a .npy file with an integer for each row; "
        '"": with a group_size those that `bam data import` was told of.', path=True),
    Key("dataset.group_size", 0,
        "The most examples used of a user. See docs/users.md.", most=2**62, public=True),
    Key("dataset.memory", "auto",
        "\"device\" holds the data in each device's memory, \"stream\" reads each batch from the "
        'files (sources parquet and tfds), "auto" does the first if there is room.'),
    Key("features.name", "",
        "Features of the images instead of their pixels, by a fixed map that never saw the "
        'private data: "" (none), "prior", "scattering", "backbone", or your own MODULE:FUNCTION. '
        'They are kept in the folder `cache`; "": beside the data. `whiten`, `mirror` and `groups` '
        "are scattering's, the others a backbone's (bam/features/backbone.py). What is not set is "
        "not passed to a map.",
        names=("backbone", "prior", "scattering"), public=True),
    Key("features.cache", "", 'Folder that keeps computed features; "": beside the data.',
        path=True),
    Key("features.whiten", None,
        "Scattering: strength of the whitening by two public photographs.", kind=float,
        public=True),
    Key("features.mirror", None,
        "Scattering: average with the features of the mirror image.", kind=bool, public=True),
    Key("features.groups", None,
        "Scattering: groups of channels that are standardised within an image.", kind=int,
        public=True),
    Key("features.model", None, "Backbone: its network.", kind=str, public=True),
    Key("features.weights", None, "Backbone: safetensors file of its public weights.", kind=str),
    Key("features.size", None,
        "Backbone: images are resized to squares of so many pixels.", kind=int, public=True),
    Key("features.mean", None,
        "Backbone: mean of the pixels that its weights expect, one number or three. Not set, it, "
        "the size and the deviation are as for init_mean, or else 0.5, 224 and 0.5.", kind=object,
        public=True),
    Key("features.std", None, "Backbone: standard deviation of the same.", kind=object,
        public=True),
    Key("augment.views", 1,
        "K, the views of each example. Their losses are averaged before clipping.", most=2**12,
        public=True),
    Key("augment.shift", 0,
        "Most pixels that a view is shifted by, in each direction.", most=2**12, public=True),
    Key("augment.flip", "none", '"horizontal" mirrors a view with probability 1/2.', public=True),
    Key("augment.mixtures", 0,
        "Mixtures of two views of one example that are added (DP-MixSelf).", most=2**12,
        public=True),
    Key("input_clip_norm", 0.0, "Scale every input to at most this L2 norm; 0: leave it.", least=0,
        public=True),
    Key("optimizer.name", "nadam", "What moves the weights by the noisy gradient.",
        names=("nadam", "adam", "sgd"), public=True),
    Key("optimizer.learning_rate", 2e-3, "Size of its steps; with a schedule, of the largest.",
        public=True),
    Key("optimizer.schedule", "constant",
        'How the rate falls over the run: "constant" (not at all), "cosine" or "linear" (to 0).',
        names=("constant", "cosine", "linear"), public=True),
    Key("optimizer.warmup_steps", 0, "Steps in which the rate first rises to that.", least=0,
        public=True),
    Key("ema_decay", 0.0,
        "Decay of the moving average of weights that is evaluated; 0: no average.", public=True),
    Key("eval.every", 0, "Steps between evaluations; 0: only at the end.", least=0,
        public=True, changeable=True),
    Key("checkpoint.every", 100,
        "Steps between checkpoints; 0: only when the run is stopped.", least=0,
        public=True, changeable=True),
    Key("diagnostics.every", 0,
        "Steps between measurements of clipping bias on some training examples; 0: never. NOT "
        "PRIVATE.", least=0, public=True, changeable=True),
    Key("diagnostics.num_examples", 512, "Training examples that are measured.", least=1,
        public=True, changeable=True),
    Key("dry_run", False, "Print model, privacy plan and cost, then stop.", changeable=True),
)

# Keys that a config has with some parts alone, or in a trial of a private search.
MORE = (
    Key("model.depth", None, "Layers of a network.", kind=int, most=2**16),
    Key("mechanism.trials_mean", None, "Trials on average.", kind=float, public=True),
    Key("mechanism.trials_shape", None, "η of their number.", kind=float, unbounded=True,
        public=True),
    Key("mechanism.score_noise_multiplier", None, "Noise on a score, in images.", kind=float,
        public=True),
)
# fmt: on
BY_NAME = {key.name: key for key in (*KEYS, *MORE)}
CHANGEABLE = frozenset(key.name for key in KEYS if key.changeable)
PATHS = tuple(key.name for key in KEYS if key.path)


def in_section(section: str) -> tuple[str, ...]:
    """The names, within it, of the keys that a section has whatever it names."""
    return tuple(x.name.rpartition(".")[2] for x in KEYS if x.name.rpartition(".")[0] == section)
