"""The command line: `onnx-sublinear`, one file for each command."""
