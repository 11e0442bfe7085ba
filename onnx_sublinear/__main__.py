"""`python -m onnx_sublinear` is the command `onnx-sublinear`."""

from onnx_sublinear.cli.app import main

if __name__ == "__main__":
    main()
