"""A vector of the whole image beside its regions: compared by GlobalCosine, carried wherever images are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.image_text import ImageTextDataModule
from medclip_dcl.evaluation import EmbeddingMap, Retrieval, ZeroShotClassification
from medclip_dcl.models.image_text import ImageTextModel
from medclip_dcl.networks import FindingNetwork, GlobalCosine, ImageTextNetwork, LSENonLocal
from medclip_dcl.networks.text_encoder import BertSentences
from medclip_dcl.use.model import LoadedModel
from tests.small import GlobalPatches, LinearPatches, RegionsAndGlobal


@pytest.fixture
def network(small_bert) -> ImageTextNetwork:
    torch.manual_seed(1)
    text = BertSentences(str(small_bert), dim=8)
    return ImageTextNetwork(GlobalPatches(stride=8), text, GlobalCosine(), image_size=24).eval()


def own_vectors(network: ImageTextNetwork, images: Tensor) -> Tensor:
    encoder = network.image_encoder
    assert isinstance(encoder, GlobalPatches)
    return (3 * encoder.map((images - network.mean) / network.std)).tanh().mean((2, 3))


def cosines(vectors: Tensor, sentences: Tensor) -> Tensor:
    return cosine_similarity(sentences[:, None], vectors[None], dim=-1)


@torch.no_grad()
def test_the_cosine_is_with_the_global_vector(network):
    images, sentences = torch.rand(3, 3, 16, 24), torch.randn(2, 8)
    encoded = network.encode(images)
    expected = network.similarity.gamma2 * cosines(own_vectors(network, images), sentences)
    torch.testing.assert_close(network.logits(encoded, sentences), expected)
    regions = network.regions(network.feature_map(images))
    torch.testing.assert_close(network.regions(encoded.feature_map), regions)
    of_regions = network.similarity.gamma2 * cosines(regions.mean(1), sentences)
    torch.testing.assert_close(network.similarity(regions, sentences), of_regions)
    assert (expected - of_regions).abs().max() > 0.1
    tokens, lengths = network.tokenize(["No edema.", "Clear."])
    words = network.encode_sentences(tokens, lengths)
    torch.testing.assert_close(network(images, tokens, lengths), network.logits(encoded, words))


@torch.no_grad()
def test_features_hold_the_global_vector(network):
    images = torch.rand(3, 3, 16, 24)
    features, encoded = network.image_features(images), network.encode(images)
    assert features.shape == (3, 8, 3, 3) and encoded.feature_map.shape == (3, 8, 2, 3)
    again = network.project(features.half().float())
    torch.testing.assert_close(again.feature_map, encoded.feature_map, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(again.global_vector, own_vectors(network, images), rtol=2e-3, atol=2e-3)


@torch.no_grad()
def test_scores_in_parts_split_both():
    similarity, regions, sentences = RegionsAndGlobal(), torch.randn(5, 4, 8), torch.randn(3, 8)
    vectors = torch.randn(5, 8)
    whole = similarity(regions, sentences, vectors)
    expected = (cosines(regions.mean(1), sentences) + cosines(vectors, sentences)) / 2
    torch.testing.assert_close(whole, similarity.gamma2 * expected)
    similarity.map_budget = 24
    torch.testing.assert_close(similarity(regions, sentences, vectors), whole)


def test_a_similarity_of_regions_alone_is_refused(small_bert):
    text = BertSentences(str(small_bert), dim=8)
    with pytest.raises(UserError, match="global_vector: LSENonLocal compares regions alone; set it to false"):
        ImageTextNetwork(GlobalPatches(), text, LSENonLocal(dim=8))
    assert not ImageTextNetwork(LinearPatches(), text, GlobalCosine()).image_encoder.has_global_vector


@torch.no_grad()
def test_inference_compares_it_and_maps_regions(network):
    image, texts = np.random.default_rng(0).integers(0, 255, (24, 24), dtype=np.uint8), ["Edema.", "Clear."]
    model = LoadedModel(network)
    inputs = torch.from_numpy(image / 255).float().expand(1, 3, -1, -1)
    vectors, sentences = own_vectors(network, inputs), network.embed_texts(texts)
    expected = cosines(vectors, sentences).T.numpy()
    np.testing.assert_allclose(model.similarity([image], texts), expected, atol=1e-5)
    np.testing.assert_allclose(model.embed_images([image]), normalize(vectors, dim=-1).numpy(), atol=1e-5)
    maps = model.heat_maps(model.encode_image(image), texts)
    np.testing.assert_allclose(maps.similarity, expected[0], atol=1e-5)
    regions = network.regions(network.feature_map(inputs))[0]
    of_regions = cosines(regions, sentences).unflatten(1, (3, 3)).numpy()
    np.testing.assert_allclose(maps.regions.numpy(), of_regions, atol=1e-5)


@torch.no_grad()
def test_evaluations_of_images_get_it(network, small_set, tmp_path):
    """Zero-shot scores, retrieval and the embedding map of a test, from the images themselves."""
    model = ImageTextModel(network.image_encoder, network.text_encoder, network.similarity)
    data = ImageTextDataModule(str(small_set), image_size=24, batch_size=4, num_workers=0)
    callbacks: list[Any] = [ZeroShotClassification(min_cases=1), Retrieval(), EmbeddingMap()]
    trainer = Trainer(accelerator="cpu", callbacks=[*callbacks], logger=False, default_root_dir=tmp_path)
    seen: dict[str, Tensor] = {}
    for callback in callbacks:
        real = callback.summarise

        def summarise(network, values, tables, real=real, name=callback.section):
            seen[name] = values
            return real(network, values, tables)

        callback.summarise = summarise
    trainer.test(model, data, verbose=False)
    dicom_id = next(iter(seen["classification"]))
    image = torch.from_numpy(data.load_image(dicom_id)).float()[None, None] / 255
    vector = own_vectors(network, image.expand(1, 3, -1, -1))
    prompts = [text for pair in zip(*callbacks[0].prompts.values(), strict=True) for (text,) in pair]
    expected = cosines(vector, network.embed_texts(prompts))[:, 0]
    torch.testing.assert_close(
        torch.tensor(seen["classification"][dicom_id]).flatten(), expected, rtol=1e-4, atol=1e-4
    )
    of_map = torch.from_numpy(seen["embedding_map"][dicom_id])
    torch.testing.assert_close(of_map, normalize(vector, dim=-1)[0], rtol=1e-4, atol=1e-4)
    texts = callbacks[1]._items[1]._texts.tolist()
    _, scores = seen["retrieval"][dicom_id]
    expected = cosines(vector, network.embed_texts(texts))[:, 0]
    torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_classifier_takes_it(network):
    images = torch.rand(2, 3, 24, 24)
    classifier = FindingNetwork(network.image_encoder, ["Edema"])
    torch.testing.assert_close(classifier.features(images), own_vectors(network, images))
