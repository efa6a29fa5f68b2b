"""UnimodalModel: contrastive training on several views of each image, without text (SimCLR)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Adam, Optimizer

from medclip_dcl.common.errors import UserError, check_range
from medclip_dcl.models.trained_model import NetworkModel
from medclip_dcl.unimodal.data import ViewsProvided, ViewsRequirements
from medclip_dcl.unimodal.encoders import SmallImageEncoder
from medclip_dcl.unimodal.network import UnimodalNetwork
from medclip_dcl.unimodal.views import ViewsObjective


class UnimodalModel(NetworkModel):
    """Contrastive training of an encoder of images: the views of an image are alike, those of others are not.

    Validation and test steps give the encoder's features, not the projection's, to `UnimodalEvaluation`. In a training
    step all views of all images pass the network at once, so that BatchNorm sees them together; with several processes
    each normalises its own unless `trainer.sync_batchnorm` is set.

    Args:
        image_encoder: images to features. It comes before the objective, and no objective draws random numbers when it
            is built: under one seed every objective starts from the same weights.
        objective: the loss of the views' embeddings.
        projection_dim: size of the embeddings; null: the loss sees the features.
        hidden: size of the projection's hidden layer; null: that of the features (choice); 0: a linear projection.
        batch_norm: true puts BatchNorm before the ReLU of the projection, as in DCL's public code.
        learning_rate: of Adam, constant (SSD and DCL: 1e-3).
        weight_decay: of Adam, on all parameters (SSD: 1e-6).
    """

    network: UnimodalNetwork
    kind = UnimodalNetwork.kind
    tests_untrained = True
    parts = ("image_encoder", "projection_dim", "hidden", "batch_norm")

    def __init__(
        self,
        image_encoder: SmallImageEncoder,
        objective: ViewsObjective,
        projection_dim: int | None = 128,
        hidden: int | None = None,
        batch_norm: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-6,
    ) -> None:
        super().__init__()
        check_range("model", "(0, inf)", learning_rate=learning_rate)
        check_range("model", "[0, inf)", weight_decay=weight_decay)
        self.network = UnimodalNetwork(image_encoder, projection_dim, hidden, batch_norm)
        self.objective = objective
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    def requirements(self) -> ViewsRequirements:
        """Requirements of the datamodule: views of each image, and the fields of the objective."""
        one, parts = self.objective, self.network.image_encoder.n_parts
        if one.n_views % parts or one.n_members % parts:
            raise UserError(
                f"model.objective: expected multiples of {parts}, the encoder's views of an image, found {one.n_views} "
                f"views, {one.n_members} of them of other images"
            )
        return ViewsRequirements(one.n_views // parts, tuple(one.requires), one.n_members // parts)

    def use_data(self, data: ViewsProvided, stage: str) -> None:
        """Check that the encoder takes the images, and the objective a batch of them."""
        channels = self.network.image_encoder.channels
        if channels != data.channels:
            raise UserError(
                f"model.init_args.image_encoder.init_args.channels: expected {data.channels}, those of the images, "
                f"found {channels}"
            )
        if stage == "fit" and data.batch_size < (least := self.objective.min_images):
            raise UserError(
                f"data.batch_size: expected at least {least}, as {type(self.objective).__name__} needs, found "
                f"{data.batch_size}"
            )

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (part, image, dim)."""
        return self.network(images)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        loss, figures = self._loss(batch)
        self.log_training(loss, batch["images"].shape[1], figures)
        return loss

    def _loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of the images of all processes, and statistics to log."""
        views: Tensor = batch["images"]
        embeddings = self.network(views.flatten(0, 1)).unflatten(1, views.shape[:2])
        return self.objective(embeddings.transpose(0, 1).flatten(0, 1), batch)

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> dict[str, Any]:
        """Features for the callback."""
        return {**batch, "features": self.network.features(batch["images"])}

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        """Do nothing: there is no validation loss; the callback logs the accuracy of nearest neighbours."""

    on_validation_epoch_end = on_validation_epoch_start

    def configure_optimizers(self) -> Optimizer:
        """Adam at a constant rate; an objective may learn, too."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        return Adam(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
