"""Masks without training: from a self-supervised ViT's keys (FOUND, TokenCut), or from a saliency network (U2-Net).

The first two are unsupervised. U2-Net was trained on annotated masks, so results with it are those of a supervised
method.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from ..sight import Sight
from ..vit.model import IMAGENET_MEAN, IMAGENET_STD, ViT
from ..vit.weights import weights_sha256
from .attention import min_max_scale

TINY = 1e-10


# ---- FOUND -----------------------------------------------------------------------------------------------------------


def coarse_found(keys: Tensor, attention: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, H, W] in [-1, 1]: the dissimilarity of each patch to the background (FOUND, Siméoni et al. 2023, sec. 3.2).

    `keys` [B, heads, N, d] and CLS `attention` on patches [B, heads, N] are of the last block. The patch with the
    lowest attention is the background seed; sparse heads have larger weights, both for the seed and for the similarity.
    """
    above = attention > attention.mean(dim=(1, 2), keepdim=True)
    density = above.float().mean(dim=2)  # [B, heads]
    weights = torch.log((density + TINY).sum(dim=1, keepdim=True) / (density + TINY))
    seed = (attention * weights[..., None]).sum(dim=1).argmin(dim=1)
    patches = F.normalize(_concatenate_heads(keys * weights[..., None, None]), dim=-1)
    background = patches[torch.arange(len(patches), device=seed.device), seed]
    return -torch.einsum("bnd,bd->bn", patches, background).unflatten(1, grid)


class Found(nn.Module):
    """Keeps the patches whose similarity to the background is at most `alike`: the coarse step of FOUND, without its
    trained head.

    The paper's threshold of 0.3 is for a DINO ViT-S/8. The keys of other models are less similar: on 100 training
    images of CUB with our ViT-S/16, 0.3 keeps half of the image (IoU .34 on the patch grid) and 0 a quarter (.42).
    """

    def __init__(self, vit: ViT, alike: float = 0.0):
        super().__init__()
        self.vit, self.alike = vit, alike

    def look(self, images: Tensor) -> Sight:
        return Sight(keep=self._dissimilarity(images) >= -self.alike)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"unlike background": (1 + self._dissimilarity(images)) / 2}

    def extra_repr(self) -> str:
        return f"alike={self.alike}"

    def _dissimilarity(self, images: Tensor) -> Tensor:
        out = self.vit(images, keys=[-1], cls_attention=[-1])
        return coarse_found(out.keys[:, 0].float(), out.cls_attention[:, 0, :, self.vit.prefix :].float(), out.grid)


# ---- TokenCut --------------------------------------------------------------------------------------------------------


def tokencut(keys: Tensor, grid: tuple[int, int], *, alike: float = 0.2) -> tuple[Tensor, Tensor]:
    """The normalised cut of the patch graph: the eigenvector [B, H, W] and the foreground, bool [B, H, W].

    TokenCut (Wang et al. 2022, sec. 3.2): patches are connected where the cosine of their `keys` [B, heads, N, d] is
    above `alike`; the eigenvector of the second smallest eigenvalue of (D - E) x = λ D x is cut at its mean. The
    foreground is the side with the largest absolute value, restricted to the connected component of that patch.
    """
    values = second_eigenvector(_concatenate_heads(keys), alike)
    seed = values.abs().argmax(dim=1)
    at = torch.arange(len(values), device=values.device)
    values = values * torch.where(values[at, seed] > values.mean(dim=1), 1.0, -1.0)[:, None]
    side = values > values.mean(dim=1, keepdim=True)
    return values.unflatten(1, grid).to(keys.dtype), component_with(side.unflatten(1, grid), seed)


def second_eigenvector(patches: Tensor, alike: float, weak: float = 1e-5) -> Tensor:
    """[B, N], in double precision; `weak` edges between all patches keep it unique if the graph is disconnected."""
    patches = F.normalize(patches.double(), dim=-1)
    edges = torch.where(patches @ patches.mT > alike, 1.0, weak).to(patches.dtype)
    scale = edges.sum(dim=2).rsqrt()
    # D^-1/2 (D - E) D^-1/2 is symmetric with the same eigenvalues; its eigenvectors are D^1/2 times the wanted ones.
    similar = scale[:, :, None] * edges * scale[:, None]
    _, vectors = torch.linalg.eigh(torch.eye(similar.shape[1], dtype=similar.dtype, device=similar.device) - similar)
    return vectors[:, :, 1] * scale


