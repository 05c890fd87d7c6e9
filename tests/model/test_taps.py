"""Tapped layers picked out of more than a drafter reads."""

import pytest
import torch

from vflash_analysis.errors import InputError
from vflash_analysis.model.taps import select_taps

TAPPED = torch.arange(12.0).view(2, 6)  # layers 1, 4, 7, two features each
HELD = (1, 4, 7)


def test_each_layer_keeps_its_own_features_in_the_order_asked_for():
    assert select_taps(TAPPED, HELD, HELD) is TAPPED
    assert select_taps(TAPPED, HELD, (4,)).tolist() == [[2.0, 3.0], [8.0, 9.0]]
    outer = select_taps(TAPPED, HELD, (1, 7))
    assert outer.tolist() == [[0.0, 1.0, 4.0, 5.0], [6.0, 7.0, 10.0, 11.0]]


def test_a_layer_that_is_not_held_is_named():
    with pytest.raises(InputError, match=r"found \[1, 4, 7\], allowed: with \[4, 5\] in them"):
        select_taps(TAPPED, HELD, (4, 5))
