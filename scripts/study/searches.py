r"""Simulates twenty private searches by each accountant, and trainings without a search, at ε = 1.

python -m scripts.study.searches --features=FOLDER --data=FOLDER \
  --out=docs/results/prior/searches.json

NOT PRIVATE: noise is drawn in floats, without a budget. The privacy is that of
`bam.privacy.selection`: a search draws a number of trials, and for each a learning rate from the
grid; each trial has the noise multiplier with which the whole search costs ε. It is scored by its
number of right training images plus Gaussian noise. A search is as accurate as its best trial by
this score.

All trials are linear models of one set of features, so one product of matrices serves thirty of
them, with the same batches. A linear model's gradients have norm ‖p − y‖ · (‖x‖² + 1)^½, so
clipping needs no per-example gradients. FOLDER of features is the cache of `cifar10_prior`.
"""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import bam
from bam import files
from bam.cli import command, screen
from bam.data import datasets
from bam.privacy import selection

_FEATURES = flags.DEFINE_string("features", "", "folder with the features of CIFAR-10")
_DATA = flags.DEFINE_string("data", "", "folder with CIFAR-10")
_OUT = flags.DEFINE_string("out", "", "JSON file to write")

EPSILON, DELTA, BATCH, STEPS, CLIP, MOMENTUM = 1.0, 1e-5, 8192, 50, 0.1, 0.9
RATES, SEARCHES, SEEDS, AT_ONCE = (0.5, 1.0, 2.0, 4.0), 20, 5, 30
SEARCH = selection.Selection(5.0, 1.0, 30.0)  # mean and shape of the number of trials, score noise


@jax.jit
def clipped_sum(weights: Any, x: Any, y: Any, used: Any) -> Any:
    """The sum of clipped gradients of each model, `[features, models * 10]`."""
    x = jnp.concatenate([x.astype(jnp.float32), jnp.ones((len(x), 1), jnp.float32)], axis=1)
    logits = (x @ weights.reshape(len(weights), -1)).reshape(len(x), -1, 10)
    error = jax.nn.softmax(logits) - jax.nn.one_hot(y, 10)[:, None]
    norm = jnp.sqrt(jnp.sum(error**2, -1) * jnp.sum(x**2, 1)[:, None])
    factor = used[:, None] * jnp.minimum(1, CLIP / jnp.maximum(norm, 1e-9))
    return x.T @ (factor[..., None] * error).reshape(len(x), -1)


@jax.jit
def descend(weights: Any, momentum: Any, total: Any, key: Any, sigma: Any, rate: Any) -> Any:
    """The next weights and momentum `[features, models, 10]`."""
    noise = sigma[None, :, None] / BATCH * jax.random.normal(key, weights.shape)
    momentum = MOMENTUM * momentum + total.reshape(weights.shape) / (BATCH * CLIP) + noise
    return weights - rate[None, :, None] * momentum, momentum


@jax.jit
def num_right(weights: Any, x: Any, y: Any) -> Any:
    """The number of images that each model tells right."""
    logits = x.astype(jnp.float32) @ weights[:-1].reshape(len(weights) - 1, -1)
    logits = (logits + weights[-1].reshape(-1)).reshape(len(x), -1, 10)
    return jnp.sum(logits.argmax(-1) == y[:, None], axis=0)


def train(
    features: Any, labels: Any, trials: list[dict[str, Any]], sigmas: Any, rng: Any, seed: int
) -> Any:
    """Weights of `AT_ONCE` trials."""
    sigma = jnp.asarray([sigmas[x["accountant"]] for x in trials], jnp.float32)
    rate = jnp.asarray([x["rate"] for x in trials], jnp.float32)
    weights = momentum = jnp.zeros((features.shape[1] + 1, len(trials), 10))
    rows, key = BATCH + 600, jax.random.key(seed)
    for step in range(STEPS):
        drawn = np.flatnonzero(rng.random(len(labels)) < BATCH / len(labels))[:rows]
        x, used = np.zeros((rows, features.shape[1]), np.float16), np.zeros(rows, np.float32)
        y = np.zeros(rows, np.int32)
        x[: len(drawn)], y[: len(drawn)], used[: len(drawn)] = features[drawn], labels[drawn], 1
        total = clipped_sum(weights, x, y, used)
        key_of_step = jax.random.fold_in(key, step)
        weights, momentum = descend(weights, momentum, total, key_of_step, sigma, rate)
    return weights


