"""Models that leave their run folder: the ONNX graph, its check, and publishing to the hub."""
