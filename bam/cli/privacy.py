"""ε of DP-SGD's noise by three accountants, or σ for an ε, μ, and what an attacker gains.

It holds for one example that is replaced by nothing, its place left empty (zero-out): q and T are
public and the same with and without it. That is adding or removing it if N is a public constant.

bam privacy --noise_multiplier=1.5 --sampling_prob=0.04 --num_steps=2250 --delta=1e-5
bam privacy --target_epsilon=2 --sampling_prob=0.08 --num_steps=900 --plot=privacy.png
"""

import math
from pathlib import Path

import numpy as np
from absl import flags

from bam import files
from bam.cli import console, tables
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import accounting, pld, tradeoff
from bam.privacy.rounding import rounded_down, rounded_up

_NOISE_MULTIPLIER = flags.DEFINE_float("noise_multiplier", None, "σ; this or --target_epsilon")
_TARGET_EPSILON = flags.DEFINE_float("target_epsilon", None, "ε, to find σ for")
_SAMPLING_PROB = flags.DEFINE_float("sampling_prob", None, "q, of Poisson sampling")
_NUM_STEPS = flags.DEFINE_integer("num_steps", None, "T", lower_bound=1)
_DELTA = flags.DEFINE_float("delta", 1e-5, "δ")
_ACCOUNTANT = flags.DEFINE_enum("accountant", "pld", ["pld", "rdp"], "finds σ for an ε")
_JSON = flags.DEFINE_string("json", "", "file for the numbers; none if empty")
_PLOT = flags.DEFINE_string("plot", "", "PNG file for trade-off curves and ε over training")
console.require("sampling_prob", "num_steps")
console.ensure(
    ("noise_multiplier", "target_epsilon"),
    lambda sigma, epsilon: (sigma is None) != (epsilon is None),
    "give one of --noise_multiplier and --target_epsilon",
)

NAMES = {
    "pld": "PLD (tight)",
    "rdp": "RDP (moments accountant)",
    "gdp": "GDP central limit (asymptotic, NOT a guarantee)",
}
# What bounds an attacker -> its label and the method whose line it is drawn with.
TRADEOFFS = {
    "composed": ("the composed mechanism (PLD)", "dp_sgd"),
    "epsilon_delta": ("(ε, δ)-DP alone", "dp_sat"),
    "gdp": ("μ-GDP, central limit (asymptotic)", "bam_sam"),
}
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)
SPENT: tables.Columns = {
    "step": lambda row: str(row["step"]),
    "PLD": lambda row: rounded_up(row["pld"], ".4f"),
    "RDP": lambda row: rounded_up(row["rdp"], ".4f"),
    "GDP (asymptotic)": lambda row: rounded_up(row["gdp"], ".4f"),
}
RATES: tables.Columns = {
    "false positives": lambda row: f"{row['false_positive_rate']:.1%}",
    "composed (PLD)": lambda row: f"{rounded_up(100 * row['composed'], '.1f')}%",
    "(ε, δ) alone": lambda row: f"{rounded_up(100 * row['epsilon_delta'], '.1f')}%",
    "μ-GDP (asymptotic)": lambda row: f"{rounded_up(100 * row['gdp'], '.1f')}%",
}
NUM_POINTS = 10  # of ε as training goes


def main() -> None:
    """Prints ε (or σ), ε as training goes and the attacker's best rates."""
    with console.one_line_errors():
        sampling_prob, num_steps = _SAMPLING_PROB.value, _NUM_STEPS.value
        assert sampling_prob is not None and num_steps is not None  # the flags are required
        if not 0 < sampling_prob <= 1:
            raise InputError(f"sampling_prob must be above 0 and at most 1, got {sampling_prob}")
        sigma = _NOISE_MULTIPLIER.value
        if sigma is None:
            assert _TARGET_EPSILON.value is not None  # one of both is required
            sigma = accounting.noise_multiplier(
                target_epsilon=_TARGET_EPSILON.value,
                delta=_DELTA.value,
                accountant=_ACCOUNTANT.value,
                sampling_prob=sampling_prob,
                num_steps=num_steps,
            )
        if not 0 < sigma < math.inf:
            raise InputError(f"noise_multiplier must be positive and finite, got {sigma}")
        for file in (_JSON.value, _PLOT.value):
            console.check_writable(file)
        analysis = analyse(sigma, sampling_prob, num_steps, _DELTA.value)
        if _JSON.value:
            files.write_json(Path(_JSON.value), analysis)
        if _PLOT.value:
            draw(analysis, Path(_PLOT.value))
    console.show(
        f"σ = {rounded_down(sigma, '.5g')}, q = {rounded_up(sampling_prob, 'g')}, T = {num_steps}, "
        f"δ = {rounded_up(analysis['delta'], 'g')}, neighbours: zero-out of one example\n"
    )
    for name in accounting.ACCOUNTANTS:
        console.say(f"ε = {rounded_up(analysis['epsilon'][name], '8.4f')}   {NAMES[name]}")
    console.say(
        f"μ = {rounded_up(analysis['mu_bound'], '8.4f')}   Gaussian DP, but for δ (PLD, from above)"
    )
    console.say(
        f"μ = {analysis['mu']:8.4f}   of the central limit (asymptotic, NOT a guarantee)", ""
    )
    tables.show(SPENT, analysis["over_training"], "ε as training goes")
    rates = analysis["best_true_positive_rate"]
    tables.show(RATES, rates, "an attacker's best true positive rate")


