"""Figures that judge outputs on test data, each with a 95 % interval by the bootstrap.

Images are drawn with replacement, as many as there are, 1,000 times from a public seed; the interval
is from the 2.5th to the 97.5th percentile of the figure in those draws where it is defined. All
figures are made of sums over images, so a draw is a row of weights. For the area under the ROC curve
these are of the share of the other class that an image is ranked right against.

Intervals of few images are too narrow: a recall of 1 has one of no width.

Source: Efron 1979, "Bootstrap Methods"; DeLong, DeLong & Clarke-Pearson 1988.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, special

from bam.files import JsonObject

NUM_DRAWS, SEED, TOGETHER = 1000, 0, 20
NUM_BINS = 15  # of the calibration error: of equal width
MOST_NAMED = 100  # classes, or labels, that have figures of their own
LOWER_IS_BETTER = {"brier_score", "calibration_error", "loss", "mean_absolute_error"}


class Figures(NamedTuple):
    """The figures of a loss.

    Attributes:
      names: of the figures; one of a single class or label has `/` and its name behind.
      of: `(outputs, labels, names of classes or labels) ->` entries of `summary.json`: `figures`,
        name -> value and ends of its interval, None where it is undefined; of classes `confusion`,
        too: rows of true classes with the number of images by predicted class.
    """

    names: tuple[str, ...]
    of: Callable[[np.ndarray, np.ndarray, Sequence[str]], JsonObject]


@np.errstate(divide="ignore", invalid="ignore")
def _of_classes(outputs: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> JsonObject:
    """Of finite outputs `[N, classes]` and labels `[N]`; the Brier score of two is of one."""
    num, num_classes = outputs.shape
    outputs = outputs.astype(np.float64)
    log_p = special.log_softmax(outputs, axis=1)
    # Of two classes the same order, also where probabilities round to 1.
    scores = outputs - outputs[:, ::-1] if num_classes == 2 else log_p
    own, others, present = np.empty(num), np.zeros(num), np.unique(labels)
    for k in present:
        is_class = labels == k
        place = _placements(scores[:, k], is_class)
        own[is_class] = place[is_class]
        centred = place[~is_class] - place[is_class].mean()
        others[~is_class] += centred / len(centred) / len(present)
    predicted = outputs.argmax(axis=1)
    right, confidence = predicted == labels, np.exp(log_p.max(axis=1))
    brier = np.exp(2 * log_p).sum(axis=1) - 2 * np.exp(log_p[np.arange(num), labels]) + 1
    brier /= 2 if num_classes == 2 else 1
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    # Sums by class, by bin, and of all: each image is in one of the first and one of the second.
    ends = num_classes * np.arange(4)
    columns = [labels + ends[0], labels + ends[1], labels + ends[2], bins + ends[3]]
    columns += [np.full(num, ends[3] + NUM_BINS + i) for i in range(2)]
    values = [np.ones(num), right, own, confidence - right, brier, others]
    flat = (np.stack(x, axis=1).ravel() for x in (values, columns))
    starts = len(columns) * np.arange(num + 1)
    sums = _sums(sparse.csr_array((*flat, starts), shape=(num, ends[3] + NUM_BINS + 2)))
    count, num_right, own, gaps, (brier, others) = np.split(sums.T, [*ends[1:], ends[3] + NUM_BINS])
    figures = _by_class(count.T, num_right.T, names) | {
        "auroc": np.clip(_mean((own / count).T) + others, 0, 1),
        "calibration_error": np.abs(gaps).sum(axis=0) / num,
        "brier_score": brier / num,
    }
    return _entries(figures, _confusion(labels, predicted, num_classes))


@np.errstate(divide="ignore", invalid="ignore")
def _of_labels(outputs: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> JsonObject:
    """Of outputs and labels `[N, labels]`, 0 or 1; a label is said to be there of outputs > 0."""
    yes = labels > 0
    right = (outputs > 0) == yes
    place = np.stack([_placements(*x) for x in zip(outputs.T, yes.T, strict=True)], axis=1)
    columns = [x * side for x in (np.ones_like(place), right, place) for side in (yes, ~yes)]
    ones, zeros, *sums = np.split(_sums(np.concatenate(columns, axis=1)), 6, axis=1)
    recall, specificity, above, below = (x / y for x, y in zip(sums, [ones, zeros] * 2))
    area = np.clip(above + below - above[0], 0, 1)
    balanced = (recall + specificity) / 2
    figures = {"accuracy": (sums[0] + sums[1]).sum(axis=1) / labels.size}
    for name, each in (("balanced_accuracy", balanced), ("auroc", area)):
        figures |= {name: _mean(each)} | _named(name, each, names)
    return _entries(figures)


@np.errstate(divide="ignore", invalid="ignore")
def _of_numbers(outputs: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> JsonObject:
    """Of outputs `[N, targets]` and as many numbers; R² is the mean of those of the targets."""
    outputs = outputs.astype(np.float64)
    targets = labels.reshape(outputs.shape).astype(np.float64)
    errors, shifted = outputs - targets, targets - targets[0]  # equal targets are exactly 0
    columns = np.concatenate([np.abs(errors), errors**2, shifted, shifted**2], axis=1)
    absolute, squared, first, second = np.split(_sums(columns) / len(targets), 4, axis=1)
    variance = second - first**2
    r2 = 1 - squared / np.where(variance > 1e-12 * second, variance, np.nan)
    return _entries({"mean_absolute_error": absolute.mean(axis=1), "r2": _mean(r2)})


@np.errstate(divide="ignore", invalid="ignore")
def _of_pixels(outputs: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> JsonObject:
    """Of outputs `[N, h, w, classes]` and labels `[N, h, w]`; it is images that are drawn."""
    num, num_classes = len(labels), outputs.shape[-1]
    predicted, labels = (x.reshape(num, -1) for x in (outputs.argmax(axis=-1), labels))
    image = num_classes * np.arange(num)[:, None]

    def counts(classes: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        flat = np.bincount((image + classes).ravel(), weights, minlength=num * num_classes)
        return flat.reshape(num, num_classes)

    is_right = (predicted == labels).ravel()
    columns = [counts(labels), counts(labels, is_right), counts(predicted)]
    count, right, said = np.split(_sums(np.concatenate(columns, axis=1)), 3, axis=1)
    figures = _by_class(count, right, names) | {"mean_iou": _mean(right / (count + said - right))}
    return _entries(figures, _confusion(labels, predicted, num_classes))


CLASSES = Figures(
    ("accuracy", "balanced_accuracy", "recall", "auroc", "calibration_error", "brier_score"),
    _of_classes,
)
LABELS = Figures(("accuracy", "balanced_accuracy", "auroc"), _of_labels)
NUMBERS = Figures(("mean_absolute_error", "r2"), _of_numbers)
PIXELS = Figures(("accuracy", "balanced_accuracy", "recall", "mean_iou"), _of_pixels)


def _placements(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """The share of the other side that each is ranked right against; ties count half."""
    sides = np.sort(scores[positive]), np.sort(scores[~positive])
    place = np.empty(len(scores))
    for side, other in ((positive, sides[1]), (~positive, sides[0])):
        below = sum(np.searchsorted(other, scores[side], end) for end in ("left", "right"))
        place[side] = below / (2 * len(other)) if len(other) else np.nan
    place[~positive] = 1 - place[~positive]
    return place


def _sums(columns: Any) -> np.ndarray:
    """Sums over images, `[1 + NUM_DRAWS, columns]`: of the images themselves, then of draws."""
    num, generator = columns.shape[0], np.random.default_rng(SEED)
    draw = num * np.arange(TOGETHER)[:, None]
    sums = [np.ones((1, num)) @ columns]
    for _ in range(NUM_DRAWS // TOGETHER):
        drawn = draw + generator.integers(num, size=(TOGETHER, num))
        weights = np.bincount(drawn.ravel(), minlength=TOGETHER * num)
        sums.append(weights.reshape(TOGETHER, num).astype(np.float64) @ columns)
    return np.concatenate(sums)


def _by_class(count: np.ndarray, right: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    recall = right / count
    share = right.sum(axis=1) / count.sum(axis=1)
    figures = {"accuracy": share, "balanced_accuracy": _mean(recall)}
    return figures | _named("recall", recall, names)


def _named(figure: str, each: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """A figure of each class or label, by name or else by number, if they are not too many."""
    num = each.shape[1]
    if num > MOST_NAMED:
        return {}
    distinct = names if len(set(names)) == num else range(num)
    return {f"{figure}/{name}": x for name, x in zip(distinct, each.T, strict=True)}


def _confusion(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> Any:
    if num_classes > MOST_NAMED:
        return None
    cells = np.bincount((labels * num_classes + predicted).ravel(), minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).tolist()


def _mean(each: np.ndarray) -> np.ndarray:
    """Of each row, over what is defined."""
    defined = np.isfinite(each)
    return np.where(defined, each, 0).sum(axis=1) / defined.sum(axis=1)


def _entries(figures: Mapping[str, np.ndarray], confusion: Any = None) -> JsonObject:
    named = {name: _interval(values) for name, values in figures.items()}
    return {"figures": named} | ({"confusion": confusion} if confusion else {})


def _interval(values: np.ndarray) -> list[float] | None:
    """The first, with the interval of the others; None if the first is undefined."""
    if not np.isfinite(values[0]):
        return None
    drawn = values[1:][np.isfinite(values[1:])]
    ends = np.percentile(drawn, (2.5, 97.5)) if drawn.size else values[[0, 0]]
    return [float(values[0]), *ends.tolist()]
