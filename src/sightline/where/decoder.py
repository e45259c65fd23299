"""The border of parts, drawn by a small network that sees the picture.

    decoder = Decoder(channels=16)
    share = decoder(fine_share(shares, images, Fine()), images)      # [B, h, w]: at first, the same

Nobody shows it where things end: the answer teaches it, straight through the mask, and so do the losses of parts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Shaping
from .part_losses import entropy, total_variation
from .parts import in_full_precision


class Decoder(nn.Module):
    """Four convolutions at half the resolution, none of whose detail is lost: 2×2 pixels become channels, and back.

    They shift the log-odds of each pixel's share, by so little that only doubtful pixels can change sides. What is
    surely hidden, or surely seen, such as a part that a user drops or forces, stays so whatever they say. And what
    they give to some pixels of a picture they take from others: whoever is taught by the answer alone would learn to
    see everything, the shortcut included.
    """

    REACH = math.log(9)  # from a tenth, or from nine tenths, to a half

    def __init__(self, channels: int, seed: int = 0):
        super().__init__()
        self.first = convolution(4 * (3 + 1), channels)
        self.further = nn.ModuleList(convolution(channels, channels, dilation) for dilation in (2, 4))
        self.last = convolution(channels, 4, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1 or name.startswith("last."):
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)

    @in_full_precision
    def forward(self, shares: Tensor, images: Tensor) -> Tensor:
        """[B, h, w]: shares [B, h, w] of the foreground, as the picture [B, 3, h, w] has it."""
        odds = self.shift(shares, images).exp() * shares
        return odds / (odds + (1 - shares))  # exactly the same shares where nothing is shifted

    def shift(self, shares: Tensor, images: Tensor) -> Tensor:
        """[B, h, w], within ±REACH; zero on average, as far as pixels are in doubt."""
        h, w = shares.shape[1:]
        given = torch.cat([2 * images - 1, 2 * shares[:, None] - 1], dim=1)
        x = self.first(F.pixel_unshuffle(F.pad(given, (0, w % 2, 0, h % 2)), 2))
        for layer in self.further:
            x = x + layer(F.relu(x))
        drawn = F.pixel_shuffle(self.last(F.relu(x)), 2)[:, 0, :h, :w]
        drawn, doubt = self.REACH / 2 * drawn.tanh(), shares * (1 - shares)
        weights = doubt / doubt.sum(dim=(1, 2), keepdim=True).clamp_min(1e-6)
        return drawn - (weights * drawn).sum(dim=(1, 2), keepdim=True)


def convolution(given: int, made: int, dilation: int = 1, bias: bool = True) -> nn.Module:
    """3 × 3, and still without weights."""
    return nn.utils.skip_init(nn.Conv2d, given, made, 3, padding=dilation, dilation=dilation, bias=bias)


def pixel_losses(share: Tensor, weights: Shaping) -> dict[str, Tensor]:
    """What shapes parts, asked of pixels [B, h, w]: few borders, and every pixel surely of the parts or not."""
    both = torch.stack([share, 1 - share], dim=1)
    scale = math.sqrt(share[0].numel()) / weights.total_variation_at if weights.total_variation_at else 1.0
    losses = {
        "pixel_total_variation": (weights.total_variation, lambda: scale * total_variation(both)),
        "pixel_entropy": (weights.entropy, lambda: entropy(both)),
    }
    return {name: weight * loss() for name, (weight, loss) in losses.items() if weight}
