"""Arrays that processes share, and the fields that stand in them."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from medclip_dcl.common.errors import UserError
from medclip_dcl.data.arrays import Arrays, write_arrays
from medclip_dcl.data.fields import FieldRows

VECTORS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16)


def test_arrays_of_a_file_are_pickled_as_its_name(tmp_path):
    some = {
        "value": np.arange(100_000),
        "text": pa.array(["a", "", "é"], pa.large_string()),
        "none": np.zeros((0, 3)),
    }
    write_arrays(some, tmp_path / "a.arrow")
    mapped, own = Arrays(tmp_path / "a.arrow"), Arrays(some)
    for arrays in (mapped, own, pickle.loads(pickle.dumps(mapped)), pickle.loads(pickle.dumps(own))):
        assert np.array_equal(arrays["value"], some["value"]) and arrays["none"].shape == (0, 3)
        assert (arrays["text"].tolist(), arrays["text"][2], len(arrays["text"])) == (["a", "", "é"], "é", 3)
    assert len(pickle.dumps(mapped)) < 1000 < len(pickle.dumps(own))
    texts = pickle.dumps(mapped["text"])
    assert len(texts) < 1000 and pickle.loads(texts)[2] == "é"
    assert not mapped["value"].flags.writeable


def test_a_damaged_file_is_one_line(tmp_path):
    (tmp_path / "a.arrow").write_bytes(b"ARROW1")
    with pytest.raises(UserError, match=r"a.arrow cannot be mapped into memory .* delete it"):
        Arrays(tmp_path / "a.arrow")["value"]


@pytest.mark.parametrize("is_file", [False, True])
def test_field_by_key_and_by_shared_row(tmp_path, is_file):
    def rows(**arrays: np.ndarray) -> FieldRows:
        write_arrays(arrays, tmp_path / "a.arrow")
        return pickle.loads(pickle.dumps(FieldRows(Arrays(tmp_path / "a.arrow") if is_file else arrays)))

    of_sentences = rows(key=np.array([2, 3, 5, 8, 2**60]), value=VECTORS)
    found = of_sentences[[2**60, 2, 2]]
    assert found.dtype == torch.float32 and torch.equal(found, torch.tensor(VECTORS[[4, 0, 0]]).float())
    for missing in (4, 2**61, -1):
        with pytest.raises(KeyError, match=str(missing)):
            of_sentences[[2, missing]]
    of_images = rows(value=VECTORS, row=np.array([4, 4, 0], dtype=np.int32))
    assert torch.equal(of_images[[1, 2]], torch.tensor(VECTORS[[4, 0]]).float())
    counts = rows(value=np.array([7, 9]))[np.array([1])]
    assert counts.dtype == torch.int64 and counts.tolist() == [9]
