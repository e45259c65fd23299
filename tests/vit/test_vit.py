"""Hiding patches and pixels: exactness, agreement of the three ways, and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sightline.verify.leaks import bits_differ
from sightline.vit.model import ViT, ViTConfig
from sightline.vit.positions import resize_position_embeddings

from ..conftest import small_vit

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.15}
VITS = {  # all variants of the blocks
    "plain": small_vit(),
    "no-registers": small_vit(registers=0, positions="bicubic_offset"),
    "rotary": small_vit(positions="rotary", qkv_bias="no_key", mlp="swiglu", layer_scale=1.0),
    "clip": small_vit(pre_norm=True, patch_bias=False, mlp="quick_gelu", head_bias=False, registers=0),
}


@st.composite
def scenes(draw):
    """A ViT, images and what is visible of them: any grid, batch and mask, including none."""
    vit = VITS[draw(st.sampled_from(sorted(VITS)))]
    B, H, W = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    images = torch.rand(B, 3, 8 * H, 8 * W, generator=generator)
    keep = torch.rand(B, H, W, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
    keep_pixels = None
    if draw(st.booleans()):
        keep_pixels = torch.rand(B, 8 * H, 8 * W, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return vit, images, keep, keep_pixels, dtype, generator


def in_dtype(vit: ViT, dtype: torch.dtype) -> ViT:
    if dtype == torch.float32:
        return vit
    copy = ViT(vit.config).to(dtype)
    copy.load_state_dict(vit.state_dict())
    return copy.eval()


def visible(keep, keep_pixels=None):
    shown = keep.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
    return shown if keep_pixels is None else shown & keep_pixels


def same_bits(a, b):
    names = ("cls", "registers", "patches", "logits", "cls_attention", "keys")
    return not any(bits_differ(getattr(a, name), getattr(b, name)).any() for name in names)


@given(scenes())
@settings(max_examples=80, deadline=None)
@torch.no_grad()
def test_the_ways_of_hiding_agree(scene):
    vit, images, keep, keep_pixels, dtype, _ = scene
    vit = in_dtype(vit, dtype)
    removed = vit(images, keep, keep_pixels, cls_attention=[0, -1], keys=[-1])
    masked = vit(images, keep, keep_pixels, hide="mask", cls_attention=[0, -1], keys=[-1])
    whole = vit(images, keep, keep_pixels, attention=range(3))
    weighted = vit(images, keep.to(dtype), keep_pixels, cls_attention=[0, -1])
    assert (removed.hide, masked.hide, whole.hide, weighted.hide) == ("removal", "mask", "mask", "weighted")
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for other in (masked, whole, weighted):
        torch.testing.assert_close(removed.logits, other.logits, **close)
        torch.testing.assert_close(removed.registers, other.registers, **close)
        kept = keep.flatten(1)
        torch.testing.assert_close(removed.patches[kept], other.patches[kept], **close)
    assert not removed.patches[~keep.flatten(1)].any()
    assert not masked.patches[~keep.flatten(1)].any()
    assert not removed.cls_attention[..., vit.prefix :].permute(0, 3, 1, 2)[~keep.flatten(1)].any()
    assert not removed.keys.permute(0, 3, 1, 2, 4)[~keep.flatten(1)].any()
    torch.testing.assert_close(removed.cls_attention, masked.cls_attention, **close)
    torch.testing.assert_close(whole.attention[-1][:, :, 0], masked.cls_attention[:, 1], **close)
    torch.testing.assert_close(
        removed.keys.transpose(2, 3)[:, 0][kept], masked.keys.transpose(2, 3)[:, 0][kept], **close
    )


@given(scenes(), st.sampled_from(["noise", "nan", "inf", "-inf", "huge"]), st.sampled_from(["removal", "mask"]))
@settings(max_examples=120, deadline=None)
@torch.no_grad()
def test_hidden_pixels_change_no_bit(scene, content, hide):
    vit, images, keep, keep_pixels, dtype, generator = scene
    vit = in_dtype(vit, dtype)
    noise = torch.randn(images.shape, generator=generator)
    infinite = noise.abs() * torch.inf
    other = {"noise": noise, "nan": noise * torch.nan, "inf": infinite, "-inf": -infinite, "huge": 1e30 * noise}[
        content
    ]
    redrawn = torch.where(visible(keep, keep_pixels)[:, None], images, other)
    arguments = {"hide": hide, "cls_attention": [0, -1], "keys": [-1]}
    assert same_bits(vit(images, keep, keep_pixels, **arguments), vit(redrawn, keep, keep_pixels, **arguments))


@given(scenes())
@settings(max_examples=30, deadline=None)
@torch.no_grad()
def test_with_everything_visible_it_equals_the_plain_vit(scene):
    vit, images, keep, _, _, _ = scene
    all_visible = torch.ones_like(keep)
    for out in (vit(images, all_visible), vit(images, all_visible, hide="mask"), vit(images, all_visible.float())):
        torch.testing.assert_close(out.tokens, vit(images).tokens, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("pixels", [False, True], ids=["patches", "pixels"])
@pytest.mark.parametrize("hide", ["removal", "mask"])
def test_hidden_nans_do_not_reach_gradients(hide, pixels):
    """Zero times NaN is NaN: hidden pixels must be blanked before the embedding, or its gradient is NaN."""
    vit, images, generator = small_vit(), torch.rand(3, 3, 32, 32), torch.Generator().manual_seed(1)
    keep = torch.rand(3, 4, 4, generator=generator) < 0.5
    keep_pixels = torch.rand(3, 32, 32, generator=generator) < 0.5 if pixels else None
    hidden = ~visible(keep, keep_pixels)[:, None]
    vit(torch.where(hidden, torch.nan, images), keep, keep_pixels, hide=hide).logits.sum().backward()
    assert all(p.grad.isfinite().all() for p in vit.parameters() if p.grad is not None)
    assert vit.patch_embed.proj.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_with_nothing_visible_all_images_have_the_same_logits():
    vit = small_vit()
    none_visible = torch.zeros(4, 4, 4, dtype=torch.bool)
    for hide in ("removal", "mask"):
        logits = vit(torch.rand(4, 3, 32, 32), none_visible, hide=hide).logits
        assert logits.isfinite().all()
        assert (logits == logits[0]).all()


@torch.no_grad()
def test_hidden_pixels_are_blanked_to_the_mean_colour():
    vit = small_vit()
    images, keep_pixels = torch.rand(2, 3, 32, 32), torch.rand(2, 32, 32) < 0.5
    mean = torch.tensor(vit.config.input.mean).view(3, 1, 1).expand_as(images)
    painted = torch.where(keep_pixels[:, None], images, mean)
    torch.testing.assert_close(vit(images, keep_pixels=keep_pixels).tokens, vit(painted).tokens, atol=1e-5, rtol=1e-5)


def test_weighted_hiding_has_the_gradient_of_its_limit():
    """Finite differences of m·exp(s) / Σ m·exp(s) at m strictly inside (0, 1), in double precision."""
    vit = small_vit().double()
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(2, 3, 32, 32, generator=generator).double()
    weights = (0.1 + 0.8 * torch.rand(2, 4, 4, generator=generator)).double().requires_grad_()
    direction = torch.randn(2, 5, generator=generator).double()
    (gradient,) = torch.autograd.grad((vit(images, weights).logits * direction).sum(), weights)
    for index in [(0, 0, 0), (0, 2, 3), (1, 1, 1)]:
        step = torch.zeros_like(weights)
        step[index] = 1e-3
        with torch.no_grad():
            up, down = ((vit(images, weights + s).logits * direction).sum() for s in (step, -step))
        torch.testing.assert_close(gradient[index], (up - down) / 2e-3, rtol=2e-3, atol=1e-6)


def test_pixel_weights_are_differentiable_and_agree_with_the_exact_form():
    vit, images = small_vit(), torch.rand(2, 3, 32, 32)
    keep = torch.ones(2, 4, 4, dtype=torch.bool)
    pixels = torch.rand(2, 32, 32) < 0.5
    weights = pixels.float().requires_grad_()
    soft, exact = vit(images, keep, weights), vit(images, keep, pixels)
    assert soft.hide == "weighted"
    torch.testing.assert_close(soft.tokens, exact.tokens, atol=1e-5, rtol=1e-5)
    soft.logits.sum().backward()
    assert weights.grad[~pixels].abs().sum() > 0, "hidden pixels must get a gradient"


def test_weighted_hiding_of_a_frozen_vit_is_differentiable():
    """CUDA's attention saves what it needs only if queries, keys or values require a gradient."""
    vit, required = small_vit().requires_grad_(False), []
    for block in vit.blocks:
        block.norm1.register_forward_hook(lambda module, inputs, output: required.append(output.requires_grad))
    keep = torch.rand(2, 4, 4, requires_grad=True)
    images = torch.rand(2, 3, 32, 32)
    vit(images, keep).cls.sum().backward()
    assert all(required)
    assert keep.grad.abs().min() > 0
    required.clear()
    vit(images, keep.detach())
    assert not any(required)


