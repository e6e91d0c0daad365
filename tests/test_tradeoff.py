"""f-DP against closed forms and against dp-accounting."""

import json
import math

import numpy as np
import pytest
from scipy import special

import bam
from bam.privacy import tradeoff
from tests.cases import run_command

ALPHA = np.linspace(0, 1, 1001)


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 4.0])
def test_gaussian_tradeoff_is_symmetric_falls_and_knows_its_ends(mu):
    f = tradeoff.gaussian_tradeoff(mu)
    values = f(ALPHA)
    assert values[0] == 1.0 and values[-1] == 0.0
    assert (np.diff(values) <= 1e-12).all() and (values <= 1 - ALPHA + 1e-12).all()
    inner = ALPHA[1:-1]
    np.testing.assert_allclose(f(f(inner)), inner, atol=1e-6)  # its own inverse
    assert f(np.array([0.5]))[0] == pytest.approx(special.ndtr(-mu))


def delta_of_tradeoff(f, epsilon):
    """The supremum over α of 1 − f(α) − e^ε α: the δ of a mechanism with a symmetric f."""
    grid = np.logspace(-12, 0, 4001)
    best = grid[np.argmax(1 - f(grid) - np.exp(epsilon) * grid)]
    near = best * np.linspace(0.99, 1.01, 200_001)
    near = near[near <= 1]
    return max(0.0, float(np.max(1 - f(near) - np.exp(epsilon) * near)))


def test_epsilon_delta_tradeoff_is_the_formula_one_works_out_by_hand():
    f = tradeoff.epsilon_delta_tradeoff(math.log(3), 0.1)
    # 0.9 − 3α left of where both meet, (0.9 − α)/3 right of it, 0 from α = 0.9 on.
    np.testing.assert_allclose(
        f(np.array([0.0, 0.1, 0.225, 0.3, 0.9, 1.0])), [0.9, 0.6, 0.225, 0.2, 0.0, 0.0], atol=1e-12
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.2), (1.0, 1e-5), (3.0, 0.01)])
def test_conversion_to_f_and_back_is_the_identity(epsilon, delta):
    f = tradeoff.epsilon_delta_tradeoff(epsilon, delta)
    assert delta_of_tradeoff(f, epsilon) == pytest.approx(delta, abs=1e-9)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_delta_of_the_gaussian_tradeoff_is_the_closed_form(mu, epsilon):
    found = delta_of_tradeoff(tradeoff.gaussian_tradeoff(mu), epsilon)
    assert found == pytest.approx(tradeoff.delta_of_mu(mu, epsilon), abs=1e-9)


def test_the_profile_of_a_gaussian_gives_its_tradeoff_from_below():
    epsilons = np.linspace(0, 12, 400)
    f = tradeoff.profile_tradeoff(epsilons, [tradeoff.delta_of_mu(1.0, e) for e in epsilons])
    exact = tradeoff.gaussian_tradeoff(1.0)(ALPHA)
    assert (f(ALPHA) <= exact + 1e-12).all()
    np.testing.assert_allclose(f(ALPHA), exact, atol=1e-3)


def test_subsampling_is_convex_symmetric_and_between_no_attack_and_the_whole_mechanism():
    f = tradeoff.gaussian_tradeoff(2.0)
    some = tradeoff.subsampled_tradeoff(f, 0.2)
    values = some(ALPHA)
    assert (values >= f(ALPHA) - 1e-9).all() and (values <= 1 - ALPHA + 1e-9).all()
    assert (np.diff(values, 2) >= -1e-9).all()
    np.testing.assert_allclose(some(some(ALPHA)), ALPHA, atol=1e-6)
    np.testing.assert_allclose(tradeoff.subsampled_tradeoff(f, 1.0)(ALPHA), f(ALPHA), atol=1e-9)
    np.testing.assert_allclose(tradeoff.subsampled_tradeoff(f, 0.0)(ALPHA), 1 - ALPHA, atol=1e-9)
    one_sided = 0.2 * f(ALPHA) + 0.8 * (1 - ALPHA)
    assert (values <= one_sided + 1e-9).all()
    assert (values < one_sided - 1e-3).any()  # the control: symmetrising does something


@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_one_subsampled_gaussian_step_is_dp_accountings(epsilon):
    sigma, p = 1.0, 0.2
    f = tradeoff.subsampled_tradeoff(tradeoff.gaussian_tradeoff(1 / sigma), p)
    found = delta_of_tradeoff(f, epsilon)
    spent = bam.epsilon(noise_multiplier=sigma, sampling_prob=p, num_steps=1, delta=found)
    assert spent == pytest.approx(epsilon, abs=2e-3)


def test_an_attackers_best_true_positive_rate():
    for mu, expected in ((0.0, 0.05), (1.0, special.ndtr(special.ndtri(0.05) + 1.0))):
        found = tradeoff.best_true_positive_rate(tradeoff.gaussian_tradeoff(mu), 0.05)
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tradeoff.gaussian_tradeoff(-1.0), "mu must be"),
        (lambda: tradeoff.gaussian_tradeoff(math.nan), "mu must be"),
        (lambda: tradeoff.epsilon_delta_tradeoff(-1.0, 0.1), "epsilon -1.0"),
        (lambda: tradeoff.epsilon_delta_tradeoff(1.0, 1.1), "delta 1.1"),
        (lambda: tradeoff.subsampled_tradeoff(lambda alpha: 1 - alpha, 1.5), "sampling_prob"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The command.


@pytest.mark.thorough
def test_the_privacy_command_prints_the_golden_epsilons_and_writes_what_it_drew(tmp_path):
    done = run_command(
        "bam", "privacy", "--noise_multiplier=1.5", "--sampling_prob=0.04", "--num_steps=2250",
        "--delta=1e-5", f"--json={tmp_path}/p.json", f"--plot={tmp_path}/p.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for epsilon in ("6.7688   PLD", "7.3294   RDP", "6.6016   GDP"):
        assert epsilon in done.stdout
    found = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    assert found["epsilon"]["pld"] == pytest.approx(6.76879, abs=1e-5)
    assert found["over_training"][-1]["pld"] == found["epsilon"]["pld"]
    assert (tmp_path / "p.png").stat().st_size > 20_000
    for row in found["best_true_positive_rate"]:  # (ε, δ) alone allows more than the mechanism
        assert row["false_positive_rate"] < row["composed"] < row["epsilon_delta"]


def test_the_privacy_command_refuses_nonsense_in_a_line():
    mechanism = ("--sampling_prob=1", "--num_steps=10", "--delta=1e-5")
    for bad, message in (((), "give one of"), (("--noise_multiplier=0",), "must be positive")):
        done = run_command("bam", "privacy", *bad, *mechanism)
        assert done.returncode == 2
        assert message in done.stderr and done.stderr.count("\n") == 1
