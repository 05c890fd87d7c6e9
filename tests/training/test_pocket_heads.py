"""Labels of places by hand: colours, movement, and which patch speaks for a pooled cell."""

import torch

from vflash_analysis.training import pocket_heads


def test_dense_labels_of_a_circle_that_moves_and_turns():
    codes = torch.zeros(1, 2, 16, dtype=torch.long)
    codes[0, 0, 5] = (
        1 + 2 + 6 * (0 + 4 * 1)
    )  # a large blue circle in the second cell of the second row
    codes[0, 1, 6] = 1 + 3 + 6 * (0 + 4 * 1)  # a cell to the right, yellow
    codes[0, 1, 3] = 49  # the star
    labels = pocket_heads.dense_labels(codes, torch.zeros(1, 2, 16, 2), torch.tensor([2]))
    assert labels["colour"][0, 0, 5] == 2 and labels["colour"][0, 1, 6] == 3
    assert labels["colour"][0, 0, 0] == 6 + 2 and labels["colour"][0, 1, 3] == 6 + 4
    assert (
        labels["shape"][0, 1, 6] == 1
        and labels["shape"][0, 1, 3] == 5
        and labels["shape"][0, 0, 0] == 0
    )
    assert labels["size"][0, 1, 6] == 2 and labels["size"][0, 1, 3] == 0
    assert labels["step"][0, 1, 6].tolist() == [2.0, 0.0]  # cells are two patches wide
    assert labels["first_colour"][0, 1, 6] == 2 and labels["first_size"][0, 1, 6] == 1
    assert labels["followed"][0, 1, 6] and not labels["followed"][0, 0, 5]


def test_cells_take_the_patch_nearest_to_the_centre():
    codes, offsets = torch.zeros(1, 1, 64, dtype=torch.long), torch.zeros(1, 1, 64, 2)
    codes[0, 0, [0, 9]] = torch.tensor([7, 8])  # both in the first cell
    offsets[0, 0, 0], offsets[0, 0, 9] = torch.tensor([1.0, 1.0]), torch.tensor([0.25, 0.0])
    code, offset = pocket_heads.cells(codes, offsets)
    assert code[0, 0, 0] == 8 and code.sum() == 8
    assert offset[0, 0, 0].tolist() == [0.75, 0.5]  # patch 9 is the lower right one


def test_a_single_frame_has_no_step_to_learn():
    codes = torch.full((1, 1, 16), 5)
    labels = pocket_heads.dense_labels(codes, torch.zeros(1, 1, 16, 2), torch.tensor([2]))
    assert not labels["followed"].any()
    loss, _ = pocket_heads.DenseHead(8, moving=True).loss(torch.zeros(1, 1, 16, 8), labels)
    assert loss.isfinite()
