"""Checkpoints of other programs to our folders and back, and ours as ONNX files; not part of a saved model."""
