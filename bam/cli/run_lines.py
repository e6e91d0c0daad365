"""The lines about a run that commands print: its plan, its rows of metrics, its last figures."""

from collections.abc import Iterable

import jax

from bam.data import datasets, users
from bam.extras import needs
from bam.models.vision_transformer import PATCH
from bam.privacy.rounding import round_up
from bam.text import short_list
from bam.training import devices, loop, parts, rundir, schedules

with needs("train"):
    from ml_collections import ConfigDict


def describe(trainer: loop.Trainer) -> str:
    """The plan in a few lines: the model, its devices, the guarantee and its conditions."""
    config, features = trainer.config, trainer.config.features.name
    frozen = f" ({trainer.num_frozen:,} more are frozen)" if trainer.num_frozen else ""
    lines = [
        f"{config.method.name} on {trainer.listing.name}: {config.model.name}, "
        f"{trainer.num_params:,} parameters{frozen}, on {devices_of(trainer)}, "
        f"{config.microbatch_size} at a time",
        describe_plan(trainer),
    ]
    if trainer.plan.private and trainer.plan.unit == "example":
        lines += unprotected_users(config.dataset)
    condition = "ε holds if {} made without any of these examples"
    if ":" in features:
        lines.append(f"features by {features}: {condition.format('it was')}")
    elif features:
        lines.append(f"features by {features}, a fixed map of each image: they cost no privacy")
    if config.init_from:
        lines.append(f"weights of {config.init_from}: {condition.format('they were')}")
    return "\n".join(lines + preprocessing(trainer))


def describe_plan(trainer: loop.Trainer) -> str:
    """The plan with the clip and the schedule of the learning rate, in a few lines of text."""
    words = schedules.in_words(parts.schedule_of(trainer.config.optimizer, trainer.plan))
    name = trainer.config.clip.name
    clip = "clip norm" if name == "l2" else f"clip {name} of norm"
    clip += f" {trainer.clip_norm:.4g}"
    if trainer.sensitivity != trainer.clip_norm:
        clip += f", sensitivity {round_up(trainer.sensitivity, '.4g')}"
    plan = trainer.plan.describe(clip)
    return f"{plan}\nlearning rate: {words}" if words else plan


def unprotected_users(section: ConfigDict) -> list[str]:
    """Returns a line that ε protects one image, for a run on an imported folder, or else []."""
    if section.name != "folder":
        return []
    column = users.column(datasets.folder_of(section.name, section.source, section.path))
    remedy = ": these data name users; --config.dataset.group_size=K protects all images of each"
    return [f"ε IS FOR ONE IMAGE, NOT FOR ONE PERSON{remedy if column else ''} (docs/users.md)"]


def preprocessing(trainer: loop.Trainer) -> list[str]:
    """Returns lines on what a run uses of its weights' preprocessing, or [] without weights."""
    expected, config = trainer.normalisation, trainer.config
    if expected is None:
        return []
    if config.features.name:  # a backbone resizes the images, too
        return [f"images are normalised for these weights: {expected}"]
    sides = trainer.listing.train.images.shape[-3:-1]
    is_vit = ":" not in config.model.name and config.model.name.startswith("vit_")
    size = expected.size or (is_vit and trainer.weights.size) or sides
    unused = [*([times(size)] if size != sides else []), *filter(None, [expected.interpolation])]
    used = expected._replace(size=None, interpolation="")
    line = f"images are normalised for these weights: {used}"
    if unused:
        line += f"; not used, because images stay as they are: {', '.join(unused)}"
    if size == sides:
        return [line]
    grid = f", a grid of {times([x // PATCH for x in sides])} patches" if is_vit else ""
    remedy = (
        f"import them again with --size={'x'.join(map(str, size))}"
        if config.dataset.name == "folder"
        else "--config.features.name=backbone resizes images"
    )
    differ = f"these weights expect images of {times(size)}, and yours are {times(sides)}{grid}"
    return [line, f"warning: {differ}: {remedy} (docs/finetuning.md)"]


def times(sides: Iterable[int]) -> str:
    """For example "224 × 192"."""
    return " × ".join(map(str, sides))


def devices_of(trainer: loop.Trainer) -> str:
    """For example "2 × cpu" or "16 × NVIDIA H100 80GB HBM3 in 2 processes"."""
    many = f"{trainer.num_devices} × " if trainer.num_devices > 1 else ""
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{many}{devices.name()}{processes}"


def test_figures(row: dict) -> list[str]:
    """Returns the test accuracy and a loss's other figures, or the test loss if it has none."""
    accuracy = row.get("test_accuracy")
    texts = [] if accuracy is None else [f"test accuracy {accuracy:.2%}"]
    if diverged := rundir.divergence(row):
        return [*texts, diverged]
    figures = row.get("figures") or {}
    if balanced := figures.get("balanced_accuracy"):
        texts.append(f"balanced accuracy {balanced[0]:.2%}{_num_averaged(figures)}")
    names = [x for x in row if x.startswith("test_") and "/" not in x]
    names = [x for x in names if x not in ("test_accuracy", "test_loss")]
    if "test_loss" in row and not (names or texts):
        names = ["test_loss"]
    return texts + [f"{name.replace('_', ' ')} {row[name]:.4f}" for name in names]


def _num_averaged(figures: dict) -> str:
    """The number of classes or labels in a mean that leaves some out for lack of test images."""
    by_class = "recall/" if any(x.startswith("recall/") for x in figures) else "balanced_accuracy/"
    each = {x.removeprefix(by_class): y for x, y in figures.items() if x.startswith(by_class)}
    without = [name for name, figure in each.items() if figure is None]
    if not without:
        return ""
    unit = "classes; no test image" if by_class == "recall/" else "labels; all or no test images"
    return f" (of {len(each) - len(without)} of {len(each)} {unit}: {short_list(without, 3)})"


def describe_row(row: dict) -> str:
    """One line of progress."""
    spent = (
        "not private" if row["epsilon"] is None else f"epsilon {round_up(row['epsilon'], '.3f')}"
    )
    parts = [f"step {row['step']:>6}", spent]
    parts += test_figures(row)
    clipped, low, high = (row.get(f"private/share_clipped{x}") for x in ("", "_low", "_high"))
    if clipped is not None and low is not None and high is not None:
        parts.append(f"clipped {clipped:.0%} ({low:.0%} to {high:.0%})")
    bias, relative = (row.get(f"not_private/{x}") for x in ("bias_norm", "relative_bias"))
    if bias is not None and relative is not None:
        parts.append(f"bias {bias:.3f} ({relative:.0%} of the gradient; NOT PRIVATE)")
    parts.append(f"{row['seconds']:.1f} s")
    return "  ".join(parts)
