"""Settings of methods that weight training images by group or by loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .limits import Count, Fraction, HalfOpen, NotNegative, Positive, PositiveFraction, Several, Whole
from .methods import Erm
from .training import Balance


@dataclass(frozen=True)
class Groupdro(Erm):
    """Fine-tune with group weights that follow the group losses (GroupDRO). Uses group labels."""

    step_size: NotNegative = 0.01
    """Step size of the exponentiated-gradient update of the group weights."""
    adjustment: NotNegative = 0.0
    """Generalisation adjustment C: C / √(group size) is added to each group loss; published values: 0 to 5."""
    balance: Balance = "groups"
    """Draw classes or groups equally often, or logit adjustment with the training class priors."""
    select: Literal["worst-group", "worst-class", "balanced", "accuracy", "auc"] = "worst-group"
    """Validation metric for checkpoint selection."""

    method: ClassVar[str] = "groupdro"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"adjustment": (0.0, 2.0)}
    needs_groups: ClassVar[bool] = True
    weighs_batches: ClassVar[bool] = True

    @property
    def selects(self) -> str | None:
        return f"{self.select} (GroupDRO: trained with group labels)"


@dataclass(frozen=True)
class Cvar(Erm):
    """Fine-tune on the highest losses of each batch (CVaR-DRO)."""

    worst_fraction: PositiveFraction = 0.2
    """Fraction of each batch, by highest loss, that the loss averages over."""

    method: ClassVar[str] = "cvar"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"worst_fraction": (0.1, 0.2, 0.5)}
    weighs_batches: ClassVar[bool] = True


@dataclass(frozen=True)
class Lff(Erm):
    """Fine-tune with weights from a second, deliberately biased model: learning from failure (LfF)."""

    gce_q: Positive = 0.7
    """q of the generalised cross-entropy that biases the second model; towards 0 it becomes cross-entropy."""
    loss_ema: HalfOpen = 0.7
    """Decay of the moving average of each image's loss."""

    method: ClassVar[str] = "lff"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"gce_q": (0.5, 0.7)}
    weighs_batches: ClassVar[bool] = True


@dataclass(frozen=True)
class Jtt(Erm):
    """Fine-tune twice, upweighting the errors of the first model in the second (JTT). The first is in RUN/first."""

    first_epochs: Count = 1
    """Epochs of the first model; few, so that it learns the shortcut."""
    upweight: Whole = 50
    """Extra copies of each misclassified training image. Published: 100 (Waterbirds), 50 (CelebA), tuned with
    validation groups."""

    method: ClassVar[str] = "jtt"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"upweight": (5, 20, 50)}


@dataclass(frozen=True)
class Irm(Erm):
    """Fine-tune with the same classifier optimal in every environment (IRM). Uses group labels."""

    penalty: NotNegative = 100.0
    """Weight of the penalty on how far the classifier is from optimal in each environment (an attribute of the
    groups)."""
    ramp: Fraction = 0.1
    """Fraction of training in which the weight rises from 0 to --penalty."""

    method: ClassVar[str] = "irm"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"penalty": (1.0, 10.0, 100.0)}
    needs_groups: ClassVar[bool] = True
    weighs_batches: ClassVar[bool] = True

    @property
    def selects(self) -> str | None:
        return f"{self.select} (IRM: trained with group labels)"


@dataclass(frozen=True)
class Coral(Erm):
    """Fine-tune with the same feature mean and covariance in every environment (CORAL). Uses group labels."""

    penalty: NotNegative = 1.0
    """Weight of the squared differences of means and covariances between environments (attributes of the groups)."""

    method: ClassVar[str] = "coral"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"penalty": (0.1, 1.0, 10.0)}
    needs_groups: ClassVar[bool] = True
    weighs_batches: ClassVar[bool] = True

    @property
    def selects(self) -> str | None:
        return f"{self.select} (CORAL: trained with group labels)"


@dataclass(frozen=True)
class George(Erm):
    """GroupDRO on clusters that a first model's features or errors form within each class (GEORGE). No group labels."""

    first_epochs: Count = 10
    """Epochs of the first model, whose representation is clustered. It is in RUN/first."""
    clustered: Literal["hardness", "features"] = "hardness"
    """What is clustered within each class: the log odds that the first model gives the true class (as published for
    Waterbirds), or the first two principal components of its features."""
    most_clusters: Several = 5
    """Maximum number of clusters per class; their number is chosen by silhouette."""
    step_size: NotNegative = 0.01
    """Step size of the exponentiated-gradient update of the cluster weights."""
    adjustment: NotNegative = 2.0
    """Generalisation adjustment C: C / √(cluster size) is added to each cluster loss."""
    balance: Balance = "groups"
    """Draw classes or groups equally often, or logit adjustment with the training class priors. Groups are the
    clusters."""

    method: ClassVar[str] = "george"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"clustered": ("hardness", "features")}
    weighs_batches: ClassVar[bool] = True
    finds_groups: ClassVar[bool] = True
