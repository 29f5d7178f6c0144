"""The benchmark on a GPU: larger models, half precision, CUDA graphs, peak memory."""
