"""Reference networks as ONNX training graphs: builders, committed golden graphs, feeds to run them."""
