"""One function decides which layers a model is made of."""

from __future__ import annotations

import pytest

from pnpo_megatron.policy.spec import uses_transformer_engine


@pytest.mark.parametrize(
    ("backend", "cuda", "installed", "expected"),
    [
        ("auto", True, True, True),
        ("flash", True, True, True),
        ("local", True, True, False),
        ("auto", True, False, False),
        ("auto", False, True, False),
    ],
)
def test_transformer_engine_is_chosen_where_it_and_a_gpu_are_there(backend, cuda, installed, expected):
    assert uses_transformer_engine(backend, cuda=cuda, installed=installed) is expected
