"""The digital phantom: stylised chest radiographs with reports, labels, boxes and truth, in MIMIC-CXR's layout."""
