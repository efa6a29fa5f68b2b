"""The digital phantom: stylised chest radiographs with reports, labels, boxes and known truth, in MIMIC-CXR's layout.

``python -m data_prep.phantom --output DIR --studies N --seed S``. Classes and their wordings: `catalogue.yaml`,
`catalogue`, `findings`, `language`. Patients and studies: `studies`; shares of false negatives and of rare findings:
`rates`, `dial`. Images: `geometry`, `anatomy`, `layers`,
`lesions`, `devices`, `lateral`, `drawing`. Reports and labels: `reports`. Files: `options`, `release`, `tables`.
"""
