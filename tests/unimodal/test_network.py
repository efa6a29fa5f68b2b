"""The unimodal network: its projection, its description, its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from medclip_dcl.common.errors import UserError
from medclip_dcl.unimodal.encoders import SmallConvNet
from medclip_dcl.unimodal.network import UnimodalNetwork

IMAGES = torch.rand(5, 1, 8, 8)


def test_projection_has_two_layers_as_configured():
    network: Any = UnimodalNetwork(SmallConvNet(2), projection_dim=3, hidden=7)
    first, _, last = network.projection
    hidden = (network.features(IMAGES) @ first.weight.T + first.bias).clamp(min=0)
    torch.testing.assert_close(network(IMAGES)[0], hidden @ last.weight.T + last.bias)
    assert network.eval()(IMAGES).shape == (1, 5, 3) and network.features(IMAGES).shape == (5, 8)
    # BatchNorm replaces the bias before the ReLU.
    network = UnimodalNetwork(SmallConvNet(2), 3, batch_norm=True)
    kinds = [type(layer) for layer in network.projection]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert network.projection[0].bias is None and network.projection[3].bias is not None


@pytest.mark.parametrize("options", [(3, 7, True), (3, None, False), (None, None, False)])
def test_a_checkpoint_rebuilds_the_network(options, tmp_path):
    network = UnimodalNetwork(SmallConvNet(2), *options)
    network(IMAGES)  # moves BatchNorm's statistics
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    torch.save(
        {"format_version": 3, "network": network.config(), "state_dict": state}, tmp_path / "last.ckpt"
    )
    again = UnimodalNetwork.from_pretrained(tmp_path / "last.ckpt")
    assert not again.training and again.config() == network.config()
    assert torch.equal(again(IMAGES), network.eval()(IMAGES))
    torch.save(
        {"format_version": 3, "network": network.config(), "state_dict": dict(list(state.items())[1:])},
        tmp_path / "less.ckpt",
    )
    with pytest.raises(UserError, match="missing.*layers.0.weight"):
        UnimodalNetwork.from_pretrained(tmp_path / "less.ckpt")
