import pytest
import torch

from sightline.sight import Method, Prediction, Sight, cell_share


def grid(*rows):
    return torch.tensor([[[c == "#" for c in row] for row in rows]])


def test_visible_pixels_are_in_kept_patches_and_kept_themselves_and_in_a_box():
    keep = grid("#.", "##")
    pixels = torch.ones(1, 4, 4, dtype=torch.bool)
    pixels[0, 0, 0] = False
    sight = Sight(keep, pixels, boxes=torch.tensor([[[0, 0, 4, 3]]]))
    assert torch.equal(sight.visible((4, 4)), grid(".#..", "##..", "####", "...."))
    assert sight.coverage((4, 4)).item() == 7 / 16


def test_overlapping_boxes_are_a_union():
    sight = Sight(boxes=torch.tensor([[[0, 0, 2, 2], [1, 1, 3, 3]]]))
    assert torch.equal(sight.visible((3, 4)), grid("##..", "###.", ".##."))


def test_everything_is_visible_at_any_size():
    assert Sight.everything(torch.rand(3, 3, 10, 7)).visible((10, 7)).all()


@pytest.mark.parametrize(("at_least", "kept"), [(0.01, "##"), (0.25, "##"), (0.3, "#."), (1.0, "#.")])
def test_a_pixel_mask_keeps_the_patches_it_fills_enough(at_least, kept):
    mask = grid("##..", "###.")
    sight = Sight.of_pixels(mask, (1, 2), at_least=at_least)
    assert torch.equal(sight.keep, grid(kept))
    assert torch.equal(sight.visible((2, 4)), mask & grid(kept).repeat_interleave(2, 2).expand_as(mask))
    loose = Sight.of_pixels(mask, (1, 2), at_least=at_least, exact=False)
    assert loose.keep_pixels is None


def test_a_sight_for_other_patches_shows_exactly_the_same_pixels(generator):
    for _ in range(20):
        keep = torch.rand(2, 3, 4, generator=generator) < 0.4
        sight = Sight(keep)
        other, pixels = sight.on_grid((4, 3), (12, 12))
        assert torch.equal(Sight(other, pixels).visible((12, 12)), sight.visible((12, 12)))
        assert sight.on_grid((3, 4), (12, 12)) == (keep, None)
    finer, pixels = sight.on_grid((6, 8), (24, 24))
    assert pixels is None, "whole patches need no pixel mask"
    assert torch.equal(finer, keep.repeat_interleave(2, 1).repeat_interleave(2, 2))


def test_boxes_become_patches_and_pixels():
    sight = Sight(boxes=torch.tensor([[[1, 0, 3, 2]]]))
    keep, pixels = sight.on_grid((2, 2), (4, 4))
    assert torch.equal(keep, grid("##", ".."))
    assert torch.equal(pixels, grid(".##.", ".##.", "....", "...."))


def test_selecting_images():
    sight = Sight(torch.eye(4, dtype=torch.bool).view(4, 2, 2), parts=torch.rand(4, 3, 2, 2))
    assert len(sight) == 4
    assert len(sight[1:3]) == 2
    assert torch.equal(sight[[3, 0]].keep, sight.keep[[3, 0]])
    assert torch.equal(sight[1:3].parts, sight.parts[1:3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": torch.ones(1, 2, 2)}, "bool"),
        ({"keep": torch.ones(2, 2, dtype=torch.bool)}, "3 dimensions"),
        ({"keep": torch.ones(1, 2, 2, dtype=torch.bool), "boxes": torch.zeros(2, 1, 4)}, "different numbers"),
    ],
)
def test_a_wrong_sight_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sight(**fields)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="does not divide"):
        Sight(grid("##", "##")).visible((5, 4))
    with pytest.raises(ValueError, match="keep_pixels is for images of"):
        Sight(keep_pixels=grid("##", "##")).visible((4, 4))
    with pytest.raises(ValueError, match="does not define"):
        Sight().visible((4, 4))


def test_cells_that_do_not_divide_the_image_are_blocks_of_whole_pixels():
    pixels = torch.zeros(1, 5, 4, dtype=torch.bool)
    pixels[0, 2:, 2:] = True
    # Rows 0 to 2 and 2 to 4, columns 0 to 1 and 2 to 3.
    torch.testing.assert_close(cell_share(pixels, (2, 2))[0], torch.tensor([[0.0, 2 / 6], [0.0, 1.0]]))


def test_prediction():
    prediction = Prediction(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), Sight(grid("#")))
    assert prediction.labels.tolist() == [1, 0]
    torch.testing.assert_close(prediction.probabilities.sum(dim=1), torch.ones(2))


def test_a_method_must_declare_whether_it_is_blind():
    class Undeclared(Method):
        pass

    class Declared(Method):
        blind = True

    with pytest.raises(TypeError, match="Undeclared must declare `blind`"):
        Undeclared()
    images = torch.zeros(1, 3, 2, 2)
    for call in (Declared().look, Declared().maps, lambda x: Declared().judge(x, Sight.everything(x))):
        with pytest.raises(NotImplementedError):
            call(images)