def analyse(sigma: float, sampling_prob: float, num_steps: int, delta: float) -> JsonObject:
    """Every number that is printed or drawn, as a JSON object."""
    mechanism = {"noise_multiplier": sigma, "sampling_prob": sampling_prob}

    def epsilons(steps: int) -> dict[str, float]:
        return {
            name: accounting.epsilon(num_steps=steps, delta=delta, accountant=name, **mechanism)
            for name in accounting.ACCOUNTANTS
        }

    total = epsilons(num_steps)
    points = sorted({max(1, round(num_steps * i / NUM_POINTS)) for i in range(1, NUM_POINTS + 1)})
    mu = tradeoff.mu_of_noisy_sgd(sigma, sampling_prob, num_steps)
    tradeoffs = {
        "composed": accounting.poisson_tradeoff(
            num_steps=num_steps, up_to=max(1.0, 1.5 * total["pld"]), **mechanism
        ),
        "epsilon_delta": tradeoff.epsilon_delta_tradeoff(total["pld"], delta),
        "gdp": tradeoff.gaussian_tradeoff(mu),
    }
    alpha = np.linspace(0, 1, 501)
    return {
        **mechanism,
        "num_steps": num_steps,
        "delta": delta,
        "mu": mu,
        "mu_bound": pld.mu(sigma, sampling_prob, num_steps, up_to=total["pld"]),
        "epsilon": total,
        "over_training": [{"step": steps, **epsilons(steps)} for steps in points],
        "best_true_positive_rate": [
            {"false_positive_rate": rate}
            | {name: tradeoff.best_true_positive_rate(f, rate) for name, f in tradeoffs.items()}
            for rate in FALSE_POSITIVE_RATES
        ],
        "tradeoff": {"type_1_error": alpha.tolist()}
        | {name: f(alpha).tolist() for name, f in tradeoffs.items()},
    }


def draw(analysis: JsonObject, path: Path) -> None:
    """Draws trade-off curves beside ε over training, from what `analyse` found."""
    from bam.sweep.plot import STYLES, Line, Panel, panels  # what an extra brings

    alpha = analysis["tradeoff"]["type_1_error"]
    lines = [
        Line(label, alpha, analysis["tradeoff"][name], None, STYLES[method])
        for name, (label, method) in TRADEOFFS.items()
    ]
    guess = [1 - a for a in alpha]
    lines.append(Line("guessing", alpha, guess, None, STYLES["non_private"]))
    steps = [row["step"] for row in analysis["over_training"]]
    looks = {
        "pld": TRADEOFFS["composed"],
        "rdp": (NAMES["rdp"], "bam_exact"),
        "gdp": TRADEOFFS["gdp"],
    }
    spent = [
        Line(label, steps, [row[name] for row in analysis["over_training"]], None, STYLES[method])
        for name, (label, method) in looks.items()
    ]
    title = (
        f"σ = {rounded_down(analysis['noise_multiplier'], '.4g')}, "
        f"q = {rounded_up(analysis['sampling_prob'], 'g')}, "
        f"T = {analysis['num_steps']}, δ = {rounded_up(analysis['delta'], 'g')}"
    )
    charts = [
        Panel("type II error against type I error", "type I (false positives)", lines),
        Panel("ε as training goes", "step", spent),
    ]
    panels(charts, path, title, num_columns=2)


if __name__ == "__main__":
    console.run(main)
