"""load() and what a notebook asks of it."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from jaxtyping import config as jaxtyping_config
from matplotlib import pyplot
from matplotlib.figure import Figure
from PIL import Image

from data_prep.sources.prepared_images import Job, prepare_image
from medclip_dcl import load
from medclip_dcl.common.errors import UserError
from medclip_dcl.common.findings import CHEX5
from medclip_dcl.metrics.calibration import Calibration
from medclip_dcl.networks.classifier import FindingNetwork
from medclip_dcl.networks.image_text import ImageTextNetwork
from medclip_dcl.pictures.inputs import ConstantImageWarning, as_grey, network_input
from medclip_dcl.pictures.overlay import overlay
from medclip_dcl.pictures.transforms import centre_crop, load_grey
from medclip_dcl.use.model import LoadedModel
from tests.small import platt_calibration


@pytest.fixture(scope="module")
def grey():
    return np.random.default_rng(0).integers(0, 256, (90, 70)).astype(np.uint8)


CHANNELS_FIRST = np.zeros((3, 90, 70), np.uint8)
TEXTS = ["No pneumothorax.", "Mild pulmonary edema.", "The lungs are clear."]


def test_similarity_is_the_logits_over_gamma2(model, grey):
    found = model.similarity([grey, grey[:, ::-1].copy()], TEXTS)
    assert found.shape == (2, 3) and np.abs(found).max() <= 1
    resized = Image.fromarray(grey).resize((64, 64), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.asarray(resized).astype(np.float32) / 255).expand(1, 3, 64, 64)
    with torch.no_grad():
        logits = model.network(pixels, *model.network.tokenize(TEXTS))
    np.testing.assert_allclose(found[0], logits[:, 0].numpy() / 14, rtol=1e-4)


def test_paths_images_and_arrays_are_the_same_image(model, grey, tmp_path):
    Image.fromarray(grey).save(tmp_path / "a.png")
    colour = np.repeat(grey[..., None], 3, axis=2)
    images = [grey, colour, Image.fromarray(grey), str(tmp_path / "a.png"), tmp_path / "a.png"]
    found = model.similarity(images, "No pneumothorax.")
    assert found.shape == (5, 1)
    np.testing.assert_allclose(found, found[0, 0], atol=1e-6)
    assert model.similarity(grey, TEXTS).shape == (1, 3)


def test_a_model_prints_as_one_line(model):
    own = FindingNetwork(model.network.image_encoder, ["Hernia", "Mass"], image_size=48)
    calibration = platt_calibration(model.network, without=[*CHEX5][:3])
    assert repr(LoadedModel(own, name="runs/a")) == (
        f"<runs/a: classifier, {sum(x.numel() for x in own.parameters()):,} parameters, images of 48 pixels, "
        "findings: Hernia, Mass, calibrated: none>"
    )
    line = repr(LoadedModel(model.network, calibration=calibration))
    assert line.endswith(
        "images of 64 pixels, findings: of any prompts, calibrated: Pneumonia, Pneumothorax>"
    )


def test_heat_map_has_image_pixels_and_region_values(model, grey):
    heat_map = model.heat_map(grey, TEXTS[0])
    assert heat_map.shape == (90, 70) and np.abs(heat_map).max() <= 1
    with torch.no_grad():
        inputs = network_input(Image.fromarray(grey), model.network.view)
        regions = model.network.regions(model.encode_inputs(np.stack([inputs])).feature_map)[0]
        sentence = model.network.embed_texts(TEXTS[:1])[0]
    cosines = torch.cosine_similarity(regions, sentence[None]).view(4, 4).numpy()
    # The image's corners lie in the corner regions, beyond their centres: bilinear interpolation is constant there.
    corners = heat_map[[0, 0, -1, -1], [0, -1, 0, -1]]
    np.testing.assert_allclose(corners, cosines[[0, 0, -1, -1], [0, -1, 0, -1]], atol=1e-5)


def test_classify_is_positive_minus_negative(model, grey, tmp_path):
    Image.fromarray(grey).save(tmp_path / "a.png")
    frame = model.classify([tmp_path / "a.png", grey])
    assert list(frame.columns) == list(CHEX5) and list(frame.index) == [str(tmp_path / "a.png"), 1]
    prompts = CHEX5["Edema"]
    scores = model.similarity(grey, [prompts.negative, prompts.positive])[0]
    assert frame["Edema"].iloc[1] == pytest.approx(scores[1] - scores[0], abs=1e-6)
    (tmp_path / "prompts.yaml").write_text("x: [no x, [x, much x]]\ny: [no y, y]\n")
    frame = model.classify([grey, grey[::-1]], tmp_path / "prompts.yaml")
    scores = model.similarity([grey, grey[::-1]], ["no x", "x", "much x", "no y", "y"])
    expected = [scores[:, 1:3].mean(1) - scores[:, 0], scores[:, 4] - scores[:, 3]]
    assert list(frame.columns) == ["x", "y"]
    np.testing.assert_allclose(frame.to_numpy(), np.stack(expected, axis=1), atol=1e-6)


def of_geometry(model, geometry, prepared_size=None):
    config = {**model.network.config(), "geometry": geometry, "prepared_size": prepared_size}
    network = ImageTextNetwork.from_config(config)
    network.load_state_dict(model.network.state_dict())
    return LoadedModel(network)


def test_a_model_of_padded_images_pads(model, grey, tmp_path):
    # 64 x 32 pixels are fitted to 64 without scaling: 16 columns of padding on both sides.
    narrow, padded = grey[:64, :32], np.zeros((64, 64), np.uint8)
    padded[:, 16:48] = narrow
    of_padded = of_geometry(model, "pad")
    np.testing.assert_allclose(
        of_padded.similarity(narrow, TEXTS), model.similarity(padded, TEXTS), atol=1e-6
    )
    whole = model.heat_map(padded, TEXTS[0])
    np.testing.assert_allclose(of_padded.heat_map(narrow, TEXTS[0]), whole[:, 16:48], atol=1e-6)
    of_geometry(model, "pad", 96).save_pretrained(tmp_path / "padded")
    loaded = load(tmp_path / "padded").network
    assert (loaded.geometry, loaded.prepared_size) == ("pad", 96)


def test_a_model_of_middle_squares_looks_there_alone(model, grey):
    wide = np.concatenate([grey[:64], grey[26:]], axis=1)[:, :100]
    of_middle = of_geometry(model, "shortest")
    middle = wide[:, 18:82]
    np.testing.assert_allclose(of_middle.similarity(wide, TEXTS), model.similarity(middle, TEXTS), atol=1e-6)
    heat_map = of_middle.heat_map(wide, TEXTS[0])
    assert np.isnan(heat_map[:, :18]).all() and np.isnan(heat_map[:, 82:]).all()
    np.testing.assert_allclose(heat_map[:, 18:82], model.heat_map(middle, TEXTS[0]), atol=1e-6)


@pytest.mark.parametrize("geometry", ["stretch", "pad", "shortest"])
def test_images_are_fitted_as_they_were_for_training(model, geometry, tmp_path):
    job = Job(tmp_path / "a.png", tmp_path / "a.jpg", 128, geometry)
    waves = np.add.outer(np.sin(np.arange(360) / 30), np.cos(np.arange(280) / 20))
    Image.fromarray((127 + 60 * waves).astype(np.uint8)).save(job.source)
    prepare_image(job)
    trained = centre_crop(load_grey(job.target.read_bytes(), 64), 64).astype(float)
    asked = network_input(as_grey(job.source), of_geometry(model, geometry, 128).network.view)
    # JPEG lies between them, which shows at the edge of the padding.
    assert np.abs(asked - trained).mean() < 1
    if geometry != "stretch":
        assert np.abs(network_input(as_grey(job.source), model.network.view) - trained).mean() > 10


def test_batches_of_all_sizes_equal_one_by_one(model):
    generator = np.random.default_rng(1)
    sizes = [(90, 70), (64, 64), (31, 200), (90, 70), (64, 64)]
    images = [generator.integers(0, 256, size).astype(np.uint8) for size in sizes]
    one_by_one = np.concatenate([model.similarity(image, TEXTS) for image in images])
    np.testing.assert_allclose(model.similarity(images, TEXTS, batch_size=2), one_by_one, atol=1e-5)
    scores = pd.concat([model.classify(image) for image in images])
    np.testing.assert_allclose(model.classify(images, batch_size=3), scores, atol=1e-5)
    vectors = np.concatenate([model.embed_images(image) for image in images])
    np.testing.assert_allclose(model.embed_images(images, batch_size=4), vectors, atol=1e-5)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(5))
    assert np.linalg.norm(model.embed_texts(TEXTS), axis=1) == pytest.approx(np.ones(3))


def test_images_are_read_a_batch_at_a_time(model, grey, monkeypatch):
    given, seen = [], []

    def images():
        for place in range(7):
            given.append(place)
            yield grey

    encode = model.network.feature_map

    def noted(inputs, scale):
        seen.append((len(given), len(inputs)))
        return encode(inputs, scale)

    monkeypatch.setattr(model.network, "feature_map", noted)
    assert list(model.classify(images(), batch_size=3).index) == list(range(7))
    assert seen == [(3, 3), (6, 3), (7, 1)]


def test_bfloat16_is_close_and_leaves_the_weights_alone(model, exported, grey, tmp_path):
    lower = load(exported, dtype=torch.bfloat16)
    np.testing.assert_allclose(lower.similarity(grey, TEXTS), model.similarity(grey, TEXTS), atol=0.03)
    found = lower.heat_map(grey, TEXTS[0])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, model.heat_map(grey, TEXTS[0]), atol=0.03)
    assert not np.array_equal(found, model.heat_map(grey, TEXTS[0]))
    assert lower.embed_texts(TEXTS).dtype == lower.embed_images(grey).dtype == np.float32
    lower.save_pretrained(tmp_path / "again")
    assert np.array_equal(load(tmp_path / "again").similarity(grey, TEXTS), model.similarity(grey, TEXTS))


def test_heat_maps_of_texts_share_colours(model, grey):
    maps = model.heat_maps(grey, TEXTS)
    np.testing.assert_allclose(maps.similarity, model.similarity(grey, TEXTS)[0], atol=1e-6)
    each = np.stack([model.heat_map(grey, text) for text in TEXTS])
    np.testing.assert_allclose(np.stack([maps.in_image(i) for i in range(3)]), each, atol=1e-6)
    assert maps.limits == pytest.approx((each.min(), each.max()), abs=1e-6)
    assert np.array_equal(maps.overlay(1), overlay(grey, maps.in_image(1), limits=maps.limits))


def test_figure_shows_itself_unknown_to_pyplot(model, grey):
    figure = model.show_all(grey, TEXTS)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    scores = model.similarity(grey, TEXTS)[0]
    assert titles == [f"{text}\nsimilarity {score:.2f}" for text, score in zip(TEXTS, scores, strict=True)]
    shown = Image.open(io.BytesIO(figure._repr_png_()))
    assert shown.format == "PNG" and shown.width > 2 * shown.height
    assert isinstance(figure, Figure)
    one = model.show(grey, "Costs $5 or $6, _x_^")  # no mathematics
    assert one._repr_png_() and pyplot.get_fignums() == []


def test_constant_image_gives_result_and_warning(model, tmp_path):
    Image.new("L", (40, 30), 7).save(tmp_path / "flat.png")
    with pytest.warns(ConstantImageWarning, match="flat.png: all pixels have grey level 7"):
        assert np.isfinite(model.classify(tmp_path / "flat.png").to_numpy()).all()


def test_empty_lists_give_empty_results(model, grey):
    assert model.similarity([], TEXTS).shape == (0, 3)
    assert model.similarity([grey], []).shape == (1, 0)
    assert model.embed_images([]).shape == (0, 16) and model.embed_texts([]).shape == (0, 16)
    assert model.similarity(CHANNELS_FIRST[:2], "x").shape == (2, 1)
    empty = model.classify([])
    assert len(empty) == 0 and list(empty.columns) == list(CHEX5)


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        ("text.jpg", UserError, "text.jpg: not an image file of a known format"),
        ("gone.jpg", FileNotFoundError, "No such file .*gone.jpg"),
        ("", IsADirectoryError, "Is a directory"),
        ("huge.pgm", UserError, "huge.pgm: image .*large.* give a smaller copy"),
        ([np.zeros((9, 9), np.uint8)], TypeError, "image: expected a path, .* found list"),
        (None, TypeError, "image: expected a path, .* found NoneType"),
        (np.zeros((4, 4)), TypeError, "a uint8 array of 0..255, found float64"),
        (np.zeros((4, 4, 2), np.uint8), ValueError, r"shape \(H, W\) or \(H, W, 3\), found \(4, 4, 2\)"),
        (CHANNELS_FIRST, ValueError, r"found \(3, 90, 70\)"),
        (np.zeros((500, 7), np.uint8), UserError, "image of 7 x 500 pixels; .* at least 8 .* give the original"),
        (np.zeros((0, 7), np.uint8), UserError, r"found \(0, 7\)"),
    ],
)  # fmt: skip
def test_what_is_not_an_image_is_refused(model, tmp_path, image, error, words):
    (tmp_path / "text.jpg").write_bytes(b"no picture")
    (tmp_path / "huge.pgm").write_bytes(b"P5 20000 10000 255\n")
    # Own errors are seen only where jaxtyping does not speak first, as in production.
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(error, match=words):
            model.heat_map(tmp_path / image if isinstance(image, str) else image, "x")
    finally:
        jaxtyping_config.update("jaxtyping_disable", False)


LONGEST = "edema " * 125  # with [CLS] and [SEP] 127 tokens


def infinite(model: LoadedModel) -> LoadedModel:
    network = ImageTextNetwork.from_config(model.network.config())
    state = model.network.state_dict()
    network.load_state_dict({**state, "image_encoder.projection.bias": torch.full((16,), torch.inf)})
    return LoadedModel(network)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda model, grey: model.similarity(grey, ["x", "  "]), "position 1 is empty; give a sentence"),
        (lambda model, grey: model.embed_texts(LONGEST + "edema"), "of 126 words, is longer .* split"),  # with a period
        (lambda model, grey: model.classify(grey, {"wet": ("dry", LONGEST + "edema")}), "a prompt of wet, of 126 w"),
        (lambda model, grey: model.similarity(grey, "x", batch_size=0), "batch_size: expected at least 1, found 0"),
        (lambda model, grey: infinite(model).classify(grey), "scores are not finite in torch.float32; use float32"),
        (lambda model, grey: model.classify(CHANNELS_FIRST), r"shape \(3, 90, 70\) .*transpose\(1, 2, 0\)"),
    ],
)  # fmt: skip
def test_texts_and_prompts_are_refused(model, grey, ask, words):
    assert model.embed_texts(LONGEST + ".").shape == (1, 16)
    with pytest.raises(ValueError, match=words):
        ask(model, grey)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04 truncated", "a.ckpt is not a checkpoint that can be loaded safely, or it is truncated"),
        ({"format_version": 3, "network": Path("here")}, "or holds more than tensors and plain values"),
        ({"state_dict": {}}, "a.ckpt: expected a model of kind image-text or classifier, found none"),
        (torch.nn.Identity(), "truncated: it is a TorchScript archive"),  # as OpenAI published CLIP
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_files_that_are_not_models_are_refused(tmp_path, content, words):
    if isinstance(content, bytes):
        (tmp_path / "a.ckpt").write_bytes(content)
    elif isinstance(content, torch.nn.Module):
        torch.jit.script(content).save(tmp_path / "a.ckpt")
    else:
        torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=words) as caught:
        load(tmp_path / "a.ckpt")
    assert "weights_only" not in str(caught.value), "torch's advice is to load it unsafely"


def test_a_repository_keeps_its_calibration(model, tmp_path, monkeypatch):
    """As the Hub's: the files that are asked for, and no others, are copied."""
    repository = tmp_path / "repository"
    calibration = Calibration(model.network.fingerprint(), 14.0, {"sensitivity": 0.95}, {}, {})
    LoadedModel(model.network, calibration=calibration).save_pretrained(repository)

    def download(name, *, allow_patterns):
        copy = tmp_path / "cache"
        copy.mkdir()
        for file in repository.iterdir():
            if any(map(file.match, allow_patterns)):
                shutil.copy(file, copy)
        return str(copy)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load("owner/name").calibration == calibration
