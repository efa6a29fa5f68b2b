"""Files of another version, or of another program, are refused."""

from __future__ import annotations

import pytest

from medclip_dcl.common.formats import Format


@pytest.mark.parametrize(
    "content, found", [({"format_version": 4}, "version 4"), ({}, "version none"), ([1], "version none")]
)
def test_other_versions_are_refused(content, found):
    Format("thing", 4).check({"format_version": 4}, "x")
    with pytest.raises(
        ValueError, match=f"x: expected a thing of format version 3, found {found}; make it again"
    ):
        Format("thing", 3).check(content, "x")
