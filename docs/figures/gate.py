"""Draws gate.svg: what the gate of Eq. 8-9 keeps under an assumed spread of log-ratios.

Run from the project root: python docs/figures/gate.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

from pnpo_megatron.analysis.gate_model import acceptance_by_position

PAPER = {"gate_low": 7e-4, "gate_high": 9.5e-4}
LENGTH = 15_360


def main() -> None:
    """Two panels: acceptance by position, and at the end of a response by sigma."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained", facecolor="white")
    by_position, by_sigma = figure.subplots(1, 2)
    place = torch.arange(1, LENGTH + 1) / LENGTH
    shown = torch.arange(0, LENGTH, 64)
    for sigma, centred in ((0.05, True), (0.02, False), (0.0374, False), (0.05, False)):
        kept = acceptance_by_position(**PAPER, length=LENGTH, sigma=sigma, centred=centred)
        label = f"sigma = {sigma:g}, {'mean 0' if centred else 'E[rho] = 1'}"
        by_position.plot(place[shown], kept[shown], "--" if centred else "-", label=label)
    by_position.set(xlabel="position t / L", ylabel="kept", ylim=(0, 1.03), title=f"L = {LENGTH:,}")
    by_position.legend(fontsize=8)
    sigmas = torch.linspace(0.005, 0.08, 60).tolist()
    for length in (512, 4096, LENGTH):
        kept = [acceptance_by_position(**PAPER, length=length, sigma=sigma) for sigma in sigmas]
        (line,) = by_sigma.plot(sigmas, [one[-1] for one in kept], label=f"L = {length:,}, at t = L")
        means = [one.mean() for one in kept]
        by_sigma.plot(sigmas, means, ":", color=line.get_color(), label=f"L = {length:,}, all positions")
    by_sigma.set(xlabel="sigma, nats", ylabel="kept", ylim=(0, 1.03), title="E[rho] = 1")
    by_sigma.legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "gate"}):
        figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
