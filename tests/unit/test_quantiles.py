"""Exactness on one process; the layout matrix holds the same numbers to a reference on many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pnpo_megatron.parallel.quantiles import quantiles

LEVELS = (0.01, 0.05, 0.5, 0.95, 0.99, 1.0)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 4321])
def test_a_quantile_is_numpys_inverted_cdf_exactly(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.01
    values[::3] = values[0]  # ties
    found = quantiles(values, LEVELS, None).numpy()
    np.testing.assert_array_equal(found, np.quantile(values.numpy(), LEVELS, method="inverted_cdf"))


def test_no_value_at_all_is_zero():
    assert quantiles(torch.empty(0), LEVELS, None).tolist() == [0.0] * len(LEVELS)
