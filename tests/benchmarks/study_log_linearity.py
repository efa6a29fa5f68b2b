"""Is class probability log-linear in text probability, as eta(x) = a * p_LM(x)^k assumes?

    python tests/benchmarks/study_log_linearity.py --data SET [--log_p NAME]

Run by hand on a scored set. For the share of training reports with a sentence, and the truth of a phantom, it compares
the share of the variance of log rho (adjusted R^2, weighted by training reports) that the best straight line in log p
explains, and bins of log p, which fit any shape. RESULTS.md has the results.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from data_prep.eta_report import scored_sentences
from medclip_dcl.data.prepared import PreparedSet

LITTLE = 0.2
"""Explained share below which log p says little about rho."""
CURVED = 0.05
"""Share that bins must explain beyond a line to call the relation curved."""
FEWEST_BINS = 3


def straight_line(log_p: np.ndarray, log_rho: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """(log a, k) of the weighted least squares line, without the bounds of a class probability."""
    k, log_a = np.polyfit(log_p, log_rho, 1, w=np.sqrt(weights))
    return float(log_a), float(k)


def effective_number(weights: np.ndarray) -> float:
    """Number of equally weighted points that carry as much information (Kish)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def adjusted_r_squared(
    predicted: np.ndarray, observed: np.ndarray, weights: np.ndarray, parameters: int
) -> float:
    """1 - (1 - R^2) (n - 1) / (n - parameters), with the effective number n of points.

    NaN if the values do not vary or the points are too few.
    """
    n = effective_number(weights)
    if not (np.ptp(observed) > 0 and n > parameters):
        return float("nan")
    mean = np.average(observed, weights=weights)
    unexplained = (weights * (observed - predicted) ** 2).sum() / (weights * (observed - mean) ** 2).sum()
    return float(1 - unexplained * (n - 1) / (n - parameters))


def binned_means(x: np.ndarray, y: np.ndarray, weights: np.ndarray, bins: int) -> tuple[np.ndarray, int]:
    """For each point the weighted mean of y in its bin of x, and the number of bins that hold a point.

    Bins hold about equal weight, but points of equal x share a bin: where x does not vary, bins explain nothing.
    """
    values, which = np.unique(x, return_inverse=True)
    weight = np.bincount(which, weights)
    # The middle of each value's own weight decides, so that a heavy one does not fall into the next bin.
    share = (np.cumsum(weight) - weight / 2) / weight.sum()
    wanted = np.minimum((share * bins).astype(np.int64), bins - 1)
    occupied, number = np.unique(wanted[which], return_inverse=True)
    total = np.bincount(number, weights)
    mean = np.bincount(number, weights * y) / np.where(total > 0, total, 1)
    return mean[number], len(occupied)


def study(prepared: PreparedSet, log_p_name: str | None) -> None:
    """Print a line for each source of rho."""
    table = scored_sentences(prepared, prepared.log_p_file(log_p_name).stem)
    table["share of reports"] = table["train_reports"] / len(prepared.studies("train"))
    for name in ("share of reports", "rho"):
        if name not in table:
            continue
        known = table[table[name] > 0]
        log_p, weights = known["log_p"].to_numpy(), known["train_reports"].to_numpy(dtype=float)
        log_rho = np.log(known[name].to_numpy())
        bins = int(min(20, max(3, effective_number(weights) // 10)))
        means, bins = binned_means(log_p, log_rho, weights, bins)
        any_shape = adjusted_r_squared(means, log_rho, weights, bins)
        if bins < FEWEST_BINS or np.isnan(any_shape):
            print(
                f"{name}: too few different sentences ({len(known):,} with rho above 0, {bins} bins of log p)"
            )
            continue
        log_a, k = straight_line(log_p, log_rho, weights)
        of_line = adjusted_r_squared(log_a + k * log_p, log_rho, weights, 2)
        if max(of_line, any_shape) < LITTLE:
            verdict = "log p says little about rho, whatever the shape"
        elif any_shape - of_line > CURVED:
            verdict = "not a straight line"
        else:
            verdict = "a straight line says what log p has to say"
        print(
            f"{name}, {len(known):,} sentences with rho above 0: best straight line (a {np.exp(log_a):.3f}, k {k:.3f}) "
            f"{of_line:.3f}, {bins} bins {any_shape:.3f}: {verdict}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, required=True, metavar="SET", help="prepared data set with scores"
    )
    parser.add_argument("--log_p", metavar="NAME", help="stem of a file in SET/log_p (default: the only one)")
    options = parser.parse_args()
    study(PreparedSet(options.data), options.log_p)
