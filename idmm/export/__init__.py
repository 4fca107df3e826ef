"""A run's model for other programs: ONNX, and folders for timm and Hugging Face with a model card."""
