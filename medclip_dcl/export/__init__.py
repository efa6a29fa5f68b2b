"""Export of a trained model: a folder with its model card, plain encoders, ONNX files, the Hugging Face Hub."""
