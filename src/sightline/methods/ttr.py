"""TTR: the patches of recent images are clustered, and CLIP sees only the cluster that shows the subject.

The queue starts with the last validation images, so that predictions on the test data are the same right after training
and later, and no test image is seen before its turn.
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
from ..what.zeroshot import ZeroShot, project_tokens
from ..where.clusters import Clustering, cluster_tokens, subject_cluster
from .zeroshot import empty_text_embeddings, prepare_clip, save_untrained

if TYPE_CHECKING:
    from accelerate import Accelerator

    from ..data.rows import Rows
    from ..training.run_folder import Run


class TtrClassifier(Method):
    """Its sight depends on the last `len(start)` images it has seen, including the current one."""

    blind = True
    export_obstacle = "its predictions depend on the images it has seen before"

    general: Tensor
    start: Tensor
    recent: Tensor | None

    def __init__(self, what: ZeroShot, general: Tensor, start: Tensor, clustering: Clustering):
        super().__init__()
        self.what, self.clustering, self.recent = what, clustering, None
        self.register_buffer("general", general)  # [P], normalised
        self.register_buffer("start", start)  # [Q, N, P]: the initial queue

    def look(self, images: Tensor) -> Sight:
        check_single_process()
        queue = self.start if self.recent is None else self.recent
        H, W = self.what.vit.grid(images)
        if queue.shape[1] != H * W:
            raise ValueError(f"the queue has images of {queue.shape[1]} patches, and these have {H * W}")
        keep = []
        for tokens in patch_tokens(self.what.vit, images):
            queue = torch.cat([queue[1:], tokens[None].to(queue.dtype)])
            labels = cluster_tokens(queue.flatten(0, 1), self.clustering)[-len(tokens) :]
            keep.append(labels == subject_cluster(tokens, labels, self.general))
        self.recent = queue.detach()
        return Sight(keep=torch.stack(keep).view(-1, H, W))

    def judge(self, images: Tensor, sight: Sight) -> Prediction:
        return self.what.judge(images, sight)

    def maps(self, images: Tensor) -> dict[str, Tensor]:  # noqa: ARG002 (no map, only the cluster)
        return {}

    def extra_repr(self) -> str:
        return str(self.clustering)


def check_single_process() -> None:
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise UserError("ttr: predictions depend on the order of images; run it in one process")


def patch_tokens(vit: ViT, images: Tensor) -> Tensor:
    """[B, N, P]: patch tokens in CLIP's joint embedding space, not normalised."""
    patches = vit(images).patches
    with torch.autocast(images.device.type, enabled=False):
        return project_tokens(vit, patches)


# ---- making ----------------------------------------------------------------------------------------------------------


def check_ttr_config(config: Ttr) -> None:
    if not config.general_prompt or not config.general_prompt.strip():
        raise UserError(
            '--general-prompt: describe what all images show, such as --general-prompt "a photo of a bird."'
        )
    if config.components > config.rank:
        raise UserError(f"--components {config.components}: must be at most --rank, {config.rank}")
    check_single_process()


def check_cluster_count(config: Ttr, patch: int, expects: Input) -> None:
    patches = config.queue * (expects.size[0] // patch) * (expects.size[1] // patch)
    if config.clusters > patches:
        raise UserError(
            f"--clusters {config.clusters}: more than the {patches} patches of a queue of {config.queue} images; use "
            "fewer clusters or a longer --queue"
        )


def make_ttr(config: Ttr, rows: Rows, run: Run, accelerator: Accelerator) -> tuple[nn.Module, Input]:
    check_ttr_config(config)
    assert config.general_prompt is not None
    clip, text, expects = prepare_clip(config, rows)
    check_cluster_count(config, clip.vit.config.patch, expects)
    (general,) = clip.embed([config.general_prompt])
    val = rows.split_indices("val")
    last = val[np.arange(-config.queue, 0) % len(val)]  # repeated if there are too few
    vit = clip.vit.to(accelerator.device)
    batches = inference_batches(rows, last, expects, accelerator, batch=config.batch, workers=config.workers)
    try:
        start = map_batches(lambda images, _: patch_tokens(vit, images), batches, accelerator)
    finally:
        batches.close()
    clustering = Clustering(config.clusters, config.components, config.rank, config.sigma, config.seed)
    what = ZeroShot(vit, expects.size, text, clip.scale)
    model = TtrClassifier(what, general, torch.from_numpy(start), clustering).to(accelerator.device).eval()
    if accelerator.is_main_process:
        run.note(clustering=asdict(clustering), queue=list(start.shape[:2]))
        save_untrained(run, model, clip.vit, expects, config, rows, {"general": config.general_prompt})
    return model, expects


def build_ttr(vit_config: ViTConfig, _: Train, facts: Mapping[str, Any]) -> nn.Module:
    what = ZeroShot(ViT(vit_config), vit_config.input.size, empty_text_embeddings(vit_config, dict(facts)))
    start = torch.zeros(*facts["queue"], vit_config.classes)
    return TtrClassifier(what, torch.zeros(vit_config.classes), start, Clustering(**facts["clustering"]))
