"""A search that ε pays for: the best of a random number of trials, by a noised score.

Every trial is a fresh run of one mechanism: a setting drawn from the grid, training, the score, all
with randomness of the operating system. How many there are is drawn before the first. The theorem
(`bam.privacy.selection`) covers the chosen trial for whoever knows neither that number nor anything
of the others, so nothing of them is shown, nor how far the search is.
"""

import contextlib
import dataclasses
import fcntl
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from bam import files
from bam.cli import console, sweeps, tables
from bam.core.chacha import secret_key
from bam.data import datasets
from bam.files import JsonObject
from bam.privacy import accounting
from bam.privacy.plan import PrivacyPlan
from bam.privacy.rounding import rounded_down, rounded_up
from bam.privacy.selection import composed_epsilon
from bam.release import export
from bam.training import loop, rundir, score

OF_PRIVATE = ("trials_mean", "trials_shape", "score", "score_noise")
PRIVATE = flags.DEFINE_bool(
    "private", False, "--config.epsilon pays for the choice, too: docs/selection.md"
)
_TRIALS_MEAN = flags.DEFINE_float("trials_mean", 8, "of --private: trials on average")
_TRIALS_SHAPE = flags.DEFINE_float(
    "trials_shape", 1, "of --private: shape η of their number; 0: logarithmic, 1: geometric"
)
SCORE = flags.DEFINE_enum(
    "score", "training", ["training", "held_out"], "of --private: images that a trial is judged on"
)
_SCORE_NOISE = flags.DEFINE_float(
    "score_noise", 10, "of --private: standard deviation of the noise on a score, in images"
)
console.ensure(
    ("private", *OF_PRIVATE),
    lambda private, *_: private or not any(flags.FLAGS[name].present for name in OF_PRIVATE),
    f"--{', --'.join(OF_PRIVATE)} belong to --private",
)

# What a trial's config says that no other's does; further figures would help nobody.
FIXED = {"accountant", "eval.every", "diagnostics.every"}
COSTS: tables.Columns = {
    "what is paid for": lambda row: row["what"],
    "ε by RDP": lambda row: rounded_up(row["rdp"], ".3f"),
    "ε by PLD": lambda row: "–" if row["pld"] is None else rounded_up(row["pld"], ".3f"),
}


def as_trial(config: ConfigDict) -> ConfigDict:
    """A setting's config, whose ε becomes that of the whole search as the flags describe it."""
    if not config.checkpoint.every:
        raise ValueError("--private keeps the chosen weights: set checkpoint.every above 0")
    if config.loss.name != "cross_entropy":
        raise ValueError("--private counts images that are classified right: loss cross_entropy")
    trial = config.copy_and_resolve_references()
    trial.accountant, trial.eval.every, trial.diagnostics.every = "rdp", 0, 0
    with trial.unlocked():
        trial.selection = ConfigDict(
            {
                "trials_mean": _TRIALS_MEAN.value,
                "trials_shape": _TRIALS_SHAPE.value,
                "score_noise_multiplier": _SCORE_NOISE.value,
            }
        )
    return trial


