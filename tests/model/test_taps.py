"""Tapped layers picked out of more than a drafter reads."""

import torch

from vflash_analysis.model.taps import select_taps

TAPPED = torch.arange(12.0).view(2, 6)  # layers 1, 4, 7, two features each
HELD = (1, 4, 7)


def test_each_layer_keeps_its_own_features_in_the_order_asked_for():
    assert select_taps(TAPPED, HELD, HELD) is TAPPED
    assert select_taps(TAPPED, HELD, (4,)).tolist() == [[2.0, 3.0], [8.0, 9.0]]
    outer = select_taps(TAPPED, HELD, (1, 7))
    assert outer.tolist() == [[0.0, 1.0, 4.0, 5.0], [6.0, 7.0, 10.0, 11.0]]
