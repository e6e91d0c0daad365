"""A search that ε pays for: the best of a random number of trials, by a noised score.

Every trial is a fresh run of one mechanism: a setting drawn from the grid, training, the score, all
with randomness of the operating system. How many there are is drawn before the first. The theorem
(`bam.privacy.selection`) covers the chosen trial for whoever knows neither that number nor anything
of the others, so nothing of them is shown, nor how far the search is.
"""

import contextlib
import dataclasses
import functools
import math
import re
import secrets
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

from bam import files, tables
from bam.core.seeds import secret_key
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.privacy import accounting
from bam.privacy.mechanisms import BEST_OF_TRIALS
from bam.privacy.plan import PrivacyPlan
from bam.privacy.rounding import rounded_down, rounded_up
from bam.privacy.selection import CHOSEN, Selection, composed_epsilon
from bam.sweep import runs
from bam.training import loop, parts, rundir, score
from bam.training.keys import CHANGEABLE

with needs("train"):
    from ml_collections import ConfigDict

# What every trial's config says; further figures would help nobody.
FIXED = {"accountant": "rdp", "eval.every": 0, "diagnostics.every": 0}
BITS = 128  # of the number that decides how many trials there are
ANOTHER = "a new search is a second release: its ε adds to this one's"
TRIALS = "trials.json"  # what was drawn: the settings of the trials, and so their number
ACCOUNTANTS = ("rdp", "pld")
COSTS: tables.Columns = {
    "what is paid for": lambda row: row["what"],
    "ε by RDP": lambda row: _cell(row["rdp"]),
    "ε by PLD": lambda row: _cell(row["pld"]),
}


def as_trial(config: ConfigDict, selection: Selection, held_out: bool) -> ConfigDict:
    """A setting's config, whose ε becomes that of the whole search."""
    if held_out != bool(config.dataset.holdout):
        raise InputError("--score=held_out and --holdout=N belong together")
    if not config.checkpoint.every:
        raise InputError("--private keeps the chosen weights: set checkpoint.every above 0")
    if config.loss.name != "cross_entropy":
        raise InputError("--private counts images that are classified right: loss cross_entropy")
    trial = config.copy_and_resolve_references()
    trial.update_from_flattened_dict(FIXED)
    if (asked := parts.set_keys(trial.mechanism, "")) != {"name": "poisson"}:
        words = ", ".join(str(x) if key == "name" else f"{key}={x}" for key, x in asked.items())
        raise InputError(f"a choice among runs is accounted for Poisson batches, not {words}")
    trial.mechanism = ConfigDict({"name": BEST_OF_TRIALS, **dataclasses.asdict(selection)})
    return trial


def search(
    grid: Mapping[str, ConfigDict],
    workdir: Path,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
    on_plan: Callable[[PrivacyPlan], None] = lambda plan: None,
) -> Path | None:
    """Trains and scores what is missing, and points to the chosen trial.

    Args:
      grid: the settings, by name; of `as_trial`. All of them are checked before anything is drawn.
      workdir: folder for the trials, for its owner's eyes only. What was drawn stays drawn,
        whatever stops the search: neither a trial's setting nor their number is drawn again.
      should_stop: asked after every step.
      log: called with lines that may be shown.
      on_plan: called with the plan of a trial, which is the search's, before anything is drawn.

    Returns:
      The folder of the chosen trial, which `export` takes; None if the search was stopped before.

    Raises:
      InputError: if the workdir has another search's trials. BlockingIOError: if another process
        searches there.
    """
    trainers = runs.build(grid, lambda: False)
    path = workdir / TRIALS
    if path.exists():
        recorded = _read(path, grid)
        trainers = {name: _with_recorded_noise(path, recorded, x) for name, x in trainers.items()}
    first = next(iter(trainers.values()))
    if any(trainer.plan != first.plan for trainer in trainers.values()):
        raise InputError("the settings must differ in nothing that the noise depends on")
    on_plan(first.plan)
    files.make_folder(workdir, mode=0o700)
    workdir.chmod(0o700)
    with files.lock(workdir):
        drawn = _drawn(path, grid, trainers)
        for number, trial in enumerate(drawn["trials"]):
            if trial["score"] is None:
                try:
                    if should_stop():
                        raise loop.StoppedError
                    folder = workdir / "trials" / str(number)
                    trial["score"] = _score(trainers[trial["setting"]], folder, should_stop, log)
                except loop.StoppedError:
                    log("stopped; the same command goes on from there")
                    return None
            _keep(path, drawn)
        return _choose(workdir, drawn["trials"], first.plan, log)