def search(
    grid: Mapping[str, ConfigDict],
    workdir: Path,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
) -> Path | None:
    """Prints what it costs, trains and scores what is missing, and points to the chosen trial.

    Args:
      grid: the settings, by name; of `as_trial`. All of them are checked before anything is drawn.
      workdir: folder for the trials, for its owner's eyes only. What was drawn stays drawn,
        whatever stops the search: neither a trial's setting nor their number is drawn again.
      should_stop: asked after every step.
      log: called with lines that may be shown.

    Returns:
      The folder of the chosen trial, which `export` takes; None if the search was stopped before.

    Raises:
      ValueError: if the workdir has another search's trials. BlockingIOError: if another process
        searches there.
    """
    built = sweeps.build(grid, lambda: False)
    if (workdir / "trials.json").exists():
        built = {name: _as_drawn(workdir / "trials.json", each) for name, each in built.items()}
    first = next(iter(built.values()))
    plan = first.plan
    assert plan.selection is not None
    if len({experiment.plan.noise_multiplier for experiment in built.values()}) > 1:
        raise ValueError("the settings must differ in nothing that the noise depends on")
    log(describe(plan))
    tables.show(COSTS, costs(plan))
    files.make_folder(workdir, mode=0o700)
    workdir.chmod(0o700)
    with _alone(workdir):
        drawn = _drawn(workdir / "trials.json", grid, first)
        for number, trial in enumerate(drawn["trials"]):
            if trial["score"] is not None:
                continue
            experiment, folder = built[trial["setting"]], workdir / "trials" / str(number)
            try:
                if should_stop():
                    raise loop.StoppedError
                with contextlib.suppress(rundir.FinishedError):
                    loop.train(experiment, None, folder, should_stop=should_stop, log=log)
            except loop.StoppedError:
                log("stopped; the same command goes on from there")
                return None
            except (OSError, ValueError) as error:  # whose number is secret, so not the folder
                if not console.on_purpose(error):
                    raise
                why = str(error).replace(str(folder), f"a trial of {workdir}")
                raise ValueError(
                    f"{why} (a new search is a second release: its ε adds to this one's)"
                ) from None
            noise = plan.selection.score_noise_multiplier
            trial["score"] = noised_score(experiment, 0, folder, noise)
            _keep(workdir / "trials.json", drawn)
        _keep(workdir / "trials.json", drawn)  # an earlier version left the key
        return _choose(workdir, drawn["trials"], plan, log)


def describe(plan: PrivacyPlan) -> str:
    """What will be promised, in lines for people."""
    selection = plan.selection
    assert selection is not None
    epsilon, delta = rounded_up(plan.epsilon, ".4g"), rounded_up(plan.delta, ".3g")
    return (
        f"({epsilon}, {delta})-DP for the whole search: the best of a random number of trials is "
        f"released, {selection.trials_mean:g} on average, shape {selection.trials_shape:g}\n"
        f"each: {plan.training_steps} steps, q = {rounded_up(plan.sampling_prob, '.4g')}, noise "
        f"multiplier {rounded_down(plan.noise_multiplier, '.4g')}; noise on its score of "
        f"{rounded_down(selection.score_noise_multiplier, '.4g')} images\n"
    )


def costs(plan: PrivacyPlan) -> list[JsonObject]:
    """ε of the search, and with the same noise of what is more or less than it; rows of `COSTS`."""
    selection = plan.selection
    assert selection is not None
    mechanism: JsonObject = {
        key: getattr(plan, key)
        for key in ("noise_multiplier", "sampling_prob", "num_steps", "delta")
    }

    def row(what: str, epsilon_by: Callable[[str], float]) -> JsonObject:
        return {"what": what} | {name: epsilon_by(name) for name in ("rdp", "pld")}

    def composed(num_trials: int) -> Callable[[str], float]:
        noise = selection.score_noise_multiplier
        return lambda name: composed_epsilon(num_trials, noise, accountant=name, **mechanism)

    num = math.ceil(selection.trials_mean)
    return [
        {"what": "the search, its best trial released", "rdp": plan.epsilon, "pld": None},
        row(f"a grid of {num} such trials, by composition", composed(num)),
        row("one such trial, its score included", composed(1)),
        row(
            "its training alone: too little to claim after a search",
            lambda name: accounting.epsilon(accountant=name, **mechanism),
        ),
    ]


