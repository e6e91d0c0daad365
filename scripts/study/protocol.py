r"""Compares features of CIFAR-10 on held-out training images: ten folds, three seeds, pairs.

python -m scripts.study.protocol --features=runs/study/prior_train.npy --data=FOLDER \
  --out=docs/results/prior/protocol.json

NOT PRIVATE: it reads the accuracy of held-out images of the data, and its noise is simulated in
floats, without a budget. It serves to choose features before they are tested once.

A fold is a tenth of the training images. For each fold a linear model is trained by DP-SGD on the
other nine, and scored on the fold. All models share each step's Poisson batch, so one product of
matrices serves them; each has its own noise. A linear model's gradients have norm
‖p − y‖ · (‖x‖² + 1)^½, so clipping needs no per-example gradients.

A file of features is `[50000, F]`, for example float16. Several files, joined by "+", are parts:
each is scaled so that all have an equal share of a row's L2 norm of 10.
"""

import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from scipy import stats

import bam
from bam import files, tables
from bam.cli import console
from bam.data import datasets

_FEATURES = flags.DEFINE_string(
    "features", "", "files of features, joined by + if they are parts; '': none, the table alone"
)
_BASE = flags.DEFINE_string("base", "prior_train", "name of the features to compare with")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10 in Parquet, for the labels")
_OUT = flags.DEFINE_string("out", "", "JSON file for results; it also keeps them")
_EPSILONS = flags.DEFINE_list("epsilons", "1,3", "values of ε; inf: no noise and no clipping")
_SEEDS = flags.DEFINE_integer("seeds", 3, "seeds of each fold", lower_bound=1)
_FIRST_SEED = flags.DEFINE_integer("first_seed", 0, "the first seed of `features`")

_RATES = flags.DEFINE_list("rates", "0.5", "learning rates for ε = inf")

FOLDS, CLASSES, BATCH, CLIP, DELTA, LENGTH = 10, 10, 8192, 0.1, 1e-5, 10.0
# ε -> steps and learning rate: those of the results.
SETTINGS = {1.0: (100, 2.0), 3.0: (150, 3.0), 8.0: (150, 8.0)}
STEPS = 150  # without noise; the rate is not in units of C


def joined(names: str) -> np.ndarray:
    """The parts side by side, `[n, F]` float16; each row has L2 norm 10, shared equally."""
    parts = [np.load(name, mmap_mode="r") for name in names.split("+")]
    whole = np.empty((min(map(len, parts)), sum(part.shape[1] for part in parts)), np.float16)
    for rows in np.array_split(np.arange(len(whole)), 50):
        each = [np.asarray(part[rows], np.float32) for part in parts]
        each = [x / np.linalg.norm(x, axis=1, keepdims=True).clip(1e-6) for x in each]
        whole[rows] = np.concatenate(each, axis=1) * LENGTH / math.sqrt(len(each))
    return whole


