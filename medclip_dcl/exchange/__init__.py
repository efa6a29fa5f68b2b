"""Foreign formats: published models converted to exported folders, trained models exported with card, ONNX and hub."""