def main() -> None:
    """Writes all trials, and the accuracy of each search."""
    dataset = datasets.load("cifar10", path=_DATA.value)
    stored = [np.load(x, mmap_mode="r") for x in Path(_FEATURES.value).glob("*.npy")]
    train_rows, test_rows = (
        next(x.reshape(len(x), -1) for x in stored if len(x) == len(split.labels))
        for split in (dataset.train, dataset.test)
    )
    run: Any = {"sampling_prob": BATCH / len(train_rows), "num_steps": STEPS, "delta": DELTA}
    sigmas = {
        name: selection.noise_multiplier(SEARCH, target_epsilon=EPSILON, accountant=name, **run)
        for name in ("pld", "rdp")
    }
    sigmas["none"] = bam.noise_multiplier(target_epsilon=EPSILON, **run)
    rng, trials = np.random.default_rng(20261129), list[dict[str, Any]]()
    for name in ("pld", "rdp"):
        for search in range(SEARCHES):
            for _ in range(SEARCH.num_trials(rng.random())):
                rate = float(rng.choice(RATES))
                trials.append({"accountant": name, "search": search, "rate": rate})
    for rate in RATES:
        trials += [{"accountant": "none", "search": s, "rate": rate} for s in range(SEEDS)]
    order = rng.permutation(len(trials))
    for start in range(0, len(trials), AT_ONCE):
        began, mine = time.time(), [trials[i] for i in order[start : start + AT_ONCE]]
        filled = mine + mine[:1] * (AT_ONCE - len(mine))
        weights = train(train_rows, dataset.train.labels, filled, sigmas, rng, start + 7)
        right: list[np.ndarray] = [
            np.sum([
                num_right(weights, np.asarray(x[i : i + 5000]), y[i : i + 5000])
                for i in range(0, len(x), 5000)
            ], axis=0)
            for x, y in ((train_rows, dataset.train.labels), (test_rows, dataset.test.labels))
        ]  # fmt: skip
        for trial, of_train, of_test in zip(mine, *right, strict=False):
            trial["score"] = float(of_train + SEARCH.score_noise_multiplier * rng.normal())
            trial["accuracy"] = 100 * float(of_test) / len(test_rows)
        screen.say(f"{start + len(mine)} of {len(trials)} trials, {time.time() - began:.0f} s")
    searches = []
    for name in ("pld", "rdp"):
        for search in range(SEARCHES):
            tried = [
                {k: x[k] for k in ("rate", "score", "accuracy")}
                for x in trials
                if (x["accountant"], x["search"]) == (name, search)
            ]
            best = max(tried, key=lambda x: x["score"])
            row = {"accountant": name, "search": search, "noise_multiplier": sigmas[name]}
            searches.append(row | {"accuracy": best["accuracy"], "trials": tried})
    alone = [
        {"rate": x["rate"], "accuracy": x["accuracy"]} for x in trials if x["accountant"] == "none"
    ]
    settings = {
        "epsilon": EPSILON, "delta": DELTA, "batch": BATCH, "steps": STEPS, "clip_norm": CLIP,
        "trials_mean": SEARCH.trials_mean, "trials_shape": SEARCH.trials_shape,
        "score_noise": SEARCH.score_noise_multiplier,
        "learning_rates": list(RATES), "noise_multiplier_without_search": sigmas["none"],
    }  # fmt: skip
    files.write_json(Path(_OUT.value), settings | {"searches": searches, "without_search": alone})


if __name__ == "__main__":
    command.run_script(main, ["out", "features", "data"])