def accuracies(
    features: np.ndarray, labels: np.ndarray, epsilon: float, seeds: range, rate: float
) -> np.ndarray:
    """Accuracy in percent on each fold, `[folds, seeds]`, after training on the others."""
    steps, rate = SETTINGS.get(epsilon, (STEPS, rate))
    num, private = len(labels), math.isfinite(epsilon)
    q = BATCH / (num * (FOLDS - 1) / FOLDS)
    sigma = 0.0
    if private:
        sigma = bam.noise_multiplier(
            target_epsilon=epsilon, delta=DELTA, sampling_prob=q, num_steps=steps
        )
    clip = CLIP if private else math.inf
    fold = np.random.default_rng(0).permutation(num) % FOLDS
    models = FOLDS * len(seeds)
    rows = int(q * num + 6 * math.sqrt(q * num)) + 1
    shape = (features.shape[1] + 1, models, CLASSES)

    @jax.jit
    def step(weights, momentum, x, y, used, key):
        x = jnp.concatenate([x.astype(jnp.float32), jnp.ones((len(x), 1), jnp.float32)], axis=1)
        logits = (x @ weights.reshape(len(weights), -1)).reshape(len(x), models, CLASSES)
        error = jax.nn.softmax(logits) - jax.nn.one_hot(y, CLASSES)[:, None]
        norm = jnp.sqrt(jnp.sum(error**2, axis=-1) * jnp.sum(x**2, axis=1)[:, None])
        factor = used * jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-9))
        total = x.T @ (factor[..., None] * error).reshape(len(x), -1)
        unit = CLIP if private else 1.0
        gradient = total.reshape(shape) / (BATCH * unit)
        gradient += sigma / BATCH * jax.random.normal(key, shape)
        momentum = 0.9 * momentum + gradient
        return weights - rate * momentum, momentum

    weights = momentum = jnp.zeros(shape, jnp.float32)
    rng = np.random.default_rng(seeds.start)
    for number in range(steps):
        drawn = np.flatnonzero(rng.random(num) < q)[:rows]
        x = np.zeros((rows, features.shape[1]), np.float16)
        x[: len(drawn)] = features[drawn]
        used = np.zeros((rows, FOLDS), np.float32)
        used[: len(drawn)] = fold[drawn, None] != np.arange(FOLDS)
        y = np.zeros(rows, np.int32)
        y[: len(drawn)] = labels[drawn]
        key = jax.random.fold_in(jax.random.key(seeds.start + 1000), number)
        used = np.repeat(used, len(seeds), axis=1)
        weights, momentum = step(weights, momentum, x, y, used, key)
    weights, found = np.asarray(weights), np.zeros((FOLDS, len(seeds)))
    for k in range(FOLDS):
        held, of_fold = fold == k, weights[:, k * len(seeds) : (k + 1) * len(seeds)]
        logits = np.einsum(
            "nf,fsc->nsc", features[held].astype(np.float32), of_fold[:-1], optimize=True
        )
        found[k] = 100 * np.mean((logits + of_fold[-1]).argmax(-1) == labels[held, None], axis=0)
    return found


def summary(values: np.ndarray) -> tuple[float, float]:
    """Mean and half the 95 % interval, from the folds' means over seeds."""
    each = values.mean(axis=1)
    half = stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    return float(each.mean()), float(half)


def table(kept: dict[str, Any], base: str) -> str:
    """All kept accuracies, with their differences from `base` at the same ε, fold by fold."""
    rows = []
    for key, row in sorted(kept.items(), key=lambda x: (float(x[0].split()[1]), -x[1]["accuracy"])):
        name, epsilon, first = key.split()
        other = kept.get(f"{base} {epsilon} 0")
        difference = "–"
        if other is not None and other is not row:
            pairs = np.mean(row["values"], axis=1) - np.mean(other["values"], axis=1)
            difference = "{:+.2f} ± {:.2f}".format(*summary(pairs[:, None]))
        seeds = f"{first} to {int(first) + len(row['values'][0]) - 1}"
        accuracy = f"{row['accuracy']:.2f} ± {row['half']:.2f}"
        rows.append([name, epsilon, str(row["features"]), seeds, accuracy, difference])
    head = ("features", "ε", "dimensions", "seeds", "accuracy, %", "difference")
    return tables.markdown(tables.text(*head), rows)


def main() -> None:
    """Prints and keeps the accuracies, and writes the table of all that are kept."""
    labels = np.asarray(datasets.load("cifar10", "parquet", _DATA.value).train.labels)
    out, name, first = Path(_OUT.value), _FEATURES.value, _FIRST_SEED.value
    kept = files.read_json(out) if out.exists() else {}
    features = joined(name) if name else None
    rates = {x: _RATES.value if x == "inf" else [0] for x in _EPSILONS.value}
    each = [(float(x), float(y)) for x in rates for y in rates[x]]
    for epsilon, rate in each if name else ():
        at = f"@{rate:g}" if rate else ""
        key = f"{'+'.join(Path(x).stem for x in name.split('+'))}{at} {epsilon:g} {first}"
        started = time.perf_counter()
        seeds = range(first, first + (_SEEDS.value if math.isfinite(epsilon) else 1))
        values = accuracies(features, labels, epsilon, seeds, rate)
        mean, half = summary(values)
        seconds = round(time.perf_counter() - started)
        kept[key] = {"features": features.shape[1], "seconds": seconds, "accuracy": mean,
                     "half": half, "values": values.round(2).tolist()}  # fmt: skip
        files.write_json(out, kept)
        print(f"{key}: {mean:.2f} ± {half:.2f}, {seconds} s", flush=True)
    files.write_text(out.with_suffix(".md"), table(kept, _BASE.value))


if __name__ == "__main__":
    console.require("data", "out")
    console.run(main)
