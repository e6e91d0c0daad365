"""Figures of merit on test data, each with a 95 % interval by the bootstrap.

The images are drawn with replacement 1,000 times, from a public seed. If the users that they are of
are known, users are drawn, each with all its images, because images of one person are alike. An
interval reaches from the 2.5th to the 97.5th percentile of a figure over the draws for which it is
defined. For few images or users it is too narrow: the interval of a recall of 1 has zero width. All
figures are functions of sums over images, so a draw is a row of weights. For the area under the ROC
curve, an image contributes its placement: the share of the other class that it is ranked right
against (DeLong, DeLong & Clarke-Pearson 1988; of users Obuchowski 1997).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse, special

from bam.files import JsonObject

NUM_DRAWS, SEED = 1000, 0
TOGETHER = 20  # draws in memory at once
NUM_BINS = 15  # bins of equal width for the calibration error
MOST_NAMED = 100  # largest number of classes or labels with one figure each
LOWER_IS_BETTER = {"calibration_error", "log_loss", "loss", "mean_absolute_error"}


@np.errstate(divide="ignore", invalid="ignore")
def classification(
    outputs: np.ndarray, labels: np.ndarray, names: Sequence[str], users: np.ndarray | None = None
) -> JsonObject:
    """Returns the entries of `summary.json` for finite outputs `[N, classes]` and labels `[N]`.

    `figures` maps a name to its value and the ends of its interval, or to None if it is undefined.
    `intervals_draw` has the unit that a draw has copies of, image or user, and the number of units.
    `confusion` has a row for each true class: the number of images by predicted class. `users` has
    the id of each image's user.
    """
    num, num_classes = outputs.shape
    outputs = outputs.astype(np.float64)
    log_p = special.log_softmax(outputs, axis=1)
    # With two classes, differences keep the order even if probabilities round to 1.
    scores = outputs - outputs[:, ::-1] if num_classes == 2 else log_p
    positives, negatives, present = np.empty(num), np.zeros(num), np.unique(labels)
    for k in present:
        is_class = labels == k
        place = _placements(scores[:, k], is_class)
        positives[is_class] = place[is_class]
        # The mean placement is the area on both sides, so a centred one adds only its deviation.
        centred = place[~is_class] - place[is_class].mean()
        negatives[~is_class] += centred / len(centred) / len(present)
    predicted = outputs.argmax(axis=1)
    right, confidence = predicted == labels, np.exp(log_p.max(axis=1))
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    columns = [_one_per_row(x, labels, num_classes) for x in (np.ones(num), right, positives)]
    columns += [_one_per_row(confidence - right, bins, NUM_BINS), negatives[:, None]]
    columns += [-log_p[np.arange(num), labels][:, None]]
    ends = np.cumsum([x.shape[1] for x in columns])[:-1]
    sums = np.split(_sums(sparse.hstack(columns), users), ends, axis=1)
    count, num_right, positives, gaps, negatives, losses = sums
    recall, num_drawn = num_right / count, count.sum(axis=1)
    figures = {
        "accuracy": num_right.sum(axis=1) / num_drawn,
        "balanced_accuracy": _mean(recall),
        "auroc": np.clip(_mean(positives / count) + negatives[:, 0], 0, 1),
        "calibration_error": np.abs(gaps).sum(axis=1) / num_drawn,
        "log_loss": losses[:, 0] / num_drawn,
    }
    result = _entries(figures | _by_class("recall", recall, names), num, users)
    if num_classes <= MOST_NAMED:
        cells = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
        result["confusion"] = cells.reshape(num_classes, num_classes).tolist()
    return result


@np.errstate(divide="ignore", invalid="ignore")
def multilabel(
    outputs: np.ndarray, labels: np.ndarray, names: Sequence[str], users: np.ndarray | None = None
) -> JsonObject:
    """Returns entries for outputs `[N, labels]` and labels 0 or 1.

    An output > 0 predicts its label.
    """
    yes = labels > 0
    right = (outputs > 0) == yes
    place = np.stack([_placements(*x) for x in zip(outputs.T, yes.T, strict=True)], axis=1)
    columns = [x * side for x in (np.ones_like(place), right, place) for side in (yes, ~yes)]
    ones, zeros, *sums = np.split(_sums(np.concatenate(columns, axis=1), users), 6, axis=1)
    recall, specificity, above, below = map(np.divide, sums, [ones, zeros] * 2)
    area = np.clip(above + below - above[0], 0, 1)
    balanced = (recall + specificity) / 2
    figures = {"accuracy": (sums[0] + sums[1]).sum(axis=1) / (ones + zeros).sum(axis=1)}
    for name, each in (("balanced_accuracy", balanced), ("auroc", area)):
        figures |= {name: _mean(each)} | _by_class(name, each, names)
    return _entries(figures, len(labels), users)


@np.errstate(divide="ignore", invalid="ignore")
def regression(
    outputs: np.ndarray, labels: np.ndarray, names: Sequence[str], users: np.ndarray | None = None
) -> JsonObject:
    """Returns entries for outputs and labels `[N, targets]`.

    R² is the mean over targets.
    """
    outputs = outputs.astype(np.float64)
    targets = labels.reshape(outputs.shape).astype(np.float64)
    errors, shifted = outputs - targets, targets - targets[0]  # equal targets are exactly 0
    columns = np.concatenate([np.abs(errors), errors**2, shifted, shifted**2], axis=1)
    sums = _sums(np.concatenate([columns, np.ones((len(targets), 1))], axis=1), users)
    absolute, squared, first, second = np.split(sums[:, :-1] / sums[:, -1:], 4, axis=1)
    variance = second - first**2
    r2 = 1 - squared / np.where(variance > 1e-12 * second, variance, np.nan)
    figures = {"mean_absolute_error": absolute.mean(axis=1), "r2": _mean(r2)}
    return _entries(figures, len(targets), users)


BOTH = ["accuracy", "balanced_accuracy", "auroc"]
# Names of the figures of each function; a figure of one class or label adds "/" and its name.
NAMES: dict[Any, list[str]] = {
    classification: [*BOTH, "recall", "calibration_error", "log_loss"],
    multilabel: BOTH,
    regression: ["mean_absolute_error", "r2"],
}


def _placements(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Returns each image's placement: the share of the other side that it is ranked right against.

    A positive is right above a negative; a tie counts half. NaN if the other side is empty.
    """
    sides = np.sort(scores[positive]), np.sort(scores[~positive])
    place = np.empty(len(scores))
    for side, other in ((positive, sides[1]), (~positive, sides[0])):
        below = sum(np.searchsorted(other, scores[side], end) for end in ("left", "right"))
        place[side] = below / (2 * len(other)) if len(other) else np.nan
    place[~positive] = 1 - place[~positive]
    return place


