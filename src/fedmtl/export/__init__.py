"""A finished model in the formats of others: transformers' folders and ONNX."""
