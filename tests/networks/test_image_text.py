"""The network: shapes and places of regions, and that it describes and rebuilds itself exactly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from medclip_dcl.networks.image_encoder import ResNetRegions
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.networks.similarity import GlobalCosine
from medclip_dcl.networks.text_encoder import BertSentences


@pytest.fixture
def network(small_bert) -> ImageTextNetwork:
    torch.manual_seed(1)
    text = BertSentences(str(small_bert), dim=16)
    return ImageTextNetwork(ResNetRegions(dim=16, stride=16, width=8), text, image_size=64).eval()


@torch.no_grad()
def test_regions_stand_row_by_row(network):
    feature_map = network.feature_map(torch.rand(2, 3, 64, 96))
    assert feature_map.shape == (2, 16, 4, 6)
    regions = network.regions(feature_map)
    assert torch.equal(regions[1, 2 * 6 + 5], feature_map[1, :, 2, 5])


@torch.no_grad()
def test_embedding_texts_does_not_depend_on_the_batch(network):
    texts = ["No pneumothorax", "Small left pleural effusion.", "Mild pulmonary edema, unchanged from ___."]
    together = network.embed_texts(texts)
    alone = torch.cat([network.embed_texts([text], batch_size=1) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert network.embed_texts([]).shape == (0, 16)


@torch.no_grad()
def test_biovils_projections_survive_saving(small_bert, tmp_path):
    text = BertSentences(str(small_bert), dim=16, projection="mlp")
    image = ResNetRegions(dim=16, stride=16, projection="mlp", width=8)
    network = ImageTextNetwork(image, text, GlobalCosine(), image_size=64)
    network.feature_map(torch.rand(3, 3, 64, 64))  # in train mode: moves the running mean
    network.eval().save_pretrained(tmp_path / "export")
    loaded = ImageTextNetwork.from_pretrained(tmp_path / "export")
    assert loaded.config() == network.config() and not loaded.training
    images, (tokens, lengths) = torch.rand(2, 3, 64, 64), network.tokenize(["No pneumothorax.", "Clear."])
    assert torch.equal(network(images, tokens, lengths), loaded(images, tokens, lengths))


def test_loading_refuses_what_does_not_fit(network, tmp_path):
    folder = tmp_path / "export"
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        ImageTextNetwork.from_pretrained(folder)
    network.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["similarity.q.bias"]
    weights["other"] = torch.zeros(1)
    weights["similarity.q.weight"] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors")
    message = (
        r"missing \['similarity.q.bias'\], unexpected \['other'\], "
        r"of another shape \['similarity.q.weight \(2, 2\)"
    )
    with pytest.raises(ValueError, match=message):
        ImageTextNetwork.from_pretrained(folder)


@pytest.mark.parametrize(
    "path",
    ["os.system", "torch.nn.Linear", "medclip_dcl.networks.LSE", "medclip_dcl.nowhere.X", "nothing"],
)
def test_a_configuration_can_name_only_known_encoders(network, path):
    config = network.config()
    config["image_encoder"]["class_path"] = path
    with pytest.raises((ValueError, ModuleNotFoundError), match="not a known RegionEncoder|No module named"):
        ImageTextNetwork.from_config(config)