def _drawn(path: Path, grid: Mapping[str, ConfigDict], experiment: loop.Trainer) -> JsonObject:
    """The trials: those that were drawn before, or as many as chance wants, drawn once.

    The theorem is about runs of one mechanism on one data set, so whatever a setting computes is
    kept with them, and a fingerprint of the images that are trained on and judged: its key is
    there only until all trials are scored.
    """
    plan, settings = experiment.plan, sorted(grid)
    found = files.read_json(path) if path.exists() else None
    data_key = str((found or {}).get("data_key") or secrets.token_hex(32))
    data = (experiment.dataset.train, _judged_on(experiment))
    kept_out = (*rundir.CHANGEABLE, *rundir.AUTOMATIC)
    identity = {
        "data_key": data_key,
        "data": datasets.fingerprint(bytes.fromhex(data_key), *data),
        "settings": settings,
        "configs": {
            name: {
                key: value
                for key, value in rundir.flat(rundir.as_json(grid[name])).items()
                if not key.startswith(kept_out)
            }
            for name in settings
        },
        "plan": plan.to_json() | {"clip_norm": None, "sensitivity": None},
    }
    if found is not None:
        compared = identity.keys() - ({"data_key", "data"} if _scored(found) else set())
        if any(found.get(key) != identity[key] for key in compared):
            raise ValueError(f"{path} is of another search; choose another --workdir")
        return found
    assert plan.selection is not None
    system = secrets.SystemRandom()
    trials = [
        {"setting": system.choice(settings), "score": None}
        for _ in range(plan.selection.num_trials(system.random()))
    ]
    drawn = identity | {"trials": trials}
    files.write_json(path, drawn)
    return drawn


def _scored(drawn: JsonObject) -> bool:
    return all(trial["score"] is not None for trial in drawn["trials"])


def _keep(path: Path, drawn: JsonObject) -> None:
    """Writes the trials: with the last score, and as one with it, the data's key goes."""
    if _scored(drawn):
        drawn.pop("data_key", None)
    files.write_json(path, drawn)


def _as_drawn(path: Path, experiment: loop.Trainer) -> loop.Trainer:
    """The experiment with the noise that the search has, whatever the accountant chooses today."""
    recorded, config = files.read_json(path).get("plan", {}), experiment.config
    noise = {key: recorded.get(key) for key in ("noise_multiplier", "epsilon")}
    try:
        plan = dataclasses.replace(experiment.plan, **noise)
        if not plan.epsilon <= config.epsilon:
            raise ValueError(f"epsilon {plan.epsilon} is above the config's {config.epsilon}")
        plan.check_epsilon()
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is of another search; choose another --workdir ({error})"
        ) from None
    return experiment if plan == experiment.plan else loop.build(config, plan=plan)


def noised_score(experiment: loop.Trainer, seed: int, folder: Path, noise_multiplier: float) -> int:
    """The noised score of a finished trial: whatever is done with the exact one is done here."""
    state = sweeps.last_state(experiment, seed, folder)
    if state is None:
        raise ValueError(f"{folder} kept no weights: what became of this trial is not known")
    count = score.num_correct(experiment, loop.whole_model(state), _judged_on(experiment))
    return score.noised(count, noise_multiplier, secret_key())


def _judged_on(experiment: loop.Trainer) -> datasets.Split:
    dataset = experiment.dataset
    return dataset.test if experiment.config.dataset.holdout else dataset.train


def _choose(
    workdir: Path, trials: list[JsonObject], plan: PrivacyPlan, log: Callable[[str], None]
) -> Path:
    """Marks the best trial: of equals the first, which is any, as they are alike in law."""
    assert plan.selection is not None
    best = max(range(len(trials)), key=lambda number: trials[number]["score"])
    unit = score.unit_of(plan.selection.score_noise_multiplier)
    chosen = {
        "setting": trials[best]["setting"],
        "num_correct_noised": trials[best]["score"] / unit,
    }
    files.write_json(workdir / "trials" / str(best) / export.CHOSEN, chosen)
    link = workdir / "chosen"
    if not link.is_symlink():
        link.symlink_to(Path("trials") / str(best))
    right = chosen["num_correct_noised"]
    log(
        f"chosen: {chosen['setting']}, with about {right:.0f} images right\n"
        f"release it, and nothing else of {workdir}: bam export --workdir={link} "
        "--out=FOLDER"
    )
    return link


@contextlib.contextmanager
def _alone(workdir: Path) -> Iterator[None]:
    with (workdir / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another process is searching in {workdir}") from None
        yield
