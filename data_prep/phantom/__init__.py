"""The digital phantom: stylised chest radiographs with reports, labels, boxes and known truth, in MIMIC-CXR's layout.

``python -m data_prep.phantom --output DIR --studies N --seed S``. Classes and their wordings: `catalogue.yaml`,
`catalogue`, `findings`, `language`. Patients and studies: `studies`. Images: `geometry`, `anatomy`, `layers`,
`lesions`, `devices`, `lateral`, `drawing`. Reports and labels: `reports`. Files: `release`.
"""