def describe(plan: PrivacyPlan) -> str:
    """What will be promised, in lines for people."""
    selection = _selection(plan)
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
    selection = _selection(plan)
    mechanism: JsonObject = {
        key: getattr(plan, key)
        for key in ("noise_multiplier", "sampling_prob", "num_steps", "delta")
    }
    num, noise = math.ceil(selection.trials_mean), selection.score_noise_multiplier
    rows: list[JsonObject] = [
        {"what": "the search, its best trial released", "rdp": plan.epsilon, "pld": None}
    ]
    for what, num_trials in (
        (f"a grid of {num} such trials, by composition", num),
        ("one such trial, its score included", 1),
    ):
        composed = functools.partial(composed_epsilon, num_trials, noise, **mechanism)
        rows.append({"what": what, **_by_accountant(composed)})
    alone = _by_accountant(functools.partial(accounting.epsilon, **mechanism))
    rows.append({"what": "its training alone: too little to claim after a search", **alone})
    return rows


def _by_accountant(epsilon: Callable[..., float]) -> JsonObject:
    """ε by each accountant; None by one that has no bound there."""
    spent: JsonObject = dict.fromkeys(ACCOUNTANTS)
    for accountant in ACCOUNTANTS:
        with contextlib.suppress(InputError):
            value = epsilon(accountant=accountant)
            spent[accountant] = value if math.isfinite(value) else None
    return spent


def noised_score(trainer: loop.Trainer, seed: int, folder: Path, noise_multiplier: float) -> int:
    """The noised score of a finished trial: whatever is done with the exact one is done here."""
    state = runs.last_state(trainer, seed, folder)
    if state is None:
        raise InputError(f"{folder} kept no weights: what became of this trial is not known")
    count = score.num_correct(trainer, loop.whole_model(state), _judged_on(trainer))
    return score.noised(count, noise_multiplier, secret_key())


def _cell(epsilon: float | None) -> str:
    return "–" if epsilon is None else rounded_up(epsilon, ".3f")


def _selection(plan: PrivacyPlan) -> Selection:
    return Selection(**plan.mechanism_options)


def _score(
    trainer: loop.Trainer, folder: Path, should_stop: Callable[[], bool], log: Callable[[str], None]
) -> int:
    """The score of a trial, once it is trained; errors do not say its number, which is secret."""
    noise = _selection(trainer.plan).score_noise_multiplier
    try:
        with contextlib.suppress(rundir.FinishedError):
            # Held-out images stand in for test data: ε covers the noised score alone, no other
            # figure of them.
            judged = not trainer.config.dataset.holdout
            loop.train(trainer, None, folder, should_stop=should_stop, log=log, evaluates=judged)
        return noised_score(trainer, 0, folder, noise)
    except (OSError, InputError) as error:
        why = str(error).replace(str(folder), f"a trial of {folder.parents[1]}")
        raise InputError(f"{why} ({ANOTHER})") from None


