"""Images in memory and their heat maps, without a server."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from medclip_dcl.common.findings import CHEX5
from medclip_dcl.use.heat_maps import limits
from medclip_dcl.use.page import viewer as viewer_module
from medclip_dcl.use.page.viewer import ForgottenImageError, Viewer


@pytest.fixture
def viewer(model):
    return Viewer(model)


def test_image_is_scored_and_drawn_like_by_model(viewer, model, image_file):
    grey = np.asarray(Image.open(image_file))
    token, shown, scores = viewer.open(image_file.read_bytes())
    assert viewer.image(token) is shown
    np.testing.assert_array_equal(np.asarray(shown.grey), grey)
    expected = model.classify(grey).iloc[0]
    assert {finding: score.score for finding, score in scores.items()} == pytest.approx(
        {finding: expected[finding] for finding in CHEX5}
    )
    assert all(score.probability is None for score in scores.values())
    texts = ["No pneumothorax.", "Mild pulmonary edema."]
    found = viewer.heat_maps(shown, texts)
    np.testing.assert_allclose(found, [model.heat_map(grey, text) for text in texts], atol=1e-6)
    assert np.isnan(found[0][:, 0]).all(), "the model sees the middle square alone"
    assert limits(found) == (np.nanmin(found), np.nanmax(found))


def test_a_calibrated_model_shows_probabilities_and_thresholds(calibrated, image_file):
    _, _, scores = Viewer(calibrated).open(image_file.read_bytes())
    expected = calibrated.classify(image_file, calibrated=True).iloc[0]
    assert list(scores) == list(CHEX5)
    assert scores["Edema"].probability is None and scores["Edema"].threshold is None
    for finding in set(CHEX5) - {"Edema"}:
        assert scores[finding].probability == pytest.approx(expected[finding])
        assert scores[finding].threshold == 0.5


def test_an_image_is_encoded_once(calibrated, image_file, monkeypatch):
    calls, encode = [], type(calibrated.network).encode

    def counted(*inputs):
        calls.append(1)
        return encode(*inputs)

    monkeypatch.setattr(type(calibrated.network), "encode", counted)
    Viewer(calibrated).open(image_file.read_bytes())
    assert len(calls) == 1


def test_findings_that_no_case_has_are_not_shown(calibrated, image_file, monkeypatch):
    findings = calibrated.calibration.findings
    never = replace(findings["Edema"], n_positive=0, n_negative=0)
    monkeypatch.setitem(findings, "Edema", never)
    viewer = Viewer(calibrated)
    assert viewer.unlabelled == ["Edema"]
    assert list(viewer.open(image_file.read_bytes())[2]) == [
        finding for finding in CHEX5 if finding != "Edema"
    ]


def test_large_image_is_shown_smaller_but_seen_whole(viewer, model):
    waves = np.add.outer(np.sin(np.arange(1536) / 90), np.cos(np.arange(2048) / 70))
    grey = (127 + 60 * waves).astype(np.uint8)
    Image.fromarray(grey).save(file := io.BytesIO(), "PNG")
    _, shown, _ = viewer.open(file.getvalue())
    assert shown.grey.size == (1024, 768)
    np.testing.assert_array_equal(shown.encoded.feature_map, model.encode_image(grey).encoded.feature_map)
    found, whole = viewer.heat_maps(shown, ["No pneumothorax."])[0], model.heat_map(grey, "No pneumothorax.")
    # A pixel of the small picture lies between two of the large one; the square's edges are rounded.
    middle = slice(125, 890)
    np.testing.assert_allclose(
        found[:, middle], ((whole[::2, ::2] + whole[1::2, 1::2]) / 2)[:, middle], atol=5e-3
    )


def test_images_leave_the_memory(viewer, image_file, monkeypatch):
    monkeypatch.setattr(viewer_module, "MAX_IMAGES", 2)
    first, second, third = (viewer.open(image_file.read_bytes())[0] for _ in range(3))
    with pytest.raises(ForgottenImageError, match="no longer in memory"):
        viewer.image(first)
    viewer.image(second)
    fourth = viewer.open(image_file.read_bytes())[0]
    with pytest.raises(ForgottenImageError):
        viewer.image(third)  # unused for longest
    viewer.forget(second)
    viewer.forget(second)
    with pytest.raises(ForgottenImageError):
        viewer.image(second)
    assert len({first, second, third, fourth}) == 4 and min(map(len, (first, second))) > 40
    viewer.image(fourth)