def component_with(keep: Tensor, seed: Tensor) -> Tensor:
    """The connected component (4-neighbours) of each mask [B, H, W] that contains patch number `seed` [B]."""
    from scipy.ndimage import label

    components = np.stack([label(mask)[0] for mask in keep.cpu().numpy()])
    flat = components.reshape(len(components), -1)
    number = np.take_along_axis(flat, seed.cpu().numpy()[:, None], axis=1)[:, :, None]
    return torch.from_numpy((components == number) & (components > 0)).to(keep.device)


class TokenCut(nn.Module):
    """Keeps the foreground of the normalised cut of a self-supervised ViT's patches."""

    def __init__(self, vit: ViT, alike: float = 0.2):
        super().__init__()
        self.vit, self.alike = vit, alike

    def look(self, images: Tensor) -> Sight:
        return Sight(keep=self._cut(images)[1])

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"cut": min_max_scale(self._cut(images)[0], (1, 2))}

    def extra_repr(self) -> str:
        return f"alike={self.alike}"

    def _cut(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out = self.vit(images, keys=[-1])
        return tokencut(out.keys[:, 0].float(), out.grid, alike=self.alike)


# ---- U2-Net ----------------------------------------------------------------------------------------------------------


class U2Net(nn.Module):
    """Keeps the salient pixels of a saliency network (U²-Net, Qin et al. 2020), run from its ONNX file.

    The output is a sigmoid trained with cross-entropy, so 0.5 is the natural threshold; scaling its map to [0, 1], as
    published, shifts that a little and ensures that something is kept.
    """

    SIDE = 320

    def __init__(self, path: Path | str, threshold: float = 0.5):
        super().__init__()
        self.threshold = threshold
        self.session = _open_onnx(Path(path))
        self.sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()

    def look(self, images: Tensor) -> Sight:
        return Sight(keep_pixels=self._salience(images) >= self.threshold)

    def maps(self, images: Tensor) -> dict[str, Tensor]:
        return {"salience": self._salience(images)}

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}, sha256={self.sha256[:16]}"

    def _salience(self, images: Tensor) -> Tensor:
        """[B, h, w] in [0, 1]."""
        pixels = F.interpolate(images.float(), (self.SIDE, self.SIDE), mode="bilinear", antialias=True)
        pixels = pixels / pixels.amax(dim=(1, 2, 3), keepdim=True).clamp(min=1e-6)
        mean, std = (pixels.new_tensor(numbers).view(3, 1, 1) for numbers in (IMAGENET_MEAN, IMAGENET_STD))
        name = self.session.get_inputs()[0].name
        inputs = ((pixels - mean) / std).cpu().numpy()
        try:  # the network takes one image at a time
            fused = [self.session.run(None, {name: image[None]})[0] for image in inputs]
        except Exception as error:  # as in `_open_onnx`
            raise UserError(f"the ONNX file of --masks u2net cannot be run ({_first_line(error)})") from error
        if not fused or fused[0].shape != (1, 1, self.SIDE, self.SIDE) or not np.isfinite(np.concatenate(fused)).all():
            raise UserError("the ONNX file of --masks u2net gives no salience map; give U2-Net as an ONNX file")
        salience = min_max_scale(torch.from_numpy(np.concatenate(fused)[:, 0]), (1, 2))
        return F.interpolate(salience[:, None], images.shape[-2:], mode="bilinear")[:, 0].to(images.device)


def _open_onnx(path: Path):
    try:
        import onnxruntime
    except ImportError:
        raise UserError("--masks u2net: needs onnxruntime; pip install 'sightline[saliency]'") from None
    if not path.is_file():
        raise UserError(f"{path}: no such file; give U2-Net's weights as an ONNX file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # no warnings about a file that is refused, or works
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )  # a second attempt on the same provider would fail in the same way
    except Exception as error:  # onnxruntime's own error classes differ between versions
        raise UserError(f"{path}: not an ONNX file that onnxruntime can read ({_first_line(error)})") from error
    shape = session.get_inputs()[0].shape if len(session.get_inputs()) == 1 else []
    if shape[1:] != [3, U2Net.SIDE, U2Net.SIDE]:
        raise UserError(
            f"{path}: takes inputs {shape}, not [1, 3, {U2Net.SIDE}, {U2Net.SIDE}]; give U2-Net as an ONNX file"
        )
    return session


Saliency = Found | TokenCut | U2Net


def selector_sha256(selector: Saliency) -> str:
    """Of its weights, or of the ONNX file that holds them."""
    return selector.sha256 if isinstance(selector, U2Net) else weights_sha256(selector)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _concatenate_heads(keys: Tensor) -> Tensor:
    """[B, heads, N, d] -> [B, N, heads·d]."""
    return keys.transpose(1, 2).flatten(2)
