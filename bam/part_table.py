"""The table of parts: every part that a config can name, in one row each.

Nothing here imports JAX, so the help that prints the names is at once. A row's maker is imported
when the part is chosen. To add a part: write its function, and add a row here.

A section's `name` is a row's name or your own "MODULE:FUNCTION", but for `mechanism`. The section's
other keys are passed to the function by name, after bam's arguments. These are public, so the
result needs no accounting. A map of images sees each image alone, and must not have been made from
private images (`bam.features.extraction`).

================ ================================================= ============================
section          your function                                     returns
================ ================================================= ============================
`method`         `(loss_fn, **options)`                            `bam.Oracle`
`clip`           `(plan, clip_norm, **options)`                    `bam.BoundedTransformation`
`optimizer`      `(plan, clip_norm, sensitivity, **options)`       optax's, or `EvaluatedOptimizer`
`model`          `(num_classes, **options)`                        a Flax module, or functions
`dataset`        `(**options)`, those that are set                 `bam.data.datasets.Dataset`
`features`       `(**options)`, those that are set                 a map of images, row by row
`loss`           `(**options)`, those that are set                 `bam.models.losses.Loss`
================ ================================================= ============================

`plan` is the run's `bam.PrivacyPlan`: N, l, q, T and σ. `clip_norm` is C, and `sensitivity` is the
clip's S; without privacy, C is `inf` and S is 0. `learning_rate` is a number or, with a schedule, a
function of the step, as in optax.

Functions of bam's own differ in three sections. Clips and optimizers get C alone, because none
reads the plan or S. Data sets are read by one function, which knows them by their names.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bam import named


class Part(NamedTuple):
    """A row of the table.

    Attributes:
      maker: MODULE:FUNCTION, a function of bam's arguments and of options by name.
      options: its options whose defaults are the function's.
      words: the sentence on it in PRIVACY.md; "" for none but the user's declaration.
      defaults: its options with defaults of their own, which every config with the part has.
      label: its name in tables and legends.
      strength: the option that is the strength of a method's ascent; "" without an ascent.
      symbol: the letter of the strength.
    """

    maker: str
    options: tuple[str, ...] = ()
    words: str = ""
    defaults: Mapping[str, int | float | str] = {}
    label: str = ""
    strength: str = ""
    symbol: str = ""

    @property
    def make(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = named.import_function("part", self.maker)
        return function

    @property
    def public_options(self) -> tuple[str, ...]:
        """The options that a release repeats.

        A config's section can have no others, beside the keys in bam's table of keys.
        """
        return (*self.options, *self.defaults)


class Section(NamedTuple):
    """A section of a config that names a part.

    Attributes:
      rows: bam's parts, by name.
      num_given: the number of arguments of a user's function before its options; None if the
        section takes no user's function.
      returned: the names that a part must have.
    """

    rows: Mapping[str, Part]
    num_given: int | None
    returned: tuple[str, ...] = ()


# These make BAM's ascent cheaper. Its gradient is over the first `ascent_views` views (0: all), and
# it moves the parameters whose path matches `ascent_params` ("": all), for example "GroupNorm".
ASCENT: dict[str, int | float | str] = {"ascent_views": 0, "ascent_params": ""}

METHODS = {
    # The oracle of DP-SGD, which is then neither clipped nor noised.
    "non_private": Part("bam.core.oracles:dp_sgd", label="non-private"),
    "dp_sgd": Part("bam.core.oracles:dp_sgd", label="DP-SGD"),
    "dp_sat": Part(
        "bam.core.oracles:dp_sat",
        defaults={"radius": 0.05},
        label="DP-SAT",
        strength="radius",
        symbol="ρ",
    ),
    "bam_sam": Part(
        "bam.core.oracles:bam_sam",
        defaults={"radius": 0.05, "mix": 1.0, **ASCENT},
        label="BAM (SAM)",
        strength="radius",
        symbol="λ",
    ),
    "bam_exact": Part(
        "bam.core.oracles:bam_exact",
        defaults={"penalty": 0.05, **ASCENT},
        label="BAM (exact)",
        strength="penalty",
        symbol="λ",
    ),
}

# Without words, all that PRIVACY.md says is that the norm of a clipped gradient is at most S.
CLIPS = {
    "l2": Part(
        "bam.core.clipping:clip_by_l2_norm", ("slack",), "scaled down to an L2 norm of at most C"
    ),
    "normalize": Part(
        "bam.core.clipping:normalize", ("gamma",), "scaled, up or down, to an L2 norm of at most C"
    ),
    "per_layer": Part(
        "bam.core.clipping:clip_per_layer",
        words="scaled down layer by layer, all together to an L2 norm of at most C",
    ),
}

BEST_OF_TRIALS = "best_of_trials"  # its ε covers a whole search, see `bam.privacy.selection`
MECHANISMS = {
    "poisson": Part("bam.privacy.mechanisms:poisson"),
    "banded": Part("bam.privacy.mechanisms:banded"),
    "full_batch": Part("bam.privacy.mechanisms:full_batch"),
    "random_allocation": Part("bam.privacy.random_allocation:random_allocation"),
    BEST_OF_TRIALS: Part(
        "bam.privacy.selection:best_of_trials",
        ("trials_mean", "trials_shape", "score_noise_multiplier"),
    ),
}

MODELS = {
    "convnet": Part("bam.models.small:ConvNet"),
    "deep_residual": Part("bam.models.small:DeepResidual", ("depth",)),
    "lenet5": Part("bam.models.small:LeNet5"),
    "linear": Part("bam.models.small:Linear"),
    "resnet18": Part("bam.models.resnet:ResNet", ("bottleneck",)),
    "resnet50": Part("bam.models.resnet:resnet50", ("bottleneck",)),
    "resnet9": Part(
        "bam.models.resnet9:ResNet9",
        ("scale_norm", "weight_standardisation", "norm_last", "symmetries"),
    ),
    "tanh_cnn": Part("bam.models.small:TanhCNN"),
    "vit_ti16": Part("bam.models.vision_transformer:vit_ti16", ("depth",)),
    "vit_s16": Part("bam.models.vision_transformer:vit_s16", ("depth",)),
    "vit_b16": Part("bam.models.vision_transformer:vit_b16", ("depth",)),
    "wide_resnet": Part(
        "bam.models.wide_resnet:WideResNet",
        ("depth", "weight_standardisation", "shortcut_norm_first"),
    ),
    "wide_resnet_bam": Part(
        "bam.models.wide_resnet:WideResNetBam", ("depth", "scale_norm", "weight_standardisation")
    ),
}

LOSSES = {
    "binary": Part("bam.models.losses:binary"),
    "cross_entropy": Part("bam.models.losses:cross_entropy"),
    "per_pixel": Part("bam.models.losses:per_pixel"),
    "squared_error": Part("bam.models.losses:squared_error"),
}

OPTIMIZERS = {
    "nadam": Part("bam.training.parts:nadam"),
    "adam": Part("bam.training.parts:adam"),
    "sgd": Part("bam.training.parts:sgd", ("momentum", "per_clip_norm")),
}

FEATURES = {
    # Without words: only the user knows where the weights came from, and declares it.
    "backbone": Part("bam.features.backbone:backbone", ("interpolation", "digest")),
    "prior": Part(
        "bam.features.prior:prior",
        ("digest",),
        "a fixed map of each image alone, learned from drawn images",
    ),
    "scattering": Part(
        "bam.features.scattering:scattering",
        words="a fixed map of each image alone, made without these data",
    ),
}

# Shapes, classes and sources are in `bam/data/catalogue.py`.
DATASETS = dict.fromkeys(
    ("digits", "breast_cancer", "mnist", "cifar10", "cifar100", "imagenet32", "folder"),
    Part("bam.data.datasets:load"),
)

SECTIONS = {
    "method": Section(METHODS, 1, ("ascend", "grad")),
    "clip": Section(CLIPS, 2, ("init", "update")),
    "mechanism": Section(MECHANISMS, None),
    "model": Section(MODELS, 1),  # `bam.models.as_functions` looks at the result
    "loss": Section(LOSSES, 0, ("of_output", "check")),
    "optimizer": Section(OPTIMIZERS, 3, ("init", "update")),
    "features": Section(FEATURES, 0, ("__call__",)),
    "dataset": Section(DATASETS, 0, ("name", "train", "test", "num_classes", "mean", "std")),
}
# The sections that take a user's function.
USERS_OWN = tuple(name for name, section in SECTIONS.items() if section.num_given is not None)


def row(section: str, name: object) -> Part | None:
    """Returns the row of one of bam's parts, or None for a part of the user's."""
    return SECTIONS[section].rows.get(str(name))  # in a stranger's record it may be a list
