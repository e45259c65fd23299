"""TTR: patches of recent pictures are clustered; CLIP sees the cluster that holds the subject, and nothing else.

The queue begins with the last validation pictures, so that the test data are answered alike, whether right after these
or by themselves later, and no picture is seen before its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Train, Ttr
from ..errors import UserError
from ..metrics.inference import inference_batches, map_batches
from ..sight import Method, Prediction, Sight
from ..vit.model import Input, ViT, ViTConfig
from ..what.zeroshot import ZeroShot, projected
from ..where.clusters import Clustering, cluster, subject
from .zeroshot import asked, keep_untrained, unsaid

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class Recaller(Method):
    """Its sight depends on the pictures it was shown before: the last `len(start)`, this one included."""

    blind = True
    export_obstacle = "its predictions depend on the images it has seen before"

    general: Tensor
    start: Tensor
    recent: Tensor | None

    def __init__(self, what: ZeroShot, general: Tensor, start: Tensor, clustering: Clustering):
        super().__init__()
        self.what, self.clustering, self.recent = what, clustering, None
        self.register_buffer("general", general)  # [P], normalised
        self.register_buffer("start", start)  # [Q, N, P]: the queue to begin with

    def look(self, images: Tensor) -> Sight:
        check_several_processes()
        queue = self.start if self.recent is None else self.recent
        H, W = self.what.vit.grid(images)
        if queue.shape[1] != H * W:
            raise ValueError(f"its queue is of pictures with {queue.shape[1]} patches, and these have {H * W}")
        keep = []
        for tokens in patch_tokens(self.what.vit, images):
            queue = torch.cat([queue[1:], tokens[None].to(queue.dtype)])
            labels = cluster(queue.flatten(0, 1), self.clustering)[-len(tokens) :]
            keep.append(labels == subject(tokens, labels, self.general))
        self.recent = queue.detach()
        return Sight(keep=torch.stack(keep).view(-1, H, W))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (there is nothing to draw but the cluster)
        return {}

    def extra_repr(self) -> str:
        return str(self.clustering)


def check_several_processes() -> None:
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise UserError("ttr answers pictures in order, each after those before it: run it in one process")


def patch_tokens(vit: ViT, images: Tensor) -> Tensor:
    """[B, N, P]: the patches where CLIP's words are, not normalised."""
    patches = vit(images).patches
    with torch.autocast(images.device.type, enabled=False):
        return projected(vit, patches)


# ---- making ----------------------------------------------------------------------------------------------------------


def check_value(config: Ttr) -> None:
    if not config.general or not config.general.strip():
        raise UserError('--general: say what all pictures are of, such as --general "a photo of a bird."')
    for flag in ("queue", "clusters", "components", "rank"):
        if getattr(config, flag) < 1:
            raise UserError(f"--{flag} {getattr(config, flag)}: must be at least 1")
    if config.components > config.rank:
        raise UserError(f"--components {config.components}: there are no more than --rank, {config.rank}")
    if config.sigma < 0:
        raise UserError(f"--sigma {config.sigma}: must not be negative")
    check_several_processes()


def check_few_patches(config: Ttr, patch: int, expects: Input) -> None:
    patches = config.queue * (expects.size[0] // patch) * (expects.size[1] // patch)
    if config.clusters > patches:
        raise UserError(
            f"--clusters {config.clusters}: a queue of {config.queue} pictures has {patches} patches to divide; name "
            "fewer, or a longer --queue"
        )


def make_ttr(config: Ttr, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_value(config)
    assert config.general is not None
    clip, text, expects = asked(config, rows)
    check_few_patches(config, clip.vit.config.patch, expects)
    (general,) = clip.embed([config.general])
    val = rows.where("val")
    last = val[np.arange(-config.queue, 0) % len(val)]  # from the start again, where they are too few
    vit = clip.vit.to(accelerator.device)
    batches = inference_batches(rows, last, expects, accelerator, batch=config.batch, workers=config.workers)
    try:
        start = map_batches(lambda images, _: patch_tokens(vit, images), batches, accelerator)
    finally:
        batches.close()
    how = Clustering(config.clusters, config.components, config.rank, config.sigma, config.seed)
    what = ZeroShot(vit, expects.size, text, clip.scale)
    model = Recaller(what, general, torch.from_numpy(start), how).to(accelerator.device).eval()
    if accelerator.is_main_process:
        run.note(clustering=asdict(how), queue=list(start.shape[:2]))
        keep_untrained(run, model, clip.vit, expects, config, rows, {"general": config.general})
    return model, expects


def build_ttr(vit_config: ViTConfig, _: Train, facts: Mapping[str, Any]) -> nn.Module:
    what = ZeroShot(ViT(vit_config), vit_config.input.size, unsaid(vit_config, dict(facts)))
    start = torch.zeros(*facts["queue"], vit_config.classes)
    return Recaller(what, torch.zeros(vit_config.classes), start, Clustering(**facts["clustering"]))