def _one_per_row(values: np.ndarray, columns: np.ndarray, num: int) -> sparse.csr_array:
    """Returns a sparse array `[N, num]` with one value in each row, in the given column."""
    rows = np.arange(len(values) + 1)
    return sparse.csr_array((values.astype(np.float64), columns, rows), shape=(len(values), num))


def _sums(columns: Any, users: np.ndarray | None) -> np.ndarray:
    """Sums over images, `[1 + NUM_DRAWS, columns]`: first over all images, then over each draw."""
    if users is not None:
        columns = _by_user(users) @ columns
    num, generator = columns.shape[0], np.random.default_rng(SEED)
    offsets = num * np.arange(TOGETHER)[:, None]  # one `bincount` counts all draws
    sums = [np.ones((1, num)) @ columns]
    for _ in range(NUM_DRAWS // TOGETHER):
        rows = offsets + generator.integers(num, size=(TOGETHER, num))
        weights = np.bincount(rows.ravel(), minlength=TOGETHER * num)
        sums.append(weights.reshape(TOGETHER, num).astype(np.float64) @ columns)
    return np.concatenate(sums)


def _by_user(users: np.ndarray) -> sparse.csr_array:
    """Returns the array `[users, N]` that adds up the rows of each user.

    Users are in the order of their first images.
    """
    _, first, inverse = np.unique(users, return_index=True, return_inverse=True)
    place = np.argsort(np.argsort(first))[inverse]
    return sparse.csr_array(_one_per_row(np.ones(len(users)), place, len(first)).T)


def _entries(
    figures: Mapping[str, np.ndarray], num_images: int, users: np.ndarray | None
) -> JsonObject:
    """Returns the entries of `summary.json` for values of figures, first over all images."""
    unit = "image" if users is None else "user"
    number = num_images if users is None else len(np.unique(users))
    drawn = {"unit": unit, "number": number}
    return {"figures": _intervals(figures), "intervals_draw": drawn}


def _by_class(figure: str, each: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the figure of each class or label by its name, or by number.

    {} if there are too many.
    """
    num = each.shape[1]
    if num > MOST_NAMED:
        return {}
    distinct = names if len(set(names)) == num else range(num)
    return {f"{figure}/{name}": x for name, x in zip(distinct, each.T, strict=True)}


def _mean(each: np.ndarray) -> np.ndarray:
    """Returns the mean of each row over its finite values."""
    defined = np.isfinite(each)
    return np.where(defined, each, 0).sum(axis=1) / defined.sum(axis=1)


def _intervals(figures: Mapping[str, np.ndarray]) -> dict[str, list[float] | None]:
    """Returns the first value of each figure and the interval of the others.

    None if it is not finite.
    """
    intervals: dict[str, list[float] | None] = dict.fromkeys(figures)
    for name, values in figures.items():
        if np.isfinite(values[0]):
            ends = np.nanpercentile(values[1:], (2.5, 97.5))
            intervals[name] = [float(values[0]), *ends.tolist()]
    return intervals