def test_weighted_hiding_reaches_hidden_patches_in_bfloat16():
    vit, images = in_dtype(small_vit(), torch.bfloat16), torch.rand(2, 3, 32, 32)
    keep = (torch.rand(2, 4, 4) < 0.5).float().requires_grad_()
    vit(images, keep).logits.float().sum().backward()
    assert keep.grad.isfinite().all()
    assert keep.grad[keep == 0].abs().sum() > 0


@pytest.mark.parametrize("how", ["weights", "autocast", "model"])
def test_weighted_hiding_refuses_float16(how):
    vit, images, keep = small_vit(), torch.rand(1, 3, 32, 32), torch.rand(1, 4, 4)
    if how == "weights":
        keep = keep.half()
    if how == "model":
        vit, images = vit.half(), images.half()
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"), pytest.raises(ValueError, match="float16"):
        vit(images, keep)
    if how == "autocast":  # exact hiding has no such limit
        with torch.autocast("cpu", torch.float16), torch.no_grad():
            assert vit(images, keep > 0.5).logits.isfinite().all()


@pytest.mark.parametrize("name", sorted(VITS))
def test_autocast_keeps_the_residual_stream_in_the_weights_precision(name):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = VITS[name](torch.rand(2, 3, 32, 32), torch.rand(2, 4, 4) < 0.5)
    assert out.cls.dtype == torch.float32
    assert out.patches.dtype == torch.float32