def _drawn(
    path: Path, grid: Mapping[str, ConfigDict], trainers: Mapping[str, loop.Trainer]
) -> JsonObject:
    """The trials: those that were drawn before, or as many as chance wants, drawn once.

    The theorem is about runs of one mechanism on one data set, so whatever a setting computes is
    kept with them, and a fingerprint of the images that are trained on and judged: its key is
    there only until all trials are scored.
    """
    recorded, plan = _read(path, grid) if path.exists() else {}, trainers[min(trainers)].plan
    data_key = recorded.get("data_key") or secrets.token_hex(32)
    datasets_of = {id(x.dataset): x for _, x in sorted(trainers.items())}.values()
    configs = {name: rundir.flat(rundir.as_json(config)) for name, config in sorted(grid.items())}
    identity: JsonObject = {
        "data_key": data_key,
        "data": ",".join(sorted({_fingerprint(data_key, x) for x in datasets_of})),
        "settings": list(configs),
        "configs": {
            name: {key: value for key, value in config.items() if key not in CHANGEABLE}
            for name, config in configs.items()
        },
        "plan": plan.to_json(),
    }
    if recorded:
        compared = identity.keys() - ({"data_key", "data"} if _scored(recorded) else set())
        if any(recorded.get(key) != identity[key] for key in compared):
            raise InputError(f"{path} is of another search; choose another --workdir")
        return recorded
    system = secrets.SystemRandom()
    num_trials = _selection(plan).num_trials(Fraction(secrets.randbits(BITS), 2**BITS))
    trials = [
        {"setting": system.choice(identity["settings"]), "score": None} for _ in range(num_trials)
    ]
    drawn = identity | {"trials": trials}
    files.write_json(path, drawn)
    return drawn


def _read(path: Path, grid: Mapping[str, ConfigDict]) -> JsonObject:
    """What a search has drawn; InputError if that is not whole."""
    drawn = files.read_json(path)
    trials, key = drawn.get("trials"), drawn.get("data_key", "0" * 64)
    has_trials = isinstance(trials, list) and trials and all(_is_trial(x) for x in trials)
    has_key = isinstance(key, str) and re.fullmatch("[0-9a-f]{64}", key)
    if not (has_trials and has_key and isinstance(drawn.get("plan"), dict)):
        raise InputError(f"{path} is damaged: put it back, as {ANOTHER}")
    if any(x["setting"] not in grid for x in drawn["trials"]):
        raise InputError(f"{path} is of another search; choose another --workdir")
    return drawn


def _is_trial(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"setting", "score"}
        and isinstance(value["setting"], str)
        and (value["score"] is None or type(value["score"]) is int)
    )


def _fingerprint(key: str, trainer: loop.Trainer) -> str:
    """A digest of the images that a trial is trained on and judged by."""
    data = (trainer.dataset.train, _judged_on(trainer))
    return datasets.fingerprint(bytes.fromhex(key), *data)


def _scored(drawn: JsonObject) -> bool:
    return all(trial["score"] is not None for trial in drawn["trials"])


def _keep(path: Path, drawn: JsonObject) -> None:
    """Writes the trials: with the last score, and as one with it, the data's key goes."""
    if _scored(drawn):
        drawn.pop("data_key", None)
    files.write_json(path, drawn)


def _with_recorded_noise(path: Path, drawn: JsonObject, trainer: loop.Trainer) -> loop.Trainer:
    """The trainer with the noise that the search has, whatever the accountant chooses today."""
    config = trainer.config
    noise = {key: drawn["plan"].get(key) for key in ("noise_multiplier", "epsilon")}
    try:
        plan = dataclasses.replace(trainer.plan, **noise)
        plan.check_target(config.epsilon)
        plan.check_epsilon()
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} is of another search; choose another --workdir ({error})"
        ) from None
    return trainer if plan == trainer.plan else loop.build(config, plan=plan)


def _judged_on(trainer: loop.Trainer) -> datasets.Split:
    return trainer.dataset.test if trainer.config.dataset.holdout else trainer.dataset.train


def _choose(
    workdir: Path, trials: list[JsonObject], plan: PrivacyPlan, log: Callable[[str], None]
) -> Path:
    """Marks the best trial: of equals the first, which is any, as they are alike in law."""
    best = max(range(len(trials)), key=lambda number: trials[number]["score"])
    unit = score.unit_of(_selection(plan).score_noise_multiplier)
    right = trials[best]["score"] / unit
    chosen = {"setting": trials[best]["setting"], "num_correct_noised": right}
    files.write_json(workdir / "trials" / str(best) / CHOSEN, chosen)
    link = workdir / "chosen"
    if not link.is_symlink():
        link.symlink_to(Path("trials") / str(best))
    log(
        f"chosen: {chosen['setting']}, with about {right:.0f} images right\n"
        f"release it, and nothing else of {workdir}: bam export --workdir={link} --out=FOLDER"
    )
    return link
