"""The digital phantom: stylised chest radiographs with reports, labels, boxes and known truth, in MIMIC-CXR's layout.

``python -m data_prep.phantom --output DIR --studies N --seed S``. What can be true and how it is said: `findings`,
`classes`, `language`, `catalogue`. Who is in a phantom: `studies`. Pictures: `geometry`, `anatomy`, `lesions`,
`lateral`, `drawing`. Reports and labels: `reports`. Files: `release`.
"""
