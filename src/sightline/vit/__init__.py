"""The one Vision Transformer: model, masking, positions, weights, key maps, and the registry of backbones."""
