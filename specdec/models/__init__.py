"""Loading models: MLX folders, hub ids, GGUF files; vocabulary checks."""