@torch.no_grad()
def test_hide_mask_compiles_without_graph_breaks():
    vit, images, keep = small_vit(), torch.rand(2, 3, 32, 32), torch.rand(2, 4, 4) < 0.5
    compiled = torch.compile(lambda x, k: vit(x, k, hide="mask").logits, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, keep), vit(images, keep).logits, atol=2e-5, rtol=2e-5)


def test_full_attention_is_differentiable():
    vit, images = small_vit(), torch.rand(2, 3, 32, 32)
    out = vit(images, attention=range(3))
    gradients = torch.autograd.grad(out.logits[:, 1].sum(), out.attention)
    assert [g.shape for g in gradients] == [(2, 4, 19, 19)] * 3
    assert all(g.abs().sum() > 0 for g in gradients)
    torch.testing.assert_close(out.logits, vit(images).logits, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_blocks_are_returned_in_the_requested_order():
    vit, images = small_vit(), torch.rand(2, 3, 32, 32)
    both, last = vit(images, cls_attention=[-1, 0, -1]).cls_attention, vit(images, cls_attention=[2]).cls_attention
    assert both.shape == (2, 3, 4, 19)
    assert torch.equal(both[:, 0], last[:, 0])
    assert torch.equal(both[:, 2], last[:, 0])
    assert not torch.equal(both[:, 1], last[:, 0])
    torch.testing.assert_close(both.sum(dim=-1), torch.ones(2, 3, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": torch.rand(1, 3, 33, 32)}, "33×32 .* e.g. to 32×32"),
        ({"images": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}, "must be floats"),
        ({"images": torch.rand(3, 32, 32)}, "must be floats"),
        ({"keep": torch.ones(1, 3, 4, dtype=torch.bool)}, r"keep must have shape \[1, 4, 4\]"),
        ({"keep": torch.ones(1, 4, 4, dtype=torch.int64)}, "boolean .* or float"),
        ({"keep_pixels": torch.ones(1, 4, 4, dtype=torch.bool)}, "keep_pixels must have shape"),
        ({"keep": torch.ones(1, 4, 4), "hide": "removal"}, "does not go with"),
        ({"keep": torch.ones(1, 4, 4, dtype=torch.bool), "hide": "weighted"}, "does not go with"),
        ({"keep": torch.ones(1, 4, 4, dtype=torch.bool), "hide": "removal", "attention": [0]}, "all tokens"),
        ({"cls_attention": [3]}, "3 blocks"),
        ({"hide": "mask"}, "needs keep"),
    ],
)
def test_invalid_arguments_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        small_vit()(**{"images": torch.rand(1, 3, 32, 32)} | arguments)


@pytest.mark.parametrize(("mode", "assumed"), [("bicubic", 11), ("bicubic_offset", 11.1)])
def test_position_embeddings_are_resized_as_in_the_authors_code(mode, assumed, generator):
    """DINO and DINOv2 resize as if the grid were 0.1 larger; checked against cubic convolution written out."""
    stored = torch.rand(16, generator=generator)
    resized = resize_position_embeddings(stored.expand(16, 16).reshape(1, -1, 1), (16, 16), (16, 11), mode).view(
        16, 11
    )[8]

    def cubic(t):
        t, a = abs(t), -0.75
        return (
            (a + 2) * t**3 - (a + 3) * t**2 + 1
            if t <= 1
            else a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
            if t < 2
            else 0
        )

    for column in range(11):
        position = (column + 0.5) * 16 / assumed - 0.5
        value = sum(cubic(position - i) * stored[min(max(i, 0), 15)] for i in range(-3, 20))
        torch.testing.assert_close(resized[column], value, atol=1e-5, rtol=0)


def test_a_missing_key_bias_stays_zero():
    """DINOv3 has none, and with rotary position embeddings it would not cancel."""
    vit = small_vit(positions="rotary", qkv_bias="no_key")
    vit(torch.rand(1, 3, 32, 32)).logits.sum().backward()
    for block in vit.blocks:
        assert not block.attn.qkv.bias.grad[32:64].any()
        assert block.attn.qkv.bias.grad[:32].any()


def test_the_same_seed_gives_the_same_vit():
    def build():
        torch.manual_seed(7)
        return ViT(ViTConfig(width=32, depth=2, heads=4, patch=8, grid=(4, 4))).state_dict()

    one, two = build(), build()
    assert all(torch.equal(one[name], two[name]) for name in one)
