"""A finished model's answers to new texts and labelled files, from torch or ONNX."""
