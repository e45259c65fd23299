"""The registry of published backbones: architecture, preprocessing and source of the weights by name.

Sizes, normalisation and cropping are the authors' own (resize to 256 and crop 224 is `crop=0.875`). Revisions are
commits of the hub's repositories; where none is pinned, the newest is used and `vit.origin` records it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import Backbones
from .model import Input, ViTConfig

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Backbone:
    name: str
    config: ViTConfig
    repository: str | None = None  # on the Hugging Face hub; None: not published there as safetensors
    revision: str | None = None
    file: str = "model.safetensors"
    note: str = ""  # for those without a repository: where to get the weights
    embedded: str | None = None  # the weights file in this package


SIZES = {  # width, depth, heads
    "nano": (128, 6, 4),
    "ti": (192, 12, 3),
    "s": (384, 12, 6),
    "b": (768, 12, 12),
    "l": (1024, 24, 16),
    "h": (1280, 32, 16),
}


# Small enough to train on a laptop CPU in a minute; not published.
NANO = ViTConfig(width=96, depth=6, heads=3, patch=8, grid=(8, 8), registers=2, input=Input(size=(64, 64)))


def _vit(size: str, patch: int, grid: int | None = None, **rest) -> ViTConfig:
    width, depth, heads = SIZES[size]
    grid = 224 // patch if grid is None else grid
    rest.setdefault("input", Input(crop=0.875))
    return ViTConfig(width=width, depth=depth, heads=heads, patch=patch, grid=(grid, grid), **rest)


def sightline_vit_config(size: str, patch: int, pixels: int, registers: int) -> ViTConfig:
    """The architectures of this project's own pretraining."""
    return _vit(size, patch, pixels // patch, registers=registers, input=Input((pixels, pixels)))


def _dinov2(size: str, registers: int = 0) -> ViTConfig:
    positions = "bicubic_antialias" if registers else "bicubic_offset"
    return _vit(size, 14, 37, registers=registers, layer_scale=1e-5, positions=positions)


def _giant(config: ViTConfig) -> ViTConfig:
    return replace(config, width=1536, depth=40, heads=24, hidden=4096, mlp="swiglu")


def _dinov3(size: str, **rest) -> ViTConfig:
    expects = Input(size=(256, 256))
    config = _vit(
        size, 16, input=expects, registers=4, layer_scale=1e-5, positions="rotary", qkv_bias="no_key", norm_eps=1e-5
    )
    return replace(config, **rest)


def _clip(size: str, patch: int, **rest) -> ViTConfig:
    expects = Input(mean=CLIP_MEAN, std=CLIP_STD)
    config = _vit(size, patch, input=expects, mlp="quick_gelu", pre_norm=True, patch_bias=False, norm_eps=1e-5)
    return replace(config, **rest)


def _augreg(size: str) -> ViTConfig:
    return _vit(size, 16, input=Input(mean=HALF, std=HALF, crop=0.9))


def _openclip_g14() -> ViTConfig:
    return replace(_clip("h", 14, mlp="gelu"), width=1408, depth=40, hidden=6144)


def _ibot(size: str, folder: str) -> Backbone:
    note = f"The authors publish {folder}/checkpoint_teacher.pth at github.com/bytedance/ibot: download it."
    return Backbone(f"ibot-{size}16", _vit(size, 16, positions="bicubic_offset"), note=note)


_DINO_S8 = _vit("s", 8, positions="bicubic_offset")
_RAD_DINO = replace(_dinov2("b"), input=Input((518, 518), mean=(0.5307, 0.5307, 0.5307), std=(0.2583, 0.2583, 0.2583)))
_OPEN_CLIP = "open_clip_model.safetensors"
_OPEN_CLIP_PYTORCH = "open_clip_pytorch_model.safetensors"

# fmt: off
_ALL = [
    Backbone("dino-s16", _vit("s", 16, positions="bicubic_offset"), "timm/vit_small_patch16_224.dino", "733b42a211ebe03aa7327050699cfcee7cd96123"),
    Backbone("dino-s8", _DINO_S8, "timm/vit_small_patch8_224.dino", "1e26d402048865ad71f26f814c0d9f691254db37"),
    Backbone("dino-b16", _vit("b", 16, positions="bicubic_offset"), "timm/vit_base_patch16_224.dino", "3ca4284a1d2db6ac0fc1a7e24e71ee0643260ec2"),
    Backbone("dinov2-s14", _dinov2("s"), "timm/vit_small_patch14_dinov2.lvd142m", "4610ca143709d58a633b6397a74412c2c3842454"),
    Backbone("dinov2-b14", _dinov2("b"), "timm/vit_base_patch14_dinov2.lvd142m", "4685c99dabffe5affac90bd99dbffd25801ae58d"),
    Backbone("dinov2-l14", _dinov2("l"), "timm/vit_large_patch14_dinov2.lvd142m", "4741e1cafbf45415e77074bb0cb42dba76c8684a"),
    Backbone("dinov2-g14", _giant(_dinov2("l")), "timm/vit_giant_patch14_dinov2.lvd142m", "dd22bb6485eeb29d67273f76d983061298bdc7f0"),
    Backbone("dinov2-s14-reg", _dinov2("s", 4), "timm/vit_small_patch14_reg4_dinov2.lvd142m", "c04b5193082a8d5b0c4856c7937384a48136c5de"),
    Backbone("dinov2-b14-reg", _dinov2("b", 4), "timm/vit_base_patch14_reg4_dinov2.lvd142m", "3b06466a5548c52b8b98822e1390987695fcbf82"),
    Backbone("dinov2-l14-reg", _dinov2("l", 4), "timm/vit_large_patch14_reg4_dinov2.lvd142m", "f3c408e77602bb412aa65fb03dfa0d5f95cb3832"),
    Backbone("dinov2-g14-reg", _giant(_dinov2("l", 4)), "timm/vit_giant_patch14_reg4_dinov2.lvd142m"),
    Backbone("dinov3-s16", _dinov3("s"), "timm/vit_small_patch16_dinov3.lvd1689m", "3bf4720a82ec2066db88137180ff1f83a675cef0"),
    Backbone("dinov3-s16plus", _dinov3("s", mlp="swiglu", hidden=1536), "timm/vit_small_plus_patch16_dinov3.lvd1689m"),
    Backbone("dinov3-b16", _dinov3("b"), "timm/vit_base_patch16_dinov3.lvd1689m", "c6a5fb7d12bbd3cf3b0079253141c3332aaed7da"),
    Backbone("dinov3-l16", _dinov3("l"), "timm/vit_large_patch16_dinov3.lvd1689m", "30c1109559f65dea34316b0d4842d35c5771fe11"),
    Backbone("dinov3-h16plus", _dinov3("h", heads=20, mlp="swiglu", hidden=5120), "timm/vit_huge_plus_patch16_dinov3.lvd1689m"),
    Backbone("dinov3-7b16", _dinov3("l", width=4096, depth=40, heads=32, mlp="swiglu", hidden=8192), "timm/vit_7b_patch16_dinov3.lvd1689m"),
    Backbone("mae-b16", _vit("b", 16, positions="bicubic"), "timm/vit_base_patch16_224.mae", "9085cfddecbe125d73b95d25b7d4eb4832f216fa"),
    Backbone("mae-l16", _vit("l", 16, positions="bicubic"), "timm/vit_large_patch16_224.mae", "4b308043edaf05585fd5762ea4fb78cf75d9ac4c"),
    Backbone("mae-h14", _vit("h", 14, positions="bicubic"), "timm/vit_huge_patch14_224.mae", "007fb32550ad33651c5dd46afd86251f452b0334"),
    Backbone("augreg-ti16", _augreg("ti"), "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"),
    Backbone("augreg-s16", _augreg("s"), "timm/vit_small_patch16_224.augreg_in21k_ft_in1k", "7e2c55630205e1266030f18370f4c6ed1a514b52"),
    Backbone("augreg-b16", _augreg("b"), "timm/vit_base_patch16_224.augreg_in21k_ft_in1k", "b5b38b8f7dd93ce67d12e356a8771556b95c8cf9"),
    Backbone("augreg-l16", _augreg("l"), "timm/vit_large_patch16_224.augreg_in21k_ft_in1k"),
    Backbone("deit-s16", _vit("s", 16, positions="bicubic"), "timm/deit_small_patch16_224.fb_in1k", "91327a9c99f98fe6b524cd4d397b7226b80e1365"),
    Backbone("deit-b16", _vit("b", 16, positions="bicubic"), "timm/deit_base_patch16_224.fb_in1k", "b78cc5532a69df6bcad9c3a8d76653fd20b31ac6"),
    Backbone("clip-b32", _clip("b", 32), "timm/vit_base_patch32_clip_224.openai", "a6f597a30f7b82c51704746581f9a4e41421e878", _OPEN_CLIP),
    Backbone("clip-b16", _clip("b", 16), "timm/vit_base_patch16_clip_224.openai", "977e3dd0ec55ab8da155f2fbeb6b5f54948b6e3d", _OPEN_CLIP),
    Backbone("clip-l14", _clip("l", 14), "openai/clip-vit-large-patch14", "32bd64288804d66eefd0ccbe215aa642df71cc41"),
    Backbone("openclip-b16", _clip("b", 16, mlp="gelu"), "laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "7288da5a0d6f0b51c4a2b27c624837a9236d0112", _OPEN_CLIP),
    Backbone("openclip-l14", _clip("l", 14, mlp="gelu", input=Input(mean=HALF, std=HALF)), "laion/CLIP-ViT-L-14-laion2B-s32B-b82K", "1627032197142fbe2a7cfec626f4ced3ae60d07a", _OPEN_CLIP_PYTORCH),
    Backbone("openclip-h14", _clip("h", 14, mlp="gelu"), "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "1c2b8495b28150b8a4922ee1c8edee224c284c0c", _OPEN_CLIP),
    Backbone("openclip-g14", _openclip_g14(), "laion/CLIP-ViT-g-14-laion2B-s12B-b42K", "4b0305adc6802b2632e11cbe6606a9bdd43d35c9", _OPEN_CLIP_PYTORCH),
    _ibot("s", "vits_16"),
    _ibot("b", "vitb_16"),
    _ibot("l", "vitl_16"),
    Backbone("rad-dino", _RAD_DINO, "microsoft/rad-dino", "110cbc18d5133582e320b43d53bf5c44e410c936"),
    Backbone("sightline-nano", sightline_vit_config("nano", 8, 96, registers=4), note="Included in Sightline: pretrained on its own toy images.", embedded="nano.safetensors"),
    Backbone("sightline-s16", _vit("s", 16, registers=4, input=Input()), note="From this project's own pretraining."),
]
# fmt: on

BACKBONES = {backbone.name: backbone for backbone in _ALL}
BY_REPOSITORY = {backbone.repository: backbone for backbone in _ALL if backbone.repository}


# ---- the command -----------------------------------------------------------------------------------------------------


def run_command(_: Backbones) -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "width", "blocks", "patch", "registers", "input", "weights", box=None, pad_edge=False)
    for backbone in BACKBONES.values():
        c, weights = backbone.config, backbone.repository or backbone.note
        sizes = map(str, (c.width, c.depth, c.patch, c.registers))
        table.add_row(backbone.name, *sizes, f"{c.input.size[0]} px", weights)
    Console(highlight=False).print(table)
    return 0
