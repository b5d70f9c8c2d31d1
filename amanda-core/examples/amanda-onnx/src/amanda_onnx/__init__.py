"""Amanda's driver for ONNX Runtime."""
