"""Losses of one example, each with its metrics and figures on test data.

A clip bounds an example's gradient for any loss, so ε depends neither on the loss nor on class
weights. Still, both must be public: weights that are computed from private labels reveal them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.models.figures import classification, multilabel, regression


class Loss(NamedTuple):
    """A loss with its check of labels, its metrics and its figures.

    Attributes:
      of_output: `(output, label) -> scalar`, the loss of one image, float32 or wider. The last axis
        of an output has `num_classes` numbers.
      check: `(labels, num_classes) -> error`, for NumPy arrays; "" for right labels.
      right: `(output, label) -> share` of an image's labels that are predicted right. Its mean is
        `test_accuracy`; None if the loss has no accuracy.
      metrics: `(outputs, labels) -> {name: value}` over all test images, in NumPy, or None.
      figures: `(outputs, labels, class_names) -> entries` for `summary.json` of a finished run,
        see `bam.models.figures`, or None.
    """

    of_output: Callable[[Array, Array], Float[Array, ""]]
    check: Callable[[np.ndarray, int], str]
    right: Callable[[Array, Array], Float[Array, ""]] | None = None
    metrics: Callable[[np.ndarray, np.ndarray], dict[str, float]] | None = None
    figures: Callable[[np.ndarray, np.ndarray, Sequence[str]], JsonObject] | None = None


def cross_entropy(weights: Any = None) -> Loss:
    r"""$-w_y \log p_y$ for one label of each image: integers from 0, `[N]`.

    Args:
      weights: a public number for each class, finite and at least 0; None means 1 for each.

    Raises:
      InputError: for other weights.
    """
    class_weights = _weights(weights)

    def of_output(output: Array, label: Array) -> Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(output, label)
        return loss if class_weights is None else loss * jnp.asarray(class_weights)[label]

    def check(labels: np.ndarray, num_classes: int) -> str:
        if class_weights is not None and len(class_weights) != num_classes:
            num = len(class_weights)
            return f"labels have {num_classes} classes, but --config.loss.weights has {num} numbers"
        return _wrong_classes(labels, num_classes, 1)

    return Loss(of_output, check, right=_is_class, figures=classification)


def binary() -> Loss:
    """Returns the binary cross-entropy, summed over labels of zeros and ones, `[N, labels]`.

    The accuracy is over all labels. Metrics are the area under the ROC curve of each label that has
    both values among the test examples, and the mean of these areas.
    """

    def check(labels: np.ndarray, num_classes: int) -> str:
        if labels.ndim != 2 or labels.shape[1] != num_classes:
            kind = "one class each" if labels.ndim == 1 else f"shape {labels.shape}"
            return f"labels of {kind}; loss binary needs zeros and ones [N, {num_classes}]"
        return "" if np.isin(labels, (0, 1)).all() else "labels must be 0 or 1"

    def metrics(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        with needs("train"):
            from sklearn.metrics import roc_auc_score

        both = [k for k in range(labels.shape[1]) if 0 < labels[:, k].mean() < 1]
        areas = {k: float(roc_auc_score(labels[:, k], outputs[:, k])) for k in both}
        mean = {"test_auroc": float(np.mean([*areas.values()]))} if areas else {}
        return mean | {f"test_auroc/{k}": value for k, value in areas.items()}

    return Loss(
        lambda output, label: jnp.sum(optax.sigmoid_binary_cross_entropy(output, label)),
        check,
        right=lambda output, label: jnp.mean((output > 0) == (label > 0)),
        metrics=metrics,
        figures=multilabel,
    )


def squared_error() -> Loss:
    """Returns the mean squared error over targets `[N]` or `[N, targets]`, which are numbers."""

    def check(labels: np.ndarray, num_classes: int) -> str:
        if math.prod(labels.shape[1:]) != num_classes or labels.ndim > 2:
            return f"labels of shape {labels.shape}; expected [N, {num_classes}] numbers"
        return "" if np.isfinite(labels).all() else "labels must be finite"

    def metrics(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"test_mean_absolute_error": float(np.abs(outputs - _like(labels, outputs)).mean())}

    return Loss(
        lambda output, label: jnp.mean(jnp.square(output - _like(label, output))),
        check,
        metrics=metrics,
        figures=regression,
    )


def per_pixel(weights: Any = None) -> Loss:
    """Returns the mean over pixels of the cross-entropy.

    Labels are integers from 0, `[N, h, w]`. Outputs are `[N, h, w, classes]`. The accuracy is the
    share of pixels that are predicted right. The metric is the intersection over union on all test
    pixels, averaged over classes.
    """
    pixel_loss = cross_entropy(weights)

    def check(labels: np.ndarray, num_classes: int) -> str:
        return _wrong_classes(labels, num_classes, 3)

    def metrics(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        with needs("train"):
            from sklearn.metrics import jaccard_score

        predicted = outputs.argmax(-1).ravel()
        return {"test_mean_iou": float(jaccard_score(labels.ravel(), predicted, average="macro"))}

    def of_output(output: Array, label: Array) -> Array:
        if output.shape[:-1] != label.shape:
            raise InputError(
                f"loss per_pixel: outputs of shape {output.shape} for pixels {label.shape}"
            )
        return jnp.mean(pixel_loss.of_output(output, label))

    return Loss(
        of_output,
        check,
        right=lambda output, label: jnp.mean(_is_class(output, label)),
        metrics=metrics,
    )


def _weights(weights: Any) -> np.ndarray | None:
    """Returns class weights as float32.

    InputError for any other value of a config.
    """
    if weights is None:
        return None
    try:
        array = np.asarray(weights, np.float32)
    except (TypeError, ValueError):  # a text such as "balanced", or a dict
        array = np.zeros(0, np.float32)
    if array.ndim != 1 or not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        raise InputError(
            f"--config.loss.weights={weights!r:.200} must be finite numbers from 0, one a class, "
            "such as 1,2.5"
        )
    return array


def _wrong_classes(labels: np.ndarray, num_classes: int, ndim: int) -> str:
    """Returns the error of labels that are not integers of a class with `ndim` axes.

    "" without one.
    """
    hint = ""
    if np.issubdtype(labels.dtype, np.floating):
        hint = "; numbers need --config.loss.name=squared_error"
    elif labels.ndim == 2 == ndim + 1:
        hint = "; several labels of an image need --config.loss.name=binary"
    if num_classes < 2:
        return f"labels: at least 2 classes are needed, got {num_classes}{hint}"
    if labels.ndim != ndim or not np.issubdtype(labels.dtype, np.integer):
        axes = "[N]" if ndim == 1 else "[N, height, width]"
        return f"labels of {labels.dtype} and shape {labels.shape}; expected integers {axes}{hint}"
    bad = ((labels < 0) | (labels >= num_classes)).reshape(len(labels), -1)
    if not bad.any():
        return ""
    row = int(np.flatnonzero(bad.any(axis=1))[0])
    value = labels.reshape(len(labels), -1)[row][bad[row]][0]
    return f"label {value} of row {row} is not from 0 to {num_classes - 1}"


def _is_class(output: Array, label: Array) -> Array:
    return jnp.argmax(output, axis=-1) == label


def _like(label: Any, output: Any) -> Any:
    """Returns labels in the shape of the outputs.

    `[N]` is one target for each image.
    """
    return label.reshape(output.shape)
