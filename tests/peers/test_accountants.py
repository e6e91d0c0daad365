"""ε that other projects print for their own examples, and σ that they would choose."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import bam
from bam.privacy import accounting

# The table in TensorFlow Privacy's tutorial on MNIST: σ, epochs of 60,000 in batches of 256, ε at
# δ = 1e-5, by the older conversion of Rényi divergences, ε = r + log(1/δ) / (α - 1).
TF_PRIVACY = [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]
# Opacus's tests of its accountants: σ 1.5, q 0.04, 90 epochs, δ 1e-5.
OPACUS = {"noise_multiplier": 1.5, "sampling_prob": 0.04, "num_steps": 2250, "delta": 1e-5}
OPACUS_RDP, OPACUS_PRV = 7.32911117143, 6.777395712150674  # the second is above the truth by 0.01


@pytest.mark.parametrize(("sigma", "epochs", "printed"), TF_PRIVACY)
def test_the_epsilons_of_tensorflow_privacy(sigma, epochs, printed):
    run = {"sampling_prob": 256 / 60_000, "num_steps": epochs * 60_000 // 256}
    orders = [*range(2, 65), 128, 256, 512]
    spent = RdpAccountant(orders).compose(accounting.poisson_event(sigma, **run))
    older = min(r + math.log(1e5) / (a - 1) for a, r in zip(orders, spent.rdp, strict=True))
    assert older == pytest.approx(printed, rel=5e-3)
    ours = [
        bam.epsilon(noise_multiplier=sigma, delta=1e-5, accountant=name, **run)
        for name in ("pld", "rdp")
    ]
    assert 0.7 * printed < ours[0] < ours[1] < printed


def test_the_epsilons_of_opacus():
    assert bam.epsilon(**OPACUS, accountant="rdp") == pytest.approx(OPACUS_RDP, abs=1e-3)
    tight = bam.epsilon(**OPACUS)
    assert OPACUS_PRV - 0.01 < tight < OPACUS_PRV
    assert bam.epsilon(**OPACUS | {"num_steps": 2260}) > tight + 0.01  # the control


CALIBRATED = [  # ε, δ, q, T, small ones too
    pytest.param(1.0, 1e-5, 0.01, 500, marks=pytest.mark.thorough), (0.3, 1e-8, 1.0, 10),
    (0.02, 1e-8, 0.1, 20), (0.01, 1e-6, 1.0, 1),
]  # fmt: skip


@pytest.mark.parametrize(("target", "delta", "q", "num_steps"), CALIBRATED)
def test_the_noise_is_what_dp_accounting_calibrates(target, delta, q, num_steps):
    steps = {"sampling_prob": q, "num_steps": num_steps}
    ours = bam.noise_multiplier(target_epsilon=target, delta=delta, **steps)
    theirs = dp_accounting.calibrate_dp_mechanism(
        PLDAccountant, lambda sigma: accounting.poisson_event(sigma, **steps), target, delta,
        bracket_interval=dp_accounting.LowerEndpointAndGuess(0.0, ours), tol=1e-4 * ours,
    )  # fmt: skip
    # Their composition of T Gaussians without sampling rounds each of them, ours none.
    assert 0.98 * theirs < ours < 1.001 * theirs


def test_a_composition_of_several_mechanisms_costs_what_dp_accounting_says():
    parts = [(2.0, 0.1, 30), (5.0, 1.0, 4), (1.5, 0.01, 200)]
    composed = PLDAccountant()
    for part in parts:
        composed.compose(accounting.poisson_event(*part))
    ours = accounting.joint_epsilon([accounting.PoissonSteps(*x) for x in parts], 1e-6)
    assert ours == pytest.approx(composed.get_epsilon(1e-6), rel=1e-4)
    fewer = accounting.joint_epsilon([accounting.PoissonSteps(*x) for x in parts[:2]], 1e-6)
    assert fewer < 0.99 * ours  # the control
