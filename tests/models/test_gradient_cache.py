"""Encoding in parts is exact, keeps one part's activations, and moves BatchNorm's statistics once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from medclip_dcl.models.gradient_cache import in_parts


class Encoder(nn.Module):
    """A layer with dropout, which must hide the same in both passes; it counts what it is asked for."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(5, 7), nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        self.rows: list[int] = []

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(rows))
        return self.dropout(self.norm(self.layer(rows)).tanh()) * scale[:, None]


def in_chunks(encode: Callable[..., torch.Tensor], parts: int, *rows: torch.Tensor) -> torch.Tensor:
    size = -(-len(rows[0]) // parts)
    return in_parts(encode, list(zip(*(tensor.split(size) for tensor in rows), strict=True)), parts == 1)


def gradient(encoder: Encoder) -> torch.Tensor:
    assert encoder.layer.weight.grad is not None
    return encoder.layer.weight.grad.clone()


@pytest.mark.parametrize("rows, parts", [(8, 4), (7, 3), (5, 9), (6, 1)])
def test_equals_the_plain_pass(rows, parts):
    torch.manual_seed(1)
    encoder = Encoder().double().eval()
    x, scale = torch.randn(rows, 5, dtype=torch.float64), torch.rand(rows, dtype=torch.float64)
    plain = encoder(x, scale)
    plain.square().sum().backward()
    expected = gradient(encoder)
    encoder.zero_grad()
    encoder.rows.clear()
    found = in_chunks(encoder.forward, parts, x, scale)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    found.square().sum().backward()
    torch.testing.assert_close(gradient(encoder), expected, rtol=1e-12, atol=1e-14)
    if parts > 1:
        assert max(encoder.rows) == -(-rows // parts) and sum(encoder.rows) == 2 * rows


def test_dropout_hides_the_same_in_both_passes():
    encoder = Encoder()
    x, scale = torch.randn(6, 5), torch.ones(6)
    torch.manual_seed(5)
    found = in_chunks(encoder.forward, 3, x, scale)
    found.sum().backward()
    torch.manual_seed(5)
    again = torch.cat([encoder(*part) for part in zip(x.split(2), scale.split(2), strict=True)])
    assert torch.equal(found, again) and (found == 0).any()
    of_parts = gradient(encoder)
    encoder.zero_grad()
    again.sum().backward()
    torch.testing.assert_close(gradient(encoder), of_parts)


def test_batch_norm_counts_each_part_once():
    torch.manual_seed(2)
    encoder, twin = Encoder(norm=True), Encoder(norm=True)
    twin.load_state_dict(encoder.state_dict())
    x, scale = torch.randn(6, 5), torch.ones(6)
    in_chunks(encoder.forward, 3, x, scale).sum().backward()
    for part in x.split(2):
        twin(part, torch.ones(2))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(encoder.norm, name), getattr(twin.norm, name)), name
    assert encoder.norm.momentum == 0.1 and encoder.norm.num_batches_tracked == 3


def test_no_activations_are_kept():
    """Between the passes autograd keeps the encoder's inputs (2 rows of 5), nothing of its width of 7."""
    encoder = Encoder()
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    x, scale = torch.randn(8, 5), torch.ones(8)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        in_chunks(encoder.forward, 4, x, scale)
    assert set(kept) - {0} == {10, 2}  # and an empty tensor by torch before 2.12


def test_without_gradient_nothing_is_encoded_twice():
    encoder = Encoder()
    with torch.no_grad():
        in_chunks(encoder.forward, 4, torch.randn(8, 5), torch.ones(8))
    assert encoder.rows == [2, 2, 2, 2]


def test_norms_that_do_not_run_are_left_alone():
    """The network's text encoder is recomputed: its image encoder's norms did not run."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.image = Encoder(), Encoder(norm=True)

        def encode(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.text(rows, scale)

    network = Network()
    x, scale = torch.randn(6, 5), torch.ones(6)
    in_chunks(network.encode, 3, x, scale).sum().backward()
    network.image(x, scale)
    norm = network.image.norm
    assert isinstance(norm, nn.BatchNorm1d) and norm.num_batches_tracked == 1 and norm.momentum == 0.1
